"""Import packages of an extra, or say how to install them."""

from __future__ import annotations

import importlib
from typing import Any

from react_clip.errors import MissingPackageError, first_line


def require(module: str, purpose: str, *, extra: str) -> Any:
    """Import a module of an extra, or say how to install it.

    >>> require("json", "reading this", extra="eval").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name in (package, module)
        reason = "is missing" if missing else f"cannot be imported ({first_line(error)})"
        command = f"in the checkout of react-clip: pip install -e '.[{extra}]'"
        raise MissingPackageError(f"{purpose} needs {package}, which {reason}; {command}") from error
