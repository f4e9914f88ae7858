"""The Ray cluster that work goes to: one that runs already, or this machine for as long as the work takes."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from react_clip.environment import versions
from react_clip.errors import ReactClipError, first_line
from react_clip.optional import require

_PATIENCE = 5.0
"""Seconds to wait for the first sign of life of a cluster at an address."""

_checked: set[str] = set()
"""Nodes that are known to have our software; a node's id is never given twice."""


@contextmanager
def connected(address: str | None = None) -> Iterator[Any]:
    """Join the cluster at ``address`` (``host:port``), or start one on this machine; gives the ``ray`` module.

    A session that is connected already is used as it is, and left so. Whatever cluster it is, its workers must run the
    same software as this process, or results would depend on where an image was sent.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # its warnings are about Ray's insides
    ray = require("ray", "working on a cluster", extra="scale")
    if ray.is_initialized():
        check_versions(ray)
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
    if address is not None:
        _knock(address)
    try:
        with _without_stderr():
            if address is None:
                ray.init(address="local", include_dashboard=False, **quiet)
            else:
                ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise ReactClipError(f"no Ray cluster could be used {where}: {first_line(error)}") from None
    try:
        check_versions(ray)
        yield ray
    finally:
        ray.shutdown()


def check_versions(ray: Any) -> None:
    """Refuse a cluster in which a node has other software than this process."""
    ours = versions()
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    nodes = [node for node in nodes if node["NodeID"] not in _checked]
    asked = []
    for node in nodes:
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ask = ray.remote(versions).options(num_cpus=0, scheduling_strategy=here, max_retries=0)
        asked.append(ask.remote())
    for node, answer in zip(nodes, asked, strict=True):
        try:
            theirs: dict[str, str] = ray.get(answer)
        except (ray.exceptions.NodeDiedError, ray.exceptions.TaskUnschedulableError):
            continue  # it left while it was asked, and will do no work
        except ray.exceptions.RayError as error:
            raise ReactClipError(
                f"node {node['NodeManagerAddress']} cannot run react-clip ({_cause(error)}); install react-clip "
                f"{ours['react-clip']} there"
            ) from None
        if differing := [f"{name} {theirs[name]}, here {ours[name]}" for name in ours if theirs[name] != ours[name]]:
            raise ReactClipError(
                f"node {node['NodeManagerAddress']} has {'; '.join(differing)}; install the same versions on both sides"
            )
        _checked.add(node["NodeID"])


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


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Ray's C++ side announces there that it will be quiet; what goes wrong is raised."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _cause(error: BaseException) -> str:
    """The last line of a remote traceback names what went wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
