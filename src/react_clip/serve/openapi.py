"""The parts of the OpenAPI document that FastAPI cannot infer: bodies that are JSON or a form, errors."""

from __future__ import annotations

from typing import Any

from react_clip.serve.errors import KINDS
from react_clip.serve.requests import ImageRequest
from react_clip.serve.responses import ErrorBody

BODY_ERRORS = (400, 401, 403, 408, 413, 415, 422, 503)
"""Statuses of routes that take a body."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of error answers."""
    return {status: {"model": ErrorBody, "description": KINDS[status][1]} for status in statuses}


def request_body(model: type[ImageRequest], **fields: Any) -> dict[str, Any]:
    """A body that is JSON with base64, with an example, or a form with files."""
    schema = model.model_json_schema()
    files = schema["properties"]["images"] | {"items": {"type": "string", "format": "binary"}}
    form = schema | {"properties": schema["properties"] | {"images": files}}
    content = {
        "application/json": {"schema": schema, "example": {"images": ["iVBORw0KGgo..."], **fields}},
        "multipart/form-data": {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}
