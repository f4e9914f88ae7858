"""Connect to a Ray cluster: one that is running, or one started on this machine for the duration of a job."""

from __future__ import annotations

import logging
import os
import platform
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    # On a busy machine processes need more than the 60 and 5 seconds after which Ray starts them anew.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""Environment variables of clusters that are started here, unless they are set already."""


@contextmanager
def connected(address: str | None = None, *, advice: str, num_cpus: int | None = None) -> Iterator[Any]:
    """Connect to the cluster at ``address`` (``host:port`` or ``auto``), or start one here; yields the ``ray`` module.

    A cluster that is started here has ``num_cpus`` processors to give away, by default those of this machine. A session
    that is already connected is used and left open. An error of a worker is one line with the ``advice``.
    """
    os.environ.update(_SETTINGS | os.environ)
    ray = require("ray", "working on a cluster", extra="scale")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised
    with nullcontext() if ray.is_initialized() else _session(ray, address, num_cpus):
        try:
            yield ray
        except ray.exceptions.RayError as error:
            raise ReactClipError(worker_message(error, advice)) from error


def _session(ray: Any, address: str | None, num_cpus: int | None) -> AbstractContextManager[Any]:
    where = {"address": "local", "include_dashboard": False, "num_cpus": num_cpus}
    if address is not None:
        where = {"address": address}
        if address != "auto":
            _check_address(address)
    try:
        return ray.init(**where, log_to_driver=False, logging_level=logging.ERROR)  # type: ignore[no-any-return]
    except Exception as error:  # Ray raises a bare Exception when a node is late
        raise ReactClipError(f"no Ray cluster could be used: {first_line(error)}; try again") from None


def _check_address(address: str) -> None:
    """Raise within seconds if nothing listens at ``address``; Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except (OSError, ValueError) as error:
        raise ReactClipError(
            f"no Ray cluster answers at {address!r} ({first_line(error)}); start one with `ray start --head` and give "
            "its host:port, or leave --address out to use this machine"
        ) from None


def require_versions(driver: Mapping[str, str]) -> None:
    """Raise if this process does not have the ``versions()`` of the driver: results could depend on the node."""
    here = versions()
    if different := [name for name in driver if here.get(name) != driver[name]]:
        ours, theirs = (", ".join(f"{name} {each.get(name)}" for name in different) for each in (here, driver))
        raise ReactClipError(f"node {platform.node()} has {ours}, the driver {theirs}; install the same versions")


def resources(ray: Any, workers: int | None, device: str | None) -> tuple[str, Any, dict[str, float]]:
    """The device of a job's workers, their pool for Ray Data, and the share of a node that each takes.

    GPUs are used if the cluster has any and ``device`` does not say otherwise. Without ``workers`` there is one for
    each GPU, or for each node. Workers that die are started again.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus, cpus = (sum(node.get(kind, 0) for node in nodes) for kind in ("GPU", "CPU"))
    device = device or ("cuda" if gpus else "cpu")
    if device != "cpu" and not gpus:
        raise ReactClipError(f"--device is {device}, but the cluster has no GPU; leave it out to use CPUs")
    workers = workers or int(gpus if device != "cpu" else max(1, sum(node.get("CPU", 0) >= 1 for node in nodes)))
    # A fifth of the processors is left to the tasks that read and write.
    share = {"num_gpus": min(1.0, gpus / workers)} if device != "cpu" else {"num_cpus": 0.8 * cpus / workers}
    return device, ray.data.ActorPoolStrategy(size=workers), share


def worker_message(error: BaseException, advice: str) -> str:
    r"""The last error line in the report that Ray makes of a worker's traceback.

    >>> worker_message(Exception("Traceback ...\n  ValueError: a bug\nand more"), "start again")
    'a worker failed (ValueError: a bug); start again'
    """
    own = re.findall(r"(?:ReactClip|MissingFile|MissingPackage)Error: (.+)", str(error))
    other = re.findall(r"^\s*(?:[\w.]*\.)?(\w+(?:Error|Exception): .+)", str(error), re.MULTILINE)
    return str(own[-1]) if own else f"a worker failed ({other[-1] if other else first_line(error)}); {advice}"
