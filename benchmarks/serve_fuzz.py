"""Malformed requests against a real server: no status in the 500s but 503, no growing memory.

    python benchmarks/serve_fuzz.py --count 5000 -- --model clip-vit-b-16

Everything after ``--`` goes to ``react-clip serve``. The result is the entry "fuzz" of benchmarks/results/serve.json.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from _common import RESULTS, SERVICE, Server, where, write
from PIL import Image

BEFORE_THE_SERVICE = (
    *(b"Invalid HTTP request received.", b"The head of the request has"),
    *(b"Invalid host header", b"Malformed range header."),
)
"""Answers of uvicorn and Starlette to what does not reach the service."""
ROUTES = ("/v1/classify", "/v1/embeddings")


# ---------------------------------------------------------------------- malformed requests


@dataclass(frozen=True)
class Case:
    """One request; ``raw`` replaces all of it."""

    kind: str
    method: str = "POST"
    path: str = ROUTES[0]
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes | None = None

    def wire(self) -> bytes:
        if self.raw is not None:
            return self.raw
        headers = {"host": "localhost", "connection": "close", "content-length": str(len(self.body)), **self.headers}
        lines = [f"{self.method} {self.path} HTTP/1.1", *(f"{key}: {value}" for key, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + self.body


def photo(rng: random.Random, kind: str = "PNG") -> bytes:
    image = Image.frombytes("RGB", (24, 18), rng.randbytes(24 * 18 * 3))
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Some bytes changed, cut out or repeated."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(out) + 1)
        action = rng.randrange(4)
        if action == 0 and at < len(out):
            out[at] = rng.randrange(256)
        elif action == 1:
            out[at : at + rng.randint(1, 40)] = b""
        elif action == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 20))
        else:
            out[at:at] = out[max(0, at - 30) : at]
    return bytes(out)


def _value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    words = ["", "cat", "\ud800", "http://127.0.0.1/x", "data:,x", "A" * 5000, "../../etc/passwd", "{}", "\x00", "ａ"]
    simple: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, -1, 5, 10**30, 1e308, -0.0, 0.5]),
        lambda: rng.choice(words),
        lambda: base64.b64encode(flipped(rng, photo(rng))).decode(),
    ]
    if depth < 3 and rng.random() < 0.5:
        if rng.random() < 0.5:
            return [_value(rng, depth + 1) for _ in range(rng.randrange(5))]
        return {rng.choice(words): _value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.choice(simple)()


def _json_fields(rng: random.Random) -> Case:
    fields: dict[str, Any] = {"images": [base64.b64encode(photo(rng)).decode()]}
    names = ["images", "labels", "templates", "top_k", "encoding_format", "model", "eps", "input", "extra"]
    for name in rng.sample(names, rng.randint(1, 4)):
        fields[name] = _value(rng)
    return Case("json fields", path=rng.choice(ROUTES), headers=JSON, body=json.dumps(fields).encode())


def _json_bytes(rng: random.Random) -> Case:
    body = json.dumps({"images": [base64.b64encode(photo(rng)).decode()], "top_k": 3, "labels": ["a", "b"]}).encode()
    return Case("json bytes", path=rng.choice(ROUTES), headers=JSON, body=flipped(rng, body))


def _image(rng: random.Random) -> Case:
    data = flipped(rng, photo(rng, rng.choice(["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])))
    fields = {"images": [base64.b64encode(data).decode()]}
    return Case("damaged image", path=rng.choice(ROUTES), headers=JSON, body=json.dumps(fields).encode())


def _form(rng: random.Random) -> Case:
    parts = b""
    for _ in range(rng.randint(1, 4)):
        name = rng.choice(["images", "labels", "top_k", "templates", "x", "", 'a"b'])
        data = photo(rng) if name == "images" else rng.choice([b"cat, dog", b"3", b"\xff\xfe", b"", b"a {} b"])
        parts += (
            f'--edge\r\ncontent-disposition: form-data; name="{name}"; filename="x"\r\n\r\n'.encode() + data + b"\r\n"
        )
    body = parts + b"--edge--\r\n"
    body = flipped(rng, body) if rng.random() < 0.7 else body
    headers = {"content-type": rng.choice(["multipart/form-data; boundary=edge"] * 4 + ["multipart/form-data"])}
    return Case("form", path=rng.choice(ROUTES), headers=headers, body=body)


def _head(rng: random.Random) -> Case:
    kinds = ["text/plain", "application/json; charset=utf-7", "image/png", "multipart/form-data; boundary=" + "x" * 300]
    headers = {
        "content-type": rng.choice(kinds),
        rng.choice(["x-a", "content-encoding", "transfer-encoding", "authorization", "range", "expect"]): rng.choice(
            ["gzip", "chunked", "Bearer x", "bytes=0-", "100-continue", "\x7f", "é" * 50]
        ),
    }
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE", "FOO"])
    path = rng.choice(
        [*ROUTES, "/", "/healthz", "/readyz", "/metrics", "/docs", "/v1/%00", "/v1/../x", "//", "/%ff?a=%zz"]
    )
    return Case("head", method, path, headers, rng.randbytes(rng.randrange(200)))


def _raw(rng: random.Random) -> Case:
    choice = rng.randrange(4)
    if choice == 0:
        return Case("raw", raw=rng.randbytes(rng.randint(1, 3000)) + b"\r\n\r\n")
    if choice == 1:
        return Case("raw", raw=flipped(rng, _json_fields(rng).wire()))
    if choice == 2:
        chunks = b"".join(b"%x\r\n" % len(data) + data + b"\r\n" for data in [rng.randbytes(20) for _ in range(3)])
        head = (
            b"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
        )
        return Case("raw", raw=head + b"transfer-encoding: chunked\r\n\r\n" + flipped(rng, chunks + b"0\r\n\r\n"))
    return Case(
        "raw", raw=b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: " + b"y" * rng.choice([10, 30_000]) + b"\r\n\r\n"
    )


JSON = {"content-type": "application/json"}
_KINDS = (_json_fields, _json_bytes, _image, _form, _head, _raw)


def cases(count: int, seed: int) -> list[Case]:
    """Malformed requests, the same ones for the same seed."""
    rng = random.Random(seed)
    return [_KINDS[i % len(_KINDS)](rng) for i in range(count)]


def send(url: str, case: Case) -> tuple[int, bytes]:
    """Status and body of the answer; status 0 without an answer, as for a request that never ends."""
    parts = urlsplit(url)
    data = b""
    patience = 60.0 if case.raw is None and "transfer-encoding" not in case.headers else 0.3
    with socket.create_connection((parts.hostname, parts.port), timeout=patience) as connection:
        try:
            connection.sendall(case.wire())
            while piece := connection.recv(65536):
                data += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
        except TimeoutError:
            pass
    # The last answer counts: "100 Continue" may come before it.
    head, _, body = data.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    return int(head[:3]) if head[:3].isdigit() else 0, body


def check(case: Case, status: int, body: bytes) -> str | None:
    """One line about a wrong answer, or None."""
    if status >= 500 and status != 503:
        return f"{case.kind}: status {status}"
    known = any(line in body for line in BEFORE_THE_SERVICE)
    if status >= 400 and not known and case.method != "HEAD":
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            return f"{case.kind}: status {status} without our JSON: {body[:80]!r}"
        if not message or "\n" in message:
            return f"{case.kind}: status {status} says {message!r}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="for react-clip serve, after --")
    args = parser.parse_args()
    served = Server.start(args.flags)
    good = Case(
        "good", headers=JSON, body=json.dumps({"images": [base64.b64encode(photo(random.Random(0))).decode()]}).encode()
    )
    first = send(served.url, good)
    assert first[0] == 200, first
    before, began = served.memory(), time.monotonic()
    statuses: Counter[str] = Counter()
    wrong: list[str] = []
    for case in cases(args.count, args.seed):
        status, body = send(served.url, case)
        statuses[f"{case.kind}: {status or 'unanswered'}"] += 1
        if (line := check(case, status, body)) is not None:
            wrong.append(line)
    seconds, after, last = time.monotonic() - began, served.memory(), send(served.url, good)
    code, stop_seconds = served.stop()
    result = {
        **where(*SERVICE),
        "server": served.command,
        "requests": args.count,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(statuses.items())),
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
        "same_answer_before_and_after": first == last,
        "memory_before": before,
        "memory_after": after,
        "exit_code": code,
        "stop_seconds": round(stop_seconds, 2),
    }
    path = RESULTS / "serve.json"
    write(path.name, (json.loads(path.read_text()) if path.exists() else {}) | {"fuzz": result})
    return int(bool(wrong) or first != last or code != 0)


if __name__ == "__main__":
    sys.exit(main())
