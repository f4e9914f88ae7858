"""The layer around every request: its id, headers, count and log line, as text or JSON."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from react_clip.serve.errors import busy, kind_of

if TYPE_CHECKING:
    from react_clip.serve.app import Service

logger = logging.getLogger("react_clip.serve")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C's traceparent."""
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"cache-control": b"no-store",
    # For the pages: scripts and styles of this server only, and none inside the HTML.
    b"content-security-policy": b"default-src 'none'; script-src 'self'; style-src 'self'; "
    b"img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-resource-policy": b"same-origin",
}
"""Headers of answers that do not have their own."""


class RequestLog:
    """ASGI middleware, outermost: gives each request an id and its answer headers, counts it and writes its line.

    HEAD is answered like GET. A request that fails gets 503, as CORS does not see it.
    """

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, metrics, method, status = self._service, self._service.metrics, scope["method"], 0
        began, headers = time.perf_counter(), Headers(scope=scope)
        given, trace = headers.get("x-request-id", ""), headers.get("traceparent", "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        own = _HEADERS | {b"x-request-id": name.encode()}
        if _TRACE.fullmatch(trace):
            own[b"traceparent"] = trace.encode()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                closing = {b"connection": b"close"} if service.stopping else {}
                message = {**message, "headers": list((own | dict(message["headers"]) | closing).items())}
            await send(message)

        # The server below leaves out the body: its scope still says HEAD.
        inner = {**scope, "method": "GET" if method == "HEAD" else method, "answers": []}
        with metrics.in_flight.track_inprogress():
            try:
                await self._app(inner, receive, send_with_headers)
            except ClientDisconnect:
                metrics.rejected.labels("disconnected").inc()
                return
            except Exception as failure:
                logger.error("%s failed: %s", method, type(failure).__name__, exc_info=True)
                if not status:
                    error = busy("the request could not be finished; try again", kind="unavailable")
                    await error.response()(inner, receive, send_with_headers)
        # The route's own spelling: a caller's path could contain anything, and each would be a new counter.
        route, seconds = str(getattr(inner.get("route"), "path", "unmatched")), time.perf_counter() - began
        milliseconds = round(1000 * seconds, 1)
        metrics.requests.labels(method, route, str(status)).inc()
        metrics.latency.labels(route).observe(seconds)
        fields = {"id": name, "method": method, "route": route, "status": status, "ms": milliseconds}
        if answers := inner["answers"]:
            numbers = [answer.numbers for answer in answers]
            fields |= {"images": len(answers), "wait_ms": round(1000 * max(answer.wait for answer in answers), 1)}
            fields |= {"passes": round(sum(each["passes"] for each in numbers), 4)}
            fields |= {"gate_open": sum(bool(each["suspicious"]) for each in numbers)}
            fields |= {"changed": sum(bool(each["gated"]) for each in numbers)}
        if status >= 400:
            fields["error"] = inner.get("error_kind") or kind_of(status)
            metrics.rejected.labels(fields["error"]).inc()
        if b"traceparent" in own:
            fields["trace"] = trace.split("-")[1]
        logger.info("%s %s %d %.0f ms %s", method, route, status, milliseconds, name, extra={"fields": fields})


class JsonLines(logging.Formatter):
    """Each record as one JSON object: time, level, message, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line."""
        fields = getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            fields = {**fields, "error": self.formatException(record.exc_info)}
        now = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps({"time": now, "level": record.levelname.lower(), **fields})
