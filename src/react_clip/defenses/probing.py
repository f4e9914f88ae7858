"""The probes behind the drift: noisy views at a weak and at a stronger scale, averaged over their samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from react_clip import noise
from react_clip.defenses.base import encode_in_batches
from react_clip.defenses.views import HIGH, LOW
from react_clip.encoders.base import Encoder

Scales = tuple[float, float]
"""The noise of the weak and of the strong probe."""


def probe(
    encoder: Encoder, pixels: Tensor, keys: Tensor, scales: Scales, samples: int, max_batch: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Clean features and the mean feature of either probe: the clean views first, then the probes of each scale."""
    images = len(pixels)
    probes = _views(pixels, keys, scales, range(samples))

    def views(start: int, stop: int) -> Tensor:
        clean = pixels[start : min(stop, images)]
        return torch.cat([clean, probes(max(start - images, 0), max(stop - images, 0))])

    unit = encode_in_batches(encoder, images * (1 + 2 * samples), max_batch, views)
    low, high = unit[images:].reshape(2, samples, images, -1).mean(1)
    return unit[:images], low, high


def probe_again(
    encoder: Encoder, pixels: Tensor, keys: Tensor, scales: Scales, samples: range, max_batch: int
) -> Tensor:
    """The sums ``[2, B, D]`` of further samples of either probe, those with these numbers."""
    probes = _views(pixels, keys, scales, samples)
    unit = encode_in_batches(encoder, 2 * len(samples) * len(pixels), max_batch, probes)
    return unit.reshape(2, len(samples), len(pixels), -1).sum(1)


def _views(pixels: Tensor, keys: Tensor, scales: Scales, samples: range) -> Callable[[int, int], Tensor]:
    """A range of the noisy views of both scales, scale by scale, sample by sample, image by image."""
    probe_keys = torch.cat([noise.fork(noise.fork(keys, branch), i) for branch in (LOW, HIGH) for i in samples])
    # Filled on the device: to send numbers there, the host would have to wait for it.
    sigma = torch.cat([pixels.new_full((len(samples) * len(pixels),), scale) for scale in scales])
    image_of = torch.arange(len(pixels), device=pixels.device).repeat(2 * len(samples))
    return lambda i, j: noise.noisy_view(pixels[image_of[i:j]], probe_keys[i:j], sigma[i:j])
