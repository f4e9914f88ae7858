"""Request bodies: read under a limit and a clock, then taken apart, JSON and multipart into the same shape."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import Message
from typing import Any, NoReturn

from starlette.requests import Request

from react_clip.serve.problems import RequestError, busy, shown
from react_clip.serve.settings import Settings

FILES = "images"
"""The part name of files, and the field that lists them in JSON."""

_MOST_OTHERS = 1000
"""Fields beside images and labels; generous, because it only bounds the work of parsing."""

_LONGEST_BOUNDARY = 200
_LONGEST_HEAD = 4096
_PART_NAME = re.compile(rb'\r\ncontent-disposition:[ \t]*form-data\b[^\r\n]*?;[ \t]*name="?([^"\r\n;]+)', re.IGNORECASE)


class Buffers:
    """The memory that all bodies together may take."""

    def __init__(self, room: int) -> None:
        self._room, self._used = room, 0

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """A share that grows while a body arrives and ends with the block."""
        lease = Lease(self)
        try:
            yield lease
        finally:
            self._used -= lease.size

    def take(self, count: int) -> None:
        """Use more, or say that everything is in use."""
        if self._used + count > self._room:
            raise busy(f"{self._used:,} of {self._room:,} bytes for bodies are in use; try again soon")
        self._used += count


class Lease:
    """One request's share of the buffers."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers, self.size = buffers, 0

    def grow(self, count: int) -> None:
        """Take some more bytes."""
        self._buffers.take(count)
        self.size += count


async def read_body(request: Request, settings: Settings, lease: Lease) -> bytes:
    """The whole body, refused as soon as it is known to be too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > settings.max_body:
        _refuse_length(int(declared), settings)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                if len(body) + len(chunk) > settings.max_body:
                    _refuse_length(len(body) + len(chunk), settings)
                lease.grow(len(chunk))
                body += chunk
    except TimeoutError:
        raise RequestError(
            408,
            f"{len(body):,} bytes of the body came within {settings.body_timeout:g} s; send it faster or send less",
            headers={"connection": "close"},
        ) from None
    return bytes(body)


def _refuse_length(length: int, settings: Settings) -> NoReturn:
    raise RequestError(
        413, f"the body has {length:,} bytes or more; the limit is {settings.max_body:,}; send fewer or smaller images"
    )


def media_type(request: Request) -> tuple[str, bytes]:
    """The kind of a body, JSON or a form, and a form's boundary; anything else is refused before it is read."""
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    kind, boundary = header.get_content_type(), header.get_param("boundary")
    if kind not in ("application/json", "multipart/form-data"):
        given = request.headers.get("content-type", "")
        raise RequestError(
            415, f"content-type is {shown(given)}; send application/json or multipart/form-data", field="content-type"
        )
    if kind == "application/json":
        return kind, b""
    if not isinstance(boundary, str) or not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        line = f"content-type names no boundary of up to {_LONGEST_BOUNDARY} characters; let your client library set it"
        raise RequestError(400, line, field="content-type")
    return kind, boundary.encode("latin-1", "replace")


def parse_body(body: bytes, boundary: bytes, settings: Settings) -> dict[str, Any]:
    """The fields of a body by name; images are strings in JSON and bytes in a form."""
    return _parse_form(body, boundary, settings) if boundary else _parse_json(body, settings)


def _parse_json(body: bytes, settings: Settings) -> dict[str, Any]:
    # Counting is a thousand times faster than parsing: millions of little values must not stop the process.
    most = settings.max_images + settings.max_labels * (settings.max_label_length + 1) + _MOST_OTHERS
    marks = sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))
    if marks > most:
        raise RequestError(422, f"the body has about {marks:,} values; the limit is {most:,}; send fewer")
    try:
        fields = json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestError(400, "the body is JSON nested too deeply; send one object with known fields") from None
    except ValueError as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "not UTF-8, or a number without bounds"
        raise RequestError(400, f"the body is no valid JSON ({reason}); check how it is written") from None
    if not isinstance(fields, dict):
        line = f"the body is a JSON {type(fields).__name__}; send an object such as " + '{"images": [...]}'
        raise RequestError(422, line)
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _parse_form(body: bytes, boundary: bytes, settings: Settings) -> dict[str, Any]:
    """Parts of a form, all in memory: nothing of an image is ever written to a disk."""
    most = settings.max_images + settings.max_labels + _MOST_OTHERS
    before, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, most + 2)
    if len(parts) > most + 1:
        raise RequestError(422, f"the form has more than {most} parts; send fewer images or labels")
    if before.strip() or not parts:
        raise RequestError(400, "the body is no multipart form with this boundary; let your client library write it")
    if not parts[-1].startswith(b"--"):
        raise RequestError(400, "the multipart form ends before its last boundary; the upload was cut short")
    fields: dict[str, Any] = {}
    for number, part in enumerate(parts[:-1], 1):
        head, blank, data = part.partition(b"\r\n\r\n")
        found = _PART_NAME.search(head) if blank and len(head) <= _LONGEST_HEAD else None
        if found is None:
            raise RequestError(400, f"part {number} of the form has no name; name files {FILES!r}")
        _add_part(fields, found[1].decode("utf-8", "replace").removesuffix("[]"), data, settings)
    return fields


def _add_part(fields: dict[str, Any], name: str, data: bytes, settings: Settings) -> None:
    if name == FILES:
        fields.setdefault(name, []).append(data)
        return
    # Four bytes a character at most, and a comma and a space between two labels.
    most = settings.max_labels * (4 * settings.max_label_length + 2)
    if len(data) > most:
        line = f"{shown(name)} has {len(data):,} bytes; the limit for text is {most:,}; name files {FILES!r}"
        raise RequestError(422, line, field=name[:60])
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise RequestError(422, f"{shown(name)} is no UTF-8 text; name files {FILES!r}", field=name[:60]) from None
    if name == "labels":
        fields.setdefault(name, []).extend(part.strip() for part in text.split(","))
    elif name == "templates":
        fields.setdefault(name, []).append(text)
    else:
        fields[name] = text


def image_bytes(field: str, image: str | bytes) -> bytes:
    """The bytes of an image that came as a file, as base64 or as a data URI; addresses are never fetched."""
    if isinstance(image, bytes):
        return image
    head = image[:200].lower()
    if head.startswith("data:"):
        prefix, comma, _ = head.partition(",")
        image = image[len(prefix) + 1 :]
        if not comma or not prefix.endswith(";base64"):
            raise RequestError(
                422, f"{field} is a data URI without base64; write data:image/jpeg;base64,...", field=field
            )
    elif "://" in head:
        raise RequestError(422, f"{field} is an address; this service fetches nothing, so send the bytes", field=field)
    try:
        data = base64.b64decode(image, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(422, f"{field} is no valid base64; encode the file's bytes", field=field) from None
    if not data:
        raise RequestError(422, f"{field} is empty (0 bytes); give an image file", field=field)
    return data
