"""An embedding function for Chroma."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

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
        images = [i for i, item in enumerate(input) if isinstance(item, np.ndarray)]
        texts = [i for i, item in enumerate(input) if isinstance(item, str)]
        if len(images) + len(texts) < len(input):
            other = next(item for item in input if not isinstance(item, np.ndarray | str))
            raise ReactClipError(f"an item is of type {type(other).__name__}; give texts or images as numpy arrays")
        vectors |= dict(zip(images, self.of_images([array_to_image(input[i]) for i in images]).numpy(), strict=True))
        vectors |= dict(zip(texts, self.of_texts([input[i] for i in texts]).numpy(), strict=True))
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
        ready_features = self.classifier is not None and self.labels is None
        return {
            "model": self.encoder.name,
            "guard": self.guard.to_dict(),
            "labels": self.labels,
            "seed": self.seed if isinstance(self.seed, int) else None,
            "withheld": ["seed"] * self.has_own_secret + ["class_features"] * ready_features,
        }

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> Any:
        """The function that a stored collection was made with."""
        return _build(json.dumps(config, sort_keys=True))

    @staticmethod
    def validate_config(config: dict[str, Any]) -> None:
        """Raise if a configuration lacks the model or the guard."""
        if missing := sorted({"model", "guard"} - set(config)):
            raise ReactClipError(f"the stored configuration lacks {missing[0]!r}; make the collection again")

    def validate_config_update(self, old_config: dict[str, Any], new_config: dict[str, Any]) -> None:
        """Raise if the model changes: its vectors cannot be compared with the stored ones."""
        if old_config.get("model") != new_config.get("model"):
            raise ReactClipError(
                f"the collection holds vectors of {old_config.get('model')!r}, not of {new_config.get('model')!r}; "
                "make a new collection"
            )

    def is_legacy(self) -> bool:
        """False; Chroma's own check would load the model a second time."""
        return False


@functools.lru_cache(maxsize=2)
def _build(config: str) -> ChromaEmbeddings:
    """Cached, because Chroma asks again for every handle on a collection."""
    values = json.loads(config)
    ChromaEmbeddings.validate_config(values)
    if withheld := values.get("withheld"):
        raise ReactClipError(
            f"the collection was made with {' and '.join(withheld)}, which Chroma does not store; give the embedding "
            "function to get_collection(embedding_function=...)"
        )
    guard = defenses.from_dict(values["guard"])
    return ChromaEmbeddings(values["model"], guard, labels=values.get("labels"), seed=values.get("seed"))


def array_to_image(array: NDArray[Any]) -> Image.Image:
    """An image from ``[H, W]`` or ``[H, W, 1 | 3 | 4]``: integers up to 255, or floats in [0, 1].

    >>> array_to_image(np.ones((2, 3, 3))).getpixel((0, 0))
    (255, 255, 255)
    """
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        raise ReactClipError(f"an image has shape {list(array.shape)}; give [H, W], [H, W, 3] or [H, W, 4]")
    limit = 255 if np.issubdtype(array.dtype, np.integer) else 1
    low, high = array.min(), array.max()
    # Written so that NaN fails too.
    if not (low >= 0 and high <= limit):
        raise ReactClipError(f"an image of dtype {array.dtype} spans [{low}, {high}]; it must lie in [0, {limit}]")
    scaled = array if limit == 255 else np.rint(array * 255.0)
    return Image.fromarray(scaled.astype(np.uint8))
