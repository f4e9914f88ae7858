"""The model in a process of its own, asked by several HTTP processes.

Each HTTP process reads, decodes and answers requests; one process computes for all of them, in batches of images from
all of them and with one copy of the weights. Pixels pass through shared memory. Everything else passes through a Unix
socket as frames: two lengths, JSON, and in answers the numbers of each image as 32-bit floats.

The model's process does everything on one thread. A second one that runs Python code would take the interpreter for
milliseconds after each of the hundreds of operations that a batch consists of.
"""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip.preprocess import Preprocessing
from react_clip.serve.answers import Answer, Photo, answers_of
from react_clip.serve.engine import Engine
from react_clip.serve.errors import RequestError, busy
from react_clip.serve.labels import LabelList
from react_clip.serve.memory import return_freed_memory
from react_clip.serve.metrics import Metrics
from react_clip.serve.responses import Info
from react_clip.serve.settings import Settings
from react_clip.zeroshot import ZeroShotClassifier

logger = logging.getLogger("react_clip.serve")

SOCKET = "model.sock"
"""File name of the socket of the model's process."""

_LENGTHS = struct.Struct("<II")
"""Bytes of JSON and of floats in a frame."""
_PAUSE = 0.1
"""Seconds between two attempts to reach a model's process that has ended and is being replaced."""


class SharedMemory:
    """Memory of a service with ``processes`` HTTP processes; created before they are forked."""

    def __init__(self, processes: int) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 8 * (1 + processes))).cast("q")
        self.connections = self._numbers[1:]
        """Number of open connections of each HTTP process."""
        self._files = [os.memfd_create(f"react-clip-pixels-{place}") for place in range(processes)]

    @property
    def free_slots(self) -> int:
        """Number of images that still fit into the model's queue."""
        return self._numbers[0]

    @free_slots.setter
    def free_slots(self, images: int) -> None:
        self._numbers[0] = images

    def pixels(self, place: int, slots: int, size: int) -> Tensor:
        """Pixels ``[slots, 3, size, size]`` in 8 bits that HTTP process ``place`` shares with the model's process."""
        length = slots * 3 * size * size
        os.ftruncate(self._files[place], length)
        return torch.frombuffer(mmap.mmap(self._files[place], length), dtype=torch.uint8).view(slots, 3, size, size)


class _Frames(asyncio.Protocol):
    """One end of the socket; ``receive`` gets each message with its floats, ``lost`` is called at the end."""

    def __init__(self, receive: Callable[[dict[str, Any], bytearray], None], lost: Callable[[], None]) -> None:
        self._receive, self._lost = receive, lost
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()

    def send(self, message: dict[str, Any], floats: bytes = b"") -> None:
        text = json.dumps(message).encode()
        self._transport.write(_LENGTHS.pack(len(text), len(floats)) + text + floats)

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= _LENGTHS.size:
            text, floats = _LENGTHS.unpack_from(self._buffer, start)
            middle = start + _LENGTHS.size + text
            if end < middle + floats:
                break
            message = json.loads(self._buffer[start + _LENGTHS.size : middle].decode())
            start = middle + floats
            self._receive(message, self._buffer[middle:start])
        del self._buffer[:start]


# ---------------------------------------------------------------------- the model's process


class LoopExecutor(Executor):
    """Runs functions on the thread of the running event loop, between the messages that arrive."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function soon, on this thread."""
        future: Future[Any] = Future()
        self._loop.call_soon(self._run, future, partial(function, *args, **kwargs))
        return future

    def _run(self, future: Future[Any], function: Callable[[], Any]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)


