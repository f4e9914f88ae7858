"""A toy encoder that records the pixels it encodes and counts backward passes, and helpers for literal_* tests."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import ZeroShotClassifier, noise
from toys import ToyEncoder, toy_classifier

from . import literal

F64 = torch.float64


class WatchedEncoder(ToyEncoder):
    """Keeps every batch of pixels, and counts the rows of backward passes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.reversed = 0
        self.seen: list[Tensor] = []

    def raw_features(self, pixels: Tensor) -> Tensor:
        self.seen.append(pixels.detach().clone())
        return super().raw_features(pixels)

    def _image_features(self, normalised: Tensor) -> Tensor:
        if normalised.requires_grad:
            normalised.register_hook(self._count)
        return super()._image_features(normalised)

    def _count(self, slope: Tensor) -> None:
        self.reversed += len(slope)


def watched_classifier(dtype: torch.dtype = torch.float32) -> tuple[ZeroShotClassifier, WatchedEncoder]:
    """The toy classifier with a recording encoder."""
    plain, encoder = toy_classifier(dtype), WatchedEncoder(dtype)
    return ZeroShotClassifier.from_features(encoder, plain.names, plain.class_features), encoder


def literal_tower(clf: ZeroShotClassifier) -> literal.Tower:
    """The encoder as functions of arrays, one image at a time."""

    def raw(flat: Tensor) -> Tensor:
        return clf.encoder.raw_features(flat.reshape(1, 3, 16, 16))[0]

    def encode(image: literal.Array) -> literal.Array:
        return raw(torch.tensor(image)).numpy()

    def pull_back(image: literal.Array, vector: literal.Array) -> literal.Array:
        return torch.autograd.functional.vjp(raw, torch.tensor(image), torch.tensor(vector))[1].numpy()

    return literal.Tower(encode, pull_back, clf.class_features.numpy())


def branch(keys: Tensor, *path: int) -> Tensor:
    """The stream after several forks."""
    for step in path:
        keys = noise.fork(keys, step)
    return keys


def uniform_draws(keys: Tensor) -> literal.Array:
    """One uniform number per pixel of the toy's only image."""
    return noise.uniform(keys, 3 * 16 * 16)[0].double().numpy()


def normal_draws(keys: Tensor) -> literal.Array:
    """One normal number per pixel of the toy's only image."""
    return noise.normal(keys, (3 * 16 * 16,))[0].double().numpy()


def inside(images: Tensor, centre: Tensor, eps: float) -> bool:
    """Whether images lie in the ball and in [0, 1], up to the rounding of one addition."""
    return bool(((images - centre).abs() <= eps + 1e-7).all() & (images >= 0).all() & (images <= 1).all())
