"""The count and the log line of each request, as text or JSON, with the id that its caller sent or gets."""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

if TYPE_CHECKING:
    from react_clip.serve.app import Service

logger = logging.getLogger("react_clip.serve")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TRACE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
"""W3C's traceparent."""
_METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"}


class RequestLog:
    """ASGI middleware, outermost: gives each request an id, counts it and writes its line; answers HEAD like GET."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app, self._metrics = app, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.perf_counter(), Headers(scope=scope)
        method = scope["method"] if scope["method"] in _METHODS else "OTHER"
        given, trace = headers.get("x-request-id", ""), headers.get("traceparent", "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        echoed = {b"x-request-id": name.encode()}
        if _TRACE.fullmatch(trace):
            echoed[b"traceparent"] = trace.encode()
        # The server below leaves out the body: its scope still says HEAD.
        inner = {**scope, "method": "GET" if method == "HEAD" else scope["method"], "echoed": echoed, "answers": []}
        await self._app(inner, receive, send)
        if (status := inner.get("status")) is None:  # the caller has left
            return
        # The route's own spelling: a caller's path could contain anything, and each would be a new counter.
        route, seconds = str(getattr(inner.get("route"), "path", "unmatched")), time.perf_counter() - began
        milliseconds = round(1000 * seconds, 1)
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        fields = {"id": name, "method": method, "route": route, "status": status, "ms": milliseconds}
        if answers := inner["answers"]:
            numbers = [answer.numbers for answer in answers]
            fields |= {"images": len(answers), "wait_ms": round(1000 * max(answer.wait for answer in answers), 1)}
            fields |= {"passes": round(sum(each["passes"] for each in numbers), 4)}
            fields |= {"gate_open": sum(bool(each["suspicious"]) for each in numbers)}
            fields |= {"changed": sum(bool(each["gated"]) for each in numbers)}
        if status >= 400:
            fields["error"] = inner["error_kind"]
            self._metrics.rejected.labels(inner["error_kind"]).inc()
        if b"traceparent" in echoed:
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
