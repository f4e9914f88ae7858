"""``evaluate --engine ray``: real nodes and processes are killed, and the run is the one of a single process."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from evaluation_toys import write_photos

import react_clip as rc
from react_clip.cli import main
from react_clip.evaluation import EvaluationResult, Recipe, run_recipe
from react_clip.scale import evaluation as cluster_run

RECIPE = """
title: Tiny
model: {model}
datasets: [toys, others]
attacks: [{{kind: pgd, steps: 10, eps: 1/255}}, {{kind: pgd, steps: 80, eps: 8/255}}]
defenses: [undefended, {{defense: react, tau: 1.48, label: ReACT}}]
batch: 4
"""


@pytest.fixture(scope="module")
def _same_threads() -> Iterator[None]:
    """Workers add up their sums in the order of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def cluster(_same_threads: None, two_nodes: Any) -> Any:
    return two_nodes


def write_head(path: Path, folder: Path, model: Path, sign: float = 1.0) -> None:
    """The mean features of the photos themselves, so that most are classified rightly; turned round: none."""
    clf = rc.ZeroShotClassifier.from_folder(rc.load(model, device="cpu"), folder)
    path.parent.mkdir(exist_ok=True)
    names = [name.replace("_", " ") for name in clf.names]
    np.savez(path, names=names, folders=list(clf.names), features=sign * clf.class_features.numpy())


@pytest.fixture(scope="module")
def place(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over two sets, and a head for each."""
    place = tmp_path_factory.mktemp("place")
    (place / "tiny.yaml").write_text(RECIPE.format(model=tiny_folder))
    for seed, (name, count) in enumerate({"toys": 12, "others": 8}.items()):
        write_photos(place / "data", name, count=count, seed=seed)
        write_head(place / "heads" / f"{name}.npz", place / "data" / name / "test", tiny_folder)
    return place


def where(place: Path) -> dict[str, Any]:
    return {"root": place / "data", "heads": place / "heads", "device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def alone(place: Path, _same_threads: None) -> Path:
    """The run of one process."""
    run_recipe(Recipe.load(place / "tiny.yaml"), place / "alone", **where(place))
    return place / "alone"


def assert_same(folder: Path, alone: Path) -> None:
    assert (folder / "per_image.parquet").read_bytes() == (alone / "per_image.parquet").read_bytes()
    ours, theirs = (dataclasses.asdict(EvaluationResult.load(one / "result.json")) for one in (folder, alone))
    for key in ("created", "command"):
        del ours[key], theirs[key]
    assert repr(ours) == repr(theirs)
    assert not list(folder.rglob(".*.part"))


def shards(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (folder / "shards").rglob("*.safetensors")}


def wait_for(what: Callable[[], Any]) -> Any:
    until = time.monotonic() + 300
    while not (found := what()):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.05)
    return found


def started(folder: Path) -> list[int]:
    """Processes of the workers, from the run's log."""
    log = folder / "run.log"
    return [int(pid) for pid in re.findall(r"worker: process (\d+)", log.read_text())] if log.exists() else []


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def test_a_killed_worker_and_a_killed_node_change_nothing(cluster: Any, place: Path, alone: Path) -> None:
    folder = place / "killed"
    recipe = Recipe.load(place / "tiny.yaml")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(cluster_run.run_recipe, recipe, folder, workers=2, **where(place))
        wait_for(lambda: run.done() or (len(started(folder)) == 2 and len(shards(folder)) > 10))
        before = shards(folder)
        os.kill(started(folder)[0], signal.SIGKILL)
        cluster.remove_node(min(cluster.worker_nodes, key=str), allow_graceful=False)
        run.result()
    wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)  # for the tests that follow
    assert len(re.findall("a worker died of .* in Step.kind='fill'", (folder / "run.log").read_text())) >= 1
    assert_same(folder, alone)
    after = shards(folder)
    assert len(before) < len(after)
    assert {path: after[path] for path in before} == before, "finished shards must not be computed again"


