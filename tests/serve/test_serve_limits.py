"""What the service refuses, and that those who misbehave wait alone."""

from __future__ import annotations

import base64
import io
import socket
import struct
import time
import zlib
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from PIL import Image

import react_clip as rc
from react_clip.serve.body import Buffers
from react_clip.serve.problems import RequestError

KEYS = ["first-key-of-the-tests", "second-key-of-the-tests"]


def one_line(answer: httpx.Response, status: int, *words: str) -> None:
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.fixture(scope="module")
def guarded(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Small limits, short clocks, keys, and a defence that is slow enough to miss a deadline."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "keys").write_text("# for the tests\n" + "\n".join(KEYS) + "\n")
    rc.ReACT(views=1000, tau=None).save(folder / "slow.json")
    server = launch(
        *("--config", folder / "slow.json", "--api-key-file", folder / "keys", "--fixed-labels"),
        *("--max-body", 60_000, "--max-images", 8, "--max-pixels", 10_000, "--max-connections", 12),
        *("--header-timeout", 1.5, "--body-timeout", 1.5, "--deadline", 0.4, "--keep-alive", 1, "--write-timeout", 1),
        log=folder / "log",
    )
    server.log = folder / "log"
    server.client.headers["authorization"] = f"Bearer {KEYS[1]}"
    return server


def dial(server: Any) -> socket.socket:
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=20)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def damaged_images() -> dict[str, tuple[bytes, int]]:
    """Files that must not be answered with 200 nor with 5xx, and the status they get."""

    def saved(kind: str, size: tuple[int, int] = (20, 20), mode: str = "RGB") -> bytes:
        stream = io.BytesIO()
        Image.effect_noise(size, 80).convert(mode).save(stream, kind)
        return stream.getvalue()

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def header(width: int, height: int) -> bytes:
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))

    bomb = header(30_000, 30_000) + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")
    return {
        "truncated jpeg": (saved("JPEG", (90, 90))[:400], 422),
        "truncated png": (saved("PNG", (90, 90))[:400], 422),
        "truncated webp": (saved("WEBP", (90, 90))[:100], 422),
        "bomb": (bomb, 422),
        "huge header": (header(2**31 - 1, 2**31 - 1), 422),
        "no pixels": (header(0, 0), 422),
        "gif": (saved("GIF", mode="P"), 415),
        "bmp": (saved("BMP"), 415),
        "tiff": (saved("TIFF"), 415),
        "svg": (b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', 415),
        "text": (b"hello", 415),
        "jpeg start only": (b"\xff\xd8\xff\xe0", 422),
    }


@pytest.mark.parametrize("name", damaged_images())
def test_bad_images(server: Any, name: str) -> None:
    data, status = damaged_images()[name]
    one_line(server.client.post("/v1/classify", files=[("images", ("x", data))]), status, "images[0]")
    encoded = [base64.b64encode(data).decode()]
    one_line(server.client.post("/v1/embed", json={"images": encoded}), status, "images[0]")


def test_empty_files_and_odd_forms(server: Any, photos: list[bytes]) -> None:
    one_line(server.client.post("/v1/classify", files=[("images", ("x", b""))]), 415, "images[0]")
    one_line(server.client.post("/v1/classify", json={"images": [""]}), 422, "empty")
    one_line(server.client.post("/v1/classify", files=[("photo", ("x", photos[0]))]), 422, "photo")
    form = {"content-type": "multipart/form-data; boundary=x"}
    one_line(server.client.post("/v1/classify", content=b"--x\r\n", headers=form), 400, "multipart")
    one_line(server.client.post("/v1/classify", content=b"nonsense", headers=form), 400, "multipart")
    nameless = b"--x\r\ncontent-disposition: form-data\r\n\r\n1\r\n--x--\r\n"
    one_line(server.client.post("/v1/classify", content=nameless, headers=form), 400, "no name")
    cut = b'--x\r\ncontent-disposition: form-data; name="images"\r\n\r\n' + photos[0]
    one_line(server.client.post("/v1/classify", content=cut, headers=form), 400, "cut short")
    commas = {"files": [("images", ("x", photos[0]))], "data": {"labels": "," * 500_000}}
    one_line(server.client.post("/v1/classify", **commas), 422, "500,000 bytes", "limit for text is 402,000")
    unbounded = {"content-type": "multipart/form-data"}
    one_line(server.client.post("/v1/classify", content=b"", headers=unbounded), 400, "boundary")
    body = b'{"images": [' + b"0," * 300_000 + b"0]}"
    kind = {"content-type": "application/json"}
    one_line(server.client.post("/v1/classify", content=body, headers=kind), 422, "values", "limit is")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b'{"images": NaN}', 400),
        (b"[" * 90_000, 400),
        (b'{"top_k": ' + b"9" * 5000 + b"}", 400),
        (b'{"images": ["\\ud800"]}', 422),
        (b'{"images": ["aaaa"], "labels": ["\\ud800"]}', 422),
        (b'{"images": ["aaaa"], "\\ud800": 1}', 422),
        (b'{"images": {"a": 1}}', 422),
        (b'{"images": ["aaaa"], "top_k": 1e999}', 422),
        (b'{"images": ["aaaa"], "top_k": true}', 422),
    ],
)
def test_odd_json(server: Any, body: bytes, status: int) -> None:
    one_line(server.client.post("/v1/classify", content=body, headers={"content-type": "application/json"}), status)


def test_other_media_types(server: Any, photos: list[bytes]) -> None:
    for kind in ("image/png", "text/plain", "application/x-www-form-urlencoded", ""):
        answer = server.client.post("/v1/classify", content=photos[0], headers={"content-type": kind})
        one_line(answer, 415, "application/json or multipart/form-data")


