"""A recipe on a cluster: workers fill the store of a run, span by span, and read its sets back from there.

A shard is accepted by its content, whoever computed it, and depends on nothing but its images. So a run on a cluster is
the run on one machine, image by image; a worker, a node or a driver that dies costs the shards it was busy with.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from react_clip import data as data_room
from react_clip.encoders import Encoder
from react_clip.environment import device_name
from react_clip.errors import ReactClipError
from react_clip.evaluation import Recipe, run_dir, selfcheck, sets
from react_clip.evaluation.progress import Progress, Tally
from react_clip.evaluation.result import EvaluationResult, SelfCheck
from react_clip.evaluation.run import (
    SetOutcome,
    conclude,
    load_encoders,
    planned_work,
    set_costs,
    set_outcome,
    typed_command,
)
from react_clip.evaluation.runner import SetRunner, Span
from react_clip.evaluation.store import ShardStore, log
from react_clip.scale.cluster import connected

_MOST_LOSSES = 5
"""A step that took so many workers down with it will take the next one too."""

_PATIENCE = 60.0
"""Seconds without any worker after which the user is told what they wait for."""


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
    """:func:`react_clip.evaluation.run_recipe` on the cluster at ``address``, or on all of this machine.

    ``folder``, ``root`` and ``heads`` lie on a file system that all nodes see. There is one worker per GPU, or per node
    where there are none, unless ``workers`` says otherwise.
    """
    root = (data_room.default_root() if root is None else root).absolute()
    recipe = recipe.with_sets_under(root)
    folder = Path(folder).absolute()
    with connected(address) as ray:

        def on_cluster(store: ShardStore) -> Iterator[SetOutcome]:
            with _token(folder) as token:
                job = Job(recipe, folder, token, root, heads and heads.absolute(), device, Path.cwd())
                with Crew(ray, job, workers) as crew:
                    found = _direct(crew, recipe, progress)
            store.sweep()  # what workers that were killed had begun to write
            return (found[name] for name in recipe.datasets)

        return conclude(recipe, folder, on_cluster, typed_command())


@dataclass(frozen=True)
class Job:
    """What a worker must know; the paths are the same on every node."""

    recipe: Recipe
    folder: Path
    token: Path
    """A file that the driver keeps in the folder while it runs."""
    root: Path
    heads: Path | None
    device: str | None
    directory: Path
    """Where the driver was started: a recipe may name models and sets from there."""


class Step(NamedTuple):
    """One piece of work: a method of the worker, the set it is about, and what else it needs."""

    kind: str
    name: str
    details: tuple[Any, ...] = ()


class Filled(NamedTuple):
    """Passes that a span took, and passes that it did not."""

    finished: int
    skipped: int


class Worker:
    """A process of the cluster: loads the encoders once and keeps the set open that it worked on last.

    The constructor does nothing that can fail, because what fails there is the death of an actor to Ray; what fails in
    a step reaches the user as its one line.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._open: SetRunner | None = None

    def do(self, step: Step) -> tuple[Any, list[str]]:
        """Take one step; warnings about the store travel with its answer to the log of the run."""
        with _warnings() as lines:
            answer = getattr(self, step.kind)(step.name, *step.details)
        return answer, lines

    def greet(self, _: str) -> tuple[str, int, str]:
        """Load the encoders; tells node, process and device."""
        return _node(), os.getpid(), device_name(self._encoders[0].device)

    def check(self, name: str) -> SelfCheck:
        """Whether PGD-10 at 1/255 breaks undefended CLIP, on a few images of a set."""
        return selfcheck.on_few_images(self._job.recipe, self._runner(name).subject)

    def plan(self, name: str) -> list[tuple[Span, int]]:
        """The spans of a set, and the passes that each can take."""
        runner = self._runner(name)
        work = partial(planned_work, self._job.recipe, runner.subject, runner.costs)
        return [(span, work(span[1] - span[0])) for span in runner.spans()]

    def fill(self, name: str, span: Span) -> Filled:
        """Compute the shards of a span that are not there."""
        runner = self._runner(name)
        runner.progress = tally = Tally()
        runner.outcomes(span)
        return Filled(tally.finished, tally.skipped)

    def finish(self, name: str, check: SelfCheck) -> SetOutcome:
        """Read a whole set back as an ordinary run would."""
        runner = self._runner(name)
        return set_outcome(self._job.recipe, runner.subject, runner.store, check, progress=False)

    @cached_property
    def _encoders(self) -> tuple[Encoder, Encoder]:
        if not self._job.token.is_file():
            raise ReactClipError(
                f"node {_node()} does not see {self._job.folder} of the driver; put --out on a file system that all "
                "nodes share"
            )
        with suppress(OSError):
            os.chdir(self._job.directory)
        return load_encoders(self._job.recipe, self._job.device)

    def _runner(self, name: str) -> SetRunner:
        if self._open is None or self._open.subject.name != name:
            self._open = None  # one set in memory, not two
            job = self._job
            alone = job.recipe.replace(datasets=(name,))
            [subject] = sets.from_recipe(alone, *self._encoders, job.root, job.heads, progress=False)
            store = ShardStore(job.folder / run_dir.SHARDS)
            self._open = SetRunner(job.recipe, subject, store, set_costs(job.recipe, subject), Tally())
        return self._open


