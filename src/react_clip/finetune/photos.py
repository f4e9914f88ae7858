"""The training photos: their order, augmentation and random streams, all of which depend on the seed alone."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from react_clip import noise
from react_clip.encoders import Encoder
from react_clip.errors import ReactClipError

_ORDER, _START, _AUGMENT = range(3)
_SMALLEST_CROP = 0.5
_RATIO = 4 / 3


@dataclass(frozen=True, eq=False)
class Photos:
    """uint8 pixels ``[N, 3, S, S]`` and labels ``[N]`` on the CPU."""

    pixels: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def indices(self, step: int, size: int, seed: int) -> Tensor:
        """Indices of a step's photos: the next ``size`` of an endless sequence of shuffled passes over all photos."""
        begin, count = step * size, len(self)
        passes = range(begin // count, (begin + size - 1) // count + 1)
        order = torch.cat([_shuffled(count, number, seed) for number in passes])
        return order[begin % count : begin % count + size]

    def batch(self, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Float pixels in [0, 1] and labels, on the device."""
        pixels, labels = upload(self.pixels[indices], device), upload(self.labels[indices], device)
        return pixels.float().div_(255.0), labels


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device; from pinned memory, so that the copy does not wait for the work queued there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def stream_keys(indices: Tensor, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random streams ``[B]`` of a step's photos: for the attack's start, and for the augmentation."""
    root = torch.full_like(indices, seed)
    keys = noise.fork(noise.fork(root, step), indices)
    return noise.fork(keys, _START), noise.fork(keys, _AUGMENT)


def augmented(pixels: Tensor, keys: Tensor, kind: str) -> Tensor:
    """Photos, half of them mirrored; with ``crop`` also cut to 50-100 % of their area and resized."""
    if kind == "none":
        return pixels
    draws = noise.uniform(keys, 5)
    if kind == "crop":
        pixels = _cropped(pixels, draws[:, 1:])
    return torch.where((draws[:, 0] < 0.5)[:, None, None, None], pixels.flip(3), pixels)


def checked_photos(encoder: Encoder, pixels: Tensor, labels: Tensor | None, classes: int) -> Photos:
    """Photos as uint8, or an error if they cannot be trained on; floats in [0, 1] are rounded to bytes."""
    if pixels.dtype != torch.uint8:
        encoder.check(pixels)
        pixels = pixels.detach().mul(255).round().to(torch.uint8)
    size = encoder.image_size
    if pixels.ndim != 4 or tuple(pixels.shape[1:]) != (3, size, size) or not len(pixels):
        raise ReactClipError(
            f"photos have shape {list(pixels.shape)}; {encoder.name!r} takes [N, 3, {size}, {size}] with N >= 1"
        )
    if labels is None:
        labels = torch.zeros(len(pixels), dtype=torch.long)
    elif labels.shape != (len(pixels),) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ReactClipError(
            f"labels are {labels.dtype} of shape {list(labels.shape)}; {len(pixels)} photos need one class index each"
        )
    elif int(labels.min()) < 0 or int(labels.max()) >= classes:
        raise ReactClipError(
            f"labels span {int(labels.min())} to {int(labels.max())}; there are class features for 0 to {classes - 1}"
        )
    return Photos(pixels.detach().cpu().contiguous(), labels.detach().cpu().long())


def check_memory(photos: int, size: int, available: int | None = None) -> None:
    """Refuse sets that need more than half of the memory (by default this machine's): photos are read once and kept.

    >>> check_memory(2000, 224, available=8 * 2**30)
    """
    available = available or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    needed = photos * 3 * size * size
    if needed > available // 2:
        most = available // 2 // (3 * size * size)
        raise ReactClipError(
            f"{photos:,} photos at {size} pixels take {needed / 2**30:.1f} GiB, more than half of this machine's "
            f"{available / 2**30:.1f} GiB of memory; give --limit {most} or less"
        )


@lru_cache(maxsize=2)
def _shuffled(count: int, number: int, seed: int) -> Tensor:
    root = torch.tensor([seed])
    keys = noise.fork(noise.fork(noise.fork(root, _ORDER), number), torch.arange(count))
    return keys.argsort(stable=True)


def _cropped(pixels: Tensor, draws: Tensor) -> Tensor:
    """A rectangle of random area, shape and position, resized bilinearly to the image size."""
    area = _SMALLEST_CROP + (1 - _SMALLEST_CROP) * draws[:, 0]
    ratio = ((2 * draws[:, 1] - 1) * math.log(_RATIO)).exp()
    width, height = (area * ratio).sqrt().clamp_max(1), (area / ratio).sqrt().clamp_max(1)
    left, top = (2 * draws[:, 2] - 1) * (1 - width), (2 * draws[:, 3] - 1) * (1 - height)
    zero = torch.zeros_like(width)
    rows = [torch.stack([width, zero, left], dim=1), torch.stack([zero, height, top], dim=1)]
    grid = F.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    # Bilinear weights sum to one only up to rounding.
    return F.grid_sample(pixels, grid, padding_mode="border", align_corners=False).clamp(0, 1)
