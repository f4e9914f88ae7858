"""What the machine can do at best, and what one encoder pass asks of it: the two sides of a roofline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from react_clip.encoders.base import Encoder

_TRIES = 5
_SIDES = {"cuda": 8192, "cpu": 2048}
"""Sides of the square matrices whose product is timed: large enough to be fastest, small enough to be quick."""
_COPIED = {"cuda": 2**30, "cpu": 2**28}
"""Bytes that are copied: more than any cache holds."""


@dataclass(frozen=True)
class Roofline:
    """A pass cannot be faster than ``pass_flops / matmul_flops``, nor a call than ``weight_bytes / memory_bytes``."""

    pass_flops: float
    """Floating-point operations of one pass, a multiply-add counted as two."""
    weight_bytes: int
    """Image tower; read once by every encoder call, however many images it holds."""
    matmul_flops: float
    """Operations a second in the best of a few large matrix products of the encoder's dtype."""
    memory_bytes: float
    """Bytes a second, read and written, in the best of a few large copies."""


def roofline(encoder: Encoder) -> Roofline:
    """Count the encoder's work and measure its machine."""
    device, dtype = encoder.device, encoder.dtype
    kind = "cuda" if device.type == "cuda" else "cpu"
    side, size = _SIDES[kind], _COPIED[kind]
    one = torch.randn(side, side, device=device, dtype=dtype)
    block = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(block)
    return Roofline(
        pass_flops=pass_flops(encoder),
        weight_bytes=_image_weights(encoder),
        matmul_flops=2.0 * side**3 / _best_seconds(lambda: one @ one, device),
        memory_bytes=2.0 * size / _best_seconds(lambda: target.copy_(block), device),
    )


def pass_flops(encoder: Encoder) -> float:
    """Floating-point operations of the matrix products, convolutions and attention of one pass."""
    size = encoder.image_size
    # In double precision no graph answers, whose recording would count the tower several times.
    image = torch.full((1, 3, size, size), 0.5, device=encoder.device, dtype=torch.float64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder.encode_views(image)
    return float(counter.get_total_flops())


def _image_weights(encoder: Encoder) -> int:
    named = list(encoder.tower.named_parameters())
    # Image towers are called so in transformers and in open_clip; a model that is nothing else needs no such name.
    image = [weight for name, weight in named if name.startswith(("vision", "visual"))]
    return sum(weight.numel() * weight.element_size() for weight in image or [weight for _, weight in named])


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(_TRIES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