class Crew:
    """The workers of a run and what each of them is doing.

    A step whose worker died goes to whoever is idle; Ray retries nothing but the greeting by which the worker, started
    again, says that it is back. On a cluster that lost a node that may take for ever.
    """

    def __init__(self, ray: Any, job: Job, count: int | None) -> None:
        self._ray = ray
        number, self._share = _shares(ray, count, job.device)
        hire = ray.remote(Worker).options(max_restarts=-1, max_task_retries=0, **self._share)
        self._workers = [hire.remote(job) for _ in range(number)]
        self._doing: dict[Any, tuple[Any, Step]] = {}
        self._device: str | None = None
        self.idle: dict[Any, str] = {}
        """Workers without a step, and the set that each has open."""
        for worker in self._workers:
            self.hand(worker, _GREETING)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._ray.kill(worker)

    def hand(self, worker: Any, step: Step) -> None:
        """Give a worker something to do."""
        self.idle.pop(worker, None)
        retries = -1 if step == _GREETING else 0
        self._doing[worker.do.options(max_task_retries=retries).remote(step)] = (worker, step)

    def wait(self) -> tuple[Step, Any]:
        """The next step that ended, and its answer; ``None`` where its worker died."""
        while True:
            done, _ = self._ray.wait(list(self._doing), num_returns=1, timeout=_PATIENCE)
            if not done:
                if self._device is None:
                    log.warning(
                        "no worker is ready yet; %d wait for %s each, or fail to load the model",
                        len(self._workers),
                        self._share,
                    )
                continue
            worker, step = self._doing.pop(done[0])
            try:
                answer, lines = self._ray.get(done[0])
            except self._ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, ReactClipError) else error) from None
            except self._ray.exceptions.RayError as error:
                log.info("a worker died of %s in %s", type(error).__name__, step)
                if step != _GREETING:
                    self.hand(worker, _GREETING)
                elif not self._doing and not self.idle:
                    raise ReactClipError(f"no worker is left ({type(error).__name__}); start again to go on") from None
                return step, None
            for line in lines:
                log.warning("%s", line)
            if step == _GREETING:
                self._welcome(*answer)
            self.idle[worker] = step.name
            return step, answer

    def _welcome(self, node: str, process: int, device: str) -> None:
        log.info("worker: process %d on node %s computes on %s", process, node, device)
        self._device = self._device or device
        if device != self._device:
            raise ReactClipError(
                f"node {node} computes on {device} and another one on {self._device}, where results may differ in the "
                "last bit; use nodes of one kind, or --device cpu"
            )


_GREETING = Step("greet", "")


def _direct(crew: Crew, recipe: Recipe, progress: bool) -> dict[str, SetOutcome]:
    """Hand out steps until every set is finished; a step that ends may bring new ones."""
    plans = [Step("plan", name) for name in recipe.datasets]
    # First of all, because nobody wants to learn after hours that the model was wrong.
    todo = [Step("check", recipe.datasets[0])] if recipe.self_check else plans
    check = selfcheck.skipped()
    left: Counter[str] = Counter()
    losses: Counter[Step] = Counter()
    found: dict[str, SetOutcome] = {}
    with Progress("cluster", 0, enabled=progress) as bar:
        while len(found) < len(recipe.datasets):
            for worker, name in list(crew.idle.items()):
                if todo:
                    crew.hand(worker, todo.pop(_best(todo, name)))
            step, answer = crew.wait()
            if answer is None:
                todo += _once_more(step, losses)
            elif step.kind == "check":
                check = answer
                selfcheck.insist(check)
                todo += plans
            elif step.kind == "plan":
                left[step.name] = len(answer)
                log.info("%s: %d images in %d spans", step.name, answer[-1][0][1], len(answer))
                bar.skip(-sum(work for _, work in answer))
                todo += [Step("fill", step.name, (span,)) for span, _ in answer]
            elif step.kind == "fill":
                left[step.name] -= 1
                bar.stage(f"{left.total()} spans left")
                bar.skip(answer.skipped)
                bar.done(answer.finished)
                todo += [] if left[step.name] else [Step("finish", step.name, (check,))]
            elif step.kind == "finish":
                found[step.name] = answer
    return found


def _best(todo: list[Step], name: str) -> int:
    """Which step suits a worker: one about the set it has open, else a set that nobody has opened, else any.

    >>> todo = [Step("fill", "pets", (0, 8)), Step("plan", "cars"), Step("fill", "cars", (0, 8))]
    >>> _best(todo, "pets"), _best(todo, "dtd"), _best(todo[2:], "dtd")
    (0, 1, 0)
    """
    order = [(step.name != name, step.kind != "plan") for step in todo]
    return order.index(min(order))


def _once_more(step: Step, losses: Counter[Step]) -> list[Step]:
    if step == _GREETING:
        return []
    losses[step] += 1
    if losses[step] >= _MOST_LOSSES:
        raise ReactClipError(
            f"{_MOST_LOSSES} workers died of {step.kind} {step.name} {list(step.details)}, perhaps for lack of memory; "
            "use fewer --workers, or a smaller --batch with another --out"
        )
    return [step]


def _shares(ray: Any, count: int | None, device: str | None) -> tuple[int, dict[str, float]]:
    """How many workers, and what each may use: a GPU or part of one, or the cores of a node or part of them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = 0 if device == "cpu" else int(sum(node.get("GPU", 0) for node in nodes))
    cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1] or [1]
    count = count or gpus or len(cores)
    if gpus:
        return count, {"num_gpus": 1 / -(-count // gpus), "num_cpus": 1}
    return count, {"num_cpus": max(1, min(sum(cores) // count, *cores))}


@contextmanager
def _token(folder: Path) -> Iterator[Path]:
    """A file by which workers recognise the folder; one that a killed driver left is swept like any other leftover."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".seen-by-all-nodes.", suffix=".part")
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep(logging.WARNING)
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def _node() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
