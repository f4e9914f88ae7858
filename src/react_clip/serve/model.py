"""The model's loop: one thread that owns the model, takes requests from a socket and answers them in batches.

It runs on a thread of the only process, or in a process of its own that several HTTP processes ask; the socket
(ZeroMQ) is the same. Everything happens on this thread, between two batches: no other one competes with it for the
interpreter. One turn of the loop reads what has arrived, gives the model a batch of images of all callers and label
lists, and encodes some prompts of new label lists.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch
import zmq
from torch import Tensor

from react_clip.defenses.base import Defense
from react_clip.defenses.result import Defended
from react_clip.errors import ReactClipError
from react_clip.preprocess import to_float
from react_clip.serve.client import BATCH_FRACTION, admit
from react_clip.serve.errors import RequestError, busy
from react_clip.serve.metrics import Metrics
from react_clip.serve.responses import Info, label_source
from react_clip.serve.settings import BEAT, GRACE, PROMPTS_PER_SLOT, Settings
from react_clip.serve.shadow import Shadow
from react_clip.zeroshot import DEFAULT_TEMPLATES, ZeroShotClassifier, fill_template

logger = logging.getLogger("react_clip.serve")

DemoAttack = Callable[[ZeroShotClassifier, Tensor, int, float, Callable[[int], None]], Tensor]
"""``(classifier, pixels [1, 3, S, S], index of the class to leave, eps in [0, 1], advance) -> attacked pixels``, where
``advance`` is called after every step and raises if the caller is gone."""

_PROMPTS = 32
"""Prompts encoded in one turn."""
_LABEL_LISTS = 64
"""Label lists whose class features are kept."""
_GPU_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of batches on a GPU, which records a graph for each; images beyond such a size wait for the next batch."""


@dataclass(eq=False)
class Labels:
    """A label list: the classes, or what of its prompts is encoded so far."""

    names: tuple[str, ...]
    prompts: list[str] = field(default_factory=list)
    classes: ZeroShotClassifier | None = None
    features: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _Ask:
    """One request. All of its images are in one batch."""

    caller: bytes
    number: int
    pixels: Tensor
    """``[N, 3, S, S]`` in 8 bits."""
    keys: list[int]
    labels: Labels
    arrived: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, eq=False)
class _Batch:
    """Requests that the model computes, ``rows`` that are being copied to the host, and when that began."""

    asks: list[_Ask]
    rows: Tensor
    columns: list[str]
    copied: torch.cuda.Event | None
    began: float


