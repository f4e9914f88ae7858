"""``defend_dataset`` on a real cluster: whatever is killed, the parts are byte for byte those of a local run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import react_clip as rc
from programs import start_command
from react_clip.scale import Summary, defend_dataset
from react_clip.scale.cluster import connected
from scale_toys import picture, wait_for, write_tar

GUARD = rc.ReACT(tau=0.8, views=40, max_batch=32)
IMAGES, CHUNK = 72, 4


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
    collection: Path,
    clf: rc.ZeroShotClassifier,
    expected: dict[str, bytes],
    tmp_path: Path,
    worker_processes: Callable[[], list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "out"
    # Connected here, because Ray changes clusters from the main thread only.
    node = cluster.add_node(num_cpus=1)
    with connected(cluster.address), ThreadPoolExecutor(1) as pool:
        job = pool.submit(defend_dataset, collection, out, clf, GUARD, chunk=CHUNK, workers=2)
        wait_for(lambda: job.done() or parts_of(out))
        os.kill(worker_processes()[0], signal.SIGKILL)
        cluster.remove_node(node, allow_graceful=False)
        summary = job.result()
        assert ray.is_initialized(), "a session that was open before stays open"
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
    cluster: Any, collection: Path, clf: rc.ZeroShotClassifier, expected: dict[str, bytes], tmp_path: Path
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
            defend_dataset(collection, out, clf, GUARD, chunk=CHUNK, workers=1, address=cluster.address)
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
