"""``run_recipe`` on a Ray cluster: workers compute the shards of a run, and read whole sets back from its folder.

A shard depends on its images only and is accepted by its content. So a run on a cluster has the results of a run on one
machine, image by image; when a worker dies, the shards that it was computing are computed again.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from react_clip import data as data_room
from react_clip.environment import device_name
from react_clip.errors import ReactClipError
from react_clip.evaluation import Recipe, checks, sets
from react_clip.evaluation.result import EvaluationResult, SelfCheck
from react_clip.evaluation.run import SetOutcome, set_outcome, typed_command, write_result
from react_clip.evaluation.runner import SetRunner, pass_bar
from react_clip.evaluation.store import RECIPE, SHARDS, ShardStore, log, open_run
from react_clip.scale.cluster import connected
from react_clip.scale.runner import Allocation, WorkerPool


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
    with connected(address) as ray:
        allocation = Allocation.choose(ray, workers, device, whole_nodes=True)
        with open_run(folder, recipe) as store:
            written = (folder / RECIPE).read_bytes()
            job = _Job(recipe, folder, written, root, heads and heads.absolute(), allocation.device)
            with WorkerPool(ray, partial(_Worker, job), allocation, log=log, one_device=True) as pool:
                check, outcomes = _run_sets(pool, recipe, progress)
            store.remove_leftovers()  # temporary files of killed workers
            return write_result(recipe, folder, check, outcomes, typed_command())


class Task(NamedTuple):
    """A method of the worker, the set it is called for, and its argument."""

    method: str
    dataset: str
    argument: Any = None

    def __str__(self) -> str:
        return f"{self.method} {self.dataset} {self.argument or ''}".strip()


def _run_sets(pool: WorkerPool, recipe: Recipe, progress: bool) -> tuple[SelfCheck, list[SetOutcome]]:
    """The outcome of every set: check the model, list the spans of all sets, compute them, read the sets back."""
    [(_, check)] = pool.run([Task("check", recipe.datasets[0])])
    passes = {
        (task.dataset, span): passes
        for task, spans in pool.run([Task("spans", name) for name in recipe.datasets])
        for span, passes in spans
    }
    fills = [Task("fill", name, span) for name, span in sorted(passes, key=lambda key: recipe.datasets.index(key[0]))]
    with pass_bar("cluster", sum(passes.values()), enabled=progress) as bar:
        for left, (task, _) in zip(reversed(range(len(fills))), pool.run(fills), strict=True):
            bar.set_description(f"cluster: {left} spans left", refresh=False)
            bar.update(passes[task.dataset, task.argument])
    results = {task.dataset: outcome for task, outcome in pool.run([Task("finish", name) for name in recipe.datasets])}
    return check, [results[name] for name in recipe.datasets]


@dataclass(frozen=True)
class _Job:
    """Inputs of a worker; the paths are the same on every node."""

    recipe: Recipe
    folder: Path
    written_recipe: bytes
    """Content of the recipe in the folder, by which a worker knows that it sees the driver's folder."""
    root: Path
    heads: Path | None
    device: str


class _Worker:
    """Loads the encoders once and keeps the set loaded that it worked on last."""

    def __init__(self, job: _Job) -> None:
        recipe = job.folder / RECIPE
        if not recipe.is_file() or recipe.read_bytes() != job.written_recipe:
            raise ReactClipError(
                f"node {platform.node()} does not see {job.folder} of the driver; put --out on a file system that all "
                "nodes share"
            )
        self._job = job
        self._encoders = sets.load_encoders(job.recipe, job.device)
        self._loaded: SetRunner | None = None
        self.device = device_name(self._encoders[0].device)

    def __call__(self, task: Task) -> Any:
        """Run one task."""
        runner = self._runner(task.dataset)
        if task.method == "fill":
            runner.outcomes(task.argument)
            return None
        if task.method == "spans":
            return [(span, runner.planned_work(span[1] - span[0])) for span in runner.spans()]
        if task.method == "check":
            return checks.self_check(self._job.recipe, runner.subject)
        return set_outcome(runner, progress=False)

    def _runner(self, dataset: str) -> SetRunner:
        if self._loaded is None or self._loaded.subject.name != dataset:
            self._loaded = None  # free the memory of the last set first
            job = self._job
            recipe = job.recipe.replace(datasets=(dataset,))
            [subject] = sets.from_recipe(recipe, *self._encoders, job.root, job.heads, progress=False)
            self._loaded = SetRunner(job.recipe, subject, ShardStore(job.folder / SHARDS))
        return self._loaded
