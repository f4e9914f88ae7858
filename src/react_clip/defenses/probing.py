"""The probes behind the drift: noisy views at a weak and at a stronger scale, averaged over their samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from react_clip import noise
from react_clip.defenses.base import encode_in_batches
from react_clip.encoders.base import Encoder


def probe(
    encoder: Encoder,
    pixels: Tensor,
    streams: Callable[[], Tensor],
    scales: tuple[float, float],
    samples: int,
    max_batch: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clean features and the mean feature of the probes at the weak and at the strong scale.

    ``streams`` makes the keys ``[2, S, B]`` of the views: scale by scale, sample by sample, image by image. It is
    called once, and where the clean views fill a call of the encoder, after that: by then a GPU is at work on them.
    """
    images = len(pixels)

    @cache
    def keys_and_sigmas() -> tuple[Tensor, Tensor]:
        # Filled on the device: to send numbers there, the host would have to wait for it.
        return streams().flatten(), torch.cat([pixels.new_full((samples * images,), scale) for scale in scales])

    def noisy(start: int, stop: int) -> Tensor:
        keys, sigmas = keys_and_sigmas()
        first, last = start % images, start % images + stop - start
        if last <= images:
            shown = pixels[first:last]
        else:
            shown = pixels[torch.arange(start, stop, device=pixels.device) % images]
        return noise.noisy_view(shown, keys[start:stop], sigmas[start:stop])

    def views(start: int, stop: int) -> Tensor:
        """The clean views first, then the noisy ones."""
        if stop <= images:
            return pixels[start:stop]
        made = noisy(max(start - images, 0), stop - images)
        return made if start >= images else torch.cat([pixels[start:], made])

    unit = encode_in_batches(encoder, images * (1 + 2 * samples), max_batch, views)
    low, high = unit[images:].reshape(2, samples, images, -1).mean(1)
    return unit[:images], low, high
