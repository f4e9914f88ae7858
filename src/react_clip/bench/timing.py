"""Timing several ways to answer the same images, taking turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from react_clip.errors import ReactClipError

Answer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pixels ``[B, 3, S, S]`` to the forward and backward encoder passes that each image took."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to answer images."""

    label: str
    answer: Answer


@dataclass(frozen=True)
class Timing:
    """What one contender took. Ratios between contenders of one run mean something; seconds belong to the machine."""

    label: str
    images_per_second: float
    milliseconds: float
    """Per image, at the run's batch size: the median over rounds."""
    passes: float
    backward_passes: float
    overhead: float
    """Time divided by what its passes take at the bare encoder's speed, a backward pass counted as two."""
    latency_p50: float
    latency_p99: float
    """Milliseconds for one image alone."""
    peak_bytes: int | None
    """Most device memory during a batch; not measured on a CPU."""


def compare(
    contenders: Sequence[Contender],
    images: Tensor,
    *,
    batch: int,
    rounds: int = 5,
    singles: int = 20,
    progress: Callable[[str], None] = lambda label: None,
) -> list[Timing]:
    """Time every contender on the same images, round by round; the first one is the bare encoder, the yardstick."""
    if not contenders or not len(images) or min(batch, rounds, singles) < 1:
        raise ReactClipError(
            f"{len(contenders)} contenders, {len(images)} images, batch {batch}, {rounds} rounds and {singles} single "
            "images are too few; each must be at least 1"
        )
    spent: list[list[float]] = [[] for _ in contenders]
    alone: list[list[float]] = [[] for _ in contenders]
    costs: list[tuple[float, float]] = []
    peaks: list[int | None] = []
    for contender in contenders:
        progress(f"warm-up: {contender.label}")
        forward, backward, peak = _measure_cost(contender, images, batch)
        costs.append((forward, backward))
        peaks.append(peak)
    for turn in range(rounds):
        for number, contender in enumerate(contenders):
            progress(f"round {turn + 1}: {contender.label}")
            spent[number].append(_seconds(contender, images, batch))
    for turn in range(singles):
        image = images[turn % len(images)][None]
        for number, contender in enumerate(contenders):
            alone[number].append(_seconds(contender, image, 1))
        progress("one image alone")
    per_image = [statistics.median(times) / len(images) for times in spent]
    yardstick = per_image[0] / (costs[0][0] + 2 * costs[0][1])
    return [
        Timing(
            label=contender.label,
            images_per_second=1 / per_image[number],
            milliseconds=1000 * per_image[number],
            passes=costs[number][0],
            backward_passes=costs[number][1],
            overhead=per_image[number] / (yardstick * (costs[number][0] + 2 * costs[number][1])),
            latency_p50=1000 * percentile(alone[number], 0.5),
            latency_p99=1000 * percentile(alone[number], 0.99),
            peak_bytes=peaks[number],
        )
        for number, contender in enumerate(contenders)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


def _measure_cost(contender: Contender, images: Tensor, batch: int) -> tuple[float, float, int | None]:
    """Mean passes per image, and the most memory a batch takes; also warms the contender up."""
    on_gpu = images.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(images.device)
    passes = [contender.answer(part) for part in torch.split(images, batch)]
    contender.answer(images[:1])
    peak = torch.cuda.max_memory_allocated(images.device) if on_gpu else None
    forward, backward = (torch.cat([part[kind] for part in passes]).double().mean().item() for kind in (0, 1))
    return forward, backward, peak


def _seconds(contender: Contender, images: Tensor, batch: int) -> float:
    _wait_for(images.device)
    begin = time.perf_counter()
    for part in torch.split(images, batch):
        contender.answer(part)
    _wait_for(images.device)
    return time.perf_counter() - begin


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
