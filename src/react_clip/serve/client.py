"""The application's end of the model's socket: sends photos and labels, knows whether the model lives."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import zmq
import zmq.asyncio
from torch import Tensor

from react_clip.preprocess import Preprocessing
from react_clip.serve.admission import BATCH_FRACTION, admit
from react_clip.serve.errors import RequestError, busy
from react_clip.serve.responses import Info
from react_clip.serve.settings import BEAT, Settings

_MESSAGES = 64
"""Requests on their way to a model that does not read; later ones are refused."""


LabelList = tuple[list[str], list[str]]
"""Names and templates of a request."""


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
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = count()
        self._told = self._asked = 0
        self._seconds = self._heard = 0.0

    async def connect(self) -> None:
        """Reach the model and learn what it is."""
        self._socket: Any = zmq.asyncio.Context(zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = _MESSAGES
        self._socket.connect(self._address)
        self._tell({"hello": True})
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

    async def submit(
        self, pixels: Tensor, keys: Sequence[int], labels: LabelList | None, texts: Sequence[str] = ()
    ) -> list[Answer]:
        """Answers for 8-bit pixels ``[N, 3, S, S]``; ``labels`` are names and templates, None for the server's own.

        With ``texts``, and no images, the answers have their features. Cancelling this frees the places in the queue.
        """
        self.admit(len(keys))
        number = next(self._numbers)
        message = {"id": number, "keys": list(keys), "labels": labels, "texts": list(texts)}
        answer: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._asked += len(keys)
        try:
            # It returns at once; a model that has not read for long is Again.
            self._socket.send_multipart([json.dumps(message).encode(), pixels.numpy()], zmq.NOBLOCK).result()
            return await answer
        except zmq.Again:
            raise busy("the model does not answer; try again soon", kind="unavailable") from None
        except asyncio.CancelledError:
            self._tell({"cancel": number})
            raise
        finally:
            del self._waiting[number]
            self._asked -= len(keys)

    async def shadow(self) -> dict[str, Any]:
        """The table of the shadow, which the model owns."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._tell({"id": number, "shadow": True})
        try:
            return dict(await asyncio.wait_for(self._waiting[number], self.settings.deadline))
        except TimeoutError:
            raise busy("the model does not answer; try again soon", kind="unavailable") from None
        finally:
            del self._waiting[number]

    def _tell(self, message: dict[str, Any]) -> None:
        """Send a message that may be lost where the model has not read for long."""
        with suppress(zmq.Again):
            self._socket.send(json.dumps(message).encode(), zmq.NOBLOCK).result()

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
