"""The parts of the OpenAPI document that FastAPI cannot infer: bodies that are JSON or a form, errors."""

from __future__ import annotations

from typing import Any

from react_clip.serve.errors import KINDS
from react_clip.serve.requests import ImageRequest
from react_clip.serve.responses import ErrorBody

BODY_ERRORS = (400, 401, 403, 408, 413, 415, 422, 429, 503)
"""Statuses of routes that take a body."""

EXAMPLE = "R0lGODdhCgAKAIEAAEaCyNIoKAAAAAAAACwAAAAACgAKAAAIHwABCBxIsKDBgQECHEyYsCBDhgQfNowI0eDEgxgPBgQAOw=="
"""A drawing of a red ball on blue, so that examples can be run as they are."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of error answers."""
    return {status: {"model": ErrorBody, "description": KINDS[status][1]} for status in statuses}


def request_body(model: type[ImageRequest], **fields: Any) -> dict[str, Any]:
    """A body that is JSON with base64, with an example, or a form with files."""
    schema = model.model_json_schema()
    name = "input" if "input" in schema["properties"] else "images"
    files = {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}}
    form = schema | {"properties": schema["properties"] | {name: files}}
    content = {
        "application/json": {"schema": schema, "example": {name: [EXAMPLE], **fields}},
        "multipart/form-data": {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}
