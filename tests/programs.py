"""Programs that tests call, where they are installed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


def find_tool(name: str) -> str:
    """A program beside this Python, or anywhere else; the test that needs it skips and says so without."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found