def test_keys(guarded: Any, photos: list[bytes]) -> None:
    with httpx.Client(base_url=guarded.url, timeout=30) as stranger:
        for path in ("/healthz", "/readyz", "/docs", "/openapi.json"):
            assert stranger.get(path).status_code == 200, path
        for path in ("/v1/info", "/v1/models", "/metrics"):
            refused = stranger.get(path)
            one_line(refused, 401, "missing")
            assert refused.headers["www-authenticate"].startswith("Bearer")
        one_line(stranger.post("/v1/classify", files=[("images", ("x", photos[0]))]), 401, "API key")
        for headers in (
            {"authorization": "Bearer wrong"},
            {"x-api-key": "wrong"},
            {"authorization": f"Basic {KEYS[0]}"},
        ):
            one_line(stranger.get("/v1/info", headers=headers), 401)
        assert stranger.get("/v1/info", headers={"x-api-key": KEYS[0]}).status_code == 200
    for path in ("/v1/info", "/metrics"):
        assert guarded.client.get(path).status_code == 200


def test_sizes(guarded: Any, photos: list[bytes]) -> None:
    big = [("images", ("x", bytes(70_000)))]
    one_line(guarded.client.post("/v1/classify", files=big), 413, "limit is 60,000")

    def endless() -> Any:
        for _ in range(100):
            yield bytes(1000)

    chunked = guarded.client.post("/v1/classify", content=endless(), headers={"content-type": "application/json"})
    one_line(chunked, 413, "limit is 60,000")
    many = [("images", ("x", b"\xff\xd8\xff"))] * 9
    one_line(guarded.client.post("/v1/classify", files=many), 422, "9 entries", "limit is 8")
    stream = io.BytesIO()
    Image.new("RGB", (101, 100)).save(stream, "PNG")
    wide = [("images", ("x", stream.getvalue()))]
    one_line(guarded.client.post("/v1/classify", files=wide), 422, "101 x 100 = 10,100 pixels", "limit is 10,000")
    fields = {"files": [("images", ("x", photos[0]))], "data": {"labels": "cat, dog"}}
    one_line(guarded.client.post("/v1/classify", **fields), 422, "its own only")


def test_the_deadline(guarded: Any, photos: list[bytes]) -> None:
    files = [("images", ("x", photo)) for photo in photos[:8]]
    began = time.monotonic()
    late = guarded.client.post("/v1/classify", files=files)
    one_line(late, 503, "0.4 s")
    assert late.json()["error"]["type"] == "deadline"
    assert int(late.headers["retry-after"]) >= 1
    assert time.monotonic() - began < 10


def test_a_slow_head_does_not_block_others_and_ends(guarded: Any) -> None:
    with dial(guarded) as slow, dial(guarded) as silent:
        slow.sendall(b"POST /v1/classify HTTP/1.1\r\nhost: x\r\nx-slow: ")
        for _ in range(5):
            assert guarded.client.get("/healthz").status_code == 200
        for connection in (slow, silent):
            answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"did not arrive within 1.5 s" in answer


def test_a_slow_second_head_ends_too(guarded: Any) -> None:
    with dial(guarded) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        first = b""
        while b"alive" not in first:
            first += connection.recv(65536)
        connection.sendall(b"G")
        assert b"HTTP/1.1 408 " in read_all(connection)


def test_a_slow_body_does_not_block_others_and_ends(guarded: Any) -> None:
    head = f"POST /v1/classify HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEYS[0]}\r\n"
    with dial(guarded) as slow:
        slow.sendall(f"{head}content-type: application/json\r\ncontent-length: 1000\r\n\r\n".encode() + b'{"images"')
        for _ in range(5):
            assert guarded.client.get("/v1/info").status_code == 200
        answer = read_all(slow)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"9 bytes of the body came within 1.5 s" in answer


def test_who_reads_no_answers_is_cut_off(guarded: Any) -> None:
    many = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 500_000
    with dial(guarded) as connection, pytest.raises((ConnectionResetError, BrokenPipeError)):
        connection.sendall(many)
    assert guarded.client.get("/healthz").status_code == 200


def test_all_bodies_together_are_bounded() -> None:
    buffers = Buffers(100)
    with buffers.lease() as first, buffers.lease() as second:
        first.grow(60)
        with pytest.raises(RequestError, match="60 of 100 bytes") as refused:
            second.grow(50)
        assert (refused.value.status, refused.value.headers["retry-after"]) == (503, "1")
        second.grow(40)
    with buffers.lease() as third:
        third.grow(100)


def test_too_many_connections(guarded: Any) -> None:
    time.sleep(1.2)
    crowd = [dial(guarded) for _ in range(16)]
    try:
        last = read_all(crowd[-1])
        assert last.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in last
        assert b"all 12 connections are in use" in last
    finally:
        for connection in crowd:
            connection.close()
    time.sleep(0.2)
    assert guarded.client.get("/healthz").status_code == 200


def test_what_is_not_http_gets_json(guarded: Any) -> None:
    for junk in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 40_000):
        with dial(guarded) as connection:
            connection.sendall(junk)
            answer = read_all(connection)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b'{"error":{"message":' in answer


def test_a_caller_that_asks_first_is_told_before_it_sends(guarded: Any) -> None:
    head = b"POST /v1/classify HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 50000\r\n\r\n"
    with dial(guarded) as connection:
        connection.sendall(head)
        answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert b"connection: close" in answer


def test_the_log_holds_no_queries_and_no_keys(guarded: Any) -> None:
    guarded.client.get("/healthz?name=a-private-word")
    guarded.client.get("/a-private-path")
    text = guarded.log.read_text()
    assert "GET /healthz 200" in text
    for word in ("private", *KEYS):
        assert word not in text