def test_a_killed_driver_is_started_again(cluster: Any, place: Path, alone: Path, command: list[str]) -> None:
    folder = place / "driver"
    words = ["evaluate", "tiny.yaml", "--data", "data", "--heads", "heads", "--out", "driver", "--quiet"]
    words += ["--device", "cpu", "--engine", "ray", "--workers", "1", "--address", cluster.address]
    driver = subprocess.Popen([*command, *words], cwd=place, stdout=subprocess.DEVNULL)
    wait_for(lambda: driver.poll() is not None or len(shards(folder)) > 10)
    driver.kill()
    assert driver.wait() == -signal.SIGKILL, "the driver was to be killed, not to finish"
    wait_for(lambda: not any(map(alive, started(folder))))
    before = shards(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(words) == 0
    assert_same(folder, alone)
    after = shards(folder)
    assert 10 < len(before) < len(after)
    assert {path: after[path] for path in before} == before, "finished shards must not be computed again"


def test_attackers_who_know_the_defence_meet_the_same_checks(cluster: Any, place: Path) -> None:
    values = {
        **Recipe.load(place / "tiny.yaml").replace(datasets=("others",), attacks=(), limit=4).to_dict(),
        "threat": "adaptive",
        "attacks": [{"kind": "adaptive-both", "eps": "4/255", "steps": 5, "eot": 1}],
        "defenses": [{"defense": "react", "tau": 1.48}],
    }
    recipe = Recipe.from_dict(values)
    ours = cluster_run.run_recipe(recipe, place / "knows", workers=1, **where(place))
    theirs = run_recipe(recipe, place / "knows-alone", **where(place))
    assert ours.checks
    assert repr(ours.checks) == repr(theirs.checks)
    assert_same(place / "knows", place / "knows-alone")


def test_a_broken_model_is_known_before_anything_is_computed(
    cluster: Any, place: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    write_head(tmp_path / "heads" / "toys.npz", place / "data" / "toys" / "test", tiny_folder, sign=-1.0)
    recipe = Recipe.load(place / "tiny.yaml").replace(datasets=("toys",))
    with pytest.raises(rc.ReactClipError, match="gets no clean image of toys right"):
        cluster_run.run_recipe(recipe, tmp_path / "run", workers=1, **{**where(place), "heads": tmp_path / "heads"})
    assert not shards(tmp_path / "run")


def kill_for_good(worker: Any) -> None:
    """Ray only asks for the death, and a busy machine lets the dying worker answer a while longer."""
    ray.kill(worker)
    with suppress(ray.exceptions.RayActorError):
        while True:
            with suppress(ray.exceptions.RayTaskError):
                ray.get(worker.do.options(max_task_retries=0).remote(cluster_run._GREETING))


def test_nodes_must_live_see_the_folder_and_compute_alike(cluster: Any, place: Path, tmp_path: Path) -> None:
    recipe = Recipe.load(place / "tiny.yaml")
    job = cluster_run.Job(recipe, tmp_path, tmp_path / "not-there", place / "data", None, "cpu", place)
    with cluster_run.Crew(ray, job, 1) as crew:
        with pytest.raises(rc.ReactClipError, match=rf"does not see {tmp_path} of the driver; put --out on"):
            crew.wait()
        kill_for_good(crew._workers[0])
        crew.hand(crew._workers[0], cluster_run._GREETING)
        with pytest.raises(rc.ReactClipError, match="no worker is left"):
            crew.wait()
        crew._welcome("10.0.0.8", 1, "cpu")
        with pytest.raises(rc.ReactClipError, match=r"node 10\.0\.0\.9 computes on NVIDIA H200 and another one on cpu"):
            crew._welcome("10.0.0.9", 2, "NVIDIA H200")


@pytest.mark.parametrize(
    ("nodes", "asked", "device", "expected"),
    [
        ([{"CPU": 8}, {"CPU": 4}, {}], None, None, (2, {"num_cpus": 4})),
        ([{"CPU": 8}, {"CPU": 8}], 4, None, (4, {"num_cpus": 4})),
        ([{"CPU": 2}], 5, None, (5, {"num_cpus": 1})),
        ([{"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}], None, None, (8, {"num_gpus": 1, "num_cpus": 1})),
        ([{"CPU": 8, "GPU": 2}], 3, "cuda", (3, {"num_gpus": 0.5, "num_cpus": 1})),
        ([{"CPU": 8, "GPU": 2}], None, "cpu", (1, {"num_cpus": 8})),
    ],
)
def test_shares_fit_the_nodes(
    nodes: list[dict[str, int]], asked: int | None, device: str | None, expected: Any
) -> None:
    fake = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": node} for node in nodes])
    assert cluster_run._shares(fake, asked, device) == expected


def test_a_step_that_kills_every_worker_is_given_up() -> None:
    losses: Any = cluster_run.Counter()
    step = cluster_run.Step("fill", "toys", ((0, 4),))
    for _ in range(4):
        assert cluster_run._once_more(step, losses) == [step]
    with pytest.raises(rc.ReactClipError, match=r"5 workers died of fill toys \[\(0, 4\)\].* smaller --batch"):
        cluster_run._once_more(step, losses)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--workers", "2"), "--workers is 2, but the engine is local; add --engine ray"),
        (("--address", "a:1"), "--address is 'a:1', but the engine is local; add --engine ray"),
        (("--engine", "ray", "--workers", "0"), "--workers is 0; it must be >= 1"),
    ],
)
def test_bad_flags_are_one_line(flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "nowhere.yaml", *flags]) == 2
    assert capsys.readouterr().err == f"react-clip: {line}\n"
