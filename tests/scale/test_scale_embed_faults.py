"""Collections on a cluster in which things die: nothing is lost, nothing is made twice, the parts are those of a calm
run. The cluster is real, and so are the deaths: SIGKILL to a decoding process, to an actor at work, to a node, to the
driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray

import react_clip as rc
from react_clip.scale import Summary, defend_dataset

GUARD = rc.ReACT(tau=0.8, views=40, max_batch=32)
IMAGES, PARCEL = 96, 4
DECODER, ACTOR = (f"ray::MapWorker(MapBatches({name}))" for name in ("_Decoder", "_Worker"))


@pytest.fixture(scope="module")
def pair(cluster_of: Any) -> Iterator[Any]:
    """Two nodes of one core: of two workers, one lives on each."""
    with cluster_of(1, 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, picture: Callable[[int], bytes], write_tar: Any) -> Path:
    """A shard and a few photos, two of which are none."""
    folder = tmp_path_factory.mktemp("collection")
    images = [b"no image" if i in (5, 50) else picture(i) for i in range(IMAGES)]
    for i in range(8):
        (folder / f"{i}.png").write_bytes(images[i])
    write_tar(folder / "shard.tar", {f"{i:03d}.png": images[i] for i in range(8, IMAGES)})
    return folder


@pytest.fixture(scope="module")
def calm(collection: Path, clf: rc.ZeroShotClassifier, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The parts that a process on its own writes, and that nobody disturbed."""
    out = tmp_path_factory.mktemp("calm") / "out"
    summary = defend_dataset(collection, out, clf, GUARD, engine="local", parcel=PARCEL)
    assert (summary.images, summary.errors) == (IMAGES, 2)
    assert 0 < summary.opened < IMAGES - 2
    return parts_of(out)


def parts_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("part-*.parquet"))}


def on_ray(collection: Path, out: Path, clf: rc.ZeroShotClassifier, **options: Any) -> Summary:
    return defend_dataset(collection, out, clf, GUARD, parcel=PARCEL, **{"workers": 1, **options})


def processes(title: str, roots: set[int]) -> list[int]:
    """Processes of that title below some others: other clusters on this machine are none of our business."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            titles[pid] = (entry / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace")

    def is_ours(pid: int) -> bool:
        while pid in parents and pid not in roots:
            pid = parents[pid]
        return pid in roots

    return [pid for pid, shown in titles.items() if shown.startswith(title) and is_ours(pid)]


def raylets(cluster: Any) -> set[int]:
    return {info.process.pid for node in cluster.list_all_nodes() for info in node.all_processes["raylet"]}


@contextlib.contextmanager
def meanwhile(strike: Callable[[], bool]) -> Iterator[None]:
    """Try to strike until it works; it must, before the block ends."""
    over, struck = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.is_set() and not struck.is_set():
            if strike():
                struck.set()
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert struck.is_set(), "the job ended before anything died"


def kill_one(title: str, cluster: Any) -> bool:
    for pid in processes(title, raylets(cluster)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def test_killed_processes_cost_their_parcels_a_second_try(
    pair: Any, collection: Path, clf: rc.ZeroShotClassifier, calm: dict[str, bytes], tmp_path: Path
) -> None:
    out, victims = tmp_path / "out", [DECODER, ACTOR]

    def strike() -> bool:
        at_work = victims[0] == DECODER or 1 <= len(parts_of(out)) < len(calm)
        if at_work and kill_one(victims[0], pair):
            del victims[0]
        return not victims

    with meanwhile(strike):
        summary = on_ray(collection, out, clf)
    assert parts_of(out) == calm
    assert (summary.images, summary.errors, summary.missing) == (IMAGES, 2, ())


def test_a_dead_node_takes_no_part_with_it(
    pair: Any, collection: Path, clf: rc.ZeroShotClassifier, calm: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    [doomed] = set(pair.list_all_nodes()) - {pair.head_node}
    roots = {info.process.pid for info in doomed.all_processes["raylet"]}

    with ThreadPoolExecutor(1) as pool:
        # The job in a thread, because Ray starts nodes from the main one only.
        job = pool.submit(on_ray, collection, out, clf, workers=2)
        while not (parts_of(out) and processes(ACTOR, roots)):
            assert not job.done(), "the job ended before anything died"
            time.sleep(0.005)
        pair.remove_node(doomed, allow_graceful=False)
        assert not job.done(), "the job ended before anything died"
        pair.add_node(num_cpus=1)  # as an autoscaler would: the other one has no room for a second worker
        summary = job.result()
    assert parts_of(out) == calm
    assert summary.images == IMAGES


def test_a_killed_driver_is_continued_where_it_was(
    pair: Any,
    collection: Path,
    clf: rc.ZeroShotClassifier,
    calm: dict[str, bytes],
    tiny_folder: Path,
    command: list[str],
    tmp_path: Path,
) -> None:
    out, config = tmp_path / "out", tmp_path / "guard.json"
    GUARD.save(config)
    options = ["--model", str(tiny_folder), "--labels", "cat, dog, teapot", "--config", str(config)]
    ray_options = ["--engine", "ray", "--address", pair.address, "--workers", "1", "--parcel", str(PARCEL)]
    everything = [*command, "embed", str(collection), "--out", str(out), *options, *ray_options, "--quiet"]
    driver = subprocess.Popen(everything, stderr=subprocess.PIPE, text=True)
    while driver.poll() is None and len(parts_of(out)) < 2:
        time.sleep(0.005)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL, driver.communicate()[1]
    finished = {path: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert 2 <= len(finished) < len(calm)

    with pytest.raises(rc.ReactClipError, match="continue it with --resume"):
        on_ray(collection, out, clf)
    assert on_ray(collection, out, clf, resume=True).images == IMAGES
    assert parts_of(out) == calm
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_a_full_folder_keeps_what_fitted(
    pair: Any, collection: Path, clf: rc.ZeroShotClassifier, calm: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    size = 3 * max(map(len, calm.values())) // 1024
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", out], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        with pytest.raises(rc.ReactClipError, match=r"cannot write .*part-\d+.parquet: No space left on device"):
            on_ray(collection, out, clf)
        fitted = parts_of(out)
        assert 0 < len(fitted) < len(calm)
        assert fitted.items() <= calm.items()
        assert not list(out.glob(".part-*"))
        subprocess.run(["mount", "-o", "remount,size=8m", out], check=True)
        # Whoever continues it: the engines write the same parts.
        defend_dataset(collection, out, clf, GUARD, engine="local", parcel=PARCEL, resume=True)
        assert parts_of(out) == calm
    finally:
        subprocess.run(["umount", "--lazy", out], check=True)


def test_what_fails_in_a_worker_reaches_the_user_as_its_line(
    pair: Any,
    collection: Path,
    clf: rc.ZeroShotClassifier,
    tiny_copy: Path,
    tmp_path: Path,
    calm: dict[str, bytes],
) -> None:
    lost = rc.ZeroShotClassifier(rc.load(tiny_copy, device="cpu"), ["cat", "dog", "teapot"])
    (tiny_copy / "config.json").unlink()
    with pytest.raises(rc.ReactClipError, match=r"has no config.json; .*--resume continues$") as caught:
        on_ray(collection, tmp_path / "out", lost)
    assert "\n" not in str(caught.value)
    assert ray.is_initialized(), "a session that was there before stays"
    with pytest.raises(rc.ReactClipError, match="--workers is 99; the cluster has 2 CPU cores"):
        on_ray(collection, tmp_path / "other", clf, workers=99)
