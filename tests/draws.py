"""Everything that is drawn at random, made on a device, to be compared with another device or with known bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import noise
from react_clip.attacks import Corruption
from react_clip.augment import JitterFirst, Motion, WeakAugmentation, smaller_copy
from react_clip.defenses.agc import perspective_views
from react_clip.defenses.augmix import AugMix
from react_clip.linf import Ball

SIDE = 224
SECRET = b"a secret that is long enough"


def photos(count: int, side: int = SIDE) -> Tensor:
    """Half of them with 8 bits; every pixel differs from its neighbours."""
    levels = noise.uniform(torch.arange(count), 3 * side * side).reshape(-1, 3, side, side)
    return torch.where(torch.arange(count)[:, None, None, None] % 2 == 0, (255 * levels).round() / 255, levels)


def numbers(images: Tensor) -> dict[str, Tensor]:
    """Keys and numbers, of which every bit must be known."""
    keys = noise.stream_keys(images, 3)
    eps = noise.uniform(keys, 1)[:, :, None, None]
    return {
        "keys": keys,
        "secret keys": noise.stream_keys(images, SECRET),
        "branches": noise.fork(keys[:, None], torch.arange(5, device=keys.device)),
        "uniform": noise.uniform(keys, 1001),
        "normal": noise.normal(keys, (7, 143)),
        "noisy views": noise.noisy_view(images, keys, eps.flatten()),
        "start": Ball(images, 4 / 255).random_start(keys),
        "starts of their own size": Ball(images, eps).random_start(keys),
        "damaged": Corruption(type="noise", severity=0.1)._damaged(images, keys),
    }


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "moved": Motion(),
    "moved far": Motion(rotation=180.0, translation=0.3, scale=(0.4, 2.0)),
    "smaller": lambda images, _: smaller_copy(images, 160),
    "moved and smaller": lambda images, keys: smaller_copy(Motion()(images, keys), 176),
    "cropped": AugMix(chains=0),
    "augmented": WeakAugmentation(probability=1.0),
    "augmented, jitter first": JitterFirst(),
    "perspective": perspective_views,
    "mixed": AugMix(),
}


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """All uniform numbers and parameters that views are made of, and the places at which they are sampled."""
    seen: list[Tensor] = []

    def spy(function: Callable[..., Tensor], place: int | None) -> Callable[..., Tensor]:
        def call(*arguments: Any, **options: Any) -> Tensor:
            result = function(*arguments, **options)
            seen.append(result if place is None else arguments[place])
            return result

        return call

    with ExitStack() as patches:
        for owner, name, place in ((noise, "uniform", None), (noise, "tabulated", None), (F, "grid_sample", 1)):
            patches.enter_context(patch.object(owner, name, spy(getattr(owner, name), place)))
        yield seen


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Also tells -0.0 from 0.0."""
    return one.shape == other.shape and one.cpu().numpy().tobytes() == other.cpu().numpy().tobytes()
