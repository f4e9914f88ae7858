"""The pixels of a set, read once, and the rounding with which adversarial images are stored."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from react_clip.data import ImageDataset
from react_clip.errors import ReactClipError
from react_clip.preprocess import crop_to_size, read_image

ROUNDING_NOTES = {
    "float16": (
        "adversarial images are stored as float16 (steps of at most 0.12/255) and evaluated as stored: rounding can "
        "kill an attack, though rarely one of 1/255 or more"
    ),
    "uint8": (
        "adversarial images are stored as uint8 (steps of 1/255) and evaluated as stored: rounding can kill an attack, "
        "above all at budgets of 1/255 or 2/255"
    ),
    "none": "adversarial images are not stored; they are evaluated in float32 as the attack left them",
}
"""What a reader of the numbers must know about each way of storing."""


def read_pixels(dataset: ImageDataset, size: int, *, progress: bool = False) -> Tensor:
    """All photos of a set as uint8 ``[N, 3, size, size]``: decoded once, kept for every attack and defence."""
    stack = torch.empty(len(dataset), 3, size, size, dtype=torch.uint8)

    def read(index: int) -> None:
        photo = crop_to_size(read_image(dataset.image(index)), size)
        stack[index] = torch.from_numpy(np.array(photo, dtype=np.uint8)).permute(2, 0, 1)

    # Pillow decodes and resizes outside Python's lock, so threads do help.
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        done = pool.map(read, range(len(dataset)))
        for _ in tqdm(done, f"{dataset.name}: photos", len(dataset), unit="photo", leave=False, disable=not progress):
            pass
    return stack


def to_float(pixels: Tensor) -> Tensor:
    """Float pixels in [0, 1], as an encoder takes them."""
    return pixels.float().div(255.0) if pixels.dtype == torch.uint8 else pixels.float()


def rounded(images: Tensor, clean: Tensor, eps: float, store: str) -> Tensor:
    """Adversarial images as they are stored, still within ``eps`` of the clean ones.

    Rounding to the nearest value may leave the ball by half a step; such a pixel takes the next value towards the clean
    one instead, so that the stored image is one the attacker was allowed to make (for budgets of at least one step).

    >>> clean = torch.full((1, 3, 2, 2), 100 / 255)
    >>> rounded(clean + 4 / 255, clean, 4 / 255, "uint8").unique()
    tensor([104], dtype=torch.uint8)
    """
    if store == "none":
        return images.float()
    if store == "uint8":
        nearest = images.mul(255.0).round()
        back = (nearest / 255.0 - clean).sign()
        outside = (nearest / 255.0 - clean).abs() > eps + 1e-6
        return (nearest - back * outside).clamp(0, 255).to(torch.uint8)
    if store == "float16":
        half = images.half()
        offset = half.float() - clean
        # The bit patterns of non-negative floats are ordered like their values: one less is the next smaller number.
        bits = half.view(torch.int16) - (offset.sign() * (offset.abs() > eps)).to(torch.int16)
        return bits.clamp_min(0).view(torch.float16)
    raise ReactClipError(f"store is {store!r}; choose one of {', '.join(ROUNDING_NOTES)}")
