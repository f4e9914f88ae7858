"""The model's loop: one thread that owns the model, takes requests from a socket and answers them in batches.

It runs on a thread of the only process, or in a process of its own that several HTTP processes ask; the socket
(ZeroMQ) is the same. Everything happens on this thread, between two batches: no other one competes with it for the
interpreter. One turn of the loop reads what has arrived, gives the model a batch of images of all callers and label
lists, and encodes some prompts of new label lists.
"""

from __future__ import annotations

import ctypes
import json
import logging
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import zmq
from torch import Tensor

from react_clip.defenses.base import Defense
from react_clip.defenses.result import Defended
from react_clip.encoders.base import Encoder
from react_clip.errors import ReactClipError
from react_clip.label_table import LabelTable
from react_clip.preprocess import to_float
from react_clip.serve.errors import RequestError, busy, late
from react_clip.serve.metrics import Metrics
from react_clip.serve.responses import Info, label_source
from react_clip.serve.settings import BEAT, Settings, prompt_slots
from react_clip.zeroshot import DEFAULT_TEMPLATES, ZeroShotClassifier

logger = logging.getLogger("react_clip.serve")

DemoAttack = Callable[[ZeroShotClassifier, Tensor, int, float, Callable[[int, int], None]], Tensor]
"""``(classifier, pixels [1, 3, S, S], index of the class to leave, eps in [0, 1], progress) -> attacked pixels``, where
``progress(done, steps)`` is called after every step and raises if the caller is gone."""

