"""The most memory that a call takes beyond what stood before it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_EVERY = 0.002
"""Seconds between two looks at a CPU process."""

Gauge = Callable[[], int]
"""Bytes in use now."""


def peak_growth(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes beyond what was there before, as the allocator counts them; ``None`` where nobody counts.

    On a CPU that is glibc's. With another one it is resident pages, which also hold what was freed and not given back:
    they wobble by half of what a batch takes.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    gauge = allocated() or (_resident if _STATM.exists() else None)
    if gauge is None:
        call()
        return None
    if gauge is _resident:
        _give_back()
    with _Watch(gauge) as watch:
        call()
    return watch.growth


class _Watch:
    """Looks at a gauge from a second thread; torch lets it run while it computes."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def __enter__(self) -> _Watch:
        self._done = threading.Event()
        self._before = self._most = self._gauge()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._most - self._before

    def _look(self) -> None:
        while not self._done.wait(_EVERY):
            self._most = max(self._most, self._gauge())


class _Mallinfo2(ctypes.Structure):
    """What glibc says about its memory, over all threads."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]
    hblkhd: int
    uordblks: int


@cache
def allocated() -> Gauge | None:
    """The gauge of glibc's allocator, if this process uses it."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype = _Mallinfo2

    def gauge() -> int:
        found: _Mallinfo2 = mallinfo2()
        return found.hblkhd + found.uordblks

    before, block = gauge(), torch.empty(2**20, dtype=torch.uint8)
    return gauge if gauge() - before >= block.numel() else None


def _resident() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _give_back() -> None:
    """Hand freed memory back to the system: what the last contender left in the heap would hide what this one takes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
