"""The service as replicas of one Ray Serve application: the same app in several processes, behind one address."""

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

from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.scale.cluster import connected
from react_clip.serve.server import address as url_of
from react_clip.serve.server import open_socket
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "react-clip"
"""What Ray calls the application."""

_HEALTH_PERIOD = 2.0
"""Seconds after which a dead replica is noticed and replaced; requests avoid it at once."""

_CONSTRUCTIONS = 2
"""Attempts to start the first replica: a wrong flag fails every time, a node may fail once."""


@dataclass(frozen=True)
class Fleet:
    """How many replicas there are, and what each may use."""

    replicas: int = 1
    most: int = 1
    """Replicas that load may make of them; as many as ``replicas``: a fixed number."""
    cpus: int = 1
    gpus: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ReactClipError(f"--replicas is {self.replicas}; it must be >= 1")
        if self.most < self.replicas:
            raise ReactClipError(f"--max-replicas is {self.most} but --replicas {self.replicas}; it must be >= that")


def application(build: Callable[[], FastAPI], settings: Settings, fleet: Fleet) -> Any:
    """What Ray Serve deploys; ``build`` makes the app, with an engine that runs, in the process of each replica."""
    serve = require("ray.serve", "serving on a cluster", extra="scale")

    directory = Path.cwd()

    # Made here, because Ray is imported where it is used; it travels to the replicas by value.
    class Replica:
        def __serve_build_asgi_app__(self) -> FastAPI:
            with suppress(OSError):
                os.chdir(directory)  # flags may name files from there
            self._app = build()
            return self._app

        def check_health(self) -> None:
            if not self._app.state.service.engine.alive:
                raise RuntimeError("the engine's thread has ended")

    options: dict[str, Any] = {
        "name": "replica",
        "ray_actor_options": {"num_cpus": fleet.cpus, "num_gpus": fleet.gpus},
        # The engine batches and refuses by itself; Ray's own limit of a few requests a replica would starve it.
        "max_ongoing_requests": settings.max_connections,
        "max_queued_requests": settings.max_connections,
        "graceful_shutdown_timeout_s": settings.grace,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": _HEALTH_PERIOD,
        "max_constructor_retry_count": _CONSTRUCTIONS,
    }
    if fleet.most > fleet.replicas:
        options["autoscaling_config"] = {
            "min_replicas": fleet.replicas,
            "max_replicas": fleet.most,
            "target_ongoing_requests": settings.batch,  # more than one full batch at a time is a reason to grow
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
    """Answer through Ray's proxy until SIGTERM or SIGINT; then finish what was accepted and return.

    ``fleet`` is asked once it is known whether the cluster has GPUs.
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
        with _until_signal() as stopped:
            try:
                serve.start(
                    # A machine of one's own needs one door; on a cluster every node with a replica opens one.
                    proxy_location="HeadOnly" if address is None else "EveryNode",
                    http_options={
                        "host": settings.host,
                        "port": port,
                        "keep_alive_timeout_s": max(1, round(settings.keep_alive)),
                    },
                    # Ray's lines would name paths; the service writes its own.
                    logging_config={"enable_access_log": False, "log_level": "WARNING"},
                )
                _deploy(serve, application(build, settings, wanted))
                announce(url)
                stopped.wait()
            except _StopError:
                pass
            finally:
                _end(serve)


def _end(serve: Any) -> None:
    """Let the replicas finish, for which they have their grace; then take the proxies away."""
    while NAME in serve.status().applications:
        with suppress(TimeoutError):  # Ray looks on for a minute, whatever the grace
            serve.delete(NAME)
    serve.shutdown()


def _deploy(serve: Any, app: Any) -> None:
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as error:
        # A replica's own line is somewhere in the report of its death.
        said = re.search(r"ReactClipError: (.+)", str(error))
        raise ReactClipError(said[1] if said else f"no replica could be started: {error}") from None


def _free_port(settings: Settings, *, local: bool) -> tuple[int, str]:
    """The port for Ray's proxies and the address it makes; a port in use is known before a model is loaded."""
    if not local and settings.port:
        return settings.port, f"http://{settings.host}:{settings.port}"
    with open_socket(settings) as listener:
        return listener.getsockname()[1], url_of(listener)


def _check_room(ray: Any, fleet: Fleet) -> None:
    """On one machine nobody adds processors; Ray would wait for them for ever."""
    there = ray.cluster_resources()
    for kind, way_out, each in (("CPU", "fewer --threads", fleet.cpus), ("GPU", "--device cpu", fleet.gpus)):
        if (needed := fleet.replicas * each) > there.get(kind, 0):
            raise ReactClipError(
                f"--replicas is {fleet.replicas}, which takes {needed} {kind}s, and this machine has "
                f"{there.get(kind, 0):.0f}; use fewer, or {way_out}, or give the --address of a cluster"
            )


class _StopError(BaseException):
    """Raised by a signal, wherever the program is."""


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """An event for which to wait; the first signal ends the waiting, a second one the process."""
    numbers = (signal.SIGTERM, signal.SIGINT)

    def stop(_: int, __: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        raise _StopError

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield threading.Event()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
