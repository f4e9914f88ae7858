"""Test servers and their constants, photos, request bodies and a check of error answers."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from PIL import Image

import react_clip as rc
from programs import Command
from react_clip.serve.engine import Engine

SECRET = "a secret of the tests, long enough"
KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
LABELS = ("cat", "dog", "teapot")
GUARD = rc.ReACT(tau=1.48)
"""A threshold in the middle of the small CLIP's drifts, so that some gates open and some stay closed."""
SECOND_LOOK = rc.SecondLook(threshold=0.27, look=None)
"""Likewise; the small CLIP has too few patches for a smaller look."""


def in_loop(coroutine: Any) -> Any:
    """Run a coroutine in a thread, because a browser's event loop may run in this one."""
    with ThreadPoolExecutor() as thread:
        return thread.submit(asyncio.run, coroutine).result()


def record_batches(engine: Engine) -> list[tuple[int, int]]:
    """Numbers of images and label lists of the batches from now on."""
    batches: list[tuple[int, int]] = []
    engine.on_batch = lambda answers, lists, seconds: batches.append((len(answers), lists))
    return batches


class Server:
    """A running ``react-clip serve --json`` and a client for it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.url = json.loads(command.read_line())["url"]
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def metric(self, name: str) -> float:
        """Value of a metric with labels, or the sum over them."""
        rows = [line.rpartition(" ") for line in self.client.get("/metrics").text.splitlines()]
        return sum(float(value) for row, _, value in rows if name in (row, row.partition("{")[0]))

    def end(self) -> None:
        """Kill the server if it is still running."""
        self.client.close()
        self.command.end()


def png(seed: int, size: tuple[int, int] = (50, 40)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    # Smooth photos and noise have different drifts; both kinds must occur.
    image = Image.fromarray(pixels) if seed % 2 else Image.fromarray(pixels[:4, :4]).resize(size[::-1])
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def as_json(photos: list[bytes], **fields: Any) -> dict[str, Any]:
    return {"json": {"images": [base64.b64encode(photo).decode() for photo in photos], **fields}}


def as_form(photos: list[bytes], **fields: Any) -> dict[str, Any]:
    return {"files": [("images", ("photo", photo)) for photo in photos], "data": fields}


def check_error(answer: httpx.Response, status: int, *words: str) -> None:
    """An error in the documented shape, with one line that contains these words."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "field"}
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    for word in words:
        assert word in message
