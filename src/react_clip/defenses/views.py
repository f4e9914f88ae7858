"""Noisy views of images, each following from the image's key, a branch and a number alone."""

from __future__ import annotations

import torch
from torch import Tensor

from react_clip import noise
from react_clip.defenses.base import encode_in_batches
from react_clip.encoders.base import Encoder

# Branches of an image's random stream; each role has its own, so that skipping one does not shift another.
LOW, HIGH, AUGMENT, ANCHOR, GATE = range(5)


def anchor_views(encoder: Encoder, pixels: Tensor, streams: Tensor, sigma: Tensor, max_batch: int) -> Tensor:
    """Unit features ``[B, k, D]`` of noisy views of each image, one for each of its streams ``[B, k]``."""
    view_keys, image_of = streams.flatten(), torch.arange(len(pixels), device=pixels.device)
    image_of = image_of.repeat_interleave(streams.shape[1])
    unit = encode_in_batches(
        encoder,
        len(image_of),
        max_batch,
        lambda i, j: noise.noisy_view(pixels[image_of[i:j]], view_keys[i:j], sigma[image_of[i:j]]),
    )
    return unit.reshape(*streams.shape, -1)
