"""The end of both servers, in the last file, because no other test can use them afterwards."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve_client import HEAD, as_form, as_json, check_error, dial, metric

from programs import wait_for

pytestmark = pytest.mark.process


def refuses(server: Any) -> bool:
    try:
        dial(server).close()
    except ConnectionRefusedError:
        return True
    return False


def test_accepted_requests_are_finished_on_sigterm(pair: Any, photos: list[bytes]) -> None:
    with ThreadPoolExecutor(4) as pool:
        os.kill(pair.command.process.pid, signal.SIGSTOP)
        try:
            accepted = [pool.submit(pair.client.post, "/v1/classify", **as_form(photos[:4])) for _ in range(4)]
            wait_for(lambda: metric(pair.client, "react_clip_requests_in_flight") >= 3)
            pair.command.signal(signal.SIGTERM)
        finally:
            os.kill(pair.command.process.pid, signal.SIGCONT)
        assert {answer.result().status_code for answer in accepted} == {200}
    pair.command.process.join(60)
    assert pair.command.process.exitcode == 0


def test_one_process_says_that_it_stops_and_finishes_accepted_requests(server: Any, photos: list[bytes]) -> None:
    """Load balancers see /readyz and go elsewhere; until they do, requests are answered. Then the port is closed."""
    body = json.dumps(as_json(photos[:1])["json"]).encode()
    with dial(server) as connection:
        connection.sendall(f"{HEAD}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body[:100])
        wait_for(lambda: metric(server.client, "react_clip_requests_in_flight") == 2)
        assert server.client.get("/readyz").status_code == 200
        server.command.signal(signal.SIGTERM)
        wait_for(lambda: server.client.get("/readyz").status_code == 503, 4)
        check_error(server.client.get("/readyz"), 503, "the service is stopping")
        late = server.client.post("/v1/classify", **as_form(photos[:1]))
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        wait_for(lambda: refuses(server))
        connection.sendall(body[100:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    server.command.process.join(60)
    assert server.command.process.exitcode == 0
