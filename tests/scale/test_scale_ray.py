"""Embedding, evaluation and the service on a real cluster: processes are killed, and the answers stay the same.

All tests that need a cluster are in this file, so that one is started.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from evaluation_toys import write_photos

import react_clip as rc
from programs import start_command, wait_for
from react_clip.evaluation import EvaluationResult, Recipe, run_recipe
from react_clip.scale import defend_dataset
from react_clip.scale import evaluation as on_cluster
from toys import features, picture, read_rows, write_tar

pytestmark = [pytest.mark.ray, pytest.mark.process]

GUARD = rc.ReACT(tau=0.8, views=40)
IMAGES = 72
SECRET = "a secret for the tests of Ray"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of one node with two cores."""
    from ray.cluster_utils import Cluster

    os.environ.update({"RAY_worker_niceness": "0", "RAY_worker_register_timeout_seconds": "600"})
    for attempt in range(5):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, include_dashboard=False)
            break
        except Exception:  # a node has 30 s to start
            cluster.shutdown()
            if attempt == 4:
                raise
    yield cluster.address
    cluster.shutdown()


def ray_processes(name: str) -> set[int]:
    """Processes of Ray's workers with this name in their title."""
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any("ray::" in word and name in word for word in process.info["cmdline"] or ())
    }


