"""The toy encoder as functions of arrays, and its random numbers, for comparisons with plain loops."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import ZeroShotClassifier, noise

from . import literal

F64 = torch.float64


def literal_tower(clf: ZeroShotClassifier) -> literal.Tower:
    """The encoder as functions of arrays, one image at a time."""

    def raw(flat: Tensor) -> Tensor:
        return clf.encoder.raw(flat.reshape(1, 3, 16, 16))[0]

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
