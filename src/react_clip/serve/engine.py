"""The engine: one thread that owns the model and answers queued images in batches.

Images of different requests and of different label lists share a batch: one ``guard.correct`` encodes the first views
of all of them, and the images that need more views share batches again. Other work with the model (class features of a
new label list, the demo's attack) runs on the same thread, between two batches.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from react_clip.accelerate import MAX_ROWS, HostCopy
from react_clip.defenses.react import Logits, ReACT, logits_of
from react_clip.defenses.second_look import CORRECT, KEEP, SecondLook
from react_clip.encoders.base import Encoder
from react_clip.preprocess import Preprocessing, from_8bit, to_float
from react_clip.serve.answers import NUMBERS, Answer, Photo, answers_of
from react_clip.serve.errors import busy, late
from react_clip.serve.labels import LabelCache, LabelList
from react_clip.serve.settings import Settings
from react_clip.zeroshot import ZeroShotClassifier

logger = logging.getLogger("react_clip.serve")

_MAX_TASKS = 32
"""Functions given to :meth:`Engine.run` that may wait."""

_WAIT_SHARE, _BATCH_SHARE = 0.5, 0.25
"""Shares of the deadline: for waiting in the queue, and for one batch. The rest is for wrong estimates."""

_LEAD = 1.5
"""The next batch is started this many times the duration of the last start before the GPU needs it: some starts take
longer, and a late one leaves it idle."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _QueuedImage:
    photo: Photo
    classes: ZeroShotClassifier
    all_views: bool
    future: Future[Answer] = field(default_factory=Future)
    queued_at: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class _Batch:
    """A batch that was given to the model, and its results."""

    images: list[_QueuedImage]
    results: HostCopy
    """One row of numbers per image, ``[B, D + K + len(NUMBERS)]``, see :meth:`Engine._rows`."""
    began: float

    def is_done(self) -> bool:
        """True if :meth:`wait` returns at once."""
        try:
            return self.results.is_done()
        except RuntimeError:  # a failure of the GPU
            return True

    def wait(self) -> None:
        """Wait until the results are there, or the GPU has failed."""
        with suppress(RuntimeError):
            self.results.wait()

    def answers(self) -> list[Answer]:
        """One answer per image; raises if the GPU has failed."""
        rows = self.results.wait()
        dim = self.images[0].classes.encoder.dim
        if not bool(torch.isfinite(rows[:, :dim]).all()):
            raise ArithmeticError("features are not finite")
        return answers_of(rows, dim, [len(image.classes.names) for image in self.images])


