"""The HTTP service as replicas of one Ray Serve application: the same app in several processes, behind one address."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from react_clip.environment import versions
from react_clip.errors import ReactClipError
from react_clip.optional import require
from react_clip.scale.cluster import connected, require_versions
from react_clip.serve.server import address as url_of
from react_clip.serve.server import open_socket, stopped_by_signal
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

NAME = "react-clip"
"""Name of the Ray Serve application."""

_HEALTH_CHECK_PERIOD = 2.0
"""Seconds until a dead replica is noticed and replaced; requests avoid it at once."""
_PROXY_START = 600.0
"""Seconds that Ray's proxy may take to start on a busy machine."""


def application(build: Callable[[], FastAPI], settings: Settings, *, has_gpus: bool) -> Any:
    """The Ray Serve application; ``build`` makes the app, with a running engine, in the process of each replica."""
    serve = require("ray.serve", "serving on a cluster", extra="scale")
    directory, driver_versions = Path.cwd(), versions()

    # A local class: Ray pickles it by value.
    class Replica:
        def __serve_build_asgi_app__(self) -> FastAPI:
            require_versions(driver_versions)
            with suppress(OSError):
                os.chdir(directory)  # flags may name files relative to it
            return build()

    needed = resources(settings, has_gpus)
    options: dict[str, Any] = {
        "name": "replica",
        "ray_actor_options": needed,
        # The engine batches and refuses requests itself; Ray's default limit of a few requests would starve it.
        "max_ongoing_requests": settings.max_connections,
        "max_queued_requests": settings.max_connections,
        "graceful_shutdown_timeout_s": settings.grace,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": _HEALTH_CHECK_PERIOD,
        "max_constructor_retry_count": 2,  # a wrong flag fails every time, a node may fail once
    }
    if settings.max_replicas and settings.max_replicas > settings.replicas:
        options["autoscaling_config"] = {
            "min_replicas": settings.replicas,
            "max_replicas": settings.max_replicas,
            # Grow when more than one full batch waits.
            "target_ongoing_requests": settings.largest_batch(on_gpu=bool(needed["num_gpus"])),
        }
    else:
        options["num_replicas"] = settings.replicas
    return serve.deployment(**options)(serve.ingress()(Replica)).bind()


def resources(settings: Settings, has_gpus: bool) -> dict[str, int]:
    """Ray resources of a replica: one GPU where the cluster has GPUs, unless ``device`` says otherwise."""
    on_gpu = has_gpus if settings.device is None else not settings.device.startswith("cpu")
    return {"num_cpus": max(1, settings.threads), "num_gpus": int(on_gpu)}


def serve_on_cluster(build: Callable[[], FastAPI], settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve through Ray's proxy until SIGTERM or SIGINT; then finish accepted requests and return.

    ``announce`` is called with the URL once the replicas are ready.
    """
    local = settings.address is None
    port, url = _free_port(settings, local=local)
    with connected(settings.address) as ray:
        available = ray.cluster_resources()
        has_gpus = available.get("GPU", 0) > 0
        if local:
            _check_room(settings, available)
        serve = require("ray.serve", "serving on a cluster", extra="scale")
        if serve.status().proxies:
            raise ReactClipError(
                "Ray Serve runs on this cluster already; stop it with `serve shutdown`, or choose another --address"
            )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        with stopped_by_signal():
            try:
                serve.start(
                    # One proxy on this machine; on a cluster one on every node that has a replica.
                    proxy_location="HeadOnly" if local else "EveryNode",
                    http_options={
                        "host": settings.host,
                        "port": port,
                        "keep_alive_timeout_s": max(1, round(settings.keep_alive)),
                    },
                    # Ray's access log would contain paths; the service writes its own log.
                    logging_config={"enable_access_log": False, "log_level": "WARNING"},
                )
                _deploy(serve, application(build, settings, has_gpus=has_gpus))
                announce(url)
                threading.Event().wait()
            finally:
                _shut_down(serve)


def _deploy(serve: Any, app: Any) -> None:
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except TimeoutError:
        # The replicas run, but Ray waits for its proxy for a minute only.
        _wait_for_proxy(serve)
    except RuntimeError as error:
        # The replica's own message is somewhere in Ray's report.
        message = re.search(r"ReactClipError: (.+)", str(error))
        raise ReactClipError(message[1] if message else f"no replica could be started: {error}") from None


def _wait_for_proxy(serve: Any) -> None:
    until = time.monotonic() + _PROXY_START
    while "HEALTHY" not in serve.status().proxies.values():
        if time.monotonic() > until:
            raise ReactClipError(f"Ray's proxy did not start in {_PROXY_START:.0f} s; is this machine too busy?")
        time.sleep(0.5)


def _shut_down(serve: Any) -> None:
    """Wait until the replicas have finished their requests, then stop the proxies."""
    while NAME in serve.status().applications:
        with suppress(TimeoutError):  # Ray waits for a minute only, whatever the grace period
            serve.delete(NAME)
    serve.shutdown()


def _free_port(settings: Settings, *, local: bool) -> tuple[int, str]:
    """The port of Ray's proxies and the URL; a port in use is reported before a model is loaded."""
    if not local and settings.port:
        return settings.port, f"http://{settings.host}:{settings.port}"
    with open_socket(settings) as listener:
        return listener.getsockname()[1], url_of(listener)


def _check_room(settings: Settings, available: Mapping[str, float]) -> None:
    """Raise if this machine has too few processors; Ray would wait for more."""
    each = resources(settings, available.get("GPU", 0) > 0)
    for kind, way_out in (("CPU", "fewer --threads"), ("GPU", "--device cpu")):
        if (needed := settings.replicas * each[f"num_{kind.lower()}s"]) > available.get(kind, 0):
            raise ReactClipError(
                f"--replicas is {settings.replicas}, which takes {needed} {kind}s, and this machine has "
                f"{available.get(kind, 0):.0f}; use fewer, or {way_out}, or give the --address of a cluster"
            )
