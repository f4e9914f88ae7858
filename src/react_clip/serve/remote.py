"""The model in a process of its own, asked by several HTTP processes.

Each HTTP process reads, decodes and answers requests; one process computes for all of them, in batches of images from
all of them and with one copy of the weights. Pixels pass through shared memory. Everything else passes through a Unix
socket as frames: two lengths, JSON, and in answers the 32-bit floats of features and probabilities.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from react_clip.preprocess import Preprocessing
from react_clip.serve.engine import Answer, Engine, Photo
from react_clip.serve.errors import RequestError, busy
from react_clip.serve.labels import LabelList
from react_clip.serve.metrics import Metrics
from react_clip.serve.responses import Info
from react_clip.serve.settings import Settings

SOCKET = "model.sock"
"""File name of the socket of the model's process."""

_LENGTHS = struct.Struct("<II")
"""Bytes of JSON and of floats in a frame."""
_PAUSE = 0.1
"""Seconds between two attempts to reach a model's process that has ended and is being replaced."""


class SharedMemory:
    """Memory of a service with ``processes`` HTTP processes; created before they are forked.

    ``numbers[0]`` images still fit into the model's queue, ``numbers[1 + i]`` are being read or decoded by process i.
    """

    def __init__(self, processes: int) -> None:
        self.numbers = memoryview(mmap.mmap(-1, 8 * (1 + processes))).cast("q")
        self._files = [os.memfd_create(f"react-clip-pixels-{place}") for place in range(processes)]

    def expected(self) -> int:
        """Images that are being read or decoded by any process."""
        return sum(self.numbers[1:])

    def pixels(self, place: int, slots: int, size: int) -> Tensor:
        """Pixels ``[slots, 3, size, size]`` in 8 bits that HTTP process ``place`` shares with the model's process."""
        length = slots * 3 * size * size
        os.ftruncate(self._files[place], length)
        return torch.frombuffer(mmap.mmap(self._files[place], length), dtype=torch.uint8).view(slots, 3, size, size)


