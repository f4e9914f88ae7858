"""One Ray cluster for all tests of this folder, a stand-in for it, a classifier, and photos."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import react_clip as rc
from react_clip.scale import embedding, evaluation
from scale_toys import picture

pytest.importorskip("ray", reason="needs the scale extra")
pytest.importorskip("pyarrow", reason="needs the scale extra")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster of one node with one core; the test that kills a node adds it first."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # by default workers give way to everything else on the machine
        patch.setenv("RAY_worker_register_timeout_seconds", "600")
        for _ in range(5):
            cluster = Cluster()
            try:
                cluster.add_node(num_cpus=1, include_dashboard=False)
                break
            except Exception as error:  # a node has 30 s to start
                cluster.shutdown()
                late = error
        else:
            raise late
        try:
            yield cluster
        finally:
            cluster.shutdown()


class InProcessPool:
    """The interface of ``WorkerPool`` with one worker in this process, for what no process is needed for."""

    def __init__(self, ray: Any, build: Callable[[], Any], *_: Any, **options: Any) -> None:
        self._worker = build()

    def __enter__(self) -> InProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, tasks: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for task in tasks:
            yield task, self._worker(task)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs "on a cluster" run in this process instead."""
    ray = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 1}}])
    for module in (embedding, evaluation):
        monkeypatch.setattr(module, "WorkerPool", InProcessPool)
        monkeypatch.setattr(module, "connected", lambda address: nullcontext(ray))


@pytest.fixture
def worker_processes(caplog: pytest.LogCaptureFixture) -> Callable[[], list[int]]:
    """Process ids of the workers that have started during a test."""
    caplog.set_level(logging.INFO, "react_clip")
    return lambda: [int(pid) for pid in re.findall(r"worker: process (\d+) on node", caplog.text)]


@pytest.fixture(scope="session")
def clf(tiny_folder: Path) -> rc.ZeroShotClassifier:
    """The tiny CLIP with three classes; workers load it from its folder."""
    return rc.ZeroShotClassifier(rc.load(tiny_folder, device="cpu"), ["cat", "dog", "teapot"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Twenty files in two folders; the eighth is no image."""
    folder = tmp_path / "photos"
    for i in range(20):
        path = folder / "ab"[i // 10] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"no image" if i == 7 else picture(i))
    return folder
