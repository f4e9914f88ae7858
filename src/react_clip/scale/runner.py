"""Run independent tasks on the workers of a Ray cluster.

A worker is a Ray actor. It builds one object, which loads the model, and calls it with one task after another. When a
worker or its node dies, its tasks go back to the queue for any other worker, and Ray restarts the worker as soon as
the cluster has room for it. ``ray.util.ActorPool`` does neither, so this module has a queue of its own.
"""

from __future__ import annotations

import logging.handlers
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.scale.cluster import require_versions

MAX_ATTEMPTS = 5
"""Workers that may die on one task before the job is given up."""

_WARN_AFTER = 60.0
"""Seconds without any ready worker after which a warning is logged."""

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Allocation:
    """Number of workers of a job, their device, and the Ray resources of each."""

    device: str
    workers: int
    resources: Mapping[str, float]

    @classmethod
    def choose(
        cls, ray: Any, workers: int | None, device: str | None, *, per_gpu: int = 1, whole_nodes: bool = False
    ) -> Self:
        """Use the cluster's GPUs if there are any and ``device`` does not say otherwise, else its CPU cores.

        Without ``workers`` there are ``per_gpu`` for each GPU, or one for each CPU core (``whole_nodes``: for each
        node, with all its cores). Workers that find no room wait for it.
        """
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(sum(node.get("GPU", 0) for node in nodes))
        if (device or ("cuda" if gpus else "cpu")) != "cpu":
            if not gpus:
                raise ReactClipError(f"--device is {device}, but the cluster has no GPU; leave it out to use CPUs")
            workers = workers or per_gpu * gpus
            return cls("cuda", workers, {"num_gpus": 1 / -(-workers // gpus), "num_cpus": 1})
        cores = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1] or [1]
        if not whole_nodes:
            return cls("cpu", workers or sum(cores), {"num_cpus": 1})
        workers = workers or len(cores)
        return cls("cpu", workers, {"num_cpus": max(1, min(sum(cores) // workers, *cores))})


class WorkerPool:
    """The workers of one job; a context manager that ends them.

    Args:
        build: makes the worker object, in the worker's process and in the driver's working directory: a callable
            that takes a task and returns its result, with an attribute ``device``, the name of its device.
        threads: tasks that one worker runs at the same time.
        log: receives starts and deaths of workers and the warnings logged inside them.
        one_device: refuse workers on different kinds of devices.
    """

    def __init__(
        self,
        ray: Any,
        build: Callable[[], Any],
        allocation: Allocation,
        *,
        threads: int = 1,
        log: logging.Logger,
        one_device: bool = False,
    ) -> None:
        self._ray, self._log, self._one_device = ray, log, one_device
        self._device: str | None = None
        self._allocation, self._threads = allocation, threads
        actor = ray.remote(_Actor).options(max_restarts=-1, max_concurrency=threads, **allocation.resources)
        self._workers = [actor.remote(build, Path.cwd(), versions()) for _ in range(allocation.workers)]
        self._ready: list[Any] = []
        """Workers that have started."""
        self._calls: dict[Any, tuple[Any, Any]] = {}
        """Ray references of running calls: worker and task, ``None`` for the call of ``start``."""
        for worker in self._workers:
            self._start(worker)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for call, (_worker, task) in self._calls.items():
            if task is None:
                self._ray.cancel(call)  # otherwise Ray reports a failed start on stdout
        for worker in self._workers:
            self._ray.kill(worker)

    def run(self, tasks: Iterable[T]) -> Iterator[tuple[T, Any]]:
        """Run all tasks, started in this order; yields each with its result, in the order in which they end."""
        waiting = deque(tasks)
        left = len(waiting)
        deaths: Counter[T] = Counter()
        while left:
            self._submit(waiting)
            call = self._next_call()
            worker, task = self._calls.pop(call)
            try:
                result, warnings = self._ray.get(call)
            except self._ray.exceptions.RayTaskError as error:
                raise _error_of(error, task) from error
            except self._ray.exceptions.RayError as error:
                self._handle_death(worker, task, error)
                if task is not None:
                    deaths[task] += 1
                    waiting.appendleft(task)
                if deaths[task] >= MAX_ATTEMPTS:
                    raise ReactClipError(
                        f"{deaths[task]} workers died during {task}, perhaps for lack of memory; use fewer --workers, "
                        "or smaller pieces (--chunk of embed, --batch of evaluate) with another --out"
                    ) from None
                continue
            for line in warnings:
                self._log.warning("%s", line)
            if task is None:
                self._add(worker, *result)
            else:
                left -= 1
                yield task, result

    def _add(self, worker: Any, node: str, process: int, device: str) -> None:
        self._log.info("worker: process %d on node %s computes on %s", process, node, device)
        self._device = self._device or device
        if self._one_device and device != self._device:
            raise ReactClipError(
                f"node {node} computes on {device} and another one on {self._device}, where results may differ in the "
                "last bit; use nodes of one kind, or --device cpu"
            )
        self._ready.append(worker)

    def _start(self, worker: Any) -> None:
        """Start a worker, or wait for its restart; the call ends once Ray has room for it and its model is loaded."""
        self._calls[worker.start.options(max_task_retries=-1).remote()] = (worker, None)

    def _submit(self, waiting: deque[Any]) -> None:
        """Give waiting tasks to ready workers until each has as many as it has threads."""
        busy = Counter(worker for worker, _ in self._calls.values())
        for level in range(self._threads):
            for worker in self._ready:
                if waiting and busy[worker] <= level:
                    task = waiting.popleft()
                    self._calls[worker.run.remote(task)] = (worker, task)
                    busy[worker] += 1

    def _next_call(self) -> Any:
        """Wait until a call ends."""
        while True:
            done, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=_WARN_AFTER)
            if done:
                return done[0]
            if not self._ready:
                each, count = dict(self._allocation.resources), len(self._workers)
                self._log.warning("no worker is ready yet; %d wait for %s each, or load the model", count, each)

    def _handle_death(self, worker: Any, task: Any, error: BaseException) -> None:
        self._log.info("a worker died (%s) during %s", type(error).__name__, task or "its start")
        if task is not None:
            if worker in self._ready:
                self._ready.remove(worker)
                self._start(worker)
        elif not self._ready and not self._calls:
            cause = str(error).strip().splitlines()[-1].strip()  # the last line of a remote traceback
            raise ReactClipError(f"no worker is left ({cause}); start again to go on") from None


class _Actor:
    """The Ray actor around a worker.

    The worker is built by ``start``, not by ``__init__``: Ray reports an exception of a constructor as the death of
    the actor, and one of a method with its message.
    """

    def __init__(self, build: Callable[[], Any], directory: Path, driver_versions: dict[str, str]) -> None:
        self._build, self._directory, self._versions = build, directory, driver_versions
        self._worker: Any = None
        self._lock = threading.Lock()
        self._warnings = logging.handlers.BufferingHandler(sys.maxsize)
        self._warnings.setLevel(logging.WARNING)
        logging.getLogger("react_clip").addHandler(self._warnings)

    def start(self) -> tuple[tuple[str, int, str], list[str]]:
        """Build the worker; returns its node, process and device, and logged warnings."""
        import ray

        device = self._built().device
        return (ray.util.get_node_ip_address(), os.getpid(), device), self._logged_warnings()

    def run(self, task: Any) -> tuple[Any, list[str]]:
        """Run a task; returns its result, and logged warnings."""
        return self._built()(task), self._logged_warnings()

    def _built(self) -> Any:
        with self._lock:
            if self._worker is None:
                require_versions(self._versions)
                with suppress(OSError):  # the driver's folder may not exist here; absolute names still work
                    os.chdir(self._directory)
                self._worker = self._build()
            return self._worker

    def _logged_warnings(self) -> list[str]:
        """Warnings of this process since the last call."""
        lines = [record.getMessage() for record in self._warnings.buffer]
        self._warnings.flush()
        return lines


def _error_of(error: Any, task: object) -> ReactClipError:
    """The worker's own message; of an unexpected exception its type and first line."""
    cause = error.cause
    if isinstance(cause, ReactClipError):
        return cause
    return ReactClipError(f"a worker failed during {task or 'its start'} ({type(cause).__name__}: {first_line(cause)})")
