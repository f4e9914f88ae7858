"""Gives freed memory back to the operating system.

glibc keeps what a thread has freed for the next request of that thread. Batches and photos of changing sizes, freed by
several threads, leave hundreds of megabytes there, which the operating system counts as used.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

_SECONDS = 10.0
"""Between two calls of ``malloc_trim``. One takes up to 30 ms, on a thread of its own."""


def find_malloc_trim() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``, or None where the C library has none."""
    try:
        function: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library, or Windows
        return None
    return function


async def return_freed_memory() -> None:
    """Call ``malloc_trim`` again and again until cancelled; returns at once where there is none."""
    trim = find_malloc_trim()
    while trim is not None:
        await asyncio.sleep(_SECONDS)
        await asyncio.to_thread(trim, 0)
