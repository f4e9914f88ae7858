"""``evaluate --engine ray`` on a real cluster: processes are killed, and the run is that of a single process."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from evaluation_toys import write_photos

import react_clip as rc
from programs import start_command
from react_clip.cli import main
from react_clip.evaluation import EvaluationResult, Recipe, run_recipe
from react_clip.scale import evaluation as on_cluster
from scale_toys import wait_for

RECIPE = """
title: Tiny
model: {model}
datasets: [toys, others]
attacks: [{{kind: pgd, steps: 10, eps: 1/255}}, {{kind: pgd, steps: 60, eps: 8/255}}]
defenses: [undefended, {{defense: react, tau: 1.48, label: ReACT}}]
batch: 4
"""


def write_head(path: Path, folder: Path, model: Path, sign: float = 1.0) -> None:
    """Class features: mean features of the photos, so that most are classified correctly; none with sign -1."""
    clf = rc.ZeroShotClassifier.from_folder(rc.load(model, device="cpu"), folder)
    path.parent.mkdir(exist_ok=True)
    names = [name.replace("_", " ") for name in clf.names]
    np.savez(path, names=names, folders=list(clf.names), features=sign * clf.class_features.numpy())


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over two sets, their photos and class features."""
    folder = tmp_path_factory.mktemp("evaluate")
    (folder / "tiny.yaml").write_text(RECIPE.format(model=tiny_folder))
    for seed, (name, count) in enumerate({"toys": 8, "others": 8}.items()):
        write_photos(folder / "data", name, count=count, seed=seed)
        write_head(folder / "heads" / f"{name}.npz", folder / "data" / name / "test", tiny_folder)
    return folder


def inputs(folder: Path) -> dict[str, Any]:
    return {"root": folder / "data", "heads": folder / "heads", "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def local_run(folder: Path) -> Path:
    """The run of one process."""
    run_recipe(Recipe.load(folder / "tiny.yaml"), folder / "local", **inputs(folder))
    return folder / "local"


def assert_same(run: Path, local: Path) -> None:
    assert (run / "per_image.parquet").read_bytes() == (local / "per_image.parquet").read_bytes()
    ours, theirs = (dataclasses.asdict(EvaluationResult.load(one / "result.json")) for one in (run, local))
    for key in ("created", "command"):
        del ours[key], theirs[key]
    assert repr(ours) == repr(theirs)
    assert not list(run.rglob(".*.part"))


def shards(run: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (run / "shards").rglob("*.safetensors")}


def assert_continued(before: dict[Path, int], after: dict[Path, int]) -> None:
    assert 10 < len(before) < len(after)
    assert {path: after[path] for path in before} == before, "finished shards must not be computed again"


def test_a_killed_worker_changes_nothing(
    cluster: Any, folder: Path, local_run: Path, worker_processes: Callable[[], list[int]]
) -> None:
    run, recipe = folder / "killed", Recipe.load(folder / "tiny.yaml")
    with ThreadPoolExecutor(1) as pool:
        options = {"address": cluster.address, "workers": 1, **inputs(folder)}
        job = pool.submit(on_cluster.run_recipe, recipe, run, **options)
        wait_for(lambda: job.done() or (len(shards(run)) > 10))
        before = shards(run)
        os.kill(worker_processes()[0], signal.SIGKILL)
        job.result()
    assert re.search(r"a worker died \(.*\) during fill (toys|others) \(\d+, \d+\)", (run / "run.log").read_text())
    assert_same(run, local_run)
    assert_continued(before, shards(run))


def test_a_killed_driver_is_continued(
    cluster: Any, folder: Path, local_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    run = folder / "driver"
    words = ["evaluate", "tiny.yaml", "--data", "data", "--heads", "heads", "--out", "driver", "--quiet"]
    words += ["--device", "cpu"]
    on_ray = ["--engine", "ray", "--workers", "1", "--address", cluster.address]
    driver = start_command(*words, *on_ray, log=folder / "driver.log")
    wait_for(lambda: driver.process.exitcode is not None or len(shards(run)) > 10)
    driver.end()
    assert driver.process.exitcode == -signal.SIGKILL, driver.log.read_text()
    for process in re.findall(r"worker: process (\d+)", (run / "run.log").read_text()):
        wait_for(lambda: not psutil.pid_exists(int(process)))  # noqa: B023
    before = shards(run)
    assert main(words) == 0
    assert_same(run, local_run)
    assert_continued(before, shards(run))


@pytest.mark.usefixtures("in_process")
def test_adaptive_attacks_pass_the_same_sanity_checks(folder: Path) -> None:
    values = {
        **Recipe.load(folder / "tiny.yaml").replace(datasets=("others",), attacks=(), limit=2).to_dict(),
        "threat": "adaptive",
        "attacks": [{"kind": "adaptive-both", "eps": "4/255", "steps": 5, "eot": 1}],
        "defenses": [{"defense": "react", "tau": 1.48}],
    }
    recipe = Recipe.from_dict(values)
    ours = on_cluster.run_recipe(recipe, folder / "adaptive", **inputs(folder))
    theirs = run_recipe(recipe, folder / "adaptive-local", **inputs(folder))
    assert ours.checks
    assert repr(ours.checks) == repr(theirs.checks)
    assert_same(folder / "adaptive", folder / "adaptive-local")


@pytest.mark.usefixtures("in_process")
def test_a_broken_model_is_found_before_anything_is_computed(folder: Path, tiny_folder: Path, tmp_path: Path) -> None:
    write_head(tmp_path / "heads" / "toys.npz", folder / "data" / "toys" / "test", tiny_folder, sign=-1.0)
    recipe = Recipe.load(folder / "tiny.yaml").replace(datasets=("toys",))
    with pytest.raises(rc.ReactClipError, match="gets no clean image of toys right"):
        on_cluster.run_recipe(recipe, tmp_path / "run", **{**inputs(folder), "heads": tmp_path / "heads"})
    assert not shards(tmp_path / "run")


def test_a_worker_must_see_the_folder_of_the_run(folder: Path, tmp_path: Path) -> None:
    job = on_cluster._Job(Recipe.load(folder / "tiny.yaml"), tmp_path, b"title: Tiny", folder / "data", None, "cpu")
    with pytest.raises(rc.ReactClipError, match=rf"does not see {tmp_path} of the driver; put --out on"):
        on_cluster._Worker(job)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--workers", "2"), "--workers is 2, but the engine is local; add --engine ray"),
        (("--address", "a:1"), "--address is 'a:1', but the engine is local; add --engine ray"),
        (("--engine", "ray", "--workers", "0"), "--workers is 0; it must be at least 1"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere.yaml", *flags]) == 2
    assert capsys.readouterr().err == f"react-clip: {line}\n"