def _frame(message: dict[str, Any], floats: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return _LENGTHS.pack(len(text), len(floats)) + text + floats


async def _frames(reader: asyncio.StreamReader) -> AsyncIterator[tuple[dict[str, Any], bytes]]:
    """Messages and floats until the other process closes the socket or ends."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            text, floats = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
            yield json.loads(await reader.readexactly(text)), await reader.readexactly(floats)


# ---------------------------------------------------------------------- the model's process


class ModelServer:
    """Answers the HTTP processes from a started engine, on a socket in ``folder``."""

    def __init__(self, engine: Engine, memory: SharedMemory, folder: str) -> None:
        self._engine, self._memory, self._path = engine, memory, Path(folder, SOCKET)
        self._metrics = Metrics(shared=True)
        engine.on_batch, engine.on_queue = self._metrics.count_batch, self._set_waiting
        engine.expected_elsewhere = memory.expected
        self._set_waiting(0)

    async def serve(self, announce: Callable[[], None]) -> None:
        """Answer until SIGTERM."""
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        self._path.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(self._talk, self._path)
        announce()
        await stopped.wait()
        server.close()
        self._engine.stop()

    def _set_waiting(self, images: int) -> None:
        self._metrics.waiting.set(images)
        self._memory.numbers[0] = self._engine.settings.queue - images

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one HTTP process; when it ends, so do its requests."""
        frames, settings = _frames(reader), self._engine.settings
        requests: dict[int, asyncio.Task[None]] = {}
        try:
            async for message, _ in frames:
                if "place" in message:
                    size = self._engine.encoder.image_size
                    pixels = self._memory.pixels(message["place"], settings.queue, size)
                elif "cancel" in message:
                    if task := requests.get(message["cancel"]):
                        task.cancel()
                else:
                    number = message["id"]
                    requests[number] = task = asyncio.create_task(self._answer(message, pixels, writer))
                    task.add_done_callback(partial(lambda number, _: requests.pop(number), number))
        finally:
            for task in list(requests.values()):
                task.cancel()
            writer.close()

    async def _answer(self, message: dict[str, Any], pixels: Tensor, writer: asyncio.StreamWriter) -> None:
        try:
            answers = await self._ask(message, pixels)
        except RequestError as error:
            values = {"message": error.message, "kind": error.kind, "field": error.field, "headers": error.headers}
            frame = _frame({"id": message["id"], "error": {"status": error.status, **values}})
        else:
            floats = torch.cat([part for answer in answers for part in _tensors(answer)]).float().numpy().tobytes()
            facts = [[len(answer.probs), answer.diagnostics, answer.branch] for answer in answers]
            frame = _frame({"id": message["id"], "answers": facts}, floats)
        writer.write(frame)

    async def _ask(self, message: dict[str, Any], pixels: Tensor) -> list[Answer]:
        names = message["labels"]
        labels = LabelList((), preset=True) if names is None else LabelList(tuple(names[0]), tuple(names[1]))
        images = zip(message["slots"], message["keys"], strict=True)
        photos = [Photo(pixels[slot], torch.tensor(key)) for slot, key in images]
        return await self._engine.ask(photos, labels, all_views=message["all_views"])


def _tensors(answer: Answer) -> tuple[Tensor, Tensor, Tensor]:
    return answer.feature, answer.probs, answer.plain_probs


# ---------------------------------------------------------------------- an HTTP process


class RemoteEngine:
    """What an :class:`Engine` does for the application, done by the model's process.

    Requests that wait for a model's process that ends get 503, as do new ones until another has taken its place.
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
        self.alive = False
        self._memory, self._place, self._path = memory, place, Path(folder, SOCKET)
        self._pixels = memory.pixels(place, settings.queue, info.image_size)
        self._free = list(range(settings.queue))
        self._waiting: dict[int, asyncio.Future[list[Answer]]] = {}
        self._numbers = count()
        memory.numbers[1 + place] = 0

    async def connect(self) -> None:
        """Reach the model's process; call it once, before requests arrive."""
        reader = await self._open()
        self._receiving = asyncio.create_task(self._receive(reader))

    def stop(self) -> None:
        """Leave the model's process."""
        self.alive = False
        self._receiving.cancel()
        self._writer.close()

    @property
    def free_slots(self) -> int:
        """Number of images that can be queued."""
        return min(len(self._free), self._memory.numbers[0])

    @contextmanager
    def expect(self, images: int) -> Iterator[None]:
        """As :meth:`Engine.expect`."""
        self._memory.numbers[1 + self._place] += images
        try:
            yield
        finally:
            self._memory.numbers[1 + self._place] -= images

    async def ask(self, photos: Sequence[Photo], labels: LabelList, *, all_views: bool = False) -> list[Answer]:
        """As :meth:`Engine.ask`."""
        if not self.alive:
            raise _ended()
        if len(photos) > len(self._free):
            raise busy("the queue is full; try again soon")
        number, slots = next(self._numbers), [self._free.pop() for _ in photos]
        answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answers
        try:
            for slot, photo in zip(slots, photos, strict=True):
                self._pixels[slot].copy_(photo.pixels)
            keys = [int(photo.key) for photo in photos]
            names = None if labels.preset else (labels.names, labels.templates)
            message = {"id": number, "slots": slots, "keys": keys, "labels": names, "all_views": all_views}
            self._writer.write(_frame(message))
            return await answers
        except asyncio.CancelledError:
            self._writer.write(_frame({"cancel": number}))
            raise
        finally:
            del self._waiting[number]
            self._free.extend(slots)

    async def _open(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_unix_connection(self._path)
        self._writer.write(_frame({"place": self._place}))
        self.alive = True
        return reader

    async def _receive(self, reader: asyncio.StreamReader) -> None:
        """Pass answers on to those who wait; when the model's process ends, wait for the next one."""
        while True:
            async for message, floats in _frames(reader):
                waiting = self._waiting.get(message["id"])
                if waiting is None or waiting.done():
                    continue
                if "error" in message:
                    error = message["error"]
                    waiting.set_exception(RequestError(error.pop("status"), error.pop("message"), **error))
                else:
                    waiting.set_result(self._answers(message["answers"], floats))
            self.alive = False
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(_ended())
            while not self.alive:
                await asyncio.sleep(_PAUSE)
                with suppress(OSError):
                    reader = await self._open()

    def _answers(self, facts: list[tuple[int, dict[str, Any], str]], floats: bytes) -> list[Answer]:
        sizes = [size for classes, _, _ in facts for size in (self.info.dim, classes, classes)]
        parts = iter(torch.split(torch.frombuffer(bytearray(floats), dtype=torch.float32), sizes))
        return [Answer(next(parts), next(parts), next(parts), values, branch) for _, values, branch in facts]


def _ended() -> RequestError:
    return busy("the model's process has ended and is being replaced; try again soon", kind="unavailable")
