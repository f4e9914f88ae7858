"""Versions, device names, and the cores that processes share."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def share_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> None:
    """Let several processes share cores, by variables that OpenMP reads when torch is imported; those set already win.

    Threads that wait sleep instead of turning in a circle. A container with a quota of cores has as many threads; torch
    would count the cores of the machine.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):  # of version 2 and of version 1
        with suppress(OSError, ValueError):
            quota, period = map(int, " ".join((cgroup / file).read_text() for file in files).split())
            if 0 < quota < period * len(os.sched_getaffinity(0)):
                os.environ.setdefault("OMP_NUM_THREADS", str(max(1, quota // period)))


def typed_command() -> str:
    """The command line of this process; empty unless it is ``react-clip``, such as in a notebook."""
    started = Path(sys.argv[0])
    is_ours = started.name == "react-clip" or started.parts[-2:] == ("react_clip", "__main__.py")
    return shlex.join(["react-clip", *sys.argv[1:]]) if is_ours else ""


def versions() -> dict[str, str]:
    """Versions of Python, react-clip, torch (with its CUDA build) and transformers."""
    import torch

    return {
        "python": platform.python_version(),
        "react-clip": __version__,
        "torch": str(torch.__version__),
        "transformers": metadata.version("transformers"),
    }


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the device's type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
