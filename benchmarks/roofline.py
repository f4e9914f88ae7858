"""Add the limits of this machine to files of ``react-clip bench``, for the roofline in docs/performance-details.md.

    python benchmarks/roofline.py OUT/cpu-vit-b-16-sweep-batch.json ...

Run it on the machine that made the files: it loads the same weights in the same precision, counts the operations of a
pass and times large matrix products and copies. A pass takes at least ``pass_flops / matmul_flops`` seconds, a call at
least ``weight_bytes / memory_bytes``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from react_clip import Encoder, load
from react_clip.bench.timing import seconds_of
from react_clip.bench.workload import random_encoder

TRIES = 5
MATRIX_SIDE = {"cuda": 8192, "cpu": 2048}
"""Sides of the square matrices whose product is timed."""
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**28}
"""More than any cache holds."""
RANDOM = " shapes, random weights"
"""End of the model's name in files of ``--shapes``."""


def roofline(encoder: Encoder) -> dict[str, float]:
    """Work of a pass and speeds of the device: operations (a multiply-add counts as two), bytes, both per second."""
    device = encoder.device
    side, size = MATRIX_SIDE[device.type], COPIED_BYTES[device.type]
    matrix = torch.randn(side, side, device=device, dtype=encoder.dtype)
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return {
        "pass_flops": pass_flops(encoder),
        "weight_bytes": image_tower_bytes(encoder),
        "matmul_flops": 2.0 * side**3 / best_seconds(lambda: matrix @ matrix, device),
        "memory_bytes": 2.0 * size / best_seconds(lambda: target.copy_(source), device),
    }


def pass_flops(encoder: Encoder) -> float:
    """Floating-point operations of the matrix products, convolutions and attention of one pass."""
    size = encoder.image_size
    image = torch.full((1, 3, size, size), 0.5, device=encoder.device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        encoder.encode_views(image)
    return float(counter.get_total_flops())


def image_tower_bytes(encoder: Encoder) -> int:
    """Size of the image tower, which every encoder call reads once."""
    named = list(encoder.tower.named_parameters())
    # transformers and open_clip call image towers so; other towers are image towers as a whole.
    image = [weight for name, weight in named if name.startswith(("vision", "visual"))]
    return sum(weight.numel() * weight.element_size() for weight in image or [weight for _, weight in named])


def best_seconds(call: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few times of a call."""
    return min(seconds_of(call, device) for _ in range(TRIES))


def main() -> None:
    """Write the limits into every file of the command line."""
    for path in map(Path, sys.argv[1:]):
        report = json.loads(path.read_text(encoding="utf-8"))
        device, name = "cpu" if report["device"] == "cpu" else "cuda", report["model"]
        make = random_encoder if name.endswith(RANDOM) else load
        report["roofline"] = roofline(make(name.removesuffix(RANDOM), device=device, dtype=report["dtype"]))
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
