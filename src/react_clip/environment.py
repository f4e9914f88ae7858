"""Versions, device names."""

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
