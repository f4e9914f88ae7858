"""The engine: one thread that owns the model and answers queued images in batches.

Images of different requests and of different label lists share a batch: one ``guard.correct`` runs the probes of all of
them, and the images whose gate opened share the batches of the anchor. Other work with the model (class features of a
new label list, the demo's attack) is a background task: a function that runs between two batches.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from react_clip import functional
from react_clip.defenses.react import ReACT
from react_clip.encoders.base import Encoder
from react_clip.serve.settings import Settings
from react_clip.zeroshot import ZeroShotClassifier

logger = logging.getLogger("react_clip.serve")

_MAX_BACKGROUND = 32
"""Background tasks that may wait."""

_WAIT_SHARE, _BATCH_SHARE = 0.5, 0.25
"""Shares of the deadline: for waiting in the queue, and for one batch. The rest is for wrong estimates."""

_DIAGNOSTICS = ("drift_low", "drift_high", "drift", "instability", "score", "sigma", "gated", "passes")


class OverloadedError(Exception):
    """The queue is full, or the engine is stopping."""


class ExpiredError(Exception):
    """The image waited so long that its answer would have missed the deadline."""


class EngineError(Exception):
    """The model failed on a batch (out of memory, features that are not finite)."""


@dataclass(frozen=True, eq=False)
class ClassList:
    """Names of classes and their unit features ``[K, D]`` on the encoder's device."""

    names: tuple[str, ...]
    features: Tensor

    @classmethod
    def of(cls, clf: ZeroShotClassifier) -> ClassList:
        """Names and features of a classifier."""
        return cls(clf.names, clf.class_features)

    def logits(self, features: Tensor) -> Tensor:
        """Logits ``[..., K]`` of unit features ``[..., D]``."""
        return functional.logits(features, self.features.to(features.dtype))


@dataclass(frozen=True, eq=False)
class Photo:
    """One image for the engine: pixels ``[3, S, S]`` in [0, 1] and the key of its noise stream, on the CPU."""

    pixels: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class Answer:
    """Result for one image, on the CPU: features ``[D]`` and probabilities ``[K]``, defended and plain."""

    feature: Tensor
    plain: Tensor
    probs: Tensor
    plain_probs: Tensor
    diagnostics: dict[str, Any]
    """The fields of ``Defended`` that are in ``_DIAGNOSTICS``; NaN for what was not measured."""


@dataclass(frozen=True)
class BatchStats:
    """Counts of a finished batch, for the metrics."""

    images: int
    label_lists: int
    gates_opened: int
    passes: int
    seconds: float


