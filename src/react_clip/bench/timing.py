"""What a contender took, and ratios between contenders."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

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


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed.

    >>> percentile([3.0, 1.0, 2.0], 0.5), percentile([3.0, 1.0, 2.0], 0.99)
    (2.0, 3.0)
    """
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
