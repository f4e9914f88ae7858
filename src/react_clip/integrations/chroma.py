"""An embedding function for Chroma."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from react_clip import defenses
from react_clip.errors import ReactClipError
from react_clip.integrations.common import DefendedFeatures
from react_clip.optional import require

_chroma = require("chromadb.utils.embedding_functions", "ChromaEmbeddings", extra="integrations")


@_chroma.register_embedding_function  # so that Chroma can open stored collections
class ChromaEmbeddings(DefendedFeatures, _chroma.EmbeddingFunction):  # type: ignore[misc, name-defined]
    """Chroma's ``EmbeddingFunction`` over texts and images (numpy arrays, as its ``ImageLoader`` makes them).

    Takes the arguments of :class:`~react_clip.integrations.common.DefendedFeatures`. Chroma stores the configuration
    with the collection: the model's name, the guard, the labels and an integer seed. Secrets are never stored: your own
    is needed again to open the collection; in place of one that was drawn, a new one is drawn.
    """

    def __call__(self, input: Any) -> Any:
        """One unit vector per text or image."""
        vectors: dict[int, NDArray[np.float32]] = {}
        for kind, embed in ((np.ndarray, self.of_images), (str, self.of_texts)):
            chosen = [i for i, item in enumerate(input) if isinstance(item, kind)]
            vectors |= zip(chosen, embed([input[i] for i in chosen]).numpy(), strict=True)
        if missing := [type(item).__name__ for i, item in enumerate(input) if i not in vectors]:
            raise ReactClipError(f"an item is of type {missing[0]}; give texts or images as numpy arrays")
        return [vectors[i] for i in range(len(input))]

    def embed_query(self, input: Any) -> Any:
        """Queries are embedded like documents."""
        return self(input)

    @staticmethod
    def name() -> str:
        """The name under which Chroma registers this function."""
        return "react_clip"

    def default_space(self) -> Any:
        """Cosine similarity, as CLIP compares features."""
        return "cosine"

    def get_config(self) -> dict[str, Any]:
        """The configuration that Chroma stores with a collection."""
        return {
            "model": self.encoder.name,
            "guard": self.guard.to_dict(),
            "labels": self.labels,
            "seed": self.seed if isinstance(self.seed, int) else None,
            "secret": self.has_own_secret,
        }

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> Any:
        """The function that a stored collection was made with."""
        return _build(json.dumps(config, sort_keys=True))

    def is_legacy(self) -> bool:
        """False; Chroma's own check would load the model a second time."""
        return False


@functools.lru_cache(maxsize=2)
def _build(config: str) -> ChromaEmbeddings:
    """Cached, because Chroma asks again for every handle on a collection."""
    values = json.loads(config)
    if values["secret"]:
        raise ReactClipError(
            "the collection was made with a secret, which Chroma does not store; give the embedding function to "
            "get_collection(embedding_function=...)"
        )
    guard = defenses.from_dict(values["guard"])
    return ChromaEmbeddings(values["model"], guard, labels=values["labels"], seed=values["seed"])
