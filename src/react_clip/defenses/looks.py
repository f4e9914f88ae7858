"""The views of SecondLook and its answers from their features: functions of tensors, which a CUDA graph can record.

Those with settings are frozen dataclasses: equal settings give the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from react_clip import functional, noise
from react_clip.accelerate import Backend
from react_clip.augment import Motion
from react_clip.noise import Seed

LOOK, MOVED_LOOK = range(2)
"""Branches of an image's random stream: the motion of the look (for encoders that take one size only, whose look is a
moved view), and the motion of the moved look."""


def streams_of(pixels: Tensor, keys: Tensor | Seed) -> Tensor:
    """Random streams ``[B]``; of a seed that is a number, the seeds that :class:`MovedCopy` hashes with the pixels."""
    if isinstance(keys, int):
        return noise.seeds_like(pixels, keys)
    return noise.stream_keys(pixels, keys) if isinstance(keys, bytes) else keys


def the_image(pixels: Tensor, *_: Tensor) -> Tensor:
    """The images themselves."""
    return pixels


@dataclass(frozen=True)
class SmallerCopy:
    """A function that resizes images to ``size`` pixels a side."""

    size: int
    backend: Backend

    def __call__(self, pixels: Tensor, *_: Tensor) -> Tensor:
        """Copies ``[B, 3, size, size]`` of images ``[B, 3, S, S]``."""
        return self.backend.smaller_copy(pixels, self.size)


@dataclass(frozen=True)
class MovedCopy:
    """A function that moves images by a branch of their random streams and resizes them to ``size`` pixels a side.

    With ``hashes`` it gets seeds instead of streams.
    """

    motion: Motion
    size: int
    branch: int
    hashes: bool
    backend: Backend

    def __call__(self, pixels: Tensor, streams: Tensor) -> Tensor:
        """Copies ``[B, 3, size, size]`` of images ``[B, 3, S, S]`` with streams ``[B]``."""
        moved = self.backend.moved(self.motion, pixels, streams, self.branch, hashes=self.hashes)
        return self.backend.smaller_copy(moved, self.size)


@dataclass(frozen=True)
class Extrapolation:
    """A function from the features of image, look and moved look to the answers of steps 3 and 4.

    ``alpha`` and ``blend`` are the strengths of the two, see :class:`react_clip.defenses.second_look.SecondLook`.
    """

    alpha: float
    blend: float

    def __call__(self, features: Tensor, given: Tensor | None = None) -> Tensor:
        """Features of image, look and both answers ``[B, 4, D]`` from those of image, look, moved look ``[B, 3, D]``.

        With ``given``, the features of image and look ``[B, 2, D]``, ``features`` are those of the moved look alone,
        ``[B, 1, D]``.
        """
        plain, look, moved = (features if given is None else torch.cat([given, features], 1)).unbind(1)
        anchors = functional.anchor(torch.stack([look, moved], 1))
        answers = [functional.extrapolate(plain, anchors, strength) for strength in (self.alpha, self.blend)]
        return torch.stack([plain, look, *answers], 1)
