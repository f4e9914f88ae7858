"""The application's end of the model's socket: sends photos and labels, knows whether the model lives."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch
import zmq
import zmq.asyncio
from torch import Tensor

from react_clip.preprocess import Preprocessing
from react_clip.serve.errors import RequestError, busy
from react_clip.serve.memory import return_freed_memory
from react_clip.serve.responses import Info
from react_clip.serve.settings import BEAT, Settings

_WAIT_FRACTION = 0.5
"""Most of the deadline that an image may wait in the queue."""

_MESSAGES = 64
"""Requests on their way to a model that does not read; later ones are refused."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Defended answer for one image."""

    feature: Tensor
    """Unit feature ``[D]``."""
    probs: Tensor
    """Probabilities ``[K]``, or of the demo ``[2 K]``: defended, then plain."""
    numbers: dict[str, float]
    """What the defence measured, by name."""


@dataclass(eq=False)
class _Waiting:
    answer: asyncio.Future[tuple[list[Answer], list[bytes]]]
    images: int
    progress: Callable[[int, int], None] | None


class ModelClient:
    """Asks the model behind ``address``; :meth:`connect` first, :meth:`close` at the end."""

    def __init__(self, address: str, settings: Settings) -> None:
        self.settings = settings
        self._address = address
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = count()
        self._process = self._free = 0
        self._heard = 0.0

    async def connect(self) -> None:
        """Reach the model and learn what it is; waits until it is loaded."""
        self._socket = zmq.asyncio.Context(zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.immediate = True  # nothing is queued for a model that is not there
        self._socket.sndhwm = _MESSAGES
        self._socket.connect(self._address)
        self._known = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        done, _ = await asyncio.wait([self._known, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()

    def close(self, *, stop_model: bool) -> None:
        """Leave the model, or end it."""
        for task in self._tasks:
            task.cancel()
        if stop_model:
            self._send({"stop": True})
        self._socket.close(linger=1000)

    @property
    def unready(self) -> str | None:
        """Why a request sent now would be refused, or None."""
        if time.monotonic() - self._heard > max(self.settings.deadline, 4 * BEAT):
            return "the model does not answer"
        if self._free_slots < self.settings.max_images:
            return "the queue has no room for a full request"
        return None

    @property
    def _free_slots(self) -> int:
        """Images that still fit: as the model said last, and counted here, because it may be busy or hung."""
        return min(self._free, self.settings.queue - sum(one.images for one in self._waiting.values()))

    async def submit(
        self,
        pixels: Tensor,
        keys: Sequence[int],
        labels: tuple[Sequence[str], Sequence[str]] | None,
        *,
        eps: float | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[list[Answer], list[bytes]]:
        """Answers for 8-bit pixels ``[N, 3, S, S]``, and the attacked pixels of a demo (``eps``).

        ``labels`` are names and templates, None for the server's own. Cancelling this frees the places in the queue.
        """
        if self.unready == "the model does not answer" or len(keys) > self._free_slots:
            raise busy("the queue is full; try again soon" if self._heard else "the model is being started; try again")
        number = next(self._numbers)
        expires = time.monotonic() + _WAIT_FRACTION * self.settings.deadline
        message = {"id": number, "keys": list(keys), "labels": labels, "expires": expires, "eps": eps}
        answer: asyncio.Future[tuple[list[Answer], list[bytes]]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(answer, len(keys), progress)
        try:
            self._send(message, pixels.numpy())
            return await answer
        except zmq.Again:
            raise busy("the model does not answer; try again soon", kind="unavailable") from None
        except asyncio.CancelledError:
            with suppress(zmq.Again):
                self._send({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    def _send(self, message: dict[str, Any], *frames: Any) -> None:
        """Send at once, or raise ``zmq.Again`` where the model has not read for long."""
        self._socket.send_multipart([json.dumps(message).encode(), *frames], zmq.NOBLOCK).result()

    async def _listen(self) -> None:
        while True:
            text, *frames = await self._socket.recv_multipart()
            self._heard = time.monotonic()
            message = json.loads(text)
            if "free" in message:
                self._free = message["free"]
            elif "hello" in message:
                self._free, self._process = self.settings.queue, message["process"]
                self.info = Info.model_validate(message["hello"])
                self.preprocessing = Preprocessing(**message["preprocessing"])
                if not self._known.done():
                    self._known.set_result(None)
            elif (waiting := self._waiting.get(message["id"])) is None or waiting.answer.done():
                continue
            elif "progress" in message and waiting.progress:
                waiting.progress(*message["progress"])
            elif "error" in message:
                error = message["error"]
                waiting.answer.set_exception(RequestError(error.pop("status"), error.pop("message"), **error))
            else:
                waiting.answer.set_result((self._answers(waiting.images, message["columns"], frames[0]), frames[1:]))

    def _answers(self, images: int, columns: list[str], rows: bytes) -> list[Answer]:
        dim, end = self.info.dim, self.info.dim + len(columns)
        values = torch.from_numpy(np.frombuffer(rows, np.float32).copy()).view(images, -1)
        return [Answer(row[:dim], row[end:], dict(zip(columns, row[dim:end].tolist(), strict=True))) for row in values]

    async def _watch(self) -> None:
        """Greet a model that is silent, and give up waiting for a process that has ended."""
        for turn in count():
            if time.monotonic() - self._heard > 2 * BEAT:
                with suppress(zmq.Again):
                    self._send({"hello": True})
                if self._process and not _lives(self._process):
                    self._heard, self._process = 0.0, 0
                    for waiting in self._waiting.values():
                        if not waiting.answer.done():
                            line = "the model's process has ended and is being replaced; try again soon"
                            waiting.answer.set_exception(busy(line, kind="unavailable"))
            if turn % 20 == 0:
                await asyncio.to_thread(return_freed_memory)
            await asyncio.sleep(BEAT)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
