"""Constants of the test services, photos, request bodies and a check of error answers."""

from __future__ import annotations

import base64
import io
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from PIL import Image

import react_clip as rc
from programs import Command

SECRET = "a secret of the tests, long enough"
KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
LABELS = ("cat", "dog", "teapot")
REACT = rc.ReACT(tau=1.48)
"""A threshold in the middle of the small CLIP's drifts, so that some gates open and some stay closed."""
SECOND_LOOK = rc.SecondLook(threshold=0.27, copy_size=None)
"""Likewise; the small CLIP has too few patches for a smaller copy."""


class Server:
    """A running ``react-clip serve --json`` and a client for it."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.url = json.loads(command.read_line())["url"]
        self.client = httpx.Client(base_url=self.url, timeout=180)

    def end(self) -> None:
        """Kill the server if it is still running."""
        self.client.close()
        self.command.end()


HEAD = "POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
"""The head of a request, all but the length of its body."""


def dial(server: Server) -> socket.socket:
    """A connection to a server."""
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def metric(client: Any, name: str) -> float:
    """Value of a metric with labels, or the sum over them."""
    rows = [line.rpartition(" ") for line in client.get("/metrics").text.splitlines()]
    return sum(float(value) for row, _, value in rows if name in (row, row.partition("{")[0]))


def png(seed: int, size: tuple[int, int] = (50, 40)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    # Smooth photos and noise have different drifts; both kinds must occur.
    image = Image.fromarray(pixels) if seed % 2 else Image.fromarray(pixels[:4, :4]).resize(size[::-1])
    return saved(image, "PNG")


def saved(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def as_json(photos: list[bytes], **fields: Any) -> dict[str, Any]:
    return {"json": {"images": [base64.b64encode(photo).decode() for photo in photos], **fields}}


def as_form(photos: list[bytes], **fields: Any) -> dict[str, Any]:
    return {"files": [("images", ("photo", photo)) for photo in photos], "data": fields}


def check_error(answer: Any, status: int, *words: str) -> None:
    """An error in the documented shape, with one line that contains these words."""
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param"}
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    for word in words:
        assert word in message
