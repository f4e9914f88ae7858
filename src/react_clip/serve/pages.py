"""Pages for people, and the parts of the OpenAPI document that FastAPI cannot infer."""

from __future__ import annotations

import base64
import io
import json
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from react_clip.serve.errors import KINDS
from react_clip.serve.requests import ImageRequest
from react_clip.serve.responses import ErrorBody

STATIC = Path(__file__).with_name("static")
"""Folder of ``page.html`` (served at ``/``), ``page.css`` and ``page.js`` (served below ``/static``)."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the pages: scripts and styles of this server only, and none inside the HTML."""

BODY_ERRORS = (400, 401, 408, 413, 415, 422, 503)
"""Statuses of routes that take a body."""


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of error answers."""
    return {status: {"model": ErrorBody, "description": KINDS[status][1]} for status in statuses}


def request_body(model: type[ImageRequest], **example: Any) -> dict[str, Any]:
    """OpenAPI description of a body that is JSON with base64 or a form with files."""
    schema = model.model_json_schema()
    files = schema["properties"]["images"] | {"items": {"type": "string", "format": "binary"}}
    form = schema | {"properties": schema["properties"] | {"images": files}}
    content = {
        "application/json": {"schema": schema, "example": {"images": [example_image()], **example}},
        "multipart/form-data": {"schema": form},
    }
    return {"requestBody": {"required": True, "content": content}}


def example_image() -> str:
    """A small PNG as base64, so that the examples of the OpenAPI document can be sent as they are."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 120, 40)).save(stream, "PNG")
    return base64.b64encode(stream.getvalue()).decode("ascii")


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


def example_answer(example: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI description of an example of the answer 200."""
    return {200: {"content": {"application/json": {"example": example}}}}


def manual(openapi: dict[str, Any], url: str) -> str:
    """The page at ``/docs``: every route with its description, its fields and examples; ``url`` is the server's."""
    title, about = escape(openapi["info"]["title"]), escape(openapi["info"]["description"])
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
        f'<link rel="stylesheet" href="static/page.css"><main><h1>{title}</h1><p>{about}</p>',
        '<p>The machine-readable form of this page is <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            parts.append(
                f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['description'])}</p>"
            )
            if method == "post":
                fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
                parts.append(f"<pre>curl -F images=@photo.jpg {escape(url + path)}</pre><dl>")
                parts += [f"<dt><code>{escape(name)}</code><dd>{_describe(field)}" for name, field in fields.items()]
                parts.append("</dl>")
            answer = operation["responses"]["200"]["content"]["application/json"].get("example")
            if answer is not None:
                parts.append(f"<p>Answer:</p><pre>{escape(json.dumps(answer, indent=2))}</pre>")
    return "\n".join(parts)


def _describe(field: dict[str, Any]) -> str:
    """Description and default of a field of a request."""
    default = field.get("default")
    return escape(field.get("description", "")) + ("" if default is None else f" Default: {escape(str(default))}.")