class Engine:
    """A model, its defence and a queue. Call :meth:`start` before use and :meth:`stop` at the end.

    ``preset`` has the classes of requests without labels; ``secret`` keys the noise. ``on_batch`` is called after each
    batch with its answers, the number of its label lists, and the seconds it took; ``on_queue`` whenever the length of
    the queue has changed, with that length.
    """

    def __init__(
        self,
        encoder: Encoder,
        guard: ReACT | SecondLook,
        preset: ZeroShotClassifier,
        *,
        secret: bytes,
        settings: Settings,
    ) -> None:
        self.encoder, self.preset, self.secret, self.settings = encoder, preset, secret, settings
        self._on_gpu = encoder.device.type == "cuda"
        # A GPU computes the moved look of all images in less time than it waits for the decision who needs one.
        all_passes = settings.constant_work or (isinstance(guard, SecondLook) and self._on_gpu)
        self.guard: ReACT | SecondLook = guard.replace(lazy=False) if all_passes else guard
        self.on_batch: Callable[[list[Answer], int, float], None] = lambda answers, lists, seconds: None
        self.on_queue: Callable[[int], None] = lambda length: None
        self.alive = True
        self._labels = LabelCache(self)
        self._deadline, self._seconds_per_image = math.inf, 0.0
        self._queue: deque[_QueuedImage] = deque()
        self._expected = 0
        self._changed = threading.Condition()
        self._task_slots = threading.Semaphore(_MAX_TASKS)
        self._thread: Executor = ThreadPoolExecutor(1, "react-clip-engine")
        self._preset_rows = partial(self._rows, logits_of(preset))
        self._scheduled = self._polls = False
        self._computing: deque[_Batch] = deque()
        self._batch_seconds: dict[int, float] = {}
        self._start_seconds = self._last_end = 0.0

    def start(self) -> None:
        """Answer two grey images: the first warms up, the second measures the speed. On a GPU record graphs before."""
        size = self.encoder.image_size
        grey = Photo(torch.full((3, size, size), 128, dtype=torch.uint8), key=0)
        if self._on_gpu:
            self.run(partial(self._record_graphs, grey)).result()
        for _ in range(2):
            self._seconds_per_image = 0.0
            self.submit([grey], self.preset)[0].result()
        self._deadline = self.settings.deadline

    def stop(self) -> None:
        """Take no more work, finish what is waiting, and end the thread."""
        with self._changed:
            was_alive, self.alive = self.alive, False
        if was_alive:
            self._thread.submit(self._finish_all).result()
            self._thread.shutdown()

    def run_on(self, executor: Executor) -> None:
        """Compute on another executor than a thread of the engine's own; call it after :meth:`start`.

        While a GPU computes, the executor runs other functions: the engine asks again and again whether it is done.
        """
        self._thread.shutdown()
        self._thread = executor
        self._polls = self._on_gpu

    @property
    def preprocessing(self) -> Preprocessing:
        """From an image to the pixels of a :class:`Photo`."""
        return self.encoder.preprocessing

    @property
    def waiting(self) -> int:
        """Number of images in the queue."""
        return len(self._queue)

    @property
    def free_slots(self) -> int:
        """Number of images that still fit into the queue."""
        return self.settings.queue - self.waiting

    # ------------------------------------------------------------------ requests, from any thread

    def submit(
        self, photos: Sequence[Photo], classes: ZeroShotClassifier, *, all_views: bool = False
    ) -> list[Future[Answer]]:
        """Queue all of these images, or none and raise 503; cancel a future to skip its image.

        ``all_views`` draws every view of ReACT's anchor where the gate opens, for callers who use the feature. Without
        it ReACT may stop early when further views cannot change the label. SecondLook has no such choice.
        """
        queued = [_QueuedImage(photo, classes, all_views) for photo in photos]
        with self._changed:
            if not self.alive or len(queued) > self.free_slots:
                raise busy("the queue is full; try again soon")
            self._queue.extend(queued)
            self.on_queue(self.waiting)
            self._notify()
            self._schedule()
        return [image.future for image in queued]

    async def classes(self, labels: LabelList) -> ZeroShotClassifier:
        """Classes with these names; raises 422 where the model has no features for them."""
        return self.preset if labels.preset else await self._labels.get(labels)

    async def ask(self, photos: Sequence[Photo], labels: LabelList, *, all_views: bool = False) -> list[Answer]:
        """Answers in the order of the photos, see :meth:`submit`; cancelling this cancels the images that wait."""
        classes = await self.classes(labels)
        futures = self.submit(photos, classes, all_views=all_views)
        return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))

    @contextmanager
    def expect(self, count: int) -> Iterator[None]:
        """Within this block ``count`` images are being read or decoded: a batch that is not full waits for them."""
        with self._changed:
            self._expected += count
        try:
            yield
        finally:
            with self._changed:
                self._expected -= count
                self._notify()

    def run(self, function: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread, between two batches; raises 503 if too many are waiting."""
        if not self.alive or not self._task_slots.acquire(blocking=False):
            raise busy("the model has too much to do; try again soon")
        future = self._thread.submit(function)
        future.add_done_callback(lambda _: self._task_slots.release())
        return future

    def _schedule(self) -> None:
        """Let the engine's thread answer a batch, after what it has to do already."""
        if not self._scheduled:
            self._scheduled = True
            self._thread.submit(self._advance)

    def _notify(self) -> None:
        """Wake the engine's thread if its wait is over: every wake-up would take the interpreter from the others."""
        if self._is_complete():
            self._changed.notify()

    def _is_complete(self) -> bool:
        """True if the next batch is full, or no image is on its way that could join it."""
        return len(self._queue) >= self._batch_limit or not self._expected

    # ------------------------------------------------------------------ the engine's thread

    def _advance(self) -> None:
        """Give the model the next batch, and answer the first one that it has computed.

        With :meth:`run_on` a GPU gets its next batch shortly before the last one is done, so that it need not wait.
        """
        self._scheduled = False
        done = self._next_done()
        if self._queue and self._is_nearly_idle():
            batch = self._start(self._next_images())
            if batch is not None:
                self._computing.append(batch)
        if not self._polls:
            done = self._next_done()
        if done is not None:
            self._answer(*done)
        with self._changed:
            if self._queue or self._computing:
                self._schedule()

    def _next_done(self) -> tuple[_Batch, float] | None:
        """The oldest batch if it is done, and the seconds it took; :meth:`run_on` decides whether to wait for it."""
        if not self._computing or (self._polls and not self._computing[0].is_done()):
            return None
        batch = self._computing.popleft()
        batch.wait()
        end = time.monotonic()
        seconds, self._last_end = end - max(batch.began, self._last_end), end
        self._batch_seconds[len(batch.images)] = seconds
        return batch, seconds

    def _is_nearly_idle(self) -> bool:
        """True if the model computes nothing, or one batch that is done by the time that the next one is started."""
        if len(self._computing) != 1:
            return not self._computing
        [batch] = self._computing
        end = max(batch.began, self._last_end) + self._batch_seconds.get(len(batch.images), math.inf)
        return end - time.monotonic() <= _LEAD * self._start_seconds

    def _finish_all(self) -> None:
        while self._queue or self._computing:
            self._advance()

    def _start(self, images: list[_QueuedImage]) -> _Batch | None:
        """Give images to the model; None if there is none, or if it fails, which their futures get."""
        images = self._drop_expired(images)
        if not images:
            return None
        began = time.monotonic()
        try:
            batch = _Batch(images, self._compute(images), began)
        except Exception as error:
            _fail(images, error)
            return None
        self._start_seconds = time.monotonic() - began
        return batch

    def _answer(self, batch: _Batch, seconds: float) -> None:
        """Give the answers of a batch that is done to those who wait for them."""
        try:
            answers = batch.answers()
        except Exception as error:
            _fail(batch.images, error)
            return
        measured = seconds / len(batch.images)
        self._seconds_per_image = (self._seconds_per_image + measured) / 2 if self._seconds_per_image else measured
        # Before the futures: a caller that has its answer must find it counted in the metrics.
        self.on_batch(answers, len({image.classes for image in batch.images}), seconds)
        for image, answer in zip(batch.images, answers, strict=True):
            image.future.set_result(answer)

    def _next_images(self) -> list[_QueuedImage]:
        """Take a batch from the queue, without cancelled images; waits up to ``max_wait`` for those on their way."""
        with self._changed:
            if self._queue:
                self._changed.wait_for(self._is_complete, self.settings.max_wait / 1000)
            images = [self._queue.popleft() for _ in range(min(self._batch_limit, len(self._queue)))]
            self.on_queue(self.waiting)
        return [image for image in images if image.future.set_running_or_notify_cancel()]

    @property
    def _largest_batch(self) -> int:
        return self.settings.largest_batch(on_gpu=self._on_gpu)

    @property
    def _batch_limit(self) -> int:
        """Largest next batch: fewer than ``batch`` images where that many would take too long for the deadline."""
        in_time = _BATCH_SHARE * self._deadline / max(self._seconds_per_image, 1e-9)
        return max(1, int(min(self._largest_batch, in_time)))

    def _drop_expired(self, images: list[_QueuedImage]) -> list[_QueuedImage]:
        """Fail images that have waited too long and return the rest; while stopping, return all of them."""
        oldest = time.monotonic() - _WAIT_SHARE * self._deadline if self.alive else -math.inf
        for image in images:
            if image.queued_at < oldest:
                image.future.set_exception(late(self.settings.deadline))
        return [image for image in images if image.queued_at >= oldest]

    @torch.no_grad()
    def _record_graphs(self, photo: Photo) -> None:
        """Compute batches of every size, so that no request waits for a new CUDA graph."""
        for size in range(min(self._largest_batch, MAX_ROWS), 0, -1):  # large ones first: small ones fit their memory
            batch = [_QueuedImage(photo, self.preset, all_views=True)] * size
            pixels, keys = self._inputs(batch)
            # Other label lists than the preset need the graphs of the passes alone. With ReACT the number of images
            # that need more views is as random as the size of a batch.
            self.guard.replace(lazy=False).correct(self.encoder, from_8bit(pixels), keys, logits_of(self.preset))
            if isinstance(self.guard, SecondLook):
                self._compute(batch)

    def _inputs(self, batch: list[_QueuedImage]) -> tuple[Tensor, Tensor]:
        """Pixels ``[B, 3, S, S]`` and keys ``[B]`` of a batch."""
        images = [image.photo.pixels for image in batch]
        if any(image.is_floating_point() for image in images):  # of the demo
            images = [to_float(image) for image in images]
        pixels = torch.empty(len(images), *images[0].shape, dtype=images[0].dtype, pin_memory=self._on_gpu)
        torch.stack(images, out=pixels)
        keys = torch.tensor([image.photo.key for image in batch], pin_memory=self._on_gpu)
        return self._to_device(pixels), self._to_device(keys)

    def _to_device(self, pinned: Tensor) -> Tensor:
        """Values on the model's device. A GPU copies them after what it was given before, and nobody waits for that."""
        return pinned.to(self.encoder.device, non_blocking=True)

    @torch.no_grad()
    def _compute(self, batch: list[_QueuedImage]) -> HostCopy:
        """Results of a batch as :meth:`_rows` gives them."""
        inputs = self._inputs(batch)
        if isinstance(self.guard, SecondLook) and all(image.classes is self.preset for image in batch):
            rows = self.encoder.backend(self._preset_rows, *inputs)
        else:
            may_stop = self._to_device(torch.tensor([not one.all_views for one in batch], pin_memory=self._on_gpu))
            rows = self._rows(_logits_of(batch, self.encoder.device), *inputs, may_stop)
        return HostCopy(rows)

    def _rows(self, logits: Logits, pixels: Tensor, keys: Tensor, may_stop: Tensor | bool = False) -> Tensor:
        """Feature, probabilities and :data:`NUMBERS` of each image in one row: one copy to the CPU for all of them."""
        pixels = from_8bit(pixels) if pixels.dtype == torch.uint8 else pixels
        out: Any
        if isinstance(self.guard, SecondLook):
            out = self.guard.correct(self.encoder, pixels, keys, logits)
            branches = out.branch
        else:
            out = self.guard.correct(self.encoder, pixels, keys, logits, may_stop=may_stop)
            branches = torch.where(out.gated, CORRECT, KEEP)
        everyone = torch.arange(len(pixels), device=pixels.device)
        probs = self.encoder.similarity.probabilities(logits(everyone, out.features))
        unknown = torch.full_like(out.features[:, 0], torch.nan)
        numbers = [branches, *(getattr(out, name, unknown) for name in NUMBERS[1:])]
        columns = torch.stack([values.to(out.features.dtype) for values in numbers], 1)
        return torch.cat([out.features, probs, columns], 1)


def _fail(images: list[_QueuedImage], error: Exception) -> None:
    """Refuse the images of a batch that failed."""
    show_trace = logger.isEnabledFor(logging.DEBUG)
    logger.error("a batch of %d images failed: %s", len(images), type(error).__name__, exc_info=show_trace and error)
    for image in images:
        image.future.set_exception(busy("the model could not answer this batch; try again", kind="unavailable"))


def _logits_of(batch: list[_QueuedImage], device: torch.device) -> Logits:
    """The logits of the images of a batch, each over its own label list."""
    lists = list(dict.fromkeys(image.classes for image in batch))
    if len(lists) == 1:
        return logits_of(lists[0])
    list_of = torch.tensor([lists.index(image.classes) for image in batch], device=device)
    longest = max(len(classes.names) for classes in lists)

    def logits(rows: Tensor, features: Tensor) -> Tensor:
        out = features.new_full((*features.shape[:-1], longest), -torch.inf)
        for number, classes in enumerate(lists):
            at = (list_of[rows] == number).nonzero().flatten()
            out[at, ..., : len(classes.names)] = classes.logits(features[at])
        return out

    return logits
