"""Timing several ways to answer the same images, taking turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from react_clip.bench.memory import peak_growth
from react_clip.bench.syncs import host_syncs
from react_clip.errors import ReactClipError

_COUNTED = 2
"""Images in the batch whose host synchronisations are counted: how many there are does not change the number."""

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
    """Time divided by what its passes take at the bare encoder's speed in the same round, a backward pass counted as
    two: the median over rounds."""
    overhead_range: tuple[float, float]
    """The smallest and the largest overhead of any round."""
    latency_p50: float
    latency_p99: float
    """Milliseconds for one image alone."""
    peak_bytes: int | None
    """Most memory on the way through all images, beyond the weights and the images themselves; ``None`` where it cannot
    be measured."""
    host_syncs: int
    """How often the host waits for the device in one batch."""
    round_milliseconds: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio measured round by round: the median, the smallest and the largest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """
        >>> Ratio.of([3.0, 1.0, 2.0])
        Ratio(middle=2.0, low=1.0, high=3.0)
        """
        return cls(statistics.median(values), min(values), max(values))


def speedup(ours: Timing, theirs: Timing) -> Ratio:
    """How many images we answer while they answer one."""
    return Ratio.of([b / a for a, b in zip(ours.round_milliseconds, theirs.round_milliseconds, strict=True)])


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
    syncs, peaks = [], []
    for contender in contenders:
        progress(f"warm-up: {contender.label}")
        syncs.append(len(_host_syncs(contender, images[:_COUNTED])))
        peaks.append(_peak(contender, images, batch))
    turns: list[list[_Turn]] = [[] for _ in contenders]
    for number in range(rounds):
        pieces: list[list[_Turn]] = [[] for _ in contenders]
        for part in _parts(images, batch):
            for mine, contender in zip(pieces, contenders, strict=True):
                mine.append(_turn(contender, part, batch))
        for mine, taken, contender in zip(turns, pieces, contenders, strict=True):
            progress(f"round {number + 1}: {contender.label}")
            mine.append(_Turn.of(taken))
    alone: list[list[float]] = [[] for _ in contenders]
    for number in range(singles):
        image = images[number % len(images)][None]
        for latencies, contender in zip(alone, contenders, strict=True):
            latencies.append(1000 * _turn(contender, image, 1).seconds)
        progress("one image alone")
    return [
        _timing(contender.label, mine, turns[0], latencies, peak, count)
        for contender, mine, latencies, peak, count in zip(contenders, turns, alone, peaks, syncs, strict=True)
    ]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


@dataclass(frozen=True)
class _Turn:
    """One contender, once through all images: seconds in all, passes an image."""

    seconds: float
    images: int
    forward: float
    backward: float

    @classmethod
    def of(cls, parts: Sequence[_Turn]) -> _Turn:
        """The parts of a turn as one."""
        images = sum(part.images for part in parts)
        return cls(
            seconds=sum(part.seconds for part in parts),
            images=images,
            forward=sum(part.images * part.forward for part in parts) / images,
            backward=sum(part.images * part.backward for part in parts) / images,
        )

    @property
    def work(self) -> float:
        """Passes an image, a backward pass counted as two."""
        return self.forward + 2 * self.backward


def _parts(images: Tensor, batch: int) -> tuple[Tensor, ...]:
    """What contenders take turns on: single batches, so that a machine that others use too slows all of them alike.

    A GPU works off one batch while the host prepares the next, so there a turn is all images.
    """
    return torch.split(images, batch) if images.device.type == "cpu" else (images,)


def _turn(contender: Contender, images: Tensor, batch: int) -> _Turn:
    _wait_for(images.device)
    begin = time.perf_counter()
    passes = [contender.answer(part) for part in torch.split(images, batch)]
    _wait_for(images.device)
    seconds = time.perf_counter() - begin
    forward, backward = (torch.cat([part[kind] for part in passes]).double().mean().item() for kind in (0, 1))
    return _Turn(seconds, len(images), forward, backward)


def _timing(
    label: str, turns: list[_Turn], bare: list[_Turn], alone: list[float], peak: int | None, syncs: int
) -> Timing:
    each = tuple(1000 * turn.seconds / turn.images for turn in turns)
    milliseconds = statistics.median(each)
    # The same round's encoder is the yardstick, so that a machine that slows down over the run moves both.
    pairs = zip(turns, bare, strict=True)
    overhead = Ratio.of([turn.seconds * one.work / (one.seconds * turn.work) for turn, one in pairs])
    return Timing(
        label=label,
        images_per_second=1000 / milliseconds,
        milliseconds=milliseconds,
        passes=turns[0].forward,
        backward_passes=turns[0].backward,
        overhead=overhead.middle,
        overhead_range=(overhead.low, overhead.high),
        latency_p50=percentile(alone, 0.5),
        latency_p99=percentile(alone, 0.99),
        peak_bytes=peak,
        host_syncs=syncs,
        round_milliseconds=each,
    )


def _host_syncs(contender: Contender, images: Tensor) -> list[str]:
    return host_syncs(lambda: contender.answer(images))


def _peak(contender: Contender, images: Tensor, batch: int) -> int | None:
    """Over all images: what somebody keeps from batch to batch shows nowhere else."""
    return peak_growth(lambda: [contender.answer(part) for part in torch.split(images, batch)], images.device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
