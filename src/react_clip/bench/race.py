"""Timing several ways to answer images, taking turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from react_clip.bench.memory import peak_growth
from react_clip.bench.syncs import host_syncs
from react_clip.bench.timing import Contender, Ratio, Timing, percentile
from react_clip.errors import ReactClipError

_COUNTED = 2
"""Images in the batch whose host synchronisations are counted: how many there are does not change the number."""

Progress = Callable[[str], None]


def compare(
    contenders: Sequence[Contender],
    images: Tensor,
    *,
    batch: int,
    rounds: int = 5,
    singles: int = 20,
    progress: Progress = lambda label: None,
) -> list[Timing]:
    """Time every contender on the same images, round by round; the first one is the bare encoder, the yardstick."""
    race = Race(contenders, images, batch=batch)
    for _ in run([race], rounds=rounds, singles=singles, progress=progress):
        pass
    return race.timings()


class Race:
    """Contenders on the same images; several races, such as the points of a sweep, share their rounds."""

    def __init__(self, contenders: Sequence[Contender], images: Tensor, *, batch: int) -> None:
        if not contenders or not len(images) or batch < 1:
            raise ReactClipError(
                f"{len(contenders)} contenders, {len(images)} images and batch {batch} are too few; each must be at "
                "least 1"
            )
        self.contenders, self.images, self.batch = list(contenders), images, batch
        self._rounds: list[list[_Turn]] = []
        """By round, then by contender."""
        self._syncs: list[int] = []
        self._peaks: list[int | None] = []
        self._alone: list[list[float]] = [[] for _ in contenders]

    def warm_up(self, singles: int, progress: Progress) -> None:
        """What needs no rounds: host synchronisations, memory, the latency of single images."""
        if singles < 1:
            raise ReactClipError(f"{singles} single images are too few; there must be at least 1")
        for contender in self.contenders:
            progress(f"warm-up: {contender.label}")
            self._syncs.append(len(_host_syncs(contender, self.images[:_COUNTED])))
            self._peaks.append(_peak(contender, self.images, self.batch))
        for number in range(singles):
            image = self.images[number % len(self.images)][None]
            for latencies, contender in zip(self._alone, self.contenders, strict=True):
                latencies.append(1000 * _turn(contender, image, 1).seconds)
            progress("one image alone")

    def parts(self) -> tuple[Tensor, ...]:
        """What contenders take turns on."""
        return torch.split(self.images, part_size(len(self.images), self.batch, self.images.device))

    def turns(self, part: Tensor, label: str, progress: Progress) -> list[_Turn]:
        """Every contender once on some of the images."""
        found = []
        for contender in self.contenders:
            progress(f"{label}: {contender.label}")
            found.append(_turn(contender, part, self.batch))
        return found

    def finish_round(self, pieces: Sequence[Sequence[_Turn]]) -> None:
        """Keep a round: every contender's turns on all parts."""
        self._rounds.append([_Turn.of(mine) for mine in zip(*pieces, strict=True)])

    def timings(self) -> list[Timing]:
        """What every contender took in the rounds so far."""
        bare, *_ = by_contender = list(zip(*self._rounds, strict=True))
        columns = (self.contenders, by_contender, self._alone, self._peaks, self._syncs)
        return [
            _timing(contender.label, mine, bare, latencies, peak, count)
            for contender, mine, latencies, peak, count in zip(*columns, strict=True)
        ]


def part_size(images: int, batch: int, device: torch.device) -> int:
    """Images in one turn: a single batch, so that a machine that others use too slows all contenders alike.

    A GPU works off one batch while the host prepares the next, so there a turn is all images.
    """
    return batch if device.type == "cpu" else images


def run(races: Sequence[Race], *, rounds: int, singles: int, progress: Progress) -> Iterator[None]:
    """All races from warm-up to last round; after each round their timings may be asked for."""
    if rounds < 1:
        raise ReactClipError(f"{rounds} rounds are too few; there must be at least 1")
    for race in races:
        race.warm_up(singles, progress)
    for number in range(rounds):
        run_round(races, number, progress)
        yield


def run_round(races: Sequence[Race], number: int, progress: Progress) -> None:
    """One round of all races, whose parts take turns: each race is spread over the whole round, however long it is."""
    pieces: list[list[list[_Turn]]] = [[] for _ in races]
    schedule = [
        ((place + 0.5) / len(parts), index, part)
        for index, parts in enumerate(race.parts() for race in races)
        for place, part in enumerate(parts)
    ]
    for _, index, part in sorted(schedule, key=lambda entry: entry[:2]):
        pieces[index].append(races[index].turns(part, f"round {number + 1}", progress))
    for race, mine in zip(races, pieces, strict=True):
        race.finish_round(mine)


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


def _turn(contender: Contender, images: Tensor, batch: int) -> _Turn:
    _wait_for(images.device)
    begin = time.perf_counter()
    passes = [contender.answer(part) for part in torch.split(images, batch)]
    _wait_for(images.device)
    seconds = time.perf_counter() - begin
    forward, backward = (torch.cat([part[kind] for part in passes]).double().mean().item() for kind in (0, 1))
    return _Turn(seconds, len(images), forward, backward)


def _timing(
    label: str, turns: Sequence[_Turn], bare: Sequence[_Turn], alone: list[float], peak: int | None, syncs: int
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