class ModelServer:
    """Answers the HTTP processes from a started engine, on a socket in ``folder``."""

    def __init__(self, engine: Engine, memory: SharedMemory, folder: str) -> None:
        self._engine, self._memory, self._path = engine, memory, str(Path(folder, SOCKET))
        self._metrics = Metrics(shared=True)
        engine.on_batch, engine.on_queue = self._metrics.count_batch, self._set_waiting
        self._set_waiting(0)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Answer within this block."""
        self._engine.run_on(LoopExecutor())
        Path(self._path).unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: _HttpProcess(self._engine, self._memory).frames, self._path)
        trimming = asyncio.create_task(return_freed_memory())
        yield
        trimming.cancel()
        server.close()

    def _set_waiting(self, images: int) -> None:
        self._metrics.waiting.set(images)
        self._memory.free_slots = self._engine.settings.queue - images


class _HttpProcess:
    """The requests of one HTTP process; they end when it ends."""

    def __init__(self, engine: Engine, memory: SharedMemory) -> None:
        self.frames = _Frames(self._receive, self._lost)
        self._engine, self._memory = engine, memory
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._futures: dict[int, list[Future[Answer]]] = {}

    def _receive(self, message: dict[str, Any], _: bytearray) -> None:
        if "place" in message:
            size, slots = self._engine.encoder.image_size, self._engine.settings.queue
            self._pixels = self._memory.pixels(message["place"], slots, size)
        elif "cancel" in message:
            self._cancel(message["cancel"])
        elif message["labels"] is None:
            self._submit(message, self._engine.preset)
        else:
            number = message["id"]
            self._tasks[number] = task = asyncio.create_task(self._submit_with_labels(message))
            task.add_done_callback(lambda _: self._tasks.pop(number))

    def _lost(self) -> None:
        for number in [*self._tasks, *self._futures]:
            self._cancel(number)

    def _cancel(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()
        for future in self._futures.pop(number, ()):
            future.cancel()

    async def _submit_with_labels(self, message: dict[str, Any]) -> None:
        names, templates = message["labels"]
        try:
            classes = await self._engine.classes(LabelList(tuple(names), tuple(templates)))
        except RequestError as error:
            self._refuse(message["id"], error)
        except Exception as error:
            logger.error("a label list failed: %s", type(error).__name__, exc_info=True)
            self._refuse(message["id"], busy("the labels could not be encoded; try again", kind="unavailable"))
        else:
            self._submit(message, classes)

    def _submit(self, message: dict[str, Any], classes: ZeroShotClassifier) -> None:
        number = message["id"]
        images = zip(message["slots"], message["keys"], strict=True)
        photos = [Photo(self._pixels[slot], key) for slot, key in images]
        try:
            futures = self._engine.submit(photos, classes, all_views=message["all_views"])
        except RequestError as error:
            self._refuse(number, error)
            return
        self._futures[number] = futures
        for future in futures:
            future.add_done_callback(lambda _: self._answer(number))

    def _answer(self, number: int) -> None:
        """Answer a request if all of its images are done; nobody waits for one that was cancelled."""
        futures = self._futures.get(number)
        if futures is None or not all(future.done() for future in futures):
            return
        del self._futures[number]
        try:
            answers = [future.result() for future in futures]
        except RequestError as error:
            self._refuse(number, error)
            return
        self.frames.send({"id": number}, b"".join(answer.row.float().numpy().tobytes() for answer in answers))

    def _refuse(self, number: int, error: RequestError) -> None:
        values = {"message": error.message, "kind": error.kind, "field": error.field, "headers": error.headers}
        self.frames.send({"id": number, "error": {"status": error.status, **values}})


# ---------------------------------------------------------------------- an HTTP process


class RemoteEngine:
    """The application's engine in an HTTP process: sends images to the model's process and returns its answers.

    It has the methods of :class:`Engine` that the application calls. Requests that wait for a model's process that ends
    get 503, as do new ones until another has taken its place.
    """

    def __init__(
        self,
        info: Info,
        preprocessing: Preprocessing,
        *,
        memory: SharedMemory,
        place: int,
        folder: str,
        secret: bytes,
        settings: Settings,
    ) -> None:
        self.info, self.preprocessing, self.secret, self.settings = info, preprocessing, secret, settings
        self.alive = self._stopped = False
        self._memory, self._place, self._path = memory, place, str(Path(folder, SOCKET))
        self._pixels = memory.pixels(place, settings.queue, info.image_size)
        self._free = list(range(settings.queue))
        self._waiting: dict[int, tuple[list[int], asyncio.Future[list[Answer]]]] = {}
        self._numbers = count()

    async def connect(self) -> None:
        """Reach the model's process; call it once, before requests arrive."""
        loop = asyncio.get_running_loop()
        _, self._frames = await loop.create_unix_connection(lambda: _Frames(self._receive, self._lost), self._path)
        self._frames.send({"place": self._place})
        self.alive = True

    def stop(self) -> None:
        """Leave the model's process."""
        self.alive, self._stopped = False, True
        self._frames.close()

    @property
    def free_slots(self) -> int:
        """Number of images that can be queued."""
        return min(len(self._free), self._memory.free_slots)

    def expect(self, images: int) -> AbstractContextManager[None]:
        """As :meth:`Engine.expect`; nothing to do, because the model's process waits for no image."""
        return nullcontext()

    async def ask(self, photos: Sequence[Photo], labels: LabelList, *, all_views: bool = False) -> list[Answer]:
        """As :meth:`Engine.ask`."""
        if not self.alive:
            raise _ended()
        if len(photos) > len(self._free):
            raise busy("the queue is full; try again soon")
        number, slots = next(self._numbers), [self._free.pop() for _ in photos]
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = [len(labels.names)] * len(photos), answers
        try:
            for slot, photo in zip(slots, photos, strict=True):
                self._pixels[slot].copy_(photo.pixels)
            keys = [photo.key for photo in photos]
            names = None if labels.preset else (labels.names, labels.templates)
            message = {"id": number, "slots": slots, "keys": keys, "labels": names, "all_views": all_views}
            self._frames.send(message)
            return await answers
        except asyncio.CancelledError:
            self._frames.send({"cancel": number})
            raise
        finally:
            del self._waiting[number]
            self._free.extend(slots)

    def _receive(self, message: dict[str, Any], floats: bytearray) -> None:
        classes, answers = self._waiting.get(message["id"], ([], None))
        if answers is None or answers.done():
            return
        if "error" in message:
            error = message["error"]
            answers.set_exception(RequestError(error.pop("status"), error.pop("message"), **error))
            return
        rows = torch.frombuffer(floats, dtype=torch.float32).view(len(classes), -1)
        answers.set_result(answers_of(rows, self.info.dim, classes))

    def _lost(self) -> None:
        self.alive = False
        for _, answers in self._waiting.values():
            if not answers.done():
                answers.set_exception(_ended())
        if not self._stopped:
            self._reconnecting = asyncio.create_task(self._reconnect())

    async def _reconnect(self) -> None:
        """Try until another model's process has taken the place of the one that ended, or this one stops."""
        while not (self.alive or self._stopped):
            await asyncio.sleep(_PAUSE)
            with suppress(OSError):
                await self.connect()


def _ended() -> RequestError:
    return busy("the model's process has ended and is being replaced; try again soon", kind="unavailable")
