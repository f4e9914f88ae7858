"""``run_recipe`` on a Ray cluster: workers compute the shards of a run, then one of them reads whole sets back.

A shard depends on its images only and is accepted by its content. So a run on a cluster has the results of a run on one
machine, image by image, if all devices are of one kind. When a worker dies, its shard is computed again.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from react_clip import data as data_room
from react_clip.environment import typed_command, versions
from react_clip.errors import ReactClipError
from react_clip.evaluation import EvaluationResult, Recipe, checks, sets
from react_clip.evaluation import run_recipe as run_on_one_machine
from react_clip.evaluation.runner import SetRunner
from react_clip.evaluation.store import RECIPE, SHARDS, ShardStore, open_run
from react_clip.scale.cluster import connected, require_versions, resources


def run_recipe(
    recipe: Recipe,
    folder: str | Path,
    *,
    address: str | None = None,
    workers: int | None = None,
    root: Path | None = None,
    heads: Path | None = None,
    device: str | None = None,
    progress: bool = True,
) -> EvaluationResult:
    """:func:`react_clip.evaluation.run_recipe` on the cluster at ``address``, or on all cores of this machine.

    ``folder``, ``root`` and ``heads`` must lie on a file system that all nodes see. By default there is one worker per
    GPU, or per node if there are no GPUs.
    """
    root = (data_room.default_root() if root is None else root).absolute()
    recipe = recipe.with_sets_under(root)
    folder = Path(folder).absolute()
    with connected(address, advice="start again to go on") as ray:
        device, pool, share = resources(ray, workers, device)
        ray.data.DataContext.get_current().enable_progress_bars = False
        job = (recipe, folder, {"root": root, "heads": heads and heads.absolute(), "device": device}, versions())
        alone = ray.remote(_Worker).options(**share)
        with open_run(folder, recipe):
            planner = alone.remote(*job)
            shards = ray.get(planner.plan.remote())
            ray.kill(planner)
            done = ray.data.from_items(shards, override_num_blocks=len(shards))
            done = done.map(_Worker, fn_constructor_args=job, compute=pool, **share)
            for _ in tqdm(done.iter_rows(), "cluster", len(shards), unit="shard", disable=not progress):
                pass
        result: EvaluationResult = ray.get(alone.remote(*job).result.remote())
        result = dataclasses.replace(result, command=typed_command())
        result.save(folder)
        return result


class _Worker:
    """Loads the encoders once and keeps the set loaded that it worked on last; paths are the same on every node."""

    def __init__(self, recipe: Recipe, folder: Path, place: dict[str, Any], driver: dict[str, str]) -> None:
        require_versions(driver)
        if not (folder / RECIPE).is_file():
            raise ReactClipError(f"node {platform.node()} does not see {folder}; put --out where all nodes see it")
        self._recipe, self._folder, self._place = recipe, folder, place
        self._encoders = sets.load_encoders(recipe, place["device"])
        self._runner: SetRunner | None = None

    def _runners(self, *datasets: str) -> Iterator[SetRunner]:
        recipe, place = self._recipe.replace(datasets=datasets), self._place
        for subject in sets.from_recipe(recipe, *self._encoders, place["root"], place["heads"], False):
            yield SetRunner(self._recipe, subject, ShardStore(self._folder / SHARDS))

    def plan(self) -> list[dict[str, Any]]:
        """The shards of all sets; raises if the model fails the self-check."""
        shards = list[dict[str, Any]]()
        for runner in self._runners(*self._recipe.datasets):
            if not shards:
                checks.self_check(self._recipe, runner.subject, runner.store)
            shards += [{"dataset": runner.subject.name, "start": start, "stop": stop} for start, stop in runner.spans()]
        return shards

    def __call__(self, shard: dict[str, Any]) -> dict[str, Any]:
        """Compute a shard and its answers, unless the folder holds them."""
        if self._runner is None or self._runner.subject.name != shard["dataset"]:
            self._runner = None  # free the memory of the last set first
            [self._runner] = self._runners(shard["dataset"])
        self._runner.outcomes((shard["start"], shard["stop"]))
        return shard

    def result(self) -> EvaluationResult:
        """The result of the run, whose shards are all there."""
        return run_on_one_machine(self._recipe, self._folder, **self._place, progress=False)
