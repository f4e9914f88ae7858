"""Where photos are kept."""

from __future__ import annotations

import os
from pathlib import Path

from react_clip.storage import cache_dir


def default_root() -> Path:
    """``$REACT_CLIP_DATA``, else ``data`` in the user's cache."""
    if chosen := os.environ.get("REACT_CLIP_DATA"):
        return Path(chosen).expanduser()
    return cache_dir() / "data"
