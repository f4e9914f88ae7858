"""The layer around every request: API keys, body size and time, deadline, security headers, metrics and one log line.

It is pure ASGI and outermost, because FastAPI has no limit on bodies and no deadline, and because refusals from here
and errors from handlers must look alike and be counted alike.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from react_clip.serve.errors import RequestError, busy, kind_of, late
from react_clip.serve.metrics import Metrics
from react_clip.serve.settings import Settings, digest

logger = logging.getLogger("react_clip.serve")

OPEN_PATHS = {"/healthz", "/readyz", "/", "/docs", "/openapi.json", "/static/page.css", "/static/page.js"}
"""Paths that need no API key: they contain nothing that is not in the manual."""

DEMO_PATH = "/v1/demo/attack"
"""The path with a deadline of its own."""

_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}
"""Headers of answers that do not have their own."""
_DISCARD_SECONDS = 1.0
_METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}


class RequestGuard:
    """ASGI middleware that checks a request before and while it is handled, and turns every error into an answer.

    ``posts`` are the applications that answer POST at some paths instead of ``app``.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: Settings,
        keys: frozenset[bytes],
        metrics: Metrics,
        posts: Mapping[str, ASGIApp],
    ) -> None:
        self._app, self._posts, self.settings, self._keys, self._metrics = app, posts, settings, keys, metrics
        self._buffered = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self, scope, receive, send)
        began = time.perf_counter()
        reason = None
        try:
            with self._metrics.in_flight.track_inprogress():
                reason = await self._handle(scope, exchange)
        finally:
            exchange.close()
        if exchange.disconnected and not exchange.status:
            self._metrics.rejected.labels("disconnected").inc()
            return
        seconds, status, route, method = time.perf_counter() - began, exchange.status, _route(scope), _method(scope)
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        if status >= 400:
            self._metrics.rejected.labels(reason or kind_of(status)).inc()
        logger.info("%s %s %d %.0f ms", method, route, status, 1000 * seconds)

    async def _handle(self, scope: Scope, exchange: _Exchange) -> str | None:
        """Run the application, answer its errors, and return the kind of error."""
        try:
            self._check(scope)
            async with exchange.clock:
                app = self._posts.get(scope["path"], self._app) if scope["method"] == "POST" else self._app
                await app(scope, exchange.receive, exchange.send)
            return None
        except RequestError as refusal:
            error = refusal
        except TimeoutError:
            error = late(exchange.deadline) if exchange.body_ended else exchange.slow_body()
        except Exception as failure:
            if not exchange.disconnected:
                logger.error("%s failed: %s", _route(scope), type(failure).__name__, exc_info=True)
            error = busy("the request could not be finished; try again", kind="unavailable")
        if not exchange.status and not exchange.disconnected:
            await error.response()(scope, exchange.receive, exchange.send)
        return error.kind

    def _check(self, scope: Scope) -> None:
        """Refuse a request by its head: service stopping, body too long, API key missing or unknown."""
        path, headers = scope["path"], Headers(scope=scope)
        if scope["app"].state.stopping() and path != "/healthz":
            refusal = busy("the service is stopping; ask another instance", kind="stopping")
            refusal.headers["connection"] = "close"
            raise refusal
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.settings.max_body:
            raise self.too_long(int(declared))
        if path in OPEN_PATHS or (path == "/metrics" and self.settings.open_metrics):
            return
        if not self._keys:
            if path == "/metrics":
                line = "metrics tell how often the gate opens; start with API keys or with --open-metrics"
                raise RequestError(403, line)
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if digest(key.encode("utf-8", "surrogatepass")) not in self._keys:
            line = "the API key is unknown" if key else "an API key is missing"
            raise RequestError(
                401,
                f"{line}; send Authorization: Bearer KEY",
                field="authorization",
                headers={"www-authenticate": 'Bearer realm="react-clip"'},
            )

    def too_long(self, length: int) -> RequestError:
        """413 for a body of ``length`` bytes or more."""
        limit = f"the limit is {self.settings.max_body:,}; send fewer or smaller images"
        return RequestError(413, f"the body has {length:,} bytes or more; {limit}")

    def reserve(self, size: int) -> None:
        """Count ``size`` bytes of a body as held in memory (negative: as released), unless that is too many."""
        room = max(self.settings.max_buffered, self.settings.max_body)
        if size > 0 and self._buffered + size > room:
            raise busy(f"{self._buffered:,} of {room:,} bytes for bodies are in use; try again soon")
        self._buffered += size


class _Exchange:
    """One request and its answer: ``receive`` and ``send`` for the application.

    ``clock`` ends the request: after the body's time limit while the body arrives, then after the deadline, and at once
    when the caller disconnects.
    """

    def __init__(self, guard: RequestGuard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._receive, self._send = guard, receive, send
        self.clock = asyncio.timeout(guard.settings.body_timeout)
        settings = guard.settings
        self.deadline = settings.demo_deadline if scope["path"] == DEMO_PATH else settings.deadline
        self.status = 0
        self.size = 0
        self.body_ended = self.disconnected = False
        self._watcher: asyncio.Task[None] | None = None
        # A caller that waits for "100 Continue" has sent no body yet, and need not.
        self._expects_continue = "100-continue" in Headers(scope=scope).get("expect", "").lower()

    async def receive(self) -> Message:
        """The next part of the body, within the limits on size and memory."""
        message = await self._next()
        if chunk := len(message.get("body", b"")):
            if self.size + chunk > self._guard.settings.max_body:
                raise self._guard.too_long(self.size + chunk)
            self._guard.reserve(chunk)
            self.size += chunk
        if self.body_ended and self._watcher is None:
            self._end_at(asyncio.get_running_loop().time() + self.deadline)
            self._watcher = asyncio.create_task(self._watch())
        return message

    async def send(self, message: Message) -> None:
        """Send the answer, with the security headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = _HEADERS | dict(message["headers"])
            if not self.body_ended and not await self._discard_body():
                headers[b"connection"] = b"close"
            message = {**message, "headers": list(headers.items())}
            self._end_at(None)
        await self._send(message)

    def slow_body(self) -> RequestError:
        """408: the body did not arrive in time."""
        seconds = f"{self._guard.settings.body_timeout:g} s"
        return RequestError(408, f"{self.size:,} bytes of the body came within {seconds}; send it faster or send less")

    def close(self) -> None:
        """Release the body's memory."""
        self._guard.reserve(-self.size)
        if self._watcher is not None:
            self._watcher.cancel()

    async def _next(self) -> Message:
        self._expects_continue = False
        message = await self._receive()
        self.body_ended |= message["type"] == "http.request" and not message.get("more_body", False)
        self.disconnected |= message["type"] == "http.disconnect"
        return message

    async def _watch(self) -> None:
        """End the request when the caller disconnects, so that nothing is computed for it."""
        while not self.disconnected:
            await self._next()
        self._end_at(asyncio.get_running_loop().time())

    def _end_at(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the clock has ended already
            self.clock.reschedule(when)

    async def _discard_body(self) -> bool:
        """Read the rest of the body for a moment: closing a socket with unread bytes would lose the answer."""
        if self._expects_continue:
            return False
        size = 0
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self.body_ended and not self.disconnected and size <= 2 * self._guard.settings.max_body:
                    size += len((await self._next()).get("body", b""))
        except TimeoutError:
            return False
        return self.body_ended


def _route(scope: Scope) -> str:
    """The route's own spelling: a caller's path could contain anything, and each would be a new counter."""
    path: str = scope["path"]
    return path if path in OPEN_PATHS else str(getattr(scope.get("route"), "path", "unmatched"))


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in _METHODS else "OTHER"
