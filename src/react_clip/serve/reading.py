"""Reads requests: bodies within limits of size and time, photos on a thread, all of it within the deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request
from starlette.datastructures import UploadFile
from starlette.requests import ClientDisconnect
from starlette.types import Message

from react_clip.serve import requests
from react_clip.serve.errors import RequestError, busy, quote
from react_clip.serve.settings import LABEL_LENGTH

if TYPE_CHECKING:
    from react_clip.serve.app import Service

_BODY_SECONDS = 30.0
"""Time for a body to arrive."""
_BUFFERED_BODIES = 8
"""All bodies together may be this many times as long as the longest one."""

_JSON, _FORM = "application/json", "multipart/form-data"


def read(model: type[requests.Request], deadlines: int = 1) -> Any:
    """The dependency that reads a request, and ends it after so many deadlines or when its caller leaves."""

    async def read_request(request: Request) -> AsyncIterator[requests.Asked[requests.Request]]:
        service: Service = request.app.state.service
        settings, loop = service.settings, asyncio.get_running_loop()
        service.client.admit(1)  # before its body is read
        sent = request.headers.get("content-type", "")
        if (kind := sent.partition(";")[0].strip().lower()) not in (_JSON, _FORM):
            line = f"content-type is {quote(sent)}; send {_JSON} or {_FORM}"
            raise RequestError(415, line, field="content-type")
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            line = f"content-encoding is {quote(encoding)}; send the body as it is"
            raise RequestError(415, line, field="content-encoding")
        size, leaving = 0, None
        deadline = deadlines * settings.deadline

        async def receive_limited() -> Message:
            nonlocal size
            message = await request.receive()
            part = len(message.get("body", b""))
            size, service.buffered = size + part, service.buffered + part
            if size > settings.max_body:
                limit = f"the limit is {settings.max_body:,}; send fewer or smaller images"
                raise RequestError(413, f"the body has {size:,} bytes or more; {limit}")
            if service.buffered > (room := _BUFFERED_BODIES * settings.max_body):
                raise busy(f"all of the {room:,} bytes for bodies are in use; try again soon")
            return message

        async def end_with_caller() -> None:
            await request.receive()
            clock.reschedule(0)

        try:
            async with asyncio.timeout(_BODY_SECONDS) as clock:
                limited = Request(request.scope, receive_limited)
                content: bytes | dict[str, list[Any]]
                if kind == _JSON:
                    content = await limited.body()
                else:
                    content = {}
                    # Four bytes a character at most, and a comma and a space between two labels.
                    longest = max(2**20, settings.max_labels * (4 * LABEL_LENGTH + 2))
                    fields = settings.max_labels + 100
                    form = await limited.form(max_files=1000, max_fields=fields, max_part_size=longest)
                    for name, value in form.multi_items():
                        part = await value.read() if isinstance(value, UploadFile) else value
                        content.setdefault(name.removesuffix("[]"), []).append(part)
                leaving = asyncio.create_task(end_with_caller())
                clock.reschedule(loop.time() + deadline)
                yield await loop.run_in_executor(service.threads, requests.prepare, model, content, service)
        except TimeoutError:
            if leaving is None:
                line = f"{size:,} bytes of the body came within {_BODY_SECONDS:g} s; send it faster or send less"
                raise RequestError(408, line, headers={"connection": "close"}) from None
            if leaving.done():
                raise ClientDisconnect from None
            line = f"the answer was not ready within {deadline:g} s; try again, or send fewer images"
            raise busy(line, kind="deadline") from None
        finally:
            service.buffered -= size
            if leaving is not None:
                leaving.cancel()

    return Depends(read_request, scope="function")  # it ends before the answer is sent