@dataclass(frozen=True, eq=False)
class _QueuedImage:
    photo: Photo
    classes: ClassList
    all_views: bool
    future: Future[Answer] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class _BackgroundTask:
    function: Callable[[], Tensor]
    future: Future[Tensor] = field(default_factory=Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except Exception as error:
            self.future.set_exception(error)


class Engine:
    """A model, its defence and a queue. Call :meth:`start` before use and :meth:`stop` at the end.

    ``preset`` are the classes of requests without labels; ``secret`` keys the noise.
    """

    def __init__(self, encoder: Encoder, guard: ReACT, preset: ClassList, *, secret: bytes, settings: Settings) -> None:
        self.encoder, self.preset, self.secret, self.settings = encoder, preset, secret, settings
        self.guard = guard.replace(lazy=False) if settings.constant_work else guard
        self.on_batch: Callable[[BatchStats], None] = lambda stats: None
        self._deadline, self._seconds_per_image = math.inf, 0.0
        self._queue: deque[_QueuedImage] = deque()
        self._background: deque[_BackgroundTask] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name="react-clip-engine", daemon=True)

    def start(self) -> None:
        """Start the thread and answer two grey images: the first warms up, the second measures the speed."""
        self._thread.start()
        size = self.encoder.image_size
        grey = Photo(torch.full((3, size, size), 0.5), torch.zeros((), dtype=torch.long))
        for _ in range(2):
            self._seconds_per_image = 0.0
            self.submit([grey], self.preset)[0].result()
        self._deadline = self.settings.deadline

    def stop(self, timeout: float | None = None) -> None:
        """Answer the waiting images, fail the background tasks, and end the thread."""
        with self._changed:
            self._stopping = True
            dropped, self._background = self._background, deque()
            self._changed.notify()
        for task in dropped:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(OverloadedError())
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        """Whether the thread accepts work."""
        return self._thread.is_alive() and not self._stopping

    @property
    def waiting(self) -> int:
        """Number of images in the queue."""
        return len(self._queue)

    @property
    def free_slots(self) -> int:
        """Number of images that still fit into the queue."""
        return self.settings.queue - self.waiting

    # ------------------------------------------------------------------ requests, from any thread

    def submit(self, photos: Sequence[Photo], classes: ClassList, *, all_views: bool = False) -> list[Future[Answer]]:
        """Queue all of these images, or none and raise ``OverloadedError``; cancel a future to skip its image.

        ``all_views`` draws every view of an opened gate's anchor, for callers who use the feature. Without it the
        defence may stop early when further views cannot change the label.
        """
        queued = [_QueuedImage(photo, classes, all_views) for photo in photos]
        with self._changed:
            if self._stopping or len(queued) > self.free_slots:
                raise OverloadedError
            self._queue.extend(queued)
            self._changed.notify()
        return [image.future for image in queued]

    def run(self, function: Callable[[], Tensor]) -> Future[Tensor]:
        """Run a function on the engine's thread, between two batches."""
        task = _BackgroundTask(function)
        with self._changed:
            if self._stopping or len(self._background) >= _MAX_BACKGROUND:
                raise OverloadedError
            self._background.append(task)
            self._changed.notify()
        return task.future

    # ------------------------------------------------------------------ the engine's thread

    def _loop(self) -> None:
        while True:
            images, task = self._next_work()
            if not images and task is None:
                return
            wanted = [image for image in images if image.future.set_running_or_notify_cancel()]
            if batch := self._drop_expired(wanted):
                self._answer(batch)
            if task is not None:
                task.run()

    def _next_work(self) -> tuple[list[_QueuedImage], _BackgroundTask | None]:
        """Wait for a full batch, ``max_wait`` or a background task; empty only when the engine has stopped."""
        with self._changed:
            while not self._queue and not self._background and not self._stopping:
                self._changed.wait()
            until = time.monotonic() + self.settings.max_wait / 1000
            while self._queue and len(self._queue) < self._batch_limit and not self._background and not self._stopping:
                left = until - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            images = [self._queue.popleft() for _ in range(min(self._batch_limit, len(self._queue)))]
            return images, self._background.popleft() if self._background else None

    @property
    def _batch_limit(self) -> int:
        """Largest next batch: fewer than ``batch`` images where that many would take too long for the deadline."""
        in_time = _BATCH_SHARE * self._deadline / max(self._seconds_per_image, 1e-9)
        return max(1, int(min(self.settings.batch, in_time)))

    def _drop_expired(self, images: list[_QueuedImage]) -> list[_QueuedImage]:
        """Fail images that have waited too long and return the rest; while stopping, return all of them."""
        if self._stopping:
            return images
        oldest = time.monotonic() - _WAIT_SHARE * self._deadline
        for image in images:
            if image.queued_at < oldest:
                image.future.set_exception(ExpiredError())
        return [image for image in images if image.queued_at >= oldest]

    def _answer(self, batch: list[_QueuedImage]) -> None:
        began = time.monotonic()
        try:
            answers = self._compute(batch)
        except Exception as error:
            show_trace = logger.isEnabledFor(logging.DEBUG)
            logger.error("a batch of %d images failed: %s", len(batch), type(error).__name__, exc_info=show_trace)
            for image in batch:
                image.future.set_exception(EngineError(type(error).__name__))
            return
        seconds = time.monotonic() - began
        measured = seconds / len(batch)
        self._seconds_per_image = (self._seconds_per_image + measured) / 2 if self._seconds_per_image else measured
        # Before the futures: a caller that has its answer must find it counted in the metrics.
        self.on_batch(
            BatchStats(
                images=len(batch),
                label_lists=len({id(image.classes) for image in batch}),
                gates_opened=sum(answer.diagnostics["gated"] for answer in answers),
                passes=sum(answer.diagnostics["passes"] for answer in answers),
                seconds=seconds,
            )
        )
        for image, answer in zip(batch, answers, strict=True):
            image.future.set_result(answer)

    @torch.no_grad()
    def _compute(self, batch: list[_QueuedImage]) -> list[Answer]:
        device = self.encoder.device
        pixels = torch.stack([image.photo.pixels for image in batch]).to(device)
        keys = torch.stack([image.photo.key for image in batch]).to(device)
        lists = _BatchClasses(batch, device)
        out = self.guard.correct(self.encoder, pixels, keys, lists.divergence, lists.logits)
        if not bool(torch.isfinite(out.features).all()):
            raise EngineError("features are not finite")
        probs, plain_probs = lists.probs(out.features), lists.probs(out.plain)
        features, plain = out.features.cpu(), out.plain.cpu()
        measured = zip(*(getattr(out, name).tolist() for name in _DIAGNOSTICS), strict=True)
        diagnostics = [dict(zip(_DIAGNOSTICS, values, strict=True)) for values in measured]
        return [Answer(*values) for values in zip(features, plain, probs, plain_probs, diagnostics, strict=True)]


