"""The probes behind the drift: noisy views at a weak and at a stronger scale, averaged over their samples."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from react_clip import noise
from react_clip.defenses.base import encode_in_batches
from react_clip.defenses.views import HIGH, LOW
from react_clip.encoders.base import Encoder


def probe(
    encoder: Encoder,
    pixels: Tensor,
    keys: Callable[[], Tensor],
    scales: tuple[float, float],
    samples: int,
    max_batch: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Clean features and the mean feature of the probes at the weak and at the strong scale."""
    images = len(pixels)

    @cache  # made when first asked for: by then a GPU is at work on the clean views
    def streams() -> Tensor:
        """Scale by scale, sample by sample, image by image."""
        roles = torch.arange(LOW, HIGH + 1, device=pixels.device)[:, None, None]
        return noise.fork(noise.fork(keys(), roles), torch.arange(samples, device=pixels.device)[:, None]).flatten()

    def noisy(start: int, stop: int) -> Tensor:
        number = torch.arange(start, stop, device=pixels.device)
        # Filled on the device: to send numbers there, the host would have to wait for it.
        low, high = (pixels.new_full((), scale) for scale in scales)
        sigma = torch.where(number < samples * images, low, high)
        first, last = start % images, start % images + stop - start
        shown = pixels[first:last] if last <= images else pixels[number % images]
        return noise.noisy_view(shown, streams()[start:stop], sigma)

    def views(start: int, stop: int) -> Tensor:
        """The clean views first, then the noisy ones."""
        if stop <= images:
            return pixels[start:stop]
        made = noisy(max(start - images, 0), stop - images)
        return made if start >= images else torch.cat([pixels[start:], made])

    unit = encode_in_batches(encoder, images * (1 + 2 * samples), max_batch, views)
    low, high = unit[images:].reshape(2, samples, images, -1).mean(1)
    return unit[:images], low, high
