"""Errors of the HTTP API: one JSON shape with one line of text; 503 is the only status in the 500s."""

from __future__ import annotations

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

KINDS = {
    400: ("malformed_body", "The body cannot be parsed, or the Host header is not allowed."),
    401: ("unauthorized", "The API key is missing or unknown."),
    403: ("forbidden", "Metrics need an API key or --diagnostics, or the request comes from the page of another site."),
    404: ("not_found", "There is nothing at this path; see /docs."),
    405: ("method_not_allowed", "The path has another method; see the header Allow."),
    408: ("timeout", "The body came too slowly."),
    413: ("too_large", "The body is too large."),
    415: ("unsupported_media_type", "The media type of the body, or the format of an image, is not supported."),
    422: ("invalid_request", "A field or an image is not acceptable."),
    429: ("rate_limited", "The caller has sent its requests of this minute; Retry-After says when the next begins."),
    503: ("overloaded", "Too busy, or stopping; Retry-After says when to try again."),
}
"""Type and description of the errors of each status."""


def kind_of(status: int) -> str:
    """Type of the errors of a status."""
    return KINDS.get(status, ("error", ""))[0]


class RequestError(HTTPException):
    """An answer other than 200: its status, one line, its type, the field it is about, and extra headers."""

    def __init__(
        self, status: int, message: str, *, kind: str = "", field: str | None = None, headers: Any = None
    ) -> None:
        super().__init__(status, " ".join(message.split()), headers)
        self.kind, self.field = kind or kind_of(status), field

    def response(self) -> JSONResponse:
        """``{"error": {"message", "type", "param"}}`` with this status."""
        error = {"message": self.detail, "type": self.kind, "param": self.field}
        return JSONResponse({"error": error}, self.status_code, self.headers)


def busy(message: str, *, kind: str = "overloaded", retry: int = 1) -> RequestError:
    """503 with ``Retry-After`` in seconds."""
    return RequestError(503, message, kind=kind, headers={"retry-after": str(retry)})


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Any HTTP error in the shape of all errors."""
    assert isinstance(error, HTTPException)
    if isinstance(error, RequestError):
        request.scope["error_kind"] = error.kind
        if error.status_code == 422 and request.url.path.startswith("/v1/embed"):
            error.status_code = 400  # as OpenAI's clients know it
        return error.response()
    line = KINDS[error.status_code][1] if error.status_code in (404, 405) else error.detail
    return RequestError(error.status_code, line, headers=dict(error.headers or {})).response()


def quote(value: object, limit: int = 60) -> str:
    """A caller's value for an error message: quoted, on one line, at most ``limit`` characters.

    >>> quote("cat" * 50, limit=10), quote([1, 2])
    ("'catcat...", 'a list')
    """
    if not isinstance(value, str | bytes | int | float | None):
        return f"a {type(value).__name__}"
    text = ascii(value[:limit] if isinstance(value, str | bytes) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
