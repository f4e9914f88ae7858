"""Defended CLIP embeddings for vector stores: an embedding function for Chroma, an ``Embeddings`` for LangChain.

Both inherit the library's base class where it is installed. Images become pixels as everywhere in this package (shorter
side to 256/224 of the input size, bilinear, centre crop); features are fp32 and of unit length.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from react_clip import defenses
from react_clip.defenses import Defense
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError
from react_clip.integrations.common import DefendedFeatures, inherit, resolve_encoder
from react_clip.noise import Seed


class _Embedder:
    def __init__(
        self,
        model: Encoder | str | Path,
        guard: Defense | None = None,
        *,
        labels: Sequence[str] | None = None,
        class_features: Tensor | None = None,
        seed: Seed = 0,
        device: str | torch.device | None = None,
    ) -> None:
        encoder = resolve_encoder(model, device)
        self.features = DefendedFeatures(encoder, guard, labels=labels, class_features=class_features, seed=seed)
        self.labels = None if labels is None else list(labels)
        # What a stored configuration must not or cannot hold.
        self.withheld = ["seed"] if isinstance(seed, bytes) else []
        self.withheld += ["class_features"] if class_features is not None else []


class _Chroma(_Embedder):
    """Chroma's ``EmbeddingFunction`` over texts and images (numpy arrays, as its ``ImageLoader`` makes them).

    Takes what :class:`LangChainEmbeddings` takes. Chroma stores the configuration with the collection: the name of the
    model, the guard, the labels and an integer seed. A secret is never stored; see :meth:`build_from_config`.
    """

    def __call__(self, input: Any) -> Any:
        """One unit vector per text or image."""
        embedded: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(input)
        images = [i for i, item in enumerate(input) if isinstance(item, np.ndarray)]
        texts = [i for i, item in enumerate(input) if isinstance(item, str)]
        if len(images) + len(texts) < len(input):
            other = next(item for item in input if not isinstance(item, np.ndarray | str))
            raise ReactClipError(f"an item is of type {type(other).__name__}; give texts or images as numpy arrays")
        for rows, features in (
            (images, self.features.of_images([array_to_image(input[i]) for i in images])),
            (texts, self.features.of_texts([input[i] for i in texts])),
        ):
            for row, feature in zip(rows, features, strict=True):
                embedded[row] = feature.numpy()
        return embedded

    def embed_query(self, input: Any) -> Any:
        """Queries are embedded as everything else."""
        return self(input)

    @staticmethod
    def name() -> str:
        """How Chroma knows this function."""
        return "react_clip"

    def default_space(self) -> Any:
        """CLIP compares directions."""
        return "cosine"

    def get_config(self) -> dict[str, Any]:
        """What Chroma stores with a collection."""
        seed = None if "seed" in self.withheld else self.features.seed
        return {
            "model": self.features.encoder.name,
            "guard": self.features.guard.to_dict(),
            "labels": self.labels,
            "seed": seed,
            "withheld": self.withheld,
        }

    @staticmethod
    def build_from_config(config: dict[str, Any]) -> Any:
        """The function that a stored collection was made with."""
        return _built(json.dumps(config, sort_keys=True))

    @staticmethod
    def validate_config(config: dict[str, Any]) -> None:
        """Refuse a configuration that does not say which model and guard it is of."""
        if missing := sorted({"model", "guard"} - set(config)):
            raise ReactClipError(f"the stored configuration lacks {missing[0]!r}; make the collection again")

    def validate_config_update(self, old_config: dict[str, Any], new_config: dict[str, Any]) -> None:
        """Vectors of another model mean nothing beside the stored ones."""
        if old_config.get("model") != new_config.get("model"):
            raise ReactClipError(
                f"the collection holds vectors of {old_config.get('model')!r}, not of {new_config.get('model')!r}; "
                "make a new collection"
            )

    def is_legacy(self) -> bool:
        """No; Chroma's own answer would load the model a second time to find out."""
        return False


class _LangChain(_Embedder):
    """LangChain's ``Embeddings`` for texts, with ``embed_image`` for files, as its ``OpenCLIPEmbeddings`` has.

    Args:
        model: any name that :func:`react_clip.load` takes, or a loaded encoder.
        guard: a defence; ReACT with the encoder's constants by default.
        labels: classes over which the gate compares predictions.
        class_features: the same as ready features ``[K, dim]``. Without classes the offline tower takes the vocabulary
            of the label bank, and any other encoder looks at the drift alone.
        seed: a number, or a secret as ``bytes``.
        device: where to run; CUDA if there is one by default.
    """

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """One unit vector per text."""
        vectors: list[list[float]] = self.features.of_texts(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """The unit vector of a text."""
        return self.embed_documents([text])[0]

    def embed_image(self, uris: list[str]) -> list[list[float]]:
        """One defended unit vector per image file; URLs are not fetched."""
        if isinstance(uris, str):
            raise ReactClipError(f"uris are one string, {uris[:60]!r}; give a list of paths")
        vectors: list[list[float]] = self.features.of_images(uris).tolist()
        return vectors


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


@functools.lru_cache(maxsize=2)
def _built(config: str) -> Any:
    """Chroma asks again for every handle on a collection; the model is loaded once."""
    values = json.loads(config)
    _Chroma.validate_config(values)
    if withheld := values.get("withheld"):
        raise ReactClipError(
            f"the collection was made with {' and '.join(withheld)}, which Chroma does not store; give the embedding "
            "function to get_collection(embedding_function=...)"
        )
    guard = defenses.from_dict(values["guard"])
    kind: Any = _chroma_class()
    return kind(values["model"], guard, labels=values.get("labels"), seed=values.get("seed", 0))


@functools.cache
def _chroma_class() -> Any:
    base = _base("chromadb.api.types", "EmbeddingFunction")
    made = inherit(_Chroma, base, "ChromaEmbeddings")
    if base is not object:
        # So that Chroma can open a stored collection by itself.
        importlib.import_module("chromadb.utils.embedding_functions").register_embedding_function(made)
    return made


@functools.cache
def _langchain_class() -> Any:
    return inherit(_LangChain, _base("langchain_core.embeddings", "Embeddings"), "LangChainEmbeddings")


def _base(module: str, name: str) -> type:
    """The library's base class; without the library both classes work on their own."""
    try:
        base: type = getattr(importlib.import_module(module), name)
    except ImportError:
        return object
    return base


if TYPE_CHECKING:
    ChromaEmbeddings = _Chroma
    LangChainEmbeddings = _LangChain
else:

    def __getattr__(name: str) -> Any:
        made = {"ChromaEmbeddings": _chroma_class, "LangChainEmbeddings": _langchain_class}
        if name not in made:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return made[name]()
