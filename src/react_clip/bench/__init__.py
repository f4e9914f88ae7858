"""The cost of a defence, measured side by side in one run: same weights, same images, same precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from react_clip.bench.timing import Comparison, Timing, measure
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
    with_classes,
)
from react_clip.defenses import Defense, ReACT
from react_clip.zeroshot import ZeroShotClassifier

SWEEPS = ("batch", "images", "classes", "attacked")
_CLASSES = (10, 100, 1_000, 20_000)
_SHARES = (0.0, 0.01, 0.1, 1.0)
_BATCHES = (1, 4, 16, 64, 256, 1024)
_DIVISORS = (8, 4, 2, 1)


@dataclass(frozen=True, eq=False)
class Bench:
    """Weights and images of a measurement; a sweep changes one field at a time.

    Where the traffic has no attack (random weights), tau is set so that the gate opens for the attacked share.
    """

    clf: ZeroShotClassifier
    guard: ReACT
    traffic: Traffic
    images: int = 64
    batch: int = 64
    attacked: float = 0.0
    defenses: Mapping[str, Defense] = field(default_factory=dict)

    def table(self, *left_out: str) -> Comparison:
        """Every contender but those left out, on the same images."""
        images, guard = self.traffic.images(self.images, self.attacked), self.guard
        if self.traffic.attack is None:
            scores = gate_scores(self.clf, guard, images, batch=self.batch)
            guard = open_gate_for(guard, scores, self.attacked)
        compared = contenders(self.clf, guard, batch=self.batch, defenses=self.defenses)
        return Comparison({k: v for k, v in compared.items() if k not in left_out}, images, batch=self.batch)

    def sweep(self, axis: str) -> dict[float, Comparison]:
        """The bare encoder, ReACT and ``defenses`` at each value of an axis.

        The plain algorithm and Defend-CLIP do the same work for any traffic, so they are in the table only.
        """
        return {value: self._at(axis, value).table(PLAIN, PUBLISHED) for value in self.values(axis)}

    def values(self, axis: str) -> list[float]:
        """Values of an axis: batches up to the number of images, an eighth of the images up to all of them."""
        if axis == "batch":
            return [batch for batch in _BATCHES if batch <= self.images] or [self.images]
        if axis == "images":
            return sorted({max(1, self.images // divisor) for divisor in _DIVISORS})
        return list(_CLASSES if axis == "classes" else _SHARES)

    def _at(self, axis: str, value: float) -> Bench:
        if axis == "classes":
            return replace(self, clf=with_classes(self.clf, int(value)))
        return replace(self, **{axis: value})  # type: ignore[arg-type]


__all__ = ["BARE", "OURS", "PLAIN", "PUBLISHED", "SHAPES", "SWEEPS"]
__all__ += ["Bench", "Comparison", "Timing", "Traffic", "measure"]
