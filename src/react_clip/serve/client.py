"""The application's end of the model's socket, which knows whether the model lives; and who is admitted to it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import zmq
import zmq.asyncio
from torch import Tensor

from react_clip.preprocess import Preprocessing
from react_clip.serve.errors import RequestError, busy
from react_clip.serve.responses import Info
from react_clip.serve.settings import BEAT, Settings

WAIT_FRACTION = 0.5
"""Most of the deadline that a request may be expected to take; the rest is for what the estimate does not know."""
BATCH_FRACTION = 0.25
"""Most of the deadline that one batch may take."""


def admit(new: int, waiting: int, seconds: float, settings: Settings, passed: float = 0.0, what: str = "work") -> None:
    """Raise 503 for a request that cannot be answered in time or finds no place.

    Its Retry-After is the time until it would be admitted, if nobody else came, and that of the longest batch.

    Args:
        new: places of the queue that the request takes: one an image, or 16 prompts.
        waiting: places that are taken. With none every request is admitted: nobody could be answered sooner.
        seconds: measured time of one place.
        settings: deadline and length of the queue.
        passed: time for which the model has worked on the places that are taken.
        what: what waits, for the error.

    >>> admit(1, 90, 0.1, Settings(deadline=20))
    >>> admit(8, 109, 0.1, Settings(deadline=20))
    Traceback (most recent call last):
    react_clip.serve.errors.RequestError: 503: the queue is full: about 11 s of work wait; try again in 7 s
    """
    ahead = max(0.0, waiting * seconds - passed)
    late = ahead + new * seconds - WAIT_FRACTION * settings.deadline
    excess = max(late, (waiting + new - settings.queue) * seconds)
    if waiting > 0 and excess > 0:
        # A batch more, because places become free by batches, and no rate is exact.
        batch = min(BATCH_FRACTION * settings.deadline, 64 * seconds)
        retry = max(1, math.ceil(min(excess + batch, ahead)))
        raise busy(f"the queue is full: about {ahead:.0f} s of {what} wait; try again in {retry} s", retry=retry)


@dataclass(frozen=True, eq=False)
class Answer:
    """Defended answer for one image."""

    feature: Tensor
    """Unit feature ``[D]``."""
    probs: Tensor
    """Probabilities ``[K]``."""
    numbers: dict[str, float]
    """What the defence measured, by name."""
    wait: float
    """Seconds in the queue."""


class ModelClient:
    """Asks the model behind ``address``; :meth:`connect` first, :meth:`close` at the end."""

    def __init__(self, address: str, settings: Settings) -> None:
        self.settings = settings
        self._address = address
        self._waiting = dict[int, asyncio.Future[Any]]()
        self._numbers = count()
        self._told = self._asked = 0
        self._seconds = self._heard = 0.0

    async def connect(self) -> None:
        """Reach the model and learn what it is."""
        self._socket: Any = zmq.asyncio.Context(zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self._address)
        await self._socket.send(b'{"hello": true}')
        known = json.loads(await self._socket.recv())
        self.info, self.preprocessing = Info.model_validate(known["info"]), Preprocessing(**known["preprocessing"])
        self._heard = time.monotonic()
        self._listening = asyncio.create_task(self._listen())

    def close(self) -> None:
        """Leave the model."""
        self._listening.cancel()
        self._socket.close()

    def admit(self, images: int) -> None:
        """Raise 503 if a request with so many images would be refused now."""
        silence = time.monotonic() - self._heard
        if silence > max(self.settings.deadline, 4 * BEAT):
            raise busy("the model does not answer; try again soon", kind="unavailable")
        # As the model said last, and as counted here, because it reads between two batches only, or hangs.
        if waiting := max(self._told, self._asked):
            admit(images, waiting, self._seconds, self.settings, min(silence, BATCH_FRACTION * self.settings.deadline))

    async def ask(self, pixels: Tensor | None = None, **fields: Any) -> Any:
        """Send a message with its fields to the model, and return its answer; cancelling this frees its places.

        A list of :class:`Answer` for 8-bit pixels ``[N, 3, S, S]`` with ``keys`` and ``labels`` (None for the service's
        own), or for ``texts``; a table for ``shadow``.
        """
        images, number = len(fields.get("keys", ())), next(self._numbers)
        self.admit(images)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._asked += images
        try:
            frames = [] if pixels is None else [pixels.numpy()]
            await self._socket.send_multipart([json.dumps({"id": number, **fields}).encode(), *frames])
            return await answer
        except asyncio.CancelledError:
            self._socket.send(json.dumps({"cancel": number}).encode())
            raise
        finally:
            del self._waiting[number]
            self._asked -= images

    async def _listen(self) -> None:
        while True:
            text, *frames = await self._socket.recv_multipart()
            self._heard = time.monotonic()
            message = json.loads(text)
            self._told, self._seconds = message["waiting"], message["seconds"]
            if "id" in message:
                answer = self._waiting.get(message["id"])
                if answer is None or answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(RequestError(**message["error"]))
                elif "shadow" in message:
                    answer.set_result(message["shadow"])
                else:
                    columns, dim = message["columns"], self.info.dim
                    values = torch.frombuffer(bytearray(frames[0]), dtype=torch.float32).view(message["images"], -1)
                    middle, end = values[:, dim : dim + len(columns)].tolist(), dim + len(columns)
                    numbers = (dict(zip(columns, own, strict=True)) for own in middle)
                    rows = zip(values, numbers, strict=True)
                    answer.set_result([Answer(row[:dim], row[end:], own, message["wait"]) for row, own in rows])
