"""``serve --engine ray``: two replicas behind Ray's proxy answer like the library, also after one was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from serve_client import GUARD, KEYS, LABELS, SECRET, Server

import react_clip as rc
from programs import start_command
from react_clip.scale import serving
from react_clip.serve.settings import Settings
from scale_toys import picture, wait_for

KEY = {"authorization": f"Bearer {KEYS[0]}"}


def processes(server: Server) -> list[psutil.Process]:
    """All processes that a server has started."""
    return psutil.Process(server.command.process.pid).children(recursive=True)


def replicas(server: Server) -> set[int]:
    """Processes of the replicas."""
    pids = set()
    for process in processes(server):
        with contextlib.suppress(psutil.Error):
            if "ServeReplica" in " ".join(process.cmdline()):
                pids.add(process.pid)
    return pids


def classify(server: Server, photo: bytes) -> httpx.Response:
    """One request on a new connection."""
    headers = {**KEY, "connection": "close"}
    return httpx.post(f"{server.url}/v1/classify", files={"images": photo}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def server(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    GUARD.save(folder / "guard.json")
    variables = {
        "REACT_CLIP_SERVE_SECRET": SECRET,
        "REACT_CLIP_SERVE_API_KEYS": KEYS[0],
        "REACT_CLIP_SERVE_ENGINE": "ray",
        "REACT_CLIP_SERVE_REPLICAS": "2",
        "RAY_worker_niceness": "0",  # by default workers give way to everything else on the machine
    }
    flags = ["--model", tiny_folder, "--labels", ", ".join(LABELS), "--config", folder / "guard.json"]
    flags += ["--port", 0, "--json", "--max-body", 100_000, "--grace", 20]
    started = Server(start_command("serve", *flags, log=folder / "log", env=variables))
    started.client.headers.update(KEY)
    yield started
    started.end()


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    return [picture(seed) for seed in range(6)]


@pytest.fixture(scope="module")
def expected(tiny_folder: Path, pictures: list[bytes]) -> torch.Tensor:
    """Probabilities of the library, called directly with the server's secret."""
    clf = rc.ZeroShotClassifier(rc.load(tiny_folder, device="cpu"), LABELS)
    with torch.no_grad():
        return GUARD(clf, pictures, seed=SECRET.encode()).probs


def assert_right(answer: httpx.Response, probs: torch.Tensor) -> None:
    """Up to rounding, which depends on the other images of the batch."""
    [result] = answer.json()["results"]
    said = {entry["label"]: entry["probability"] for entry in result["answers"]}
    assert [said[label] for label in LABELS] == pytest.approx(probs.tolist(), abs=1e-4)


def test_both_replicas_give_the_librarys_answers(server: Server, pictures: list[bytes], expected: torch.Tensor) -> None:
    assert len(replicas(server)) == 2
    for photo, probs in [*zip(pictures, expected, strict=True)] * 4:
        assert_right(classify(server, photo), probs)
    assert server.client.get("/readyz").status_code == 200


def test_keys_and_limits_hold_behind_the_proxy(server: Server, pictures: list[bytes]) -> None:
    client = server.client
    as_json = {"content-type": "application/json"}
    assert client.get("/v1/info", headers={"authorization": "Bearer another"}).status_code == 401
    assert client.get("/v1/info").json()["limits"]["body_bytes"] == 100_000
    assert client.get("/nowhere").json()["error"]["type"] == "not_found"
    for body in (b"x" * 200_000, (b"x" * 1000 for _ in range(300))):
        refused = client.post("/v1/classify", content=body, headers=as_json)
        assert (refused.status_code, refused.json()["error"]["type"]) == (413, "too_large")
    for answer in (
        client.post("/v1/classify", content=b"hello", headers={"content-type": "text/plain"}),
        client.post("/v1/classify", files={"images": b"<svg/>"}),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (415, "unsupported_media_type")
    assert client.post("/v1/classify", files={"images": pictures[0]}).headers["x-content-type-options"] == "nosniff"


def test_a_killed_replica_costs_its_own_requests_only(
    server: Server, pictures: list[bytes], expected: torch.Tensor
) -> None:
    before = replicas(server)
    answers: list[tuple[int, httpx.Response]] = []
    stop = threading.Event()

    def call(number: int) -> None:
        while not stop.is_set():
            answers.append((number, classify(server, pictures[number])))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(pictures))]
    for thread in callers:
        thread.start()
    wait_for(lambda: len(answers) > 20)
    os.kill(min(before), signal.SIGKILL)
    wait_for(lambda: len(replicas(server) - before) == 1)
    count = len(answers)
    wait_for(lambda: len(answers) > count + 20)
    stop.set()
    for thread in callers:
        thread.join()
    statuses = [answer.status_code for _, answer in answers]
    assert set(statuses) <= {200, 500, 503}, "500 is the proxy's answer if a replica dies with the request"
    assert set(statuses[count:]) == {200}
    assert sum(status != 200 for status in statuses) <= len(callers), "only requests that the dead replica had"
    for number, answer in answers:
        if answer.status_code == 200:
            assert_right(answer, expected[number])


def test_sigterm_answers_accepted_requests(server: Server, pictures: list[bytes], expected: torch.Tensor) -> None:
    """The last test of the server, because it ends it."""
    answers: list[httpx.Response] = []
    dropped: list[str] = []

    def call() -> None:
        while not answers or answers[-1].status_code == 200:
            try:
                answers.append(classify(server, pictures[0]))
            except httpx.ConnectError:
                return  # the proxy no longer listens
            except httpx.HTTPError as error:
                dropped.append(repr(error))
                return

    callers = [threading.Thread(target=call) for _ in range(4)]
    for thread in callers:
        thread.start()
    wait_for(lambda: len(answers) > 8)
    started = processes(server)
    server.command.signal(signal.SIGTERM)
    server.command.process.join(60)
    assert server.command.process.exitcode == 0
    for thread in callers:
        thread.join()
    assert not dropped
    assert {answer.status_code for answer in answers} <= {200, 404, 503}, "404 while the proxies outlive the replicas"
    for answer in answers:
        if answer.status_code == 200:
            assert_right(answer, expected[0])
    assert not psutil.wait_procs(started, timeout=60)[1], "no process is left"


def test_replicas_must_fit_this_machine() -> None:
    small = {"CPU": 2.0}
    serving._check_room(Settings(engine="ray", replicas=2), small)
    with pytest.raises(rc.ReactClipError, match=r"--replicas is 3, which takes 3 CPUs, and this machine has 2; use"):
        serving._check_room(Settings(engine="ray", replicas=3), small)
    with pytest.raises(rc.ReactClipError, match=r"takes 1 GPUs, .* has 0; use fewer, or --device cpu"):
        serving._check_room(Settings(engine="ray", device="cuda"), small)
