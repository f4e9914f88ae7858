"""``serve --engine ray``: two replicas behind Ray's proxy answer like the library, also after one was killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch

import react_clip as rc
from react_clip.cli import main
from react_clip.scale import serving
from scale_toys import picture, wait_for

SECRET = "a secret of the tests, long enough"
KEY = {"authorization": "Bearer a-key-of-some-length"}
LABELS = ("cat", "dog", "teapot")
GUARD = rc.ReACT(tau=1.48)
"""The threshold is in the middle of the tiny CLIP's drifts, so that some gates open."""


class Server:
    """A running ``react-clip serve`` and a client of it."""

    def __init__(self, words: list[str], variables: dict[str, str]) -> None:
        self.process = subprocess.Popen(words, env=os.environ | variables, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the server ended with {self.process.wait()}"
        self.client = httpx.Client(base_url=json.loads(line)["url"], timeout=60, headers=KEY)

    def replicas(self) -> set[int]:
        """Processes of the replicas."""
        found = set()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "ServeReplica" in " ".join(process.cmdline()):
                    found.add(process.pid)
        return found

    def classify(self, photo: bytes) -> httpx.Response:
        """One request on a new connection."""
        url, headers = f"{self.client.base_url}/v1/classify", {**KEY, "connection": "close"}
        return httpx.post(url, files={"images": photo}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def server(tiny_folder: Path, command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    config = tmp_path_factory.mktemp("guard") / "guard.json"
    GUARD.save(config)
    variables = {
        "REACT_CLIP_SERVE_SECRET": SECRET,
        "REACT_CLIP_SERVE_API_KEYS": KEY["authorization"].removeprefix("Bearer "),
        "REACT_CLIP_SERVE_ENGINE": "ray",
        "REACT_CLIP_SERVE_REPLICAS": "2",
        "OMP_NUM_THREADS": "1",
    }
    words = ["--model", tiny_folder, "--labels", ", ".join(LABELS), "--config", config]
    words += ["--port", "0", "--json", "--max-body", "100000", "--grace", "20"]
    started = Server([*command, "serve", *map(str, words)], variables)
    yield started
    started.client.close()
    if started.process.poll() is None:
        started.process.kill()
    started.process.wait()


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
    assert len(server.replicas()) == 2
    for photo, probs in [*zip(pictures, expected, strict=True)] * 4:
        assert_right(server.classify(photo), probs)
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
        client.post("/v1/classify", files={"images": b"GIF89a"}),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (415, "unsupported_media_type")
    assert client.post("/v1/classify", files={"images": pictures[0]}).headers["x-content-type-options"] == "nosniff"


def test_a_killed_replica_costs_its_own_requests_only(
    server: Server, pictures: list[bytes], expected: torch.Tensor
) -> None:
    before = server.replicas()
    answers: list[tuple[int, httpx.Response]] = []
    stop = threading.Event()

    def call(number: int) -> None:
        while not stop.is_set():
            answers.append((number, server.classify(pictures[number])))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(len(pictures))]
    for thread in callers:
        thread.start()
    wait_for(lambda: len(answers) > 20)
    os.kill(min(before), signal.SIGKILL)
    wait_for(lambda: len(server.replicas() - before) == 1)
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
                answers.append(server.classify(pictures[0]))
            except httpx.ConnectError:
                return  # the proxy no longer listens
            except httpx.HTTPError as error:
                dropped.append(repr(error))
                return

    callers = [threading.Thread(target=call) for _ in range(4)]
    for thread in callers:
        thread.start()
    wait_for(lambda: len(answers) > 8)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    for thread in callers:
        thread.join()
    assert not dropped
    assert {answer.status_code for answer in answers} <= {200, 404, 503}, "404 while the proxies outlive the replicas"
    for answer in answers:
        if answer.status_code == 200:
            assert_right(answer, expected[0])
    assert not psutil.wait_procs(processes, timeout=60)[1], "no process is left"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--replicas", "2"), "--replicas is 2, but the engine is local; add --engine ray"),
        (("--engine", "far"), "--engine is 'far'; it should be 'local' or 'ray'"),
        (("--engine", "ray", "--address", "127.0.0.1"), "--address is '127.0.0.1'; write host:port"),
        (("--engine", "ray", "--port", "70000"), "--port is '70000'; it should be less than or equal to 65535"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--quiet", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"react-clip: {line}")
    assert err.count("\n") == 1


def test_fleets_are_checked() -> None:
    for replicas, most, line in ((0, 1, "--replicas is 0"), (4, 2, "--max-replicas is 2 but --replicas 4")):
        with pytest.raises(rc.ReactClipError, match=line):
            serving.Fleet(replicas, most)
    small = SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0})
    serving._check_room(small, serving.Fleet(2, 2))
    with pytest.raises(rc.ReactClipError, match=r"--replicas is 3, which takes 3 CPUs, and this machine has 2; use"):
        serving._check_room(small, serving.Fleet(3, 3))
    with pytest.raises(rc.ReactClipError, match=r"takes 1 GPUs, .* has 0; use fewer, or --device cpu"):
        serving._check_room(small, serving.Fleet(1, 1, gpus=1))