class Model:
    """An encoder, its defence and the classes of requests without labels; :meth:`running` answers requests."""

    def __init__(
        self,
        defense: Defense,
        preset: ZeroShotClassifier,
        settings: Settings,
        attack: DemoAttack | None = None,
        shadow: Defense | None = None,
    ) -> None:
        self.encoder, self.defense, self.settings, self.attack = preset.encoder, defense, settings, attack
        self.metrics = Metrics(shared=settings.workers > 1)
        self._shadow = Shadow(shadow, settings.shadow_share, self.metrics) if shadow else None
        self._on_gpu = self.encoder.device.type == "cuda"
        self._largest = settings.batch or (64 if self._on_gpu else 32)
        self._keep([])
        self._preset = Labels(preset.names, classes=preset)
        self._labels = lru_cache(_LABEL_LISTS)(self._new_labels)
        self._computing: _Batch | None = None
        self._callers: set[bytes] = set()
        self._stopped = False
        self._last_end = self._told = 0.0
        # The middle one of three batches, so that one hiccup does not count.
        self._rates = deque([self._warm_up(defense)], maxlen=3)
        self._seconds = self._rates[0]
        if shadow:
            self._warm_up(shadow)
        self.info = Info.of(self.encoder, defense, list(preset.names), settings)

    @contextmanager
    def running(self, address: str) -> Iterator[None]:
        """Answer requests on a thread."""
        thread = threading.Thread(target=self._serve, args=(address,), name="react-clip-model")
        thread.start()
        try:
            yield
        finally:
            self._stopped = True
            thread.join(GRACE)

    def _serve(self, address: str) -> None:
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        with self._socket:
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(address)
            while not self._stopped:
                self._turn()

    def _turn(self) -> None:
        shadow = self._shadow if self._shadow and self._shadow.waiting else None
        self._receive(0.0 if self._queue or self._computing or shadow else BEAT)
        if shadow and not self._queue and not self._computing:
            shadow.run(self._run, most=4 if self._on_gpu else 1)  # a request that comes now waits for no more
        earlier, self._computing = self._computing, None
        ready = [ask for ask in self._queue if ask.labels.classes is not None]
        # A GPU gets a full batch while it computes the last one, so that it need not wait for the next.
        if ready and (earlier is None or _images(ready) >= self._batch_limit):
            batch = self._start(self._take_batch(ready))
            earlier, self._computing = (earlier, batch) if self._on_gpu else (batch, None)
        if earlier is not None:
            self._finish(earlier)
        # As much time for prompts as for images, so that neither waits longer for the other kind than for its own.
        for _ in range(max(1, len(earlier.rows) * PROMPTS_PER_SLOT // _PROMPTS if earlier else 1)):
            if new := self._new:
                self._encode_prompts(new[0])
        self._tell()

    # ------------------------------------------------------------------ requests

    @property
    def _new(self) -> list[Labels]:
        """Label lists that waiting requests need."""
        return list(dict.fromkeys(ask.labels for ask in self._queue if ask.labels.classes is None))

    @property
    def _waiting(self) -> int:
        """Places that are computed before a new image, prompts included."""
        return self._images + min(self._images, self._prompts)

    def _keep(self, asks: list[_Ask]) -> None:
        """Go on with these requests in the queue, and count its images and the places of their new prompts."""
        self._queue = asks
        self._images, self._prompts = _images(asks), _slots(self._new)

    def _receive(self, timeout: float) -> None:
        """Read all messages that are there; wait up to ``timeout`` seconds for the first."""
        while self._socket.poll(int(1000 * timeout)):
            timeout = 0.0
            caller, text, *frames = self._socket.recv_multipart(copy=False)
            message, caller = json.loads(text.bytes), caller.bytes
            if "keys" in message or "texts" in message:
                self._take(caller, message, *frames)
            elif "cancel" in message:
                # Prompts that nobody else waits for are forgotten with it.
                self._keep([ask for ask in self._queue if (ask.caller, ask.number) != (caller, message["cancel"])])
            elif "shadow" in message and self._shadow:
                self._send(caller, {"id": message["id"], "shadow": self._shadow.table()})
            elif "hello" in message:
                self._callers.add(caller)
                how = asdict(self.encoder.preprocessing)
                self._send(caller, {"info": self.info.model_dump(), "preprocessing": how})

    def _take(self, caller: bytes, message: dict[str, Any], pixels: zmq.Frame | None = None) -> None:
        """Queue a request, or refuse it: 503 where the queue is full, 422 where its labels have no features."""
        size, keys, texts = self.encoder.image_size, message.get("keys", []), message.get("texts")
        images = torch.empty(0)
        if pixels is not None:
            images = torch.frombuffer(pixels.buffer, dtype=torch.uint8).view(-1, 3, size, size)
        try:
            # Texts to embed are prompts without images and names.
            labels = Labels((), texts) if texts else self.labels_of(message["labels"])
            ask, prompts = _Ask(caller, message["id"], images, keys, labels), 0
            admit(len(ask), self._waiting, self._seconds, self.settings)
            if labels.classes is None and labels not in self._new:
                # Prompts get half of the time and of the places: images must find room beside any label lists.
                prompts, waiting = _slots([labels]), 2 * self._prompts
                what = "texts" if texts else "new labels"
                admit(2 * prompts, waiting, self._seconds, self.settings, what=what)
        except RequestError as error:
            self._refuse(caller, message["id"], error)
            return
        self._queue.append(ask)
        self._images, self._prompts = self._images + len(ask), self._prompts + prompts

    def labels_of(self, names: list[str] | None) -> Labels:
        """The label list of a request, or the preset one."""
        return self._preset if names is None else self._labels(tuple(names))

    def _new_labels(self, names: tuple[str, ...]) -> Labels:
        """A label list, whose prompts are not encoded yet."""
        if label_source(self.encoder) == "bank":
            try:
                return Labels(names, classes=ZeroShotClassifier(self.encoder, names))
            except ReactClipError as error:
                # The rest of the library's message is for programmers; a caller can only choose other names.
                line = str(error).partition("; use one of its names")[0] + "; choose other labels"
                raise RequestError(422, line, field="labels") from None
        templates = self.settings.template or DEFAULT_TEMPLATES
        return Labels(names, [fill_template(template, name) for template in templates for name in names])

    def _send(self, caller: bytes, message: dict[str, Any], *frames: Any) -> None:
        message |= {"waiting": self._waiting, "seconds": self._seconds}
        self._socket.send_multipart([caller, json.dumps(message).encode(), *frames])

    def _refuse(self, caller: bytes, number: int, error: RequestError) -> None:
        names = {"status": error.status_code, "message": error.detail, "kind": error.kind}
        self._send(caller, {"id": number, "error": {**names, "field": error.field, "headers": error.headers}})

    def _tell(self) -> None:
        """Tell all callers now and then that the model lives."""
        self.metrics.waiting.set(self._images + self._prompts)
        if (now := time.monotonic()) - self._told > BEAT:
            self._told = now
            for caller in self._callers:
                self._send(caller, {})

    # ------------------------------------------------------------------ images

    @property
    def _batch_limit(self) -> int:
        """Largest next batch: fewer images where that many would take too long for the deadline."""
        return max(1, min(self._largest, int(BATCH_FRACTION * self.settings.deadline / self._seconds)))

    def _take_batch(self, ready: list[_Ask]) -> list[_Ask]:
        """Take the requests of a batch from the queue."""
        batch, images = list[_Ask](), 0
        most = min(self._batch_limit, _images(ready))
        if self._on_gpu:
            most = max(size for size in _GPU_BATCHES if size <= most)
        for ask in ready:
            if batch and images + len(ask) > most:
                break
            batch.append(ask)
            images += len(ask)
        taken = set(batch)
        self._keep([ask for ask in self._queue if ask not in taken])
        return batch

    def _start(self, asks: list[_Ask]) -> _Batch | None:
        """Give requests to the model; None if it fails, which their callers are told."""
        began, copied = time.monotonic(), None
        try:
            classes = [ask.labels.classes for ask in asks for _ in ask.keys]
            keys = [key for ask in asks for key in ask.keys]
            pixels = torch.cat([ask.pixels for ask in asks])
            columns, rows = self._rows(self._run(pixels, keys, classes, self.defense))
            if self._on_gpu:
                rows = torch.empty(rows.shape, pin_memory=True).copy_(rows, non_blocking=True)
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
            return _Batch(asks, rows, columns, copied, began)
        except Exception as error:
            self._fail(asks, "the model could not answer this batch", error)
            return None

    @torch.no_grad()
    def _run(self, pixels: Tensor, keys: list[int], classes: list[Any], guard: Defense) -> Defended:
        """Defended answers for 8-bit pixels on the host, with one key and one classifier for each."""
        device = self.encoder.device
        on_device = (pixels.pin_memory() if self._on_gpu else pixels).to(device, non_blocking=True)
        streams = torch.tensor(keys).to(device)
        return guard.run(self.encoder, to_float(on_device), streams, classes)

    def _rows(self, out: Defended) -> tuple[list[str], Tensor]:
        """One row of numbers per image, ``[B, D + numbers + K]``: feature, numbers with their names, probabilities."""
        numbers = {"gated": out.gated, "passes": out.passes} | out.diagnostics
        numbers["suspicious"] = numbers.pop("gate_open", out.gated)
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
            self._fail(batch.asks, "the model could not answer this batch", error)
            return
        end, images = time.monotonic(), len(batch.rows)
        seconds, self._last_end = end - max(batch.began, self._last_end), end
        self._rates.append(seconds / images)
        self._seconds = statistics.median_low(self._rates)
        # Before the answers: a caller that has its answer must find it counted in the metrics.
        numbers = batch.rows[:, dim : dim + len(names)]
        gated, passes = (numbers[:, names.index(name)] for name in ("gated", "passes"))
        self.metrics.count_batch(gated, passes, seconds)
        for ask, rows in zip(batch.asks, torch.split(batch.rows, [len(ask) for ask in batch.asks]), strict=True):
            # Other images of the batch may have more classes.
            own = rows[:, : dim + len(names) + len(ask.labels.names)].contiguous()
            told = {"id": ask.number, "images": len(ask), "columns": names, "wait": batch.began - ask.arrived}
            self._send(ask.caller, told, own.numpy())
            if self._shadow and ask.labels.classes:
                for image, key, best in zip(ask.pixels, ask.keys, own[:, dim + len(names) :].argmax(1), strict=True):
                    self._shadow.add((image.clone(), key, ask.labels.classes, int(best)))

    def _fail(self, asks: list[_Ask], line: str, error: Exception) -> None:
        """Refuse requests whose images or labels failed."""
        trace = error if logger.isEnabledFor(logging.DEBUG) else None
        logger.error("%s of %d images: %s", line, _images(asks), type(error).__name__, exc_info=trace)
        for ask in asks:
            self._refuse(ask.caller, ask.number, busy(f"{line}; try again", kind="unavailable"))

    def _warm_up(self, guard: Defense) -> float:
        """Compute grey images, so that no request waits for what is prepared once; seconds of one image."""
        size, began = self.encoder.image_size, 0.0
        grey = torch.full((self._largest, 3, size, size), 128, dtype=torch.uint8)
        # A GPU records a graph when it meets a size again. Large ones first: small ones fit their memory.
        sizes = [number for number in _GPU_BATCHES[::-1] if number <= self._largest] if self._on_gpu else [1]
        for count in [number for number in sizes for _ in range(2)]:
            began = time.monotonic()
            self._rows(self._run(grey[:count], [0] * count, [self._preset.classes] * count, guard))[1].cpu()
        return max(time.monotonic() - began, 1e-6)

    @torch.no_grad()
    def _encode_prompts(self, new: Labels) -> None:
        """Encode some prompts of a new label list; when it is complete its requests are ready.

        Nothing of a request is written to the library's cache on disk, which belongs to the owner of the machine.
        """
        try:
            done = _PROMPTS * len(new.features)
            new.features.append(self.encoder.encode_text(new.prompts[done : done + _PROMPTS]))
            if done + _PROMPTS < len(new.prompts):
                return
            if not new.names:
                [ask] = [ask for ask in self._queue if ask.labels is new]
                self._keep([each for each in self._queue if each is not ask])
                told = {"id": ask.number, "images": len(new.prompts), "columns": [], "wait": 0.0}
                self._send(ask.caller, told, torch.cat(new.features).float().cpu().numpy())
            else:
                features = torch.cat(new.features).reshape(-1, len(new.names), self.encoder.dim).mean(0)
                new.classes = ZeroShotClassifier.from_features(self.encoder, new.names, features)
                new.features.clear()
                self._keep(self._queue)  # its prompts take no places any more
        except Exception as error:
            new.features.clear()
            failed = [ask for ask in self._queue if ask.labels is new]
            self._keep([ask for ask in self._queue if ask.labels is not new])
            self._fail(failed, "the labels could not be encoded", error)


def _images(asks: Iterable[_Ask]) -> int:
    return sum(map(len, asks))


def _slots(lists: Iterable[Labels]) -> int:
    """Places of the queue that their prompts take."""
    return sum(math.ceil(len(labels.prompts) / PROMPTS_PER_SLOT) for labels in lists)
