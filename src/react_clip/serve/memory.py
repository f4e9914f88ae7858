"""Gives freed memory back to the operating system."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Call glibc's ``malloc_trim``; glibc would keep what a thread has freed for later requests of that thread."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
