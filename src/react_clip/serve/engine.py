"""The one thread that owns the model: it takes what waits, answers it in one go, and never waits for a caller.

Images of different requests and of different class lists share a batch: one ``guard.correct`` runs all probes together,
and the images whose gate opened share the anchor's batches. Longer work that is not an image's answer (class features
of a new list, a demo's attack) is an errand: a generator that is advanced one step between two batches.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from react_clip import functional
from react_clip.defenses.react import ReACT
from react_clip.encoders.base import Encoder
from react_clip.serve.classes import ClassList, LabelSource, compute_classes, label_source

logger = logging.getLogger("react_clip.serve")

_MOST_ERRANDS = 32
"""Label lists and attacks that may wait; each is long, so few are enough."""


_WAIT_SHARE, _BATCH_SHARE = 0.5, 0.25
"""Of the deadline: how long an image may wait, and how long its batch should take; the rest is for wrong guesses."""

_DIAGNOSTICS = ("drift_low", "drift_high", "drift", "instability", "score", "sigma", "gated", "passes")


class OverloadedError(Exception):
    """There is no room in the queue."""


class TooLateError(OverloadedError):
    """There was room, but the answer would not be ready in time."""


class EngineError(Exception):
    """The model failed on a batch (out of memory, features that are not finite)."""


@dataclass(frozen=True, eq=False)
class Photo:
    """One image ready for the engine: pixels ``[3, S, S]`` and the key of its noise, on the CPU."""

    pixels: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class Answer:
    """What the engine found for one image; everything on the CPU, NaN where it was not measured."""

    classes: ClassList
    feature: Tensor
    plain: Tensor
    probs: Tensor
    plain_probs: Tensor
    drift_low: float
    drift_high: float
    drift: float
    instability: float
    score: float
    sigma: float
    gated: bool
    passes: int


@dataclass(frozen=True)
class Batch:
    """What a finished batch was like, for the metrics."""

    images: int
    lists: int
    opened: int
    passes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _Job:
    photo: Photo
    classes: ClassList
    whole: bool = False
    """Whether the feature is wanted, for which all views of an anchor are drawn, and not only the answer."""
    future: Future[Answer] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class _Errand:
    steps: Generator[None, None, Any]
    future: Future[Any] = field(default_factory=Future)


class Engine:
    """A model, its defence and a queue; started by :meth:`start`, ended by :meth:`stop`."""

    def __init__(
        self,
        encoder: Encoder,
        guard: ReACT,
        preset: ClassList,
        *,
        secret: bytes,
        batch: int = 32,
        max_wait: float = 0.004,
        deadline: float = math.inf,
        queue: int = 256,
        label_cache: int = 64,
        constant_work: bool = False,
    ) -> None:
        self.encoder = encoder
        self.guard = guard.replace(lazy=False) if constant_work else guard
        self.preset = preset
        self.secret = secret
        self.label_source: LabelSource = label_source(encoder)
        self.observer: Callable[[Batch], None] = lambda batch: None
        self._batch, self._max_wait, self._room, self._label_cache = batch, max_wait, queue, label_cache
        self._deadline, self._pace = deadline, 0.0
        self._jobs: deque[_Job] = deque()
        self._errands: deque[_Errand] = deque()
        self._lists: OrderedDict[tuple[tuple[str, ...], tuple[str, ...] | None], Future[ClassList]] = OrderedDict()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="react-clip-engine", daemon=True)

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        """Start the thread and wait for two answers: one loads what frameworks load lazily, one shows the pace."""
        self._thread.start()
        size = self.encoder.image_size
        grey = Photo(torch.full((3, size, size), 0.5), torch.zeros((), dtype=torch.long))
        deadline, self._deadline = self._deadline, math.inf
        for _ in range(2):
            self._pace = 0.0
            self.submit([grey], self.preset)[0].result()
        self._deadline = deadline

    def stop(self, timeout: float | None = None) -> None:
        """Answer the images that wait, drop the errands, which nobody waits for any more, and end the thread."""
        with self._wake:
            self._stopping = True
            dropped, self._errands = self._errands, deque()
            self._wake.notify()
        for errand in dropped:
            errand.future.set_exception(OverloadedError())
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread takes work."""
        return self._thread.is_alive() and not self._stopping

    @property
    def depth(self) -> int:
        """Images that wait."""
        return len(self._jobs)

    @property
    def room(self) -> int:
        """Images that could still be queued."""
        return self._room - self.depth

    # ------------------------------------------------------------------ what others ask for, from any thread

    def submit(self, photos: Sequence[Photo], classes: ClassList, *, whole: bool = False) -> list[Future[Answer]]:
        """Queue images, all of them or none; a future that is cancelled in time is never computed.

        ``whole`` is for whoever is after the feature: an anchor of all views, where an answer needs only some of them.
        """
        jobs = [_Job(photo, classes, whole) for photo in photos]
        with self._wake:
            if self._stopping or len(self._jobs) + len(jobs) > self._room:
                raise OverloadedError
            self._jobs.extend(jobs)
            self._wake.notify()
        return [job.future for job in jobs]

    def classes(self, names: tuple[str, ...], templates: tuple[str, ...] | None) -> Future[ClassList]:
        """The features of checked names; callers that ask for the same list share one future, so do not cancel it."""
        key = (names, templates)
        with self._wake:
            if (known := self._lists.get(key)) is not None:
                self._lists.move_to_end(key)
                return known
            future = self._send(compute_classes(self.encoder, names, templates))
            self._lists[key] = future
            if len(self._lists) > self._label_cache:
                self._lists.popitem(last=False)
        # A list that failed must not be remembered; the callback may run at once, so the lock is free by now.
        future.add_done_callback(lambda done: self._forget(key) if done.exception() else None)
        return future

    def call(self, function: Callable[[], Tensor]) -> Future[Tensor]:
        """Run a function on the engine's thread, between two batches."""

        def steps() -> Generator[None, None, Tensor]:
            return function()
            yield

        with self._wake:
            return self._send(steps())

    def _send(self, steps: Generator[None, None, Any]) -> Future[Any]:
        if self._stopping or len(self._errands) >= _MOST_ERRANDS:
            raise OverloadedError
        errand = _Errand(steps)
        self._errands.append(errand)
        self._wake.notify()
        return errand.future

    def _forget(self, key: tuple[tuple[str, ...], tuple[str, ...] | None]) -> None:
        with self._wake:
            self._lists.pop(key, None)

    # ------------------------------------------------------------------ the thread

    def _loop(self) -> None:
        while True:
            jobs, errand = self._take()
            if not jobs and errand is None:
                return
            if waiting := self._refuse_late([job for job in jobs if job.future.set_running_or_notify_cancel()]):
                self._answer(waiting)
            if errand is not None:
                self._advance(errand)

    def _take(self) -> tuple[list[_Job], _Errand | None]:
        """Whatever waits, as soon as a batch is full or has waited long enough; nothing only when it is over."""
        with self._wake:
            while not self._jobs and not self._errands and not self._stopping:
                self._wake.wait()
            until = time.monotonic() + self._max_wait
            while self._jobs and len(self._jobs) < self._most and not self._errands and not self._stopping:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._wake.wait(left)
            jobs = [self._jobs.popleft() for _ in range(min(self._most, len(self._jobs)))]
            return jobs, self._errands.popleft() if self._errands else None

    @property
    def _most(self) -> int:
        """Images of the next batch: on a slow machine fewer, since a batch longer than the deadline answers nobody."""
        return max(1, int(min(self._batch, _BATCH_SHARE * self._deadline / max(self._pace, 1e-9))))

    def _refuse_late(self, jobs: list[_Job]) -> list[_Job]:
        """The others: who has waited long would not be answered in time, and would make those behind him late too.

        At the end nobody comes behind, so whoever was accepted is answered.
        """
        if self._stopping:
            return jobs
        oldest = time.monotonic() - _WAIT_SHARE * self._deadline
        for job in jobs:
            if job.since < oldest:
                job.future.set_exception(TooLateError())
        return [job for job in jobs if job.since >= oldest]

    def _advance(self, errand: _Errand) -> None:
        try:
            next(errand.steps)
        except StopIteration as finished:
            errand.future.set_result(finished.value)
        except Exception as error:
            errand.future.set_exception(error)
        else:
            with self._wake:
                if not self._stopping:
                    self._errands.append(errand)
                    return
            errand.future.set_exception(OverloadedError())

    def _answer(self, jobs: list[_Job]) -> None:
        began = time.monotonic()
        try:
            answers = self._compute(jobs)
        except Exception as error:
            logger.error("a batch of %d images failed: %s", len(jobs), type(error).__name__, exc_info=_debugging())
            for job in jobs:
                job.future.set_exception(EngineError(type(error).__name__))
            return
        seconds = time.monotonic() - began
        pace = seconds / len(jobs)
        self._pace = (self._pace + pace) / 2 if self._pace else pace
        # Counted before anybody hears: who has an answer must find it in the metrics.
        self.observer(
            Batch(
                images=len(jobs),
                lists=len({id(job.classes) for job in jobs}),
                opened=sum(answer.gated for answer in answers),
                passes=sum(answer.passes for answer in answers),
                seconds=seconds,
            )
        )
        for job, answer in zip(jobs, answers, strict=True):
            job.future.set_result(answer)

    @torch.no_grad()
    def _compute(self, jobs: list[_Job]) -> list[Answer]:
        device = self.encoder.device
        pixels = torch.stack([job.photo.pixels for job in jobs]).to(device)
        keys = torch.stack([job.photo.key for job in jobs]).to(device)
        lists = list({id(job.classes): job.classes for job in jobs}.values())
        position = {id(classes): i for i, classes in enumerate(lists)}
        owner = torch.tensor([position[id(job.classes)] for job in jobs], device=device)
        whole = torch.tensor([job.whole for job in jobs], device=device)

        def divergence(rows: Tensor, features: Tensor, augmented: Tensor) -> Tensor:
            found = features.new_zeros(len(rows))
            for i, classes in enumerate(lists):
                mine = (owner[rows] == i).nonzero().flatten()
                if len(mine):
                    pair = classes.logits(features[mine]), classes.logits(augmented[mine])
                    found[mine] = functional.js_divergence(*pair).to(found.dtype)
            return found

        def logits(rows: Tensor, features: Tensor) -> Tensor:
            most = max(len(classes.names) for classes in lists)
            found = features.new_full((*features.shape[:-1], most), -torch.inf)
            for i, classes in enumerate(lists):
                mine = (owner[rows] == i).nonzero().flatten()
                found[mine, ..., : len(classes.names)] = classes.logits(features[mine])
            # Who has one class is never sure of it, and so is drawn all views.
            found[..., 1:].masked_fill_(whole[rows, None, None], -torch.inf)
            return found

        out = self.guard.correct(self.encoder, pixels, keys, divergence, logits)
        if not bool(torch.isfinite(out.features).all()):
            raise EngineError("features are not finite")
        probs: list[tuple[Tensor, Tensor]] = [(out.plain, out.plain)] * len(jobs)
        for i, classes in enumerate(lists):
            rows = (owner == i).nonzero().flatten()
            both = classes.logits(torch.cat([out.features[rows], out.plain[rows]])).softmax(-1).cpu()
            for row, defended, plain in zip(rows.tolist(), both[: len(rows)], both[len(rows) :], strict=True):
                probs[row] = (defended, plain)
        on_cpu = {name: getattr(out, name).tolist() for name in _DIAGNOSTICS}
        features, plain = out.features.cpu(), out.plain.cpu()
        return [
            Answer(job.classes, features[i], plain[i], *probs[i], **{name: on_cpu[name][i] for name in _DIAGNOSTICS})
            for i, job in enumerate(jobs)
        ]


def _debugging() -> bool:
    return logger.isEnabledFor(logging.DEBUG)
