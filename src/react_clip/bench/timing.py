"""Times several contenders on the same images, interleaved, so that a busy machine slows all of them alike."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Answer = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Pixels ``[B, 3, S, S]`` to the forward and backward encoder passes ``[B]`` that each image took."""


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
    peak_bytes: int
    """Most bytes of tensors during one pass over all images, beyond the weights and the images."""
    round_milliseconds: tuple[float, ...]


def speedup(ours: Timing, theirs: Timing) -> tuple[float, float, float]:
    """Our images per second divided by theirs, round by round: median, smallest and largest."""
    ratios = [b / a for a, b in zip(ours.round_milliseconds, theirs.round_milliseconds, strict=True)]
    return float(np.median(ratios)), min(ratios), max(ratios)


class Comparison:
    """Contenders by label, on the same images. The first one is the bare encoder, to which overheads refer."""

    def __init__(self, contenders: Mapping[str, Answer], images: Tensor, *, batch: int) -> None:
        self.contenders, self.images, self.batch = contenders, images, batch
        # A busy CPU slows contenders alike when they alternate batch by batch. A GPU computes one batch while the host
        # prepares the next, so there contenders alternate over all images.
        self.turns = torch.split(images, batch if images.device.type == "cpu" else len(images))
        # For each round: seconds, images, forward and backward passes ``[contenders, 4]``.
        self._rounds: list[NDArray[np.float64]] = []
        self._peaks: list[int] = []

    def steps(self, rounds: int) -> int:
        """Number of times that ``measure`` calls ``progress``."""
        return len(self.contenders) * (1 + rounds * len(self.turns))

    def measure(self, *, rounds: int, progress: Callable[[str], None] = lambda label: None) -> Iterator[list[Timing]]:
        """Measure the memory, then the time of all images in ``rounds`` rounds; yields after each."""
        for label, answer in self.contenders.items():
            progress(f"warm-up: {label}")
            self._peaks.append(peak_memory(lambda a=answer: self._answer(a, self.images), self.images.device))  # type: ignore[misc]
        numbered = list(enumerate(self.contenders.items()))
        for turn in range(rounds):
            # A GPU lowers its clock under load, which slows the ones that follow: each order is also taken in reverse,
            # and then another contender begins.
            begin = turn // 2 % len(numbered)
            order = numbered[begin:] + numbered[:begin]
            self._rounds.append(np.zeros((len(numbered), 4)))
            for images in self.turns:
                for number, (label, answer) in order[::-1] if turn % 2 else order:
                    progress(f"round {turn + 1}: {label}")
                    self._rounds[-1][number] += self._run(answer, images)
            yield self.timings()

    def timings(self) -> list[Timing]:
        """Measurements of every contender in the rounds so far."""
        seconds, images, forward, backward = np.moveaxis(np.stack(self._rounds), -1, 0)
        milliseconds, cost = 1000 * seconds / images, seconds / (forward + 2 * backward)
        overheads = cost / cost[:, :1]
        middle = np.median(milliseconds, axis=0)
        return [
            Timing(
                label=label,
                images_per_second=float(1000 / middle[i]),
                milliseconds=float(middle[i]),
                passes=float(forward[0, i] / images[0, i]),
                backward_passes=float(backward[0, i] / images[0, i]),
                overhead=float(np.median(overheads[:, i])),
                overhead_range=(float(overheads[:, i].min()), float(overheads[:, i].max())),
                peak_bytes=self._peaks[i],
                round_milliseconds=tuple(milliseconds[:, i].tolist()),
            )
            for i, label in enumerate(self.contenders)
        ]

    def _answer(self, answer: Answer, images: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [answer(batch) for batch in torch.split(images, self.batch)]

    def _run(self, answer: Answer, images: Tensor) -> tuple[float, int, float, float]:
        """Seconds, images, forward passes and backward passes."""
        passes: list[tuple[Tensor, Tensor]] = []
        seconds = seconds_of(lambda: passes.extend(self._answer(answer, images)), images.device)
        forward, backward = (sum(batch[kind].double().sum().item() for batch in passes) for kind in (0, 1))
        return seconds, len(images), forward, backward


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of a call, including the work that it leaves to a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes of tensors alive at once during ``call``, beyond those that were alive before it.

    Exact on every machine: CUDA's allocator keeps a peak, and on a CPU the profiler reports every allocation of torch.
    Resident pages of the process would depend on the C allocator and on when they are looked at.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints a line for every start otherwise
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
    results: Any = profiler.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return int(max(accumulate((event.nbytes() for event in changes), initial=0)))