class _BatchClasses:
    """The label lists of one batch: computes for each image with its own list."""

    def __init__(self, batch: list[_QueuedImage], device: torch.device) -> None:
        self.lists = list({id(image.classes): image.classes for image in batch}.values())
        index = {id(classes): i for i, classes in enumerate(self.lists)}
        self._list_of = torch.tensor([index[id(image.classes)] for image in batch], device=device)
        self._all_views = torch.tensor([image.all_views for image in batch], device=device)

    def _groups(self, rows: Tensor) -> list[tuple[ClassList, Tensor]]:
        """Each label list with the positions in ``rows`` of its images."""
        groups = [(classes, (self._list_of[rows] == i).nonzero().flatten()) for i, classes in enumerate(self.lists)]
        return [(classes, positions) for classes, positions in groups if len(positions)]

    def divergence(self, rows: Tensor, features: Tensor, augmented: Tensor) -> Tensor:
        """JS divergence ``[R]`` between the predictions for two features ``[R, D]`` of the images ``rows``."""
        out = features.new_zeros(len(rows))
        for classes, at in self._groups(rows):
            pair = classes.logits(features[at]), classes.logits(augmented[at])
            out[at] = functional.js_divergence(*pair).to(out.dtype)
        return out

    def logits(self, rows: Tensor, features: Tensor) -> Tensor:
        """Logits ``[R, V, K]`` for the early stop over views, -inf beyond the end of shorter lists."""
        longest = max(len(classes.names) for classes in self.lists)
        out = features.new_full((*features.shape[:-1], longest), -torch.inf)
        for classes, at in self._groups(rows):
            out[at, ..., : len(classes.names)] = classes.logits(features[at])
        # With a single class there is no margin to decide on, so all views are drawn.
        out[..., 1:].masked_fill_(self._all_views[rows, None, None], -torch.inf)
        return out

    def probs(self, features: Tensor) -> list[Tensor]:
        """Probabilities ``[K]`` of every image of the batch over its own list, on the CPU."""
        out = [features] * len(features)
        for classes, at in self._groups(torch.arange(len(features), device=features.device)):
            rows = classes.logits(features[at]).softmax(-1).cpu()
            for position, row in zip(at.tolist(), rows, strict=True):
                out[position] = row
        return out
