"""The HTTP service as replicas of one Ray Serve application: the same app in several processes, behind one address."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from react_clip.environment import versions
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.scale.cluster import connected, require_versions
from react_clip.serve.server import address as url_of
from react_clip.serve.server import open_socket
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "react-clip"
"""Name of the Ray Serve application."""

_HEALTH_CHECK_PERIOD = 2.0
"""Seconds until a dead replica is noticed and replaced; requests avoid it at once."""


@dataclass(frozen=True)
class Fleet:
    """Number of replicas and the resources of each."""

    replicas: int = 1
    max_replicas: int = 1
    """Ray adds replicas under load up to this number; equal to ``replicas``: a fixed number."""
    cpus: int = 1
    gpus: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ReactClipError(f"--replicas is {self.replicas}; it must be >= 1")
        if self.max_replicas < self.replicas:
            raise ReactClipError(
                f"--max-replicas is {self.max_replicas} but --replicas {self.replicas}; it must be >= that"
            )


def application(build: Callable[[], FastAPI], settings: Settings, fleet: Fleet) -> Any:
    """The Ray Serve application; ``build`` makes the app, with a running engine, in the process of each replica."""
    serve = require("ray.serve", "serving on a cluster", extra="scale")
    directory, driver_versions = Path.cwd(), versions()

    # A local class: Ray pickles it by value.
    class Replica:
        def __serve_build_asgi_app__(self) -> FastAPI:
            require_versions(driver_versions)
            with suppress(OSError):
                os.chdir(directory)  # flags may name files relative to it
            self._app = build()
            return self._app

        def check_health(self) -> None:
            if not self._app.state.service.engine.alive:
                raise RuntimeError("the engine's thread has ended")

    options: dict[str, Any] = {
        "name": "replica",
        "ray_actor_options": {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        # The engine batches and refuses requests itself; Ray's default limit of a few requests would starve it.
        "max_ongoing_requests": settings.max_connections,
        "max_queued_requests": settings.max_connections,
        "graceful_shutdown_timeout_s": settings.grace,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": _HEALTH_CHECK_PERIOD,
        "max_constructor_retry_count": 2,  # a wrong flag fails every time, a node may fail once
    }
    if fleet.max_replicas > fleet.replicas:
        options["autoscaling_config"] = {
            "min_replicas": fleet.replicas,
            "max_replicas": fleet.max_replicas,
            "target_ongoing_requests": settings.batch,  # grow when more than one full batch waits
        }
    else:
        options["num_replicas"] = fleet.replicas
    return serve.deployment(**options)(serve.ingress()(Replica)).bind()


def serve_on_cluster(
    build: Callable[[], FastAPI],
    settings: Settings,
    fleet: Callable[[bool], Fleet],
    address: str | None,
    announce: Callable[[str], None],
) -> None:
    """Serve through Ray's proxy until SIGTERM or SIGINT; then finish accepted requests and return.

    Args:
        fleet: called with whether the cluster has GPUs.
        announce: called with the URL once the replicas are ready.
    """
    port, url = _free_port(settings, local=address is None)
    with connected(address) as ray:
        wanted = fleet(ray.cluster_resources().get("GPU", 0) > 0)
        if address is None:
            _check_room(ray, wanted)
        serve = require("ray.serve", "serving on a cluster", extra="scale")
        if serve.status().proxies:
            raise ReactClipError(
                "Ray Serve runs on this cluster already; stop it with `serve shutdown`, or choose another --address"
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with _stopped_by_signal():
            try:
                serve.start(
                    # One proxy on this machine; on a cluster one on every node that has a replica.
                    proxy_location="HeadOnly" if address is None else "EveryNode",
                    http_options={
                        "host": settings.host,
                        "port": port,
                        "keep_alive_timeout_s": max(1, round(settings.keep_alive)),
                    },
                    # Ray's access log would contain paths; the service writes its own log.
                    logging_config={"enable_access_log": False, "log_level": "WARNING"},
                )
                _deploy(serve, application(build, settings, wanted))
                announce(url)
                threading.Event().wait()
            finally:
                _shut_down(serve)


def _deploy(serve: Any, app: Any) -> None:
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as error:
        # The replica's own message is somewhere in Ray's report.
        message = re.search(r"ReactClipError: (.+)", str(error))
        raise ReactClipError(message[1] if message else f"no replica could be started: {error}") from None


def _shut_down(serve: Any) -> None:
    """Wait until the replicas have finished their requests, then stop the proxies."""
    while NAME in serve.status().applications:
        with suppress(TimeoutError):  # Ray waits for a minute only, whatever the grace period
            serve.delete(NAME)
    serve.shutdown()


def _free_port(settings: Settings, *, local: bool) -> tuple[int, str]:
    """The port of Ray's proxies and the URL; a port in use is found before a model is loaded."""
    if not local and settings.port:
        return settings.port, f"http://{settings.host}:{settings.port}"
    with open_socket(settings) as listener:
        return listener.getsockname()[1], url_of(listener)


def _check_room(ray: Any, fleet: Fleet) -> None:
    """Raise if this machine has too few processors; Ray would wait for more."""
    available = ray.cluster_resources()
    for kind, way_out, each in (("CPU", "fewer --threads", fleet.cpus), ("GPU", "--device cpu", fleet.gpus)):
        if (needed := fleet.replicas * each) > available.get(kind, 0):
            raise ReactClipError(
                f"--replicas is {fleet.replicas}, which takes {needed} {kind}s, and this machine has "
                f"{available.get(kind, 0):.0f}; use fewer, or {way_out}, or give the --address of a cluster"
            )


@contextmanager
def _stopped_by_signal() -> Iterator[None]:
    """End the block at the first SIGTERM or SIGINT; a second one ends the process."""

    class StopError(BaseException):
        pass

    def stop(_: int, __: FrameType | None) -> None:
        for number in earlier:
            signal.signal(number, signal.SIG_DFL)
        raise StopError

    earlier = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with suppress(StopError):
            yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
