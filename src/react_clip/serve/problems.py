"""What callers see when something is wrong: one JSON shape, one clear line, and 503 as the only 5xx."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

_TYPES = {
    400: "malformed_body",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_request",
    503: "overloaded",
}


class RequestError(Exception):
    """An answer other than 200: status, line, the field it is about, and headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        field: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = " ".join(message.split())
        self.kind = kind or _TYPES.get(status, "error")
        self.field = field
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON that says it."""
        return {"error": {"message": self.message, "type": self.kind, "field": self.field}}

    def response(self) -> Response:
        """The answer that says it."""
        return json_response(self.body(), self.status, self.headers)


def busy(message: str, *, kind: str = "overloaded", close: bool = False) -> RequestError:
    """503 with the advice to come back."""
    headers = {"retry-after": "1"} | ({"connection": "close"} if close else {})
    return RequestError(HTTPStatus.SERVICE_UNAVAILABLE, message, kind=kind, headers=headers)


def json_response(payload: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Strict JSON: ASCII, and an error of ours rather than NaN or infinity."""
    return Response(dumps(payload), status, headers, media_type="application/json")


def dumps(payload: Any) -> bytes:
    """Strict JSON as bytes.

    >>> dumps({"a": [1, "ü"]})
    b'{"a":[1,"\\\\u00fc"]}'
    """
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode("ascii")


def shown(value: object, most: int = 60) -> str:
    """A caller's value in a message: quoted, on one line, cut; of a container only its kind.

    >>> shown("x" * 200), shown([1, 2])
    ("'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...", 'a list')
    """
    if not isinstance(value, str | bytes | int | float | None):
        return f"a {type(value).__name__}"
    text = ascii(value[:most] if isinstance(value, str | bytes) else value)
    return text if len(text) <= most else text[: most - 3] + "..."
