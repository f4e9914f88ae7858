"""The layer around every request: body size and time, deadline, security headers.

It is pure ASGI and around all routes, because FastAPI has no limit on bodies and no deadline, and because refusals
from here and errors from handlers must look alike and be counted alike.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from react_clip.serve.errors import KINDS, RequestError, busy, late
from react_clip.serve.log import logger

if TYPE_CHECKING:
    from react_clip.serve.app import Service

DEMO_PATH, DEMO_DEADLINES = "/v1/demo/attack", 9
"""The path of the demo's attack, and its deadline as a multiple of that of other paths."""

_BODY_SECONDS = 30.0
"""Time for a body to arrive."""
_BUFFERED_BODIES = 8
"""All bodies together may be this many times as long as the longest one."""
_MOST_REQUESTS = 256
"""Requests handled at once; those whose body has not arrived yet keep nobody out."""

_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}
"""Headers of answers that do not have their own."""


class RequestLimits:
    """ASGI middleware that checks a request before and while it is handled, and turns every error into an answer."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._service = app, service
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, settings = self._service, self._service.settings
        deadline = settings.deadline * (DEMO_DEADLINES if scope["path"] == DEMO_PATH else 1)
        size = status = 0
        body_ended = disconnected = False
        watcher: asyncio.Future[Message] | None = None
        error: RequestError | None = None
        clock = asyncio.timeout(_BODY_SECONDS)

        async def receive_limited() -> Message:
            """The next part of the body, within the limits; after the last one the deadline runs."""
            nonlocal size, body_ended, disconnected, watcher
            message = await receive()
            part = len(message.get("body", b""))
            size, self._buffered = size + part, self._buffered + part
            if size > settings.max_body:
                limit = f"the limit is {settings.max_body:,}; send fewer or smaller images"
                raise RequestError(413, f"the body has {size:,} bytes or more; {limit}")
            if self._buffered > (room := _BUFFERED_BODIES * settings.max_body):
                raise busy(f"all of the {room:,} bytes for bodies are in use; try again soon")
            if message["type"] == "http.disconnect":
                disconnected = True
            elif not message.get("more_body", False) and not body_ended:
                body_ended = True
                service.handling += 1
                if service.handling > _MOST_REQUESTS:
                    raise busy(f"{_MOST_REQUESTS} requests are being handled; try again soon")
                clock.reschedule(asyncio.get_running_loop().time() + deadline)
                watcher = asyncio.ensure_future(receive())
                watcher.add_done_callback(end_early)
            return message

        def end_early(watcher: asyncio.Future[Message]) -> None:
            """The caller is gone: nothing more is computed for it."""
            nonlocal disconnected
            if not watcher.cancelled() and not status:
                disconnected = True
                with suppress(RuntimeError):  # the clock has ended already
                    clock.reschedule(0)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                scope["status"] = status = message["status"]
                headers = _HEADERS | scope.get("echoed", {}) | dict(message["headers"])
                headers |= {b"connection": b"close"} if service.stopping else {}
                message = {**message, "headers": list(headers.items())}
                with suppress(RuntimeError):
                    clock.reschedule(None)
            await send(message)

        service.metrics.in_flight.inc()
        try:
            async with clock:
                await self._app(scope, receive_limited, send_with_headers)
        except RequestError as refusal:
            error = refusal
        except TimeoutError:
            error = late(deadline)
            if not body_ended:
                line = f"{size:,} bytes of the body came within {_BODY_SECONDS:g} s; send it faster or send less"
                error = RequestError(408, line, headers={"connection": "close"})
        except Exception as failure:
            if not disconnected:
                logger.error("%s failed: %s", scope["method"], type(failure).__name__, exc_info=True)
            error = busy("the request could not be finished; try again", kind="unavailable")
        finally:
            service.handling -= body_ended
            service.metrics.in_flight.dec()
            self._buffered -= size
            if watcher is not None:
                watcher.remove_done_callback(end_early)
                watcher.cancel()
        if disconnected and not status:
            service.metrics.rejected.labels("disconnected").inc()
            return
        if error is not None and not status:
            await error.response()(scope, receive, send_with_headers)
        if status >= 400:
            scope["error_kind"] = error.kind if error else scope.get("error_kind") or KINDS.get(status, ("error",))[0]
