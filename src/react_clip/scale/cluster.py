"""Connect to a Ray cluster: one that is running, or one started on this machine for the duration of a job."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

_CONNECT_TIMEOUT = 5.0
"""Seconds; without a check of our own Ray would try for a minute."""
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # no warnings about Ray's internals
    # On a busy machine processes need more than the 60 and 5 seconds after which Ray starts them anew.
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
"""Environment variables of clusters that are started here, unless they are set already."""
_STARTS = 4
"""Most attempts to start a cluster here: Ray gives a node 30 s, which a busy machine may exceed once or twice."""


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Connect to the cluster at ``address`` (``host:port`` or ``auto``), or start one here; yields the ``ray`` module.

    A session that is already connected is used and left open.
    """
    os.environ.update(_SETTINGS | os.environ)
    ray = require("ray", "working on a cluster", extra="scale")
    if ray.is_initialized():
        yield ray
        return
    if address is not None:
        _check_address(address)
        _start(ray, f"at {address}", address=address)
    else:
        _start(ray, "on this machine", attempts=_STARTS, address="local", include_dashboard=False)
    try:
        yield ray
    finally:
        ray.shutdown()


def _start(ray: Any, where: str, *, attempts: int = 1, **options: Any) -> None:
    """Call ``ray.init``, again if the processes that it starts do not answer in time."""
    try:
        with _stderr_discarded():  # Ray's C++ part announces there that it will be quiet; errors are raised
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a bare Exception when a node is late
        ray.shutdown()
        if attempts > 1 and "timed out during startup" in str(error):
            return _start(ray, where, attempts=attempts - 1, **options)
        raise ReactClipError(f"no Ray cluster could be used {where}: {first_line(error)}") from None


def require_versions(driver: Mapping[str, str]) -> None:
    """Raise if this process does not have the ``versions()`` of the driver: results could depend on the node."""
    here = versions()
    if different := [
        f"{name} {here.get(name)}, the driver {driver[name]}" for name in driver if here.get(name) != driver[name]
    ]:
        raise ReactClipError(
            f"node {platform.node()} has {'; '.join(different)}; install the same versions on both sides"
        )


def _check_address(address: str) -> None:
    """Raise within seconds if nothing listens at ``address``."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ReactClipError(f"--address is {address!r}; write host:port, such as 10.0.0.5:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ReactClipError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with `ray start --head`, or "
            "leave --address out to use this machine"
        ) from None


@contextmanager
def _stderr_discarded() -> Iterator[None]:
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
