"""What one call of the benchmark measures: the table of contenders, or how cost changes along one axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from react_clip.bench.contenders import PLAIN, PUBLISHED, contenders
from react_clip.bench.race import Progress, Race, part_size, run
from react_clip.bench.timing import Contender, Timing
from react_clip.bench.traffic import Traffic, gate_scores, opening
from react_clip.defenses import Defense, ReACT
from react_clip.zeroshot import ZeroShotClassifier

SWEEPS = ("batch", "images", "classes", "attacked")
CLASSES = (10, 100, 1_000, 20_000)
SHARES = (0.0, 0.01, 0.1, 1.0)
_BATCHES = (1, 4, 16, 64, 256, 1024)
_PARTS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Point:
    """One value of a sweep and what the contenders took there."""

    value: float
    timings: tuple[Timing, ...]


@dataclass(frozen=True, eq=False)
class Bench:
    """Weights, traffic and how long to measure; frozen, so that a sweep changes one thing at a time."""

    clf: ZeroShotClassifier
    guard: ReACT
    traffic: Traffic
    images: int = 64
    batch: int = 64
    attacked: float = 0.0
    rounds: int = 5
    singles: int = 20
    scores: Tensor | None = None
    """Of all images: the threshold is then set so that the gate opens for the attacked share (random weights)."""
    defenses: Mapping[str, Defense] = field(default_factory=dict)

    def table(self, progress: Progress = lambda label: None) -> list[Timing]:
        """Every contender on the same images."""
        race = self._race(lambda contender: True)
        for _ in run([race], rounds=self.rounds, singles=self.singles, progress=progress):
            pass
        return race.timings()

    def sweep(self, axis: str, progress: Progress = lambda label: None) -> Iterator[list[Point]]:
        """The bare encoder, ReACT and the defences asked for at each value of an axis, taking turns round by round.

        After every round, all points as they are by then. The plain algorithm and Defend-CLIP do the same work whatever
        the traffic, so the table says it all about them.
        """
        values = self.values(axis)
        races = [self._at(axis, value)._race(_swept) for value in values]
        for _ in run(races, rounds=self.rounds, singles=self.singles, progress=progress):
            yield [Point(value, tuple(race.timings())) for value, race in zip(values, races, strict=True)]

    def values(self, axis: str) -> list[float]:
        """Where an axis is measured: batches up to the number of images, an eighth of the images up to all of them."""
        if axis == "batch":
            return [batch for batch in _BATCHES if batch <= self.images] or [self.images]
        if axis == "images":
            return sorted({max(1, self.images // part) for part in _PARTS})
        return list(CLASSES if axis == "classes" else SHARES)

    def steps(self, axis: str | None = None) -> int:
        """How often ``progress`` is called by the table, or by a sweep."""
        lineup = 4 + len(self.defenses) if axis is None else 2 + len(self.defenses)
        values: list[float] = [0] if axis is None else self.values(axis)
        sizes = [
            (int(v) if axis == "images" else self.images, int(v) if axis == "batch" else self.batch) for v in values
        ]
        parts = sum(-(-images // part_size(images, batch, self.clf.device)) for images, batch in sizes)
        return lineup * (len(values) + self.rounds * parts) + len(values) * self.singles

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
        # J, and so the scores, belong to the classes.
        images = self.traffic.images(self.images, 0.0)
        return replace(self, clf=clf, scores=gate_scores(clf, self.guard, images, batch=self.batch))

    def _race(self, wanted: Callable[[Contender], bool]) -> Race:
        images = self.traffic.images(self.images, self.attacked)
        guard = self.guard if self.scores is None else opening(self.guard, self.scores[: self.images], self.attacked)
        lineup = contenders(self.clf, guard, batch=self.batch, defenses=self.defenses)
        return Race([contender for contender in lineup if wanted(contender)], images, batch=self.batch)


def _swept(contender: Contender) -> bool:
    return contender.label not in (PLAIN, PUBLISHED)


def with_classes(clf: ZeroShotClassifier, count: int) -> ZeroShotClassifier:
    """The classifier with its first classes repeated until there are ``count``.

    Copies of a class share its probability evenly, so J, and with it the gate and the passes, stay as they are: what
    changes is the cost of the classes alone.
    """
    base = next(number for number in (10, 5, 2, 1) if number <= len(clf.names))
    copies = -(-count // base)
    features = clf.class_features[:base].repeat(copies, 1)[:count]
    names = [f"{name} {copy}" for copy in range(copies) for name in clf.names[:base]][:count]
    return ZeroShotClassifier.from_features(clf.encoder, names, features)
