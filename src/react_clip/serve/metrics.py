"""Prometheus metrics: counts and times, nothing about a single image."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from react_clip.serve.engine import BatchStats

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The metrics of one application, in a registry of their own, so that several applications fit in one process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, waiting: Callable[[], int]) -> None:
        self._registry = to = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"react_clip_{name}", text, labels, registry=to)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"react_clip_{name}", text, labels, buckets=buckets, registry=to)

        self._requests = counter("requests", "Answered requests.", "method", "route", "status")
        self._latency = histogram("request_seconds", "From a request's head to its answer.", _SECONDS, "route")
        self._rejected = counter("rejected", "Refused requests, by reason.", "reason")
        self._images = counter("images", "Images answered.")
        self._opened = counter("gate_opened", "Images whose gate opened.")
        self._passes = counter("encoder_passes", "Encoder passes spent on images.")
        self._batch_images = histogram("batch_images", "Images in a batch.", _IMAGES)
        self._batch_lists = histogram("batch_label_lists", "Label lists in a batch.", _IMAGES)
        self._batch_seconds = histogram("batch_seconds", "Time of one batch.", _SECONDS)
        Gauge("react_clip_queue_images", "Images that wait.", registry=to).set_function(waiting)
        self.in_flight = Gauge("react_clip_requests_in_flight", "Requests being handled.", registry=to)

    def count_batch(self, stats: BatchStats) -> None:
        """Count a finished batch."""
        self._images.inc(stats.images)
        self._opened.inc(stats.gates_opened)
        self._passes.inc(stats.passes)
        self._batch_images.observe(stats.images)
        self._batch_lists.observe(stats.label_lists)
        self._batch_seconds.observe(stats.seconds)

    def count_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def count_rejected(self, reason: str) -> None:
        """Count a refused request."""
        self._rejected.labels(reason).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
