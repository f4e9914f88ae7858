"""The process and constants of the test servers, photos, request bodies and a check of error answers."""

from __future__ import annotations

import base64
import io
import os
import sys
from typing import Any

import httpx
import numpy as np
from PIL import Image

import react_clip as rc

SECRET = "a secret of the tests, long enough"
KEYS = ("first-key-of-the-tests", "second-key-of-the-tests")
LABELS = ("cat", "dog", "teapot")
GUARD = rc.ReACT(tau=1.48)
"""A threshold in the middle of the small CLIP's drifts, so that some gates open and some stay closed."""


PRELOAD = (
    *("react_clip.cli.serve", "react_clip.serve.app", "react_clip.encoders.hf", "uvicorn"),
    *("transformers.models.clip.modeling_clip", "transformers.models.auto.tokenization_auto"),
)
"""Modules that servers import before they are forked."""


def run_server(flags: list[str], env: dict[str, str], stdout: Any, log: str) -> None:
    """``react-clip serve`` in this process, with its output in a pipe and a file."""
    from react_clip.cli import main

    os.environ.update(env)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(main(["serve", *flags]))


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
