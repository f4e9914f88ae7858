"""Gives freed memory back to the operating system, and keeps garbage collections short.

glibc keeps what a thread has freed for the next request of that thread. Batches and photos of changing sizes, freed by
several threads, leave hundreds of megabytes there, which the operating system counts as used.

PyTorch and its libraries are hundreds of thousands of Python objects that live as long as the process. A full garbage
collection looks at all of them, which takes more than a tenth of a second; meanwhile no request is answered.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable

_SECONDS = 10.0
"""Between two calls of ``malloc_trim``. One takes up to 30 ms, on a thread of its own."""


def spare_loaded_objects() -> None:
    """Let later garbage collections leave out all objects that exist now.

    A process that forks afterwards shares their memory for longer: a collection would write to every page of it.
    """
    gc.collect()
    gc.freeze()


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
