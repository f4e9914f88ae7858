"""Several processes on one port: who answers, what they share, and how they end."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from serve_client import SECOND_LOOK, as_json

from programs import start_command, wait_for
from react_clip.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


class Pair:
    """A server of two HTTP processes and the model's process."""

    def __init__(self, server: Any) -> None:
        self.command, self.port = server.command, urlsplit(server.url).port
        self.parent: int = server.command.process.pid

    def children(self) -> set[int]:
        return {int(pid) for pid in Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split()}

    def model(self) -> int:
        """The model's process: the only one that does not listen on the port."""
        [pid] = self.children() - set(self.one_of_each())
        return pid

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.connect()
        return connection

    def process_of(self, connection: http.client.HTTPConnection) -> int:
        """The process at the other end, found by the inode of its socket."""
        assert ask(connection, "GET", "/healthz") == {"status": "alive"}  # now it has accepted the connection
        ends = f":{self.port:04X}", f":{connection.sock.getsockname()[1]:04X}"
        inodes: set[str] = set()
        while len(inodes) != 1:  # a list that changes while it is read may have a row twice, or not at all
            rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            inodes = {row[9] for row in rows if row[1].endswith(ends[0]) and row[2].endswith(ends[1])}
        [inode] = inodes
        return next(pid for pid in self.children() if f"socket:[{inode}]" in open_files(pid))

    def one_of_each(self) -> dict[int, http.client.HTTPConnection]:
        """A connection to each process."""
        connections: dict[int, http.client.HTTPConnection] = {}
        for _ in range(64):
            connection = self.connect()
            connections.setdefault(self.process_of(connection), connection)
        return connections

    def metric(self, name: str) -> float:
        return metric(self.connect(), name)


def open_files(pid: int) -> set[str]:
    targets = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed by now
            targets.add(str(path.readlink()))
    return targets


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> Any:
    text = None if body is None else json.dumps(body)
    connection.request(method, path, text, {"content-type": "application/json"})
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status == 200, content
    return json.loads(content) if answer.headers["content-type"] == "application/json" else content.decode()


def metric(connection: http.client.HTTPConnection, name: str) -> float:
    rows = [line.rpartition(" ") for line in ask(connection, "GET", "/metrics").splitlines()]
    return sum(float(value) for row, _, value in rows if name in (row, row.partition("{")[0]))


def wait_for_requests(connection: http.client.HTTPConnection, count: int) -> None:
    """Until ``count`` requests are in flight, this one included: a process counts one down after its answer is sent."""
    wait_for(lambda: metric(connection, "react_clip_requests_in_flight") == count)


@pytest.fixture(scope="module")
def start(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Pair]:
    config = tmp_path_factory.mktemp("processes") / "guard.json"
    SECOND_LOOK.save(config)
    flags = ("--processes", 2, "--config", config, "--diagnostics", "--open-metrics", "--keep-alive", 60)
    # Without a given secret: the one that is drawn must be the same in both processes.
    return lambda: Pair(launch(*flags, env={"REACT_CLIP_SERVE_SECRET": ""}))


@pytest.fixture(scope="module")
def pair(start: Callable[[], Pair]) -> Pair:
    return start()


def test_each_process_gets_connections(pair: Pair) -> None:
    connections = [pair.connect() for _ in range(64)]
    counts = Counter(map(pair.process_of, connections))
    assert len(counts) == 2
    assert set(counts) < pair.children()
    assert min(counts.values()) >= 20, "they are shared evenly"


def test_processes_answer_alike_and_add_up_their_metrics(pair: Pair, photos: list[bytes]) -> None:
    before = pair.metric("react_clip_images_total")
    connections = pair.one_of_each().values()
    body = as_json(photos)["json"]
    first, second = [ask(connection, "POST", "/v1/embed", body)["data"] for connection in connections]
    gated = [answer["diagnostics"]["gated"] for answer in first]
    assert any(gated), "some features depend on random numbers"
    assert first == second
    for connection in connections:
        assert metric(connection, "react_clip_images_total") == before + 2 * len(photos)
        wait_for_requests(connection, 1)
        assert metric(connection, "react_clip_queue_images") == 0


