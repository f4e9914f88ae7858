"""Too much at once, and the end: nobody is left without an answer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import react_clip as rc


@pytest.fixture(scope="module")
def slow(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = tmp_path_factory.mktemp("slow") / "slow.json"
    rc.ReACT(views=400, tau=None).save(config)
    return launch("--config", config, "--open-metrics", "--batch", 1, "--max-images", 4, "--queue", 4, "--deadline", 60)


def post(server: Any, photos: list[bytes]) -> httpx.Response:
    """One request on a connection of its own."""
    files = [("images", ("x", photo)) for photo in photos]
    return httpx.post(f"{server.url}/v1/classify", files=files, timeout=60, headers={"connection": "close"})


def test_a_full_queue_says_when_to_come_back(slow: Any, photos: list[bytes]) -> None:
    ready: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            ready.append(httpx.get(f"{slow.url}/readyz").status_code)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: post(slow, photos[:4]), range(8)))
    over.set()
    watcher.join()
    assert {answer.status_code for answer in answers} == {200, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["type"] == "overloaded"
            assert answer.headers["retry-after"] == "1"
        else:
            assert len(answer.json()["results"]) == 4
    assert set(ready) == {200, 503}, "a saturated service says that it is not ready"
    assert slow.client.get("/readyz").status_code == 200
    assert 'rejected_total{reason="overloaded"}' in slow.client.get("/metrics").text


def test_sigterm_answers_what_was_accepted_and_exits_with_0(slow: Any, photos: list[bytes]) -> None:
    slow.client.close()
    accepted, refused, dropped = [], [], []
    over = threading.Event()

    def caller(seed: int) -> None:
        while not over.is_set():
            try:
                answer = post(slow, [photos[seed]])
            except httpx.ConnectError:
                refused.append("closed")
                return
            except httpx.HTTPError as error:
                dropped.append(repr(error))
                return
            (accepted if answer.status_code == 200 else refused).append(answer)

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(4)]
    for thread in callers:
        thread.start()
    while len(accepted) < 4:
        time.sleep(0.01)
    began = time.monotonic()
    code = slow.stop()
    over.set()
    for thread in callers:
        thread.join()
    assert code == 0
    assert time.monotonic() - began < 30
    assert not dropped
    assert len(accepted) >= 4
    for answer in refused:
        assert answer == "closed" or (answer.status_code == 503 and answer.headers["connection"] == "close")
