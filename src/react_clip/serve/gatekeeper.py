"""What happens around every request: keys, security headers, the end of unread bodies, counting, one log line."""

from __future__ import annotations

import asyncio
import logging
import time
from http import HTTPStatus

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from react_clip.serve.credentials import KeyRing
from react_clip.serve.metrics import Metrics
from react_clip.serve.problems import RequestError, busy
from react_clip.serve.settings import Settings

logger = logging.getLogger("react_clip.serve")

OPEN_PATHS = {"/healthz", "/readyz", "/", "/docs", "/openapi.json"}
"""Paths that need no key: they tell nothing that is not in the manual."""

_HEADERS = {
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_DISCARD_SECONDS = 1.0
_METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}


class State:
    """What the signal handler and the requests both look at."""

    stopping = False


class Gatekeeper:
    """The outermost layer: pure ASGI, so that it sees every answer and every error."""

    def __init__(self, app: ASGIApp, *, settings: Settings, keys: KeyRing, metrics: Metrics, state: State) -> None:
        self._app, self._settings, self._keys, self._metrics, self._state = app, settings, keys, metrics, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, discard=2 * self._settings.max_body)
        began = time.perf_counter()
        with self._metrics.in_flight.track_inprogress():
            try:
                self._admit(scope)
                await self._app(scope, exchange.receive, exchange.send)
            except RequestError as problem:
                await self._refuse(problem, exchange)
            except Exception as error:
                # An answer that nobody waits for is no failure of ours.
                if exchange.gone:
                    return
                logger.error("%s failed: %s", _route(scope), type(error).__name__, exc_info=True)
                await self._refuse(busy("the request could not be finished; try again", kind="unavailable"), exchange)
        seconds, route, method = time.perf_counter() - began, _route(scope), _method(scope)
        self._metrics.request(method, route, exchange.status, seconds)
        if exchange.status >= 400:
            self._metrics.rejected(exchange.kind or HTTPStatus(exchange.status).phrase.lower().replace(" ", "_"))
        logger.info("%s %s %d %.0f ms", method, route, exchange.status, 1000 * seconds)

    def _admit(self, scope: Scope) -> None:
        path = scope["path"]
        if self._state.stopping and path != "/healthz":
            raise busy("the service is stopping; ask another instance", kind="stopping", close=True)
        if path == "/metrics":
            if self._settings.open_metrics:
                return
            if not self._keys:
                raise RequestError(
                    403, "metrics tell how often the gate opens; start with API keys or with --open-metrics"
                )
        elif path in OPEN_PATHS:
            return
        if not self._keys:
            return
        headers = Headers(scope=scope)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        presented = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not self._keys.opens(presented):
            raise RequestError(
                401,
                ("the API key is unknown" if presented else "an API key is missing")
                + "; send Authorization: Bearer KEY",
                field="authorization",
                headers={"www-authenticate": 'Bearer realm="react-clip"'},
            )

    async def _refuse(self, problem: RequestError, exchange: _Exchange) -> None:
        if not exchange.status:
            exchange.kind = problem.kind
            await problem.response()(exchange.scope, exchange.receive, exchange.send)


class _Exchange:
    """One request and its answer, seen from the wire."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, discard: int) -> None:
        self.scope, self._receive, self._send, self._discard = scope, receive, send, discard
        self.status = 0
        self.kind: str | None = None
        self.gone = False
        self._ended = False
        # A caller that waits for our "100 Continue" has sent nothing yet, and need not.
        self._holding_back = "100-continue" in Headers(scope=scope).get("expect", "").lower()

    async def receive(self) -> Message:
        self._holding_back = False
        message = await self._receive()
        self._ended |= message["type"] == "http.request" and not message.get("more_body", False)
        self.gone |= message["type"] == "http.disconnect"
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers.setdefault(name, value)
            if not self._ended and not await self._drain():
                headers["connection"] = "close"
        await self._send(message)

    async def _drain(self) -> bool:
        """Read on for a moment: a socket closed on unread bytes is reset, and the caller would miss the answer."""
        if self._holding_back:
            return False
        size = 0
        try:
            async with asyncio.timeout(_DISCARD_SECONDS):
                while not self._ended and not self.gone and size <= self._discard:
                    size += len((await self.receive()).get("body", b""))
        except TimeoutError:
            return False
        return self._ended


def _route(scope: Scope) -> str:
    """The route's own spelling: a caller's path could hold anything, and would be a new counter each time."""
    path: str = scope["path"]
    return path if path in OPEN_PATHS else str(getattr(scope.get("route"), "path", "unmatched"))


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in _METHODS else "OTHER"
