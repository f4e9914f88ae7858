"""Packages that only evaluation needs, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from react_clip.errors import ReactClipError


def require(module: str, purpose: str) -> Any:
    """Import a module of the ``eval`` extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ReactClipError(f"{purpose} needs {package}, which is missing; pip install 'react-clip[eval]'") from error