def run_and_kill(job: Callable[[], Any], worker: str, begun: Callable[[], bool]) -> Any:
    """The result of a job of which one worker is killed once it has begun."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(job)
        wait_for(lambda: future.done() or (begun() and ray_processes(worker)), 300)
        assert not future.done(), "the job ended before a worker was killed; make it longer"
        os.kill(min(ray_processes(worker)), signal.SIGKILL)
        return future.result()


# ---------------------------------------------------------------------- embed


@pytest.mark.smoke
def test_a_cluster_gives_the_rows_of_one_process(cluster: str, clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    write_tar(tmp_path / "photos" / "shard.tar", {f"{i}.png": picture(i) for i in range(4)})
    for engine in ("local", "ray"):
        how = {"engine": engine, "address": cluster, "workers": 1} if engine == "ray" else {"engine": engine}
        defend_dataset(tmp_path / "photos", tmp_path / engine, clf, GUARD, **how)
    rows, expected = read_rows(tmp_path / "ray"), read_rows(tmp_path / "local")
    assert rows["label"].tolist() == expected["label"].tolist()
    assert np.allclose(features(rows), features(expected), atol=1e-5)


def test_a_killed_worker_changes_no_row(cluster: str, clf: rc.ZeroShotClassifier, tmp_path: Path) -> None:
    source, out = tmp_path / "photos", tmp_path / "out"
    images = [(f"{i:03d}.png", b"no image" if i in (5, 50) else picture(i)) for i in range(IMAGES)]
    for shard in range(4):
        write_tar(source / f"shard{shard}.tar", dict(images[8 + 16 * shard : 24 + 16 * shard]))
    for name, content in images[:8]:
        (source / name).write_bytes(content)
    guard = GUARD.replace(views=400)  # it takes seconds
    defend_dataset(source, tmp_path / "local", clf, guard, engine="local")
    summary = run_and_kill(
        lambda: defend_dataset(source, out, clf, guard, address=cluster, workers=1, batch=4),
        "Defender",
        lambda: any(out.glob("*.parquet")),
    )
    assert (summary.images, summary.errors, summary.missing) == (IMAGES, 2, ())
    rows, expected = read_rows(out), read_rows(tmp_path / "local")
    assert list(rows.columns) == list(expected.columns)
    for name in ("key", "error", "label", "gated", "passes"):
        pd.testing.assert_series_equal(rows[name], expected[name])
    assert np.allclose(features(rows), features(expected), atol=1e-5)


# ---------------------------------------------------------------------- evaluate


def test_an_evaluation_equals_that_of_one_process(cluster: str, tiny_folder: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "data", "toys", count=8)
    means = rc.ZeroShotClassifier.from_folder(rc.load(tiny_folder, device="cpu"), tmp_path / "data" / "toys" / "test")
    (tmp_path / "heads").mkdir()
    names = [name.replace("_", " ") for name in means.names]
    features = means.class_features.numpy()
    np.savez(tmp_path / "heads" / "toys.npz", names=names, folders=list(means.names), features=features)
    recipe = Recipe.from_dict(
        {
            "title": "Tiny",
            "model": str(tiny_folder),
            "datasets": ["toys"],
            "attacks": [{"kind": "pgd", "steps": 60, "eps": "1/255"}, {"kind": "pgd", "steps": 60, "eps": "8/255"}],
            "defenses": ["undefended", {"kind": "react", "tau": 1.48}],
            "batch": 2,
        }
    )
    place = {"root": tmp_path / "data", "heads": tmp_path / "heads", "device": "cpu", "progress": False}
    run_recipe(recipe, tmp_path / "local", **place)
    run = tmp_path / "cluster"
    result = run_and_kill(
        lambda: on_cluster.run_recipe(recipe, run, address=cluster, **place),
        "_Worker",
        lambda: len(list(run.rglob("*.safetensors"))) > 3,
    )
    local = EvaluationResult.load(tmp_path / "local")
    pd.testing.assert_frame_equal(result.images, local.images)
    assert result.self_check == local.self_check
    assert not list(run.rglob(".*.part"))


# ---------------------------------------------------------------------- serve


def test_replicas_answer_as_the_library_also_after_one_was_killed(
    cluster: str, tiny_folder: Path, clf: rc.ZeroShotClassifier, tmp_path: Path
) -> None:
    GUARD.save(tmp_path / "guard.json")
    flags = ["--model", tiny_folder, "--labels", "cat, dog, teapot", "--config", tmp_path / "guard.json", "--json"]
    flags += ["--engine", "ray", "--workers", 2, "--threads", 1, "--device", "cpu", "--port", 0]
    variables = {"RAY_ADDRESS": cluster, "REACT_CLIP_SERVE_SECRET": SECRET}
    command = start_command("serve", *flags, log=tmp_path / "log", env=variables)
    url = httpx.URL(__import__("json").loads(command.read_line())["url"])
    photos = [picture(seed) for seed in range(4)]
    with torch.no_grad():
        expected = GUARD(clf, photos, seed=SECRET.encode()).probs

    def classify(number: int) -> int:
        """The status; a wrong answer fails."""
        answer = httpx.post(f"{url}/v1/classify", files={"images": photos[number]}, timeout=60)
        if answer.status_code == 200:
            [result] = answer.json()["results"]
            said = {entry["label"]: entry["probability"] for entry in result["answers"]}
            assert [said[name] for name in clf.names] == pytest.approx(expected[number].tolist(), abs=1e-4)
        return answer.status_code

    assert {classify(number % 4) for number in range(16)} == {200}
    before, stop, statuses = ray_processes("ServeReplica"), threading.Event(), list[int]()
    assert len(before) == 2

    def call(number: int) -> None:
        while not stop.is_set():
            statuses.append(classify(number))

    with ThreadPoolExecutor(4) as callers:
        futures = [callers.submit(call, number) for number in range(4)]
        wait_for(lambda: len(statuses) > 8)
        os.kill(min(before), signal.SIGKILL)
        wait_for(lambda: ray_processes("ServeReplica") - before, 300)
        stop.set()
        for future in futures:
            future.result()
    assert set(statuses) <= {200, 500, 503}, "500 is the proxy's answer if a replica dies with the request"
    assert sum(status != 200 for status in statuses) <= 4, "only requests that the dead replica had"
    command.signal(signal.SIGTERM)
    command.process.join(120)
    assert command.process.exitcode == 0
    wait_for(lambda: not ray_processes("ServeReplica"), 120)
