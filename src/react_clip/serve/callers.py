"""Who may call, and how often: API keys, pages of other sites, requests a minute."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated

from fastapi import Request, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer

from react_clip.serve.errors import RequestError
from react_clip.serve.settings import digest

if TYPE_CHECKING:
    from react_clip.serve.app import Service


class Rates:
    """Requests of each caller in the running minute, at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most, self._end = most, 0.0
        self._counts: Counter[bytes | str] = Counter()

    def count(self, caller: bytes | str) -> None:
        """Count a request of a caller, or refuse it with the seconds to the next minute."""
        if (now := time.monotonic()) >= self._end:
            self._counts.clear()
            self._end = now + 60
        self._counts[caller] += 1
        if self._counts[caller] > self._most:
            seconds = int(self._end - now) + 1
            line = f"{self._most} requests a minute are allowed; try again in {seconds} s"
            raise RequestError(429, line, headers={"retry-after": str(seconds)})


async def check_caller(
    request: Request,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))],
    header: Annotated[str | None, Security(APIKeyHeader(name="x-api-key", auto_error=False))],
) -> None:
    """Refuse callers without a known API key if the service has keys, else pages of other sites; count the rest."""
    service: Service = request.app.state.service
    known = service.secrets.keys
    key = (bearer.credentials if bearer else header) or ""
    if known and digest(key.encode("utf-8", "surrogatepass")) not in known:
        line = f"{'the API key is unknown' if key else 'an API key is missing'}; send Authorization: Bearer KEY"
        headers = {"www-authenticate": 'Bearer realm="react-clip"'}
        raise RequestError(401, line, field="authorization", headers=headers)
    # Browsers say so of what a page makes them send: all of them with an origin, over HTTPS also with this word.
    origin = request.headers.get("origin")
    here = origin is None or origin.partition("://")[2] == request.headers.get("host")
    elsewhere = request.headers.get("sec-fetch-site", "none" if here else "cross-site") not in ("same-origin", "none")
    allowed = {origin, "*"} & set(service.settings.cors_origin or [])
    if elsewhere and not known and not allowed:
        line = "pages of other sites may not call this service; start it with API keys, or --cors-origin"
        raise RequestError(403, line)
    if service.rates is not None and request.method == "POST":
        service.rates.count(digest(key.encode()) if known else request.client.host if request.client else "")
