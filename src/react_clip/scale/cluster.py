"""The Ray cluster that work goes to: one that runs already, or this machine for as long as the work takes."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from react_clip.errors import ReactClipError
from react_clip.optional import require

_PATIENCE = 5.0
"""Seconds to wait for the first sign of life of a cluster at an address."""


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Join the cluster at ``address`` (``host:port``), or start one on this machine; gives the ``ray`` module.

    A session that is connected already is used as it is, and left so. Whatever cluster it is, its workers must run the
    same software as this process, or results would depend on where an image was sent.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    ray = require("ray", "working on a cluster", extra="scale")
    if ray.is_initialized():
        check_versions(ray)
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is not None:
        _knock(address)
    try:
        if address is None:
            ray.init(address="local", include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ReactClipError(f"no Ray cluster could be used {where}: {_first_line(error)}") from None
    try:
        check_versions(ray)
        yield ray
    finally:
        ray.shutdown()


def software() -> dict[str, str]:
    """The versions that decide what a worker computes."""
    import torch

    from react_clip import __version__

    return {"react-clip": __version__, "torch": torch.__version__, "python": platform.python_version()}


def check_versions(ray: Any) -> None:
    """Refuse a cluster in which a node has other software than this process."""
    ours = software()
    for node in ray.nodes():
        if not node["Alive"] or not node["Resources"].get("CPU"):
            continue
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ask = ray.remote(software).options(num_cpus=0, scheduling_strategy=here, max_retries=0)
        try:
            theirs: dict[str, str] = ray.get(ask.remote())
        except ray.exceptions.RayError as error:
            raise ReactClipError(
                f"node {node['NodeManagerAddress']} cannot run react-clip ({_cause(error)}); install react-clip "
                f"{ours['react-clip']} there"
            ) from None
        if differing := [f"{name} {theirs[name]}, here {ours[name]}" for name in ours if theirs[name] != ours[name]]:
            raise ReactClipError(
                f"node {node['NodeManagerAddress']} has {'; '.join(differing)}; install the same versions on both sides"
            )


def _knock(address: str) -> None:
    """Whether anybody listens; Ray itself would wait for a minute and then say it in a page."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ReactClipError(f"--address is {address!r}; write host:port, such as 10.0.0.5:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=_PATIENCE).close()
    except OSError as error:
        raise ReactClipError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with `ray start --head`, or "
            "leave --address out to use this machine"
        ) from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _cause(error: BaseException) -> str:
    """The last line of a remote traceback names what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
