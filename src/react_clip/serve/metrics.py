"""Prometheus metrics: counts and times, nothing about a single image."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

if TYPE_CHECKING:
    from torch import Tensor

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)
_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable of the folder in which several processes keep their values; prometheus_client reads it."""


class Metrics:
    """The metrics of one process, in their own registry; ``shared`` adds up those of all processes."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._registry = CollectorRegistry()
        options: Any = {"namespace": "react_clip", "registry": self._registry}
        gauge = options | {"multiprocess_mode": "livesum"}
        self.requests = Counter("requests", "Answered requests.", ["method", "route", "status"], **options)
        self.latency = Histogram(
            "request_seconds", "From a request's head to its answer.", ["route"], buckets=_SECONDS, **options
        )
        self.rejected = Counter("rejected", "Refused requests, by reason.", ["reason"], **options)
        self.in_flight = Gauge("requests_in_flight", "Requests being handled.", **gauge)
        help_text = "Images answered: left as they are (keep), or corrected (correct)."
        self._images = Counter("images", help_text, ["branch"], **options)
        for branch in ("keep", "correct"):  # a rate needs the zero before the first image
            self._images.labels(branch)
        self._passes = Counter("encoder_passes", "Encoder passes for images.", **options)
        self._batch_images = Histogram("batch_images", "Images in a batch.", buckets=_IMAGES, **options)
        self._batch_seconds = Histogram("batch_seconds", "Time of one batch.", buckets=_SECONDS, **options)
        self.shadow = Counter("shadow_images", "Images whose answers the shadow compared.", ["outcome"], **options)
        self.waiting = Gauge("queue_images", "Places of the queue that are taken.", **gauge)

    def count_batch(self, gated: Tensor, passes: Tensor, seconds: float) -> None:
        """Count a finished batch; tensors have one value per image."""
        corrected = int(gated.sum())
        self._images.labels("keep").inc(len(gated) - corrected)
        self._images.labels("correct").inc(corrected)
        self._passes.inc(float(passes.sum()))
        self._batch_images.observe(len(gated))
        self._batch_seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if not self._shared:
            return generate_latest(self._registry)
        # The images and requests of a process that has ended are no longer there.
        for process in {int(path.stem.rpartition("_")[2]) for path in Path(os.environ[_FOLDER]).glob("gauge_*.db")}:
            if not Path(f"/proc/{process}").exists():
                mark_process_dead(process)  # type: ignore[no-untyped-call]
        sums = CollectorRegistry()
        MultiProcessCollector(sums)  # type: ignore[no-untyped-call]
        return generate_latest(sums)


def share_between_processes(folder: str) -> None:
    """Let this process, and those started from now on, keep the values of later metrics in files of ``folder``."""
    os.environ[_FOLDER] = folder
    values.ValueClass = values.MultiProcessValue()  # type: ignore[no-untyped-call]
