"""API keys, sizes and times of a server with small limits, and that slow callers delay nobody else."""

from __future__ import annotations

import io
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image
from serve_client import KEYS, as_form, check_error

from programs import wait_for
from react_clip.serve.errors import RequestError
from react_clip.serve.metrics import Metrics
from react_clip.serve.middleware import RequestGuard
from react_clip.serve.settings import Settings


def dial(server: Any) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def test_keys(guarded: Any, photos: list[bytes]) -> None:
    with httpx.Client(base_url=guarded.url, timeout=60) as stranger:
        for path in ("/healthz", "/readyz", "/docs", "/openapi.json", "/", "/static/page.js"):
            assert stranger.get(path).status_code == 200, path
        for path in ("/v1/info", "/v1/models", "/metrics"):
            refused = stranger.get(path)
            check_error(refused, 401, "missing")
            assert refused.headers["www-authenticate"].startswith("Bearer")
        check_error(stranger.post("/v1/classify", **as_form(photos[:1])), 401, "API key")
        for headers in (
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"authorization": f"Basic {KEYS[0]}"},
        ):
            check_error(stranger.get("/v1/info", headers=headers), 401)
        assert stranger.get("/v1/info", headers={"x-api-key": KEYS[0]}).status_code == 200
    for path in ("/v1/info", "/metrics"):
        assert guarded.client.get(path).status_code == 200


def test_sizes(guarded: Any, photos: list[bytes]) -> None:
    check_error(guarded.client.post("/v1/classify", **as_form([bytes(70_000)])), 413, "limit is 60,000")

    def endless() -> Any:
        for _ in range(100):
            yield bytes(1000)

    chunked = guarded.client.post("/v1/classify", content=endless(), headers={"content-type": "application/json"})
    check_error(chunked, 413, "limit is 60,000")
    many = {"images": ["/9j/"] * 9}
    check_error(guarded.client.post("/v1/classify", json=many), 422, "images has 9 entries", "limit is 8")
    stream = io.BytesIO()
    Image.new("RGB", (101, 100)).save(stream, "PNG")
    wide = guarded.client.post("/v1/classify", **as_form([stream.getvalue()]))
    check_error(wide, 422, "images[0]", "101 x 100 = 10,100 pixels", "limit is 10,000")
    check_error(guarded.client.post("/v1/classify", **as_form(photos[:1], labels="cat, dog")), 422, "its own only")


def test_a_slow_body_ends_and_delays_nobody(guarded: Any) -> None:
    head = f"POST /v1/classify HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    with dial(guarded) as slow:
        slow.sendall(f"{head}content-type: application/json\r\ncontent-length: 1000\r\n\r\n".encode() + b'{"images"')
        for _ in range(5):
            assert guarded.client.get("/v1/info").status_code == 200
        answer = read_all(slow)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"9 bytes of the body came within 1.5 s" in answer


@pytest.mark.parametrize("complete", [True, False])
def test_a_long_head_is_refused(guarded: Any, complete: bool) -> None:
    line = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: "
    with dial(guarded) as connection:
        connection.sendall(line + b"a" * 15_000 + b"\r\nconnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")
    with dial(guarded) as connection:
        connection.sendall(line + b"a" * 17_000 + (b"\r\n\r\n" if complete else b""))
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"the head of the request has 17,0" in answer
    assert b"the limit is 16,384" in answer


def test_a_head_may_come_in_pieces(guarded: Any) -> None:
    with dial(guarded) as connection:
        for piece in (b"GET /hea", b"lthz HTTP/1.1\r\nho", b"st: x\r\nconnection: close\r\n", b"\r", b"\n"):
            connection.sendall(piece)
            time.sleep(0.02)
        assert read_all(connection).startswith(b"HTTP/1.1 200 ")


def test_all_bodies_together_are_bounded() -> None:
    settings = Settings(max_body=50, max_buffered=100)
    guard = RequestGuard(lambda *_: None, settings=settings, keys=frozenset(), metrics=Metrics(), posts={})  # type: ignore[arg-type, return-value]
    guard.reserve(60)
    with pytest.raises(RequestError, match="60 of 100 bytes") as refused:
        guard.reserve(50)
    assert (refused.value.status, refused.value.headers) == (503, {"retry-after": "1"})
    guard.reserve(40)
    guard.reserve(-60)
    guard.reserve(60)


def test_the_memory_of_bodies_is_released(guarded: Any, photos: list[bytes]) -> None:
    for _ in range(20):
        guarded.client.post("/v1/classify", content=bytes(50_000), headers={"content-type": "application/json"})
    assert guarded.client.post("/v1/classify", **as_form(photos[:1])).status_code == 200


def test_too_many_connections_are_refused_until_they_close(guarded: Any) -> None:
    crowd = [dial(guarded) for _ in range(30)]
    try:
        with dial(guarded) as last:
            last.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert read_all(last).startswith(b"HTTP/1.1 503 ")
    finally:
        for connection in crowd:
            connection.close()
    wait_for(lambda: httpx.get(f"{guarded.url}/healthz", timeout=60).status_code == 200)


def test_a_caller_that_expects_100_continue_is_refused_before_it_sends(guarded: Any) -> None:
    head = b"POST /v1/classify HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 50000\r\n\r\n"
    with dial(guarded) as connection:
        connection.sendall(head)
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer


def test_the_log_contains_no_queries_and_no_keys(guarded: Any) -> None:
    guarded.client.get("/healthz?name=a-private-word")
    guarded.client.get("/a-private-path")
    text = guarded.command.log.read_text()
    assert "GET /healthz 200" in text
    for word in ("private", *KEYS):
        assert word not in text
