"""The parts of the OpenAPI document that FastAPI cannot infer: bodies that are JSON or a form, examples, errors."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

from react_clip.serve.errors import KINDS
from react_clip.serve.requests import ImageRequest
from react_clip.serve.responses import ErrorBody

BODY_ERRORS = (400, 401, 403, 408, 413, 415, 422, 503)
"""Statuses of routes that take a body."""

_ANSWERS = [{"label": "cat", "probability": 0.97}, {"label": "dog", "probability": 0.02}]
CLASSIFIED = {
    "model": "clip-vit-b-16",
    "results": [{"index": 0, **_ANSWERS[0], "answers": _ANSWERS, "diagnostics": None, "suspicious": None}],
}
EMBEDDED = {
    "object": "list",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.6, -0.8], "diagnostics": None, "suspicious": None}],
    "model": "clip-vit-b-16",
    "usage": {"prompt_tokens": 0, "total_tokens": 0, "images": 1},
}
"""Example answers; a real embedding has 512 numbers or more."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of error answers."""
    return {status: {"model": ErrorBody, "description": KINDS[status][1]} for status in statuses}


def example(answer: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """An example of the answer 200."""
    return {200: {"content": {"application/json": {"example": answer}}}}


def request_body(model: type[ImageRequest], **fields: Any) -> dict[str, Any]:
    """A body that is JSON with base64, with an example, or a form with files."""
    schema = model.model_json_schema()
    files = schema["properties"]["images"] | {"items": {"type": "string", "format": "binary"}}
    form = schema | {"properties": schema["properties"] | {"images": files}}
    content = {
        "application/json": {"schema": schema, "example": {"images": [example_image()], **fields}},
        "multipart/form-data": {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}


def example_image() -> str:
    """A small PNG as base64, so that the examples can be sent as they are."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 120, 40)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")
