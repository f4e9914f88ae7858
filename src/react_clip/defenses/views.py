"""Noisy views of images, each following from the image's key, a branch and a number alone."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import noise
from react_clip.defenses.base import encode_in_batches
from react_clip.encoders.base import Encoder

# Branches of an image's random stream; each role has its own, so that skipping one does not shift another.
LOW, HIGH, AUGMENT, ANCHOR, GATE = range(5)


def anchor_views(encoder: Encoder, pixels: Tensor, keys: Tensor, sigma: Tensor, draws: range, max_batch: int) -> Tensor:
    """Unit features ``[B, len(draws), D]`` of the views with these numbers behind each image's anchor."""
    numbers = torch.arange(draws.start, draws.stop, device=keys.device)
    view_keys = noise.fork(noise.fork(keys, ANCHOR)[:, None], numbers).flatten()
    image_of = torch.arange(len(pixels), device=pixels.device).repeat_interleave(len(draws))
    unit = encode_in_batches(
        encoder,
        len(image_of),
        max_batch,
        lambda i, j: noise.noisy_view(pixels[image_of[i:j]], view_keys[i:j], sigma[image_of[i:j]]),
    )
    return unit.reshape(len(pixels), len(draws), -1)
