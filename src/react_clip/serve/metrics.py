"""Prometheus metrics: counts and times, nothing about a single image."""

from __future__ import annotations

import os
from collections import Counter as Counts
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from react_clip.defenses.second_look import BRANCHES
from react_clip.serve.answers import Answer

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one application, in a registry of their own, so that several applications fit in one process.

    With ``shared`` the text has the sums over all processes; call :func:`share_between_processes` before.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, *, shared: bool = False) -> None:
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
        self._images = Counter(
            "images", "Images answered: kept, blended with their looks, or corrected.", ["branch"], **options
        )
        for branch in BRANCHES:  # a rate needs the zero before the first image
            self._images.labels(branch)
        self._passes = Counter("encoder_passes", "Encoder passes spent on images.", **options)
        self._batch_images = Histogram("batch_images", "Images in a batch.", buckets=_IMAGES, **options)
        self._batch_lists = Histogram("batch_label_lists", "Label lists in a batch.", buckets=_IMAGES, **options)
        self._batch_seconds = Histogram("batch_seconds", "Time of one batch.", buckets=_SECONDS, **options)
        self.waiting = Gauge("queue_images", "Images that wait.", **gauge)

    def count_batch(self, answers: list[Answer], label_lists: int, seconds: float) -> None:
        """Count a finished batch."""
        for branch, images in Counts(answer.branch for answer in answers).items():
            self._images.labels(branch).inc(images)
        self._passes.inc(sum(answer.passes for answer in answers))
        self._batch_images.observe(len(answers))
        self._batch_lists.observe(label_lists)
        self._batch_seconds.observe(seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        if not self._shared:
            return generate_latest(self._registry)
        sums = CollectorRegistry()
        MultiProcessCollector(sums)  # type: ignore[no-untyped-call]
        return generate_latest(sums)


def share_between_processes(folder: str, place: int) -> None:
    """Keep the values of later ``Metrics`` in files of ``folder``, where all processes can read them.

    A process that takes the place of another continues its counters.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    values.ValueClass = values.MultiProcessValue(lambda: place)  # type: ignore[no-untyped-call]


def forget_process(folder: str, place: int) -> None:
    """Take the requests and images of a process that has ended out of the gauges."""
    mark_process_dead(place, folder)  # type: ignore[no-untyped-call]
