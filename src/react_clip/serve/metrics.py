"""What the service tells Prometheus; counters only, nothing about a single image."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from react_clip.serve.engine import Batch

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """One registry per application, so that several can live in one process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, depth: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "react_clip_requests", "Answered requests.", ["method", "route", "status"], registry=registry
        )
        self._latency = Histogram(
            "react_clip_request_seconds", "From a request's head to its answer.", ["route"], buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self._rejected = Counter("react_clip_rejected", "Requests refused, by reason.", ["reason"], registry=registry)
        self._images = Counter("react_clip_images", "Images answered.", registry=registry)
        self._opened = Counter("react_clip_gate_opened", "Images whose gate opened.", registry=registry)
        self._passes = Counter("react_clip_encoder_passes", "Encoder passes spent on images.", registry=registry)
        self._batch = Histogram(
            "react_clip_batch_images", "Images that shared a batch.", buckets=_IMAGES, registry=registry
        )
        self._lists = Histogram(
            "react_clip_batch_label_lists", "Label lists that shared a batch.", buckets=_IMAGES, registry=registry
        )
        self._engine = Histogram(
            "react_clip_batch_seconds", "Time of the engine for one batch.", buckets=_SECONDS, registry=registry
        )
        queue = Gauge("react_clip_queue_images", "Images that wait.", registry=registry)
        queue.set_function(depth)
        self.in_flight = Gauge("react_clip_requests_in_flight", "Requests being handled.", registry=registry)

    def batch(self, batch: Batch) -> None:
        """Count a finished batch."""
        self._images.inc(batch.images)
        self._opened.inc(batch.opened)
        self._passes.inc(batch.passes)
        self._batch.observe(batch.images)
        self._lists.observe(batch.lists)
        self._engine.observe(batch.seconds)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(method, route, str(status)).inc()
        self._latency.labels(route).observe(seconds)

    def rejected(self, reason: str) -> None:
        """Count a refusal."""
        self._rejected.labels(reason).inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)