def test_a_killed_process_is_replaced_while_the_other_answers(pair: Pair, photos: list[bytes]) -> None:
    (victim, doomed), (survivor, alive) = pair.one_of_each().items()
    images = metric(alive, "react_clip_images_total")
    send_head(doomed)
    wait_for_requests(alive, 2)
    os.kill(victim, signal.SIGKILL)
    answer = ask(alive, "POST", "/v1/classify", as_json(photos[:1])["json"])
    assert len(answer["results"]) == 1
    with pytest.raises(ConnectionError):
        doomed.getresponse()
    wait_for(lambda: len(pair.children() - {victim}) == 3)
    wait_for(lambda: len(pair.one_of_each()) == 2)
    connections = pair.one_of_each()
    assert survivor in connections
    assert victim not in connections
    for connection in connections.values():
        ask(connection, "POST", "/v1/classify", as_json(photos[:1])["json"])
    assert pair.metric("react_clip_images_total") == images + 3
    wait_for_requests(pair.connect(), 1)  # without the request that ended with its process
    assert f"process {victim} ended with exit code -9" in pair.command.log.read_text()


def test_connections_that_wait_survive_the_end_of_a_process(pair: Pair) -> None:
    victim, survivor = pair.one_of_each()
    for pid in (victim, survivor):
        os.kill(pid, signal.SIGSTOP)
    waiting = [pair.connect() for _ in range(8)]
    for connection in waiting:
        connection.request("GET", "/healthz")
    os.kill(victim, signal.SIGKILL)
    os.kill(survivor, signal.SIGCONT)
    for connection in waiting:
        assert connection.getresponse().status == 200
    wait_for(lambda: len(pair.one_of_each()) == 2)


def test_a_model_that_ends_costs_its_requests_and_is_replaced(pair: Pair, photos: list[bytes]) -> None:
    model, connections = pair.model(), pair.one_of_each().values()
    body = json.dumps(as_json(photos[:2])["json"])
    os.kill(model, signal.SIGSTOP)
    for connection in connections:
        connection.request("POST", "/v1/classify", body, {"content-type": "application/json"})
    wait_for_requests(pair.connect(), 3)
    os.kill(model, signal.SIGKILL)
    for connection in connections:
        answer = connection.getresponse()
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert json.loads(answer.read())["error"]["type"] == "unavailable"
    alive = pair.connect()
    alive.request("GET", "/readyz")
    answer = alive.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["type"]) == (503, "stopping")
    wait_for(lambda: is_ready(pair.connect()) and is_ready(pair.connect()))
    for connection in connections:
        wait_for(lambda connection=connection: is_ready(connection))
        assert len(ask(connection, "POST", "/v1/classify", json.loads(body))["results"]) == 2
    assert model not in pair.children()


