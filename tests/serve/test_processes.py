"""Real server processes: one, and two that share a model. Connections, signals, and parts that hang or are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_client import HEAD, as_form, as_json, check_error, dial, metric

from programs import wait_for

pytestmark = pytest.mark.process


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def descendants(pid: int) -> dict[int, str]:
    """Processes below one, and their command lines."""
    found: dict[int, str] = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= descendants(int(child))
    return found


def workers(server: Any) -> set[int]:
    """Processes that answer callers; the one that has started them computes."""
    return {pid for pid, line in descendants(server.command.process.pid).items() if "spawn_main" in line}


def is_ready(server: Any) -> bool:
    with suppress(httpx.TransportError):
        return bool(server.client.get("/readyz").status_code == 200)
    return False


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------------- one process


@pytest.mark.smoke
def test_a_server_answers(server: Any, photos: list[bytes]) -> None:
    answer = server.client.post("/v1/classify", **as_form(photos[:2]))
    assert [result["index"] for result in answer.json()["results"]] == [0, 1]
    assert "server" not in answer.headers


def test_half_open_connections_keep_nobody_out_and_heads_are_limited(server: Any, photos: list[bytes]) -> None:
    with dial(server) as crowded, dial(server) as long:
        began = time.monotonic()
        crowded.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-slow: ")
        long.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * 17_000)
        assert read_all(long).startswith(b"HTTP/1.1 400 ")
        crowd = [dial(server) for _ in range(300)]
        for connection in crowd[:260]:  # their bodies may take longer, so that they end with the test
            connection.sendall(f"{HEAD}content-length: 1000\r\n\r\nbegun".encode())
        wait_for(lambda: metric(server.client, "react_clip_requests_in_flight") > 260)
        answer = server.client.post("/v1/classify", **as_form(photos[:1]))
        assert answer.status_code == 200, "half-open connections keep nobody out"
        assert read_all(crowded) == b""
        assert 8 < time.monotonic() - began < 30
        for connection in crowd[260:]:
            assert read_all(connection) == b""
        for connection in crowd:
            connection.close()
    wait_for(lambda: metric(server.client, "react_clip_requests_in_flight") == 1)


def test_a_caller_that_is_gone_costs_nothing(server: Any, photos: list[bytes]) -> None:
    before = metric(server.client, "react_clip_rejected_total")
    body = json.dumps(as_json(photos)["json"]).encode()
    with dial(server) as connection:
        connection.sendall(f"{HEAD}content-length: {len(body)}\r\n\r\n".encode() + body[:100])
        wait_for(lambda: metric(server.client, "react_clip_requests_in_flight") == 2)
    wait_for(lambda: metric(server.client, "react_clip_requests_in_flight") == 1)
    assert metric(server.client, "react_clip_rejected_total") == before + 1


# ---------------------------------------------------------------------- two processes and a model


def test_processes_answer_alike_and_add_up_their_metrics(pair: Any, photos: list[bytes]) -> None:
    wait_for(lambda: len(workers(pair)) == 2, 240)
    for pid in workers(pair):
        assert b"OMP_WAIT_POLICY=PASSIVE" in Path(f"/proc/{pid}/environ").read_bytes()
    before = metric(pair.client, "react_clip_images_total")
    body = as_json(photos)

    def ask(_: int) -> Any:
        with httpx.Client(base_url=pair.url, timeout=60, headers=pair.client.headers) as own:
            return own.post("/v1/embeddings", **body).json()["data"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    # A lead depends on the noise, so on the secret that the processes share.
    assert any(answer["diagnostics"]["lead"] for answer in answers[0])
    for answer in answers:
        for first, other in zip(answers[0], answer, strict=True):
            assert other["embedding"] == pytest.approx(first["embedding"], abs=1e-5)
            assert other["diagnostics"]["lead"] == pytest.approx(first["diagnostics"]["lead"], abs=1e-5)
    for _ in range(4):
        assert metric(pair.client, "react_clip_images_total") == before + 8 * len(photos)


def test_the_shadows_table_is_the_models(pair: Any, photos: list[bytes]) -> None:
    assert pair.client.post("/v1/classify", **as_form(photos)).status_code == 200

    def compared() -> int:
        with httpx.Client(base_url=pair.url, timeout=60, headers=pair.client.headers) as own:  # any of the two answers
            return int(own.get("/v1/shadow").json()["compared"])

    for _ in range(4):
        wait_for(lambda: compared() >= len(photos))


def test_a_hung_model_is_not_ready(pair: Any, photos: list[bytes]) -> None:
    assert is_ready(pair)
    with stopped(pair.command.process.pid), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(pair.client.post, "/v1/classify", **as_form(photos[:1])) for _ in range(2)]
        wait_for(lambda: not is_ready(pair), 20)  # the deadline is 8 seconds
        assert pair.client.get("/healthz").status_code == 200
        for _ in range(2):  # the connection can be used again, although nobody has read the body
            check_error(pair.client.post("/v1/classify", **as_form([bytes(5_000_000)])), 503, "does not answer")
        assert [answer.result().status_code for answer in waiting] == [503, 503]
    wait_for(lambda: is_ready(pair), 20)
    assert pair.client.post("/v1/classify", **as_form(photos[:1])).status_code == 200


def test_a_killed_process_is_replaced_while_the_other_answers(pair: Any, photos: list[bytes]) -> None:
    victim = workers(pair).pop()
    images = metric(pair.client, "react_clip_images_total")
    os.kill(victim, signal.SIGKILL)

    def answered() -> bool:
        with suppress(httpx.TransportError):
            return bool(pair.client.post("/v1/classify", **as_form(photos[:1])).status_code == 200)
        return False

    wait_for(answered)
    wait_for(lambda: len(workers(pair) - {victim}) == 2, 240)
    assert metric(pair.client, "react_clip_images_total") >= images + 1
    assert metric(pair.client, "react_clip_requests_in_flight") == 1, "without those of the process that ended"
