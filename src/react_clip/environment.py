"""Versions, device names and what the CPU and the GPU can do."""

from __future__ import annotations

import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def typed_command() -> str:
    """The command line of this process; empty unless it is ``react-clip``, such as in a notebook."""
    is_ours = Path(sys.argv[0]).name in ("react-clip", "__main__.py")
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


def has_fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if this CPU multiplies bfloat16 matrices in hardware; elsewhere bf16 is slower than fp32.

    Read from the flags that Linux lists (x86: AVX512-BF16 or AMX, Arm: BF16); False on other systems.
    """
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split()}
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