def is_ready(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/readyz")
    answer = connection.getresponse()
    answer.read()
    return answer.status == 200


@pytest.mark.parametrize("labels", [None, ["cat", "boat", "a red car"]])
def test_processes_share_batches(pair: Pair, photos: list[bytes], labels: list[str] | None) -> None:
    """Requests that arrive while the model computes share its next batch, from whatever process they come."""
    model, connections = pair.model(), pair.one_of_each().values()
    body = as_json(photos[:3])["json"] | ({"labels": labels} if labels else {})
    expected = [ask(connection, "POST", "/v1/classify", body)["results"] for connection in connections]
    batches, images = (pair.metric(f"react_clip_batch_images_{name}") for name in ("count", "sum"))
    os.kill(model, signal.SIGSTOP)
    try:
        for connection in connections:
            connection.request("POST", "/v1/classify", json.dumps(body), {"content-type": "application/json"})
        time.sleep(1.0)  # time to decode; on a slower machine there are two batches
    finally:
        os.kill(model, signal.SIGCONT)
    answers = [json.loads(connection.getresponse().read())["results"] for connection in connections]
    for answer, alone in zip(answers, expected, strict=True):
        assert [each["label"] for each in answer] == [each["label"] for each in alone]
        assert [each["probability"] for each in answer] == pytest.approx(
            [each["probability"] for each in alone], rel=1e-4
        )
    assert pair.metric("react_clip_batch_images_sum") == images + 6
    assert pair.metric("react_clip_batch_images_count") - batches in (1, 2)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_port_in_use_is_one_line(pair: Pair, capsys: pytest.CaptureFixture[str], processes: str) -> None:
    assert main(["serve", "--quiet", "--port", str(pair.port), "--processes", processes]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"react-clip: cannot listen on 127.0.0.1 port {pair.port}: Address already in use")
    assert err.count("\n") == 1


def send_head(connection: http.client.HTTPConnection, length: int = 1000) -> None:
    """The head of a request whose body follows later."""
    connection.putrequest("POST", "/v1/classify")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(length))
    connection.endheaders()


def is_refused(pair: Pair) -> bool:
    """True once the server refuses connections instead of letting them wait until it ends."""
    try:
        pair.connect().close()
    except ConnectionRefusedError:
        return True
    except ConnectionResetError:
        pass  # the listener was closed while this connection waited to be accepted
    return False


def check_stop(pair: Pair, photo: bytes, stop: Callable[[], None]) -> None:
    """Both processes finish a request whose body arrives after ``stop``; then the server ends with 0."""
    body = json.dumps(as_json([photo])["json"]).encode()
    connections = pair.one_of_each().values()
    for connection in connections:
        send_head(connection, len(body))
    wait_for_requests(pair.connect(), 3)
    children = pair.children()
    stop()
    wait_for(lambda: is_refused(pair))
    for connection in connections:
        connection.send(body)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
    pair.command.process.join(60)
    assert pair.command.process.exitcode == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)


def test_ctrl_c_answers_accepted_requests(pair: Pair, photos: list[bytes]) -> None:
    """The last test with this server. A terminal sends SIGINT to every process, in any order."""

    def interrupt() -> None:
        for pid in (*pair.children(), pair.parent, *pair.children()):
            os.kill(pid, signal.SIGINT)
            time.sleep(0.3)  # uvicorn looks every 0.1 s whether it was interrupted twice

    check_stop(pair, photos[0], interrupt)


def test_sigterm_answers_accepted_requests(start: Callable[[], Pair], photos: list[bytes]) -> None:
    another = start()
    check_stop(another, photos[0], lambda: another.command.signal(signal.SIGTERM))


def test_no_process_outlives_the_first_one(start: Callable[[], Pair]) -> None:
    another = start()
    children = another.children()
    assert len(children) == 3
    folders = {Path(path).parent for pid in children for path in open_files(pid) if path.endswith(".db")}
    another.command.signal(signal.SIGKILL)
    wait_for(lambda: not any(is_running(pid) for pid in children))
    for folder in folders:  # that of the metrics, which nobody could remove
        shutil.rmtree(folder)


def is_running(pid: int) -> bool:
    """False also for a process that has ended but whose exit code nobody has read."""
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_cannot_start_ends_the_others_with_one_line(tmp_path: Path) -> None:
    words = ("serve", "--quiet", "--processes", 2, "--port", 0, "--model", "no-such-model")
    command = start_command(*words, log=tmp_path / "log")
    command.process.join(60)
    assert command.process.exitcode == 2
    [line] = command.log.read_text().splitlines()
    assert line.startswith("react-clip: no model is called 'no-such-model'")


def test_only_linux_shares_a_port(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert main(["serve", "--quiet", "--port", "0", "--processes", "3"]) == 2
    assert capsys.readouterr().err.startswith("react-clip: --processes is 3, but only Linux")
