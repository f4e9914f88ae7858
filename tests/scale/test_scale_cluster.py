"""The runner and ``defend_dataset`` on a real cluster whose workers, nodes and drivers are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import react_clip as rc
from programs import start_command
from react_clip.environment import versions
from react_clip.scale import Summary, defend_dataset, runner
from react_clip.scale.cluster import connected, require_versions
from react_clip.scale.runner import Allocation, WorkerPool
from scale_toys import picture, wait_for, write_tar

log = logging.getLogger("react_clip.scale")
GUARD = rc.ReACT(tau=0.8, views=40, max_batch=32)
IMAGES, CHUNK = 72, 4


@pytest.fixture(scope="module")
def joined(cluster: Any) -> Iterator[Any]:
    """The ``ray`` module, connected to the cluster."""
    with connected(cluster.address) as ray:
        yield ray


# ---------------------------------------------------------------------- the runner


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


# ---------------------------------------------------------------------- defend_dataset


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tar shard and eight photos; two of the images are damaged."""
    folder = tmp_path_factory.mktemp("collection")
    images = [b"no image" if i in (5, 50) else picture(i) for i in range(IMAGES)]
    for i in range(8):
        (folder / f"{i}.png").write_bytes(images[i])
    write_tar(folder / "shard.tar", {f"{i:03d}.png": images[i] for i in range(8, IMAGES)})
    return folder


@pytest.fixture(scope="module")
def expected(
    collection: Path, clf: rc.ZeroShotClassifier, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """The parts of an undisturbed local run."""
    out = tmp_path_factory.mktemp("expected") / "out"
    summary = run_locally(collection, out, clf)
    assert (summary.images, summary.errors) == (IMAGES, 2)
    assert 0 < summary.gated < IMAGES - 2
    return parts_of(out)


def run_locally(collection: Path, out: Path, clf: rc.ZeroShotClassifier, **options: Any) -> Summary:
    return defend_dataset(collection, out, clf, GUARD, engine="local", chunk=CHUNK, **options)


def parts_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("part-*.parquet"))}


def test_a_killed_worker_and_a_killed_node_change_nothing(
    cluster: Any,
    joined: Any,
    collection: Path,
    clf: rc.ZeroShotClassifier,
    expected: dict[str, bytes],
    tmp_path: Path,
    worker_processes: Callable[[], list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"
    node = cluster.add_node(num_cpus=1)
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(defend_dataset, collection, out, clf, GUARD, chunk=CHUNK, workers=2)
        wait_for(lambda: job.done() or parts_of(out))
        os.kill(worker_processes()[0], signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        summary = job.result()
    assert joined.is_initialized(), "a session that was open before stays open"
    assert "a worker died" in caplog.text
    assert parts_of(out) == expected
    assert (summary.images, summary.errors, summary.missing) == (IMAGES, 2, ())


def test_a_killed_driver_is_resumed(
    cluster: Any,
    collection: Path,
    clf: rc.ZeroShotClassifier,
    expected: dict[str, bytes],
    tiny_folder: Path,
    tmp_path: Path,
) -> None:
    out, config = tmp_path / "out", tmp_path / "guard.json"
    GUARD.save(config)
    words = ["embed", str(collection), "--out", str(out), "--chunk", str(CHUNK), "--quiet"]
    words += ["--model", str(tiny_folder), "--labels", "cat, dog, teapot", "--config", str(config)]
    words += ["--engine", "ray", "--address", cluster.address, "--workers", "1"]
    driver = start_command(*words, log=tmp_path / "driver.log")
    wait_for(lambda: driver.process.exitcode is not None or len(parts_of(out)) >= 2)
    driver.end()
    assert driver.process.exitcode == -signal.SIGKILL, driver.log.read_text()
    finished = {path: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert 2 <= len(finished) < len(expected)
    with pytest.raises(rc.ReactClipError, match="continue it with --resume"):
        run_locally(collection, out, clf)
    assert run_locally(collection, out, clf, resume=True).images == IMAGES
    assert parts_of(out) == expected
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_a_full_folder_keeps_the_parts_that_fitted(
    joined: Any, collection: Path, clf: rc.ZeroShotClassifier, expected: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    size = 3 * max(map(len, expected.values())) // 1024
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", out], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        line = r"cannot write .*part-[\d-]+.parquet: No space left on device.*--resume continues$"
        with pytest.raises(rc.ReactClipError, match=line):
            defend_dataset(collection, out, clf, GUARD, chunk=CHUNK, workers=1)
        fitted = parts_of(out)
        assert 0 < len(fitted) < len(expected)
        assert fitted.items() <= expected.items()
        assert not list(out.glob(".part-*"))
        subprocess.run(["mount", "-o", "remount,size=8m", out], check=True)
        run_locally(collection, out, clf, resume=True)
        assert parts_of(out) == expected
    finally:
        subprocess.run(["umount", "--lazy", out], check=True)


@pytest.mark.usefixtures("in_process")
def test_a_model_that_a_worker_cannot_load_is_one_line(collection: Path, tiny_copy: Path, tmp_path: Path) -> None:
    lost = rc.ZeroShotClassifier(rc.load(tiny_copy, device="cpu"), ["cat", "dog", "teapot"])
    (tiny_copy / "config.json").unlink()
    with pytest.raises(rc.ReactClipError, match=r"has no config.json; .*--resume continues$") as caught:
        defend_dataset(collection, tmp_path / "out", lost, GUARD)
    assert "\n" not in str(caught.value)
