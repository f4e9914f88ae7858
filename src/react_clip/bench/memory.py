"""The most memory that a call takes beyond what stood before it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_EVERY = 0.002
"""Seconds between two looks at a CPU process."""


def peak_growth(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes beyond what was there before: the allocator's on a GPU, resident pages on Linux; ``None`` elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if not _STATM.exists():
        call()
        return None
    _give_back()
    with _Watch() as watch:
        call()
    return watch.growth


class _Watch:
    """Looks at the process's resident pages from a second thread; torch lets it run while it computes."""

    def __enter__(self) -> _Watch:
        self._done = threading.Event()
        self._before = self._most = _resident()
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
            self._most = max(self._most, _resident())


def _resident() -> int:
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _give_back() -> None:
    """Hand freed memory back to the system: what the last contender left in the heap would hide what this one takes."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
