"""What a defence costs, measured side by side in one run: same weights, same images, same precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from react_clip.bench.hardware import Roofline, host_syncs, roofline
from react_clip.bench.timing import Comparison, Contender, Progress, Ratio, Timing, measure, speedup
from react_clip.bench.workload import (
    BARE,
    OURS,
    PLAIN,
    PUBLISHED,
    SHAPES,
    Traffic,
    contenders,
    gate_scores,
    open_gate_for,
    random_encoder,
    synthetic_photos,
    with_classes,
)
from react_clip.defenses import Defense, ReACT
from react_clip.zeroshot import ZeroShotClassifier

SWEEPS = ("batch", "images", "classes", "attacked")
_CLASSES = (10, 100, 1_000, 20_000)
_SHARES = (0.0, 0.01, 0.1, 1.0)
_BATCHES = (1, 4, 16, 64, 256, 1024)
_DIVISORS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Point:
    """One value of a sweep and the timings there."""

    value: float
    timings: tuple[Timing, ...]


@dataclass(frozen=True, eq=False)
class Bench:
    """Weights, images and length of a measurement; a sweep changes one field at a time."""

    clf: ZeroShotClassifier
    guard: ReACT
    traffic: Traffic
    images: int = 64
    batch: int = 64
    attacked: float = 0.0
    rounds: int = 5
    singles: int = 20
    scores: Tensor | None = None
    """Scores of all images, for random weights: the threshold is set so that the gate opens for the attacked share."""
    defenses: Mapping[str, Defense] = field(default_factory=dict)

    def table(self) -> Comparison:
        """Every contender on the same images."""
        return self._comparison(swept=False)

    def sweep(self, axis: str) -> dict[float, Comparison]:
        """The bare encoder, ReACT and ``defenses`` at each value of an axis.

        The plain algorithm and Defend-CLIP do the same work for any traffic, so they are in the table only.
        """
        return {value: self._at(axis, value)._comparison(swept=True) for value in self.values(axis)}

    def measure(self, comparisons: Mapping[float, Comparison], progress: Progress) -> Iterator[list[Point]]:
        """After every round, the timings so far of each comparison."""
        ordered = list(comparisons.values())
        for _ in measure(ordered, rounds=self.rounds, singles=self.singles, progress=progress):
            yield [Point(value, tuple(comparison.timings())) for value, comparison in comparisons.items()]

    def values(self, axis: str) -> list[float]:
        """Values of an axis: batches up to the number of images, an eighth of the images up to all of them."""
        if axis == "batch":
            return [batch for batch in _BATCHES if batch <= self.images] or [self.images]
        if axis == "images":
            return sorted({max(1, self.images // divisor) for divisor in _DIVISORS})
        return list(_CLASSES if axis == "classes" else _SHARES)

    def _at(self, axis: str, value: float) -> Bench:
        if axis == "batch":
            return replace(self, batch=int(value))
        if axis == "images":
            return replace(self, images=int(value))
        if axis == "attacked":
            return replace(self, attacked=value)
        clf = with_classes(self.clf, int(value))
        if self.scores is None:
            return replace(self, clf=clf)
        # J, and so the scores, depend on the classes.
        images = self.traffic.images(self.images, 0.0)
        return replace(self, clf=clf, scores=gate_scores(clf, self.guard, images, batch=self.batch))

    def _comparison(self, swept: bool) -> Comparison:
        images = self.traffic.images(self.images, self.attacked)
        guard = self.guard
        if self.scores is not None:
            guard = open_gate_for(guard, self.scores[: self.images], self.attacked)
        lineup = contenders(self.clf, guard, batch=self.batch, defenses=self.defenses)
        left_out = (PLAIN, PUBLISHED) if swept else ()
        return Comparison([one for one in lineup if one.label not in left_out], images, batch=self.batch)


__all__ = [
    "BARE",
    "OURS",
    "PLAIN",
    "PUBLISHED",
    "SHAPES",
    "SWEEPS",
    "Bench",
    "Comparison",
    "Contender",
    "Point",
    "Ratio",
    "Roofline",
    "Timing",
    "Traffic",
    "contenders",
    "gate_scores",
    "host_syncs",
    "measure",
    "open_gate_for",
    "random_encoder",
    "roofline",
    "speedup",
    "synthetic_photos",
    "with_classes",
]
