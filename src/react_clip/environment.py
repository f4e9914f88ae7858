"""Versions and device names, as result files record them."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of Python, react-clip, torch and transformers."""
    return {"python": platform.python_version(), "react-clip": __version__} | {
        package: metadata.version(package) for package in ("torch", "transformers")
    }


def device_name(device: torch.device) -> str:
    """The model of a GPU, or the device's type."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
