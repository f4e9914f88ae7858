"""``run_recipe`` on a Ray cluster: workers compute the shards of a run, then one of them reads whole sets back.

A shard depends on its images only and is accepted by its content. So a run on a cluster has the results of a run on one
machine, image by image, if all devices are of one kind. When a worker dies, its shard is computed again.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from react_clip import data as data_room
from react_clip.encoders import Encoder
from react_clip.environment import versions
from react_clip.errors import ReactClipError
from react_clip.evaluation import Recipe, checks, sets
from react_clip.evaluation.results import EvaluationResult, SelfCheck
from react_clip.evaluation.run import SetOutcome, set_outcome, write_result
from react_clip.evaluation.runner import SetRunner
from react_clip.evaluation.store import RECIPE, SHARDS, ShardStore, open_run
from react_clip.scale.cluster import connected, one_line_errors, require_versions, resources


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
    with connected(address) as ray, one_line_errors(ray, "start again to go on"), open_run(folder, recipe) as store:
        kind, compute = resources(ray, workers, device)
        written = (folder / RECIPE).read_bytes()
        job = Job(recipe, folder, written, root, heads and heads.absolute(), kind, versions())
        ray.data.DataContext.get_current().enable_progress_bars = False
        on_a_worker = ray.remote(**{name: value for name, value in compute.items() if name.startswith("num_")})
        check, shards = ray.get(on_a_worker(Job.plan).remote(job))
        done = ray.data.from_items(shards, override_num_blocks=len(shards)).map(
            _Worker, fn_constructor_args=(job,), **compute
        )
        for _ in tqdm(done.iter_rows(), "cluster", len(shards), unit="shard", disable=not progress):
            pass
        outcomes = ray.get(on_a_worker(Job.outcomes).remote(job))
        store.remove_leftovers()  # temporary files of killed workers
        return write_result(recipe, folder, check, outcomes)


@dataclass(frozen=True)
class Job:
    """Inputs of a worker; the paths are the same on every node."""

    recipe: Recipe
    folder: Path
    written_recipe: bytes
    """Content of the recipe in the folder, by which a worker knows that it sees the driver's folder."""
    root: Path
    heads: Path | None
    device: str
    versions: dict[str, str]

    def encoders(self) -> tuple[Encoder, Encoder]:
        """Load the encoders; raises if this node does not see the folder or has other versions than the driver."""
        require_versions(self.versions)
        recipe = self.folder / RECIPE
        if not recipe.is_file() or recipe.read_bytes() != self.written_recipe:
            raise ReactClipError(
                f"node {platform.node()} does not see {self.folder} of the driver; put --out on a file system that all "
                "nodes share"
            )
        return sets.load_encoders(self.recipe, self.device)

    def runners(self, encoders: tuple[Encoder, Encoder], *datasets: str) -> Iterator[SetRunner]:
        """The runner of each set."""
        recipe = self.recipe.replace(datasets=datasets)
        for subject in sets.from_recipe(recipe, *encoders, self.root, self.heads, False):
            yield SetRunner(self.recipe, subject, ShardStore(self.folder / SHARDS))

    def plan(self) -> tuple[SelfCheck, list[dict[str, Any]]]:
        """The self-check of the model, and the shards of all sets."""
        check, shards = checks.NO_SELF_CHECK, list[dict[str, Any]]()
        for runner in self.runners(self.encoders(), *self.recipe.datasets):
            if not shards:
                check = checks.self_check(self.recipe, runner.subject)
            shards += [{"dataset": runner.subject.name, "start": start, "stop": stop} for start, stop in runner.spans()]
        return check, shards

    def outcomes(self) -> list[SetOutcome]:
        """The results of all sets, read back."""
        return [set_outcome(runner, progress=False) for runner in self.runners(self.encoders(), *self.recipe.datasets)]


class _Worker:
    """Loads the encoders once and keeps the set loaded that it worked on last."""

    def __init__(self, job: Job) -> None:
        self._job, self._encoders = job, job.encoders()
        self._runner: SetRunner | None = None

    def __call__(self, shard: dict[str, Any]) -> dict[str, Any]:
        """Compute a shard and its answers, unless the folder holds them."""
        if self._runner is None or self._runner.subject.name != shard["dataset"]:
            self._runner = None  # free the memory of the last set first
            [self._runner] = self._job.runners(self._encoders, shard["dataset"])
        self._runner.outcomes((shard["start"], shard["stop"]))
        return shard
