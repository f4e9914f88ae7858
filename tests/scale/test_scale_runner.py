"""The task runner on a real cluster: workers are killed, and every task still ends once."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import react_clip as rc
from react_clip.environment import versions
from react_clip.scale import runner
from react_clip.scale.cluster import connected, require_versions
from react_clip.scale.runner import Allocation, WorkerPool

log = logging.getLogger("react_clip.scale")


def echo_worker(folder: Path, device: str = "cpu") -> Any:
    """A function that builds a worker for tasks of the form ``action number``; pickled by value, as it is local."""

    class Worker:
        def __init__(self) -> None:
            if device == "broken":
                raise KeyError("no such device")
            self.device = f"process {os.getpid()}" if device == "different" else device

        def __call__(self, task: str) -> str:
            action, _, number = task.partition(" ")
            once = folder / number
            if action == "poison" or (action == "die" and not once.exists()):
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if action == "refuse":
                raise rc.ReactClipError(f"{number} is refused")
            if action == "fail":
                raise ValueError("a bug\nin two lines")
            logging.getLogger("react_clip.scale").warning("warning of %s", task)
            return f"{Path.cwd()} {task}"

    return Worker


def pool(ray: Any, build: Any, workers: int = 1, **options: Any) -> WorkerPool:
    return WorkerPool(ray, build, Allocation("cpu", workers, {"num_cpus": 1 / workers}), log=log, **options)


@pytest.fixture(scope="module")
def joined(cluster: Any) -> Iterator[Any]:
    with connected(cluster.address) as ray:
        yield ray


def test_tasks_of_dead_workers_run_again(joined: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tasks = [f"{'die' if i == 3 else 'echo'} {i}" for i in range(40)]
    results: dict[str, str] = {}
    caplog.set_level(logging.INFO)
    with pool(joined, echo_worker(tmp_path), workers=2, threads=2) as workers:
        for task, result in workers.run(tasks):
            assert task not in results
            results[task] = result
    assert results == {task: f"{Path.cwd()} {task}" for task in tasks}
    assert (tmp_path / "3").exists()
    assert "a worker died" in caplog.text
    assert {record.getMessage() for record in caplog.records} >= {f"warning of {task}" for task in tasks}


def run_until_it_fails(workers: WorkerPool) -> None:
    """On a busy machine a killed worker may answer for a while."""
    while True:
        list(workers.run(["echo 2"]))


def test_failures_of_tasks_are_one_line(joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool: a task that refuses, one with a bug, one that kills every worker, and no worker at all."""
    monkeypatch.setattr(runner, "MAX_ATTEMPTS", 2)
    with pool(joined, echo_worker(tmp_path)) as workers:
        for task, line in {
            "refuse 7": r"^7 is refused$",
            "fail 7": r"^a worker failed during fail 7 \(ValueError: a bug\)$",
            "poison 0": r"2 workers died during poison 0, perhaps for lack of memory; use fewer",
        }.items():
            with pytest.raises(rc.ReactClipError, match=line):
                list(workers.run(["echo 1", task]))
        joined.kill(workers._workers[0])
        with pytest.raises(rc.ReactClipError, match=r"no worker is left \(.*; start again to go on"):
            run_until_it_fails(workers)


def test_failures_of_workers_are_one_line(joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pool(joined, echo_worker(tmp_path, "different"), workers=2, one_device=True) as workers,
        pytest.raises(rc.ReactClipError, match=r"computes on process \d+ and another one on process \d+, where"),
    ):
        list(workers.run([f"echo {i}" for i in range(10_000)]))
    with (
        pool(joined, echo_worker(tmp_path, "broken")) as workers,
        pytest.raises(rc.ReactClipError, match=r"a worker failed during its start .KeyError"),
    ):
        list(workers.run(["echo 1"]))


def test_nodes_must_have_the_versions_of_the_driver() -> None:
    with pytest.raises(rc.ReactClipError, match=r"has torch .*, the driver 0.1; install the same versions"):
        require_versions({**versions(), "torch": "0.1"})


@pytest.mark.parametrize(
    ("nodes", "asked", "options", "expected"),
    [
        ([{"CPU": 8}, {"CPU": 4}, {}], (None, None), {"whole_nodes": True}, ("cpu", 2, {"num_cpus": 4})),
        ([{"CPU": 8}, {"CPU": 8}], (4, None), {"whole_nodes": True}, ("cpu", 4, {"num_cpus": 4})),
        ([{"CPU": 2}], (5, None), {"whole_nodes": True}, ("cpu", 5, {"num_cpus": 1})),
        ([{"CPU": 8}, {"CPU": 4}], (None, None), {"per_gpu": 2}, ("cpu", 12, {"num_cpus": 1})),
        ([{"CPU": 8, "GPU": 4}] * 2, (None, None), {"per_gpu": 2}, ("cuda", 16, {"num_gpus": 0.5, "num_cpus": 1})),
        ([{"CPU": 8, "GPU": 2}], (3, "cuda"), {}, ("cuda", 3, {"num_gpus": 0.5, "num_cpus": 1})),
        ([{"CPU": 8, "GPU": 2}], (None, "cpu"), {"whole_nodes": True}, ("cpu", 1, {"num_cpus": 8})),
    ],
)
def test_workers_fit_the_nodes(nodes: Any, asked: Any, options: Any, expected: Any) -> None:
    fake = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes])
    assert Allocation.choose(fake, *asked, **options) == Allocation(*expected)


def test_a_missing_gpu_is_one_line() -> None:
    fake = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2}}])
    with pytest.raises(rc.ReactClipError, match="--device is cuda, but the cluster has no GPU"):
        Allocation.choose(fake, None, "cuda")