_PROMPTS = 32
"""Prompts encoded in one turn."""
_LABEL_LISTS = 64
"""Label lists whose class features are kept."""
_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of batches on a GPU, which records a graph for each; images beyond such a size wait for the next batch."""
_BATCH_FRACTION = 0.25
"""Most of the deadline that one batch may take."""

_TRIM_SECONDS = 10.0
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None

LabelList = tuple[tuple[str, ...], tuple[str, ...]]
"""Names and templates of a request."""


@dataclass(eq=False)
class _Ask:
    """One request. All of its images are in one batch."""

    caller: bytes
    number: int
    pixels: Tensor
    """``[N, 3, S, S]`` in 8 bits."""
    keys: list[int]
    expires: float
    """Time (monotonic) at which images that still wait are dropped."""
    classes: ZeroShotClassifier | None = None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(eq=False)
class _NewLabels:
    """A label list whose prompts are being encoded, and the requests that wait for it."""

    names: tuple[str, ...]
    prompts: list[str]
    features: list[Tensor] = field(default_factory=list)
    asks: list[_Ask] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return prompt_slots(len(self.prompts))


@dataclass(frozen=True, eq=False)
class _Batch:
    """Requests that the model computes, ``rows`` that are being copied to the host, and when that began."""

    asks: list[_Ask]
    rows: Tensor
    columns: list[str]
    copied: torch.cuda.Event | None
    began: float


class Model:
    """An encoder, its defence and the classes of requests without labels; :meth:`serve` answers requests."""

    def __init__(
        self,
        encoder: Encoder,
        defense: Defense,
        preset: ZeroShotClassifier,
        settings: Settings,
        attack: DemoAttack | None = None,
    ) -> None:
        self.encoder, self.defense, self.preset, self.settings = encoder, defense, preset, settings
        self.attack = attack
        self.metrics = Metrics(shared=settings.workers > 1)
        self._on_gpu = encoder.device.type == "cuda"
        self._largest = settings.batch or (64 if self._on_gpu else 32)
        self._queue: deque[_Ask] = deque()
        self._new: dict[LabelList, _NewLabels] = {}
        self._known: OrderedDict[LabelList, ZeroShotClassifier] = OrderedDict()
        self._computing: _Batch | None = None
        self._callers: set[bytes] = set()
        self.stopped = False
        self._last_end = self._trimmed = self._told = 0.0
        self._seconds_per_image = self._warm_up()
        size = encoder.image_size
        everything = self._run(torch.zeros(1, 3, size, size), [0], [preset], skip_unneeded=False)
        self.info = Info.of(encoder, defense, list(preset.names), everything.passes.max().item(), settings)

    def serve(self, address: str) -> None:
        """Answer requests until ``stopped``."""
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        with self._socket:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
            while not self.stopped:
                self._turn()

    def _turn(self) -> None:
        self._receive(0.0 if self._queue or self._new or self._computing else BEAT)
        earlier, self._computing = self._computing, None
        # A GPU gets a full batch while it computes the last one, so that it need not wait for the next.
        if self._queue and (earlier is None or _images(self._queue) >= self._batch_limit):
            batch = self._start(self._next_asks())
            if self._on_gpu:
                self._computing = batch
            else:
                earlier = batch
        if earlier is not None:
            self._finish(earlier)
        if self._new:
            self._encode_prompts()
        self._tell()

    # ------------------------------------------------------------------ requests

    @property
    def free_slots(self) -> int:
        """Images that still fit into the queue."""
        new = sum(new.slots + _images(new.asks) for new in self._new.values())
        return self.settings.queue - _images(self._queue) - new

    def _receive(self, timeout: float) -> None:
        """Read all messages that are there; wait up to ``timeout`` seconds for the first."""
        while self._socket.poll(int(1000 * timeout)):
            timeout = 0.0
            caller, text, *frames = self._socket.recv_multipart(copy=False)
            message, caller = json.loads(text.bytes), caller.bytes
            if "keys" in message:
                self._take(caller, message, frames[0].buffer)
            elif "cancel" in message:
                self._cancel(caller, message["cancel"])
            elif "hello" in message:
                self._callers.add(caller)
                how = asdict(self.encoder.preprocessing)
                self._send(caller, {"hello": self.info.model_dump(), "preprocessing": how})

    def _take(self, caller: bytes, message: dict[str, Any], pixels: memoryview) -> None:
        size, keys = self.encoder.image_size, message["keys"]
        images = torch.frombuffer(pixels, dtype=torch.uint8).view(len(keys), 3, size, size)
        ask = _Ask(caller, message["id"], images, keys, message["expires"])
        try:
            self._admit(ask, message["labels"])
        except RequestError as error:
            self._refuse(ask, error)

    def _admit(self, ask: _Ask, labels: list[list[str]] | None) -> None:
        """Queue a request, or raise: 503 where the queue is full, 422 where there are no features for its labels."""
        if len(ask) > self.free_slots:
            raise busy("the queue is full; try again soon")
        if labels is None:
            self._enqueue(ask, self.preset)
            return
        names, templates = tuple(labels[0]), tuple(labels[1])
        key = names, templates
        if key not in self._known and label_source(self.encoder) == "bank":
            self._remember(key, self._table_classes(names))
        if key in self._known:
            self._known.move_to_end(key)
            self._enqueue(ask, self._known[key])
            return
        if key not in self._new:
            # Not str.format, which would give a caller's template access to attributes.
            prompts = [template.replace("{}", name) for template in templates or DEFAULT_TEMPLATES for name in names]
            new = _NewLabels(names, prompts)
            # Images must find room beside any number of label lists.
            waiting = new.slots + sum(other.slots for other in self._new.values())
            if waiting > self.settings.queue // 2 or new.slots + len(ask) > self.free_slots:
                raise busy("too many new labels are waiting; try again soon, or send labels that were used before")
            self._new[key] = new
        self._new[key].asks.append(ask)

    def classes(self, labels: tuple[list[str], list[str]] | None) -> ZeroShotClassifier:
        """Classes of a request that was answered just now."""
        return self.preset if labels is None else self._known[tuple(labels[0]), tuple(labels[1])]

    def _enqueue(self, ask: _Ask, classes: ZeroShotClassifier) -> None:
        ask.classes = classes
        self._queue.append(ask)

    def _cancel(self, caller: bytes, number: int) -> None:
        """Forget a request whose caller is gone, and prompts that nobody else waits for."""

        def stays(ask: _Ask) -> bool:
            return (ask.caller, ask.number) != (caller, number)

        self._queue = deque(filter(stays, self._queue))
        for key, new in list(self._new.items()):
            new.asks = list(filter(stays, new.asks))
            if not new.asks:
                del self._new[key]

    def _send(self, caller: bytes, message: dict[str, Any], *frames: Any) -> None:
        message["free"] = self.free_slots
        self._socket.send_multipart([caller, json.dumps(message).encode(), *frames])

    def _refuse(self, ask: _Ask, error: RequestError) -> None:
        values = {"message": error.detail, "kind": error.kind, "field": error.field, "headers": error.headers}
        self._send(ask.caller, {"id": ask.number, "error": {"status": error.status_code, **values}})

    def _tell(self) -> None:
        """Tell all callers now and then that the model lives."""
        self.metrics.waiting.set(self.settings.queue - self.free_slots)
        if (now := time.monotonic()) - self._told > BEAT:
            self._told = now
            for caller in self._callers:
                self._send(caller, {})
        if _malloc_trim and now - self._trimmed > _TRIM_SECONDS:
            # glibc would keep what each thread has freed for later requests of that thread.
            self._trimmed = now
            _malloc_trim(0)

    # ------------------------------------------------------------------ images

    @property
    def _batch_limit(self) -> int:
        """Largest next batch: fewer images where that many would take too long for the deadline."""
        in_time = _BATCH_FRACTION * self.settings.deadline / self._seconds_per_image
        return max(1, min(self._largest, int(in_time)))

    def _next_asks(self) -> list[_Ask]:
        """Take the requests of a batch from the queue; those that have waited too long are refused."""
        batch: list[_Ask] = []
        most = min(self._batch_limit, _images(self._queue))
        if self._on_gpu:
            most = max(size for size in _GPU_BATCHES if size <= most)
        while self._queue and (not batch or _images(batch) + len(self._queue[0]) <= most):
            ask = self._queue.popleft()
            if time.monotonic() < ask.expires:
                batch.append(ask)
            else:
                self._refuse(ask, late(self.settings.deadline))
        return batch

    def _start(self, asks: list[_Ask]) -> _Batch | None:
        """Give requests to the model; None if there is none or it fails, which their callers are told."""
        if not asks:
            return None
        began, copied = time.monotonic(), None
        try:
            classes = [ask.classes for ask in asks for _ in ask.keys]
            keys = [key for ask in asks for key in ask.keys]
            columns, rows = self._rows(self._run(torch.cat([ask.pixels for ask in asks]), keys, classes))
            if self._on_gpu:
                rows = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            return _Batch(asks, rows, columns, copied, began)
        except Exception as error:
            self._fail(asks, error)
            return None

    @torch.no_grad()
    def _run(self, pixels: Tensor, keys: list[int], classes: list[Any], *, skip_unneeded: bool = True) -> Defended:
        """Defended answers for 8-bit pixels on the host, with one key and one classifier for each."""
        device = self.encoder.device
        on_device = (pixels.pin_memory() if self._on_gpu else pixels).to(device, non_blocking=True)
        streams = torch.tensor(keys).to(device)
        one = len(set(map(id, classes))) == 1
        return self.defense.run(
            self.encoder, to_float(on_device), streams, classes[0] if one else classes, skip_unneeded=skip_unneeded
        )

    def numbers(self, out: Defended) -> dict[str, Tensor]:
        """What the defence measured, one value per image."""
        opened = out.diagnostics.get("gate_open", out.gated)
        return out.diagnostics | {"gated": out.gated, "passes": out.passes, "suspicious": opened}

    def _rows(self, out: Defended) -> tuple[list[str], Tensor]:
        """One row of numbers per image, ``[B, D + numbers + K]``: feature, numbers with their names, probabilities."""
        numbers = self.numbers(out)
        columns = torch.stack([values.float() for values in numbers.values()], 1)
        return list(numbers), torch.cat([out.features.float(), columns, out.probs.float()], 1)

    def _finish(self, batch: _Batch) -> None:
        """Send the answers of the requests that this batch completes."""
        dim, names = self.encoder.dim, batch.columns
        try:
            if batch.copied is not None:
                batch.copied.synchronize()
            if not bool(torch.isfinite(batch.rows[:, :dim]).all()):
                raise ArithmeticError("features are not finite")
        except Exception as error:
            self._fail(batch.asks, error)
            return
        end, images = time.monotonic(), len(batch.rows)
        seconds, self._last_end = end - max(batch.began, self._last_end), end
        self._seconds_per_image = (self._seconds_per_image + seconds / images) / 2
        # Before the answers: a caller that has its answer must find it counted in the metrics.
        numbers = batch.rows[:, dim : dim + len(names)]
        gated, suspicious, passes = (numbers[:, names.index(name)] for name in ("gated", "suspicious", "passes"))
        self.metrics.count_batch(gated, suspicious, passes, seconds)
        for ask, rows in zip(batch.asks, torch.split(batch.rows, [len(ask) for ask in batch.asks]), strict=True):
            assert ask.classes is not None, "only requests with classes are queued"
            # Other images of the batch may have more classes.
            own = rows[:, : dim + len(names) + len(ask.classes.names)].contiguous()
            self._send(ask.caller, {"id": ask.number, "images": len(ask), "columns": names}, own.numpy())

    def _fail(self, asks: list[_Ask], error: Exception) -> None:
        """Refuse the requests of a batch that failed."""
        trace = error if logger.isEnabledFor(logging.DEBUG) else None
        logger.error("a batch of %d images failed: %s", _images(asks), type(error).__name__, exc_info=trace)
        for ask in asks:
            self._refuse(ask, busy("the model could not answer this batch; try again", kind="unavailable"))

    def _warm_up(self) -> float:
        """Compute grey images, so that no request waits for what is prepared once; seconds of one image."""
        size, began = self.encoder.image_size, 0.0
        grey = torch.full((self._largest, 3, size, size), 128, dtype=torch.uint8)
        # A GPU records a graph when it meets a size again. Large ones first: small ones fit their memory.
        sizes = [number for number in _GPU_BATCHES[::-1] if number <= self._largest] if self._on_gpu else [1]
        for count in [number for number in sizes for _ in range(2)]:
            began = time.monotonic()
            self._rows(self._run(grey[:count], [0] * count, [self.preset] * count))[1].cpu()
        return max(time.monotonic() - began, 1e-6)

    # ------------------------------------------------------------------ labels

    def _remember(self, key: LabelList, classes: ZeroShotClassifier) -> None:
        self._known[key] = classes
        if len(self._known) > _LABEL_LISTS:
            self._known.popitem(last=False)

    def _table_classes(self, names: tuple[str, ...]) -> ZeroShotClassifier:
        """Classes of a model without a text tower."""
        try:
            return ZeroShotClassifier.from_features(self.encoder, names, LabelTable.load().features(names))
        except ReactClipError as error:
            # The rest of the library's message is for programmers; a caller can only choose other names.
            line = str(error).partition("; use one of its names")[0] + "; choose other labels"
            raise RequestError(422, line, field="labels") from None

    @torch.no_grad()
    def _encode_prompts(self) -> None:
        """Encode some prompts of the oldest new label list; when it is complete its requests join the queue.

        Nothing of a request is written to the library's cache on disk, which belongs to the owner of the machine.
        """
        key, new = next(iter(self._new.items()))
        try:
            done = _PROMPTS * len(new.features)
            new.features.append(self.encoder.encode_text(new.prompts[done : done + _PROMPTS]))
            if done + _PROMPTS < len(new.prompts):
                return
            features = torch.cat(new.features).reshape(-1, len(new.names), self.encoder.dim).mean(0)
            classes = ZeroShotClassifier.from_features(self.encoder, new.names, features)
        except Exception as error:
            logger.error("a label list failed: %s", type(error).__name__)
            for ask in new.asks:
                self._refuse(ask, busy("the labels could not be encoded; try again", kind="unavailable"))
        else:
            self._remember(key, classes)
            for ask in new.asks:
                self._enqueue(ask, classes)
        del self._new[key]


def _images(asks: Iterable[_Ask]) -> int:
    return sum(map(len, asks))
