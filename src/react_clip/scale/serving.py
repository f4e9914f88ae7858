"""The HTTP service as replicas of one Ray Serve application: the same app in several processes, behind one address."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from react_clip.environment import versions
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.scale.cluster import connected, require_versions, worker_message
from react_clip.serve.server import open_socket, url_of
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "react-clip"
"""Name of the Ray Serve application."""


def application(build: Callable[[], FastAPI], settings: Settings, *, gpus: float) -> Any:
    """The Ray Serve application; ``build`` makes the app, with its model, in the process of each replica.

    ``gpus`` is the number of GPUs for each replica, unless ``--device`` is cpu.
    """
    serve = require("ray.serve", "serving on a cluster", extra="scale")
    driver = versions()

    def build_in_replica() -> FastAPI:
        require_versions(driver)
        return build()

    on_cpu = (settings.device or "").startswith("cpu")
    deployment = serve.deployment(
        name="replica",
        num_replicas=settings.workers,
        ray_actor_options={"num_cpus": max(1, settings.threads), "num_gpus": 0 if on_cpu else gpus},
        # The app batches and refuses requests itself; Ray's default limit of a few requests would starve it.
        max_ongoing_requests=settings.queue,
        max_queued_requests=settings.queue,
        graceful_shutdown_timeout_s=settings.deadline,
        health_check_period_s=2.0,  # until a dead replica is replaced; requests avoid it at once
    )
    return deployment(serve.ingress(build_in_replica)()).bind()


def serve_on_cluster(build: Callable[[], FastAPI], settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve through Ray's proxy, on the cluster of ``$RAY_ADDRESS`` or on this machine, until SIGTERM or SIGINT.

    Accepted requests are finished. ``announce`` is called with the URL once the replicas are ready.
    """
    address = os.environ.get("RAY_ADDRESS")
    with open_socket(settings) as listener:  # a port in use is reported before a model is loaded
        port, url = listener.getsockname()[1], url_of(listener)
    # More replicas than cores share them.
    cores = max(os.cpu_count() or 1, settings.workers * max(1, settings.threads))
    with connected(address, advice="no replica could be started", num_cpus=cores) as ray:
        serve = require("ray.serve", "serving on a cluster", extra="scale")
        if serve.status().proxies:
            raise ReactClipError("Ray Serve runs on this cluster already; stop it with `serve shutdown`")
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            serve.start(
                # One proxy on this machine; on a cluster one on every node that has a replica.
                proxy_location="HeadOnly" if address is None else "EveryNode",
                http_options={"host": settings.host, "port": port},
                # Ray's access log would contain paths; the service writes its own log.
                logging_config={"enable_access_log": False, "log_level": "WARNING"},
            )
            gpus = min(1.0, ray.cluster_resources().get("GPU", 0) / settings.workers)
            serve.run(application(build, settings, gpus=gpus), name=NAME, route_prefix="/")
            announce(url)
            stopped = threading.Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stopped.set())
            stopped.wait()
            serve.delete(NAME)
        except RuntimeError as error:
            raise ReactClipError(worker_message(error, "no replica could be started")) from None
        finally:
            serve.shutdown()
