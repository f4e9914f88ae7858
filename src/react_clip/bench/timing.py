"""Times several contenders on the same images, interleaved, so that a busy machine slows all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from react_clip.bench.hardware import host_syncs, peak_memory, seconds_of

Answer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pixels ``[B, 3, S, S]`` to the forward and backward encoder passes ``[B]`` that each image took."""

Progress = Callable[[str], None]
"""Called with a label after every measurement."""

_SYNC_IMAGES = 2
"""Images in the batch whose host synchronisations are counted; their number does not depend on it."""


@dataclass(frozen=True, eq=False)
class Contender:
    """One way to answer images."""

    label: str
    answer: Answer


@dataclass(frozen=True)
class Timing:
    """Measurements of one contender. Compare ratios between contenders of one run; seconds depend on the machine."""

    label: str
    images_per_second: float
    milliseconds: float
    """Per image at the run's batch size, median over rounds."""
    passes: float
    backward_passes: float
    overhead: float
    """Time divided by what the same passes take at the bare encoder's speed in the same round, a backward pass counted
    as two; median over rounds."""
    overhead_range: tuple[float, float]
    """Smallest and largest overhead of any round."""
    latency_p50: float
    latency_p99: float
    """Milliseconds for one image alone."""
    peak_bytes: int
    """Most bytes of tensors during one pass over all images, beyond the weights and the images."""
    host_syncs: int
    """Number of times that the host waits for the device in one batch."""
    round_milliseconds: tuple[float, ...]


@dataclass(frozen=True)
class Ratio:
    """A ratio measured round by round: median, smallest and largest."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """
        >>> Ratio.of([3.0, 1.0, 2.0])
        Ratio(middle=2.0, low=1.0, high=3.0)
        """
        return cls(float(np.median(values)), min(values), max(values))


def speedup(ours: Timing, theirs: Timing) -> Ratio:
    """Our images per second divided by theirs, round by round."""
    return Ratio.of([b / a for a, b in zip(ours.round_milliseconds, theirs.round_milliseconds, strict=True)])


class Comparison:
    """Contenders on the same images. The first one is the bare encoder, to which overheads refer."""

    def __init__(self, contenders: Sequence[Contender], images: Tensor, *, batch: int) -> None:
        self.contenders, self.images, self.batch = list(contenders), images, batch
        # A busy CPU slows contenders alike when they alternate batch by batch. A GPU computes one batch while the host
        # prepares the next, so there contenders alternate over all images.
        self.chunks = torch.split(images, batch if images.device.type == "cpu" else len(images))
        # For each round: seconds, images, forward and backward passes ``[contenders, 4]``.
        self._rounds: list[NDArray[np.float64]] = []
        self._syncs: list[int] = []
        self._peaks: list[int] = []
        self._latencies: list[list[float]] = [[] for _ in contenders]

    def measure_once(self, singles: int, progress: Progress) -> None:
        """Host synchronisations, memory, and the latency of ``singles`` single images."""
        for contender in self.contenders:
            self._syncs.append(len(host_syncs(lambda c=contender: c.answer(self.images[:_SYNC_IMAGES]))))  # type: ignore[misc]
            # Over all images, so that memory kept from batch to batch is seen.
            self._peaks.append(peak_memory(lambda c=contender: self._answer(c, self.images), self.images.device))  # type: ignore[misc]
            progress(f"warm-up: {contender.label}")
        for number in range(singles):
            image = self.images[number % len(self.images)][None]
            for latencies, contender in zip(self._latencies, self.contenders, strict=True):
                latencies.append(1000 * self._run(contender, image)[0])
            progress("one image alone")

    def measure_chunk(self, chunk: Tensor, first: bool, progress: Progress) -> None:
        """Every contender once on some of the images; ``first`` begins a new round."""
        if first:
            self._rounds.append(np.zeros((len(self.contenders), 4)))
        for number, contender in enumerate(self.contenders):
            self._rounds[-1][number] += self._run(contender, chunk)
            progress(f"round {len(self._rounds)}: {contender.label}")

    def timings(self) -> list[Timing]:
        """Measurements of every contender in the rounds so far."""
        seconds, images, forward, backward = np.moveaxis(np.stack(self._rounds), -1, 0)
        milliseconds, cost = 1000 * seconds / images, seconds / (forward + 2 * backward)
        overheads = cost / cost[:, :1]
        middle = np.median(milliseconds, axis=0)
        p50, p99 = np.percentile(self._latencies, [50, 99], axis=1, method="inverted_cdf")
        return [
            Timing(
                label=contender.label,
                images_per_second=float(1000 / middle[i]),
                milliseconds=float(middle[i]),
                passes=float(forward[0, i] / images[0, i]),
                backward_passes=float(backward[0, i] / images[0, i]),
                overhead=float(np.median(overheads[:, i])),
                overhead_range=(float(overheads[:, i].min()), float(overheads[:, i].max())),
                latency_p50=float(p50[i]),
                latency_p99=float(p99[i]),
                peak_bytes=self._peaks[i],
                host_syncs=self._syncs[i],
                round_milliseconds=tuple(milliseconds[:, i].tolist()),
            )
            for i, contender in enumerate(self.contenders)
        ]

    def steps(self, rounds: int, singles: int) -> int:
        """Number of times that ``progress`` is called."""
        return len(self.contenders) * (1 + rounds * len(self.chunks)) + singles

    def _answer(self, contender: Contender, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [contender.answer(part) for part in torch.split(images, self.batch)]

    def _run(self, contender: Contender, images: Tensor) -> tuple[float, int, float, float]:
        """Seconds, images, forward passes and backward passes."""
        passes: list[tuple[Tensor, Tensor]] = []
        seconds = seconds_of(lambda: passes.extend(self._answer(contender, images)), images.device)
        forward, backward = (sum(part[kind].double().sum().item() for part in passes) for kind in (0, 1))
        return seconds, len(images), forward, backward


def measure(
    comparisons: Sequence[Comparison], *, rounds: int, singles: int, progress: Progress = lambda label: None
) -> Iterator[None]:
    """Measure all comparisons, such as the points of a sweep; yields after every round, when timings may be read.

    The chunks of all comparisons are interleaved: each is spread evenly over the whole round.
    """
    for comparison in comparisons:
        comparison.measure_once(singles, progress)
    schedule = sorted(
        ((number + 0.5) / len(comparison.chunks), index, number)
        for index, comparison in enumerate(comparisons)
        for number in range(len(comparison.chunks))
    )
    for _ in range(rounds):
        for _, index, number in schedule:
            comparisons[index].measure_chunk(comparisons[index].chunks[number], number == 0, progress)
        yield
