"""``react-clip serve`` in this process with a record of its memory, for serve_soak.py.

    python benchmarks/_observed_server.py RECORD SECONDS ALLOCATOR serve FLAGS...

One JSON line is appended to RECORD after each stage of the start and then every SECONDS. ALLOCATOR is one of
ALLOCATORS. Nothing is imported before the first line that the service would import later.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HEAP_BYTES = 64 * 2**20
"""glibc aligns every heap of an arena, except the first one, to this size."""

ALLOCATORS = ("shipped", "untrimmed")
"""The service as it is, or without malloc_trim."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


class Recorder:
    """Writes the memory of this process to a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._began = time.monotonic()
        self.libc = ctypes.CDLL(None)
        self.libc.mallinfo2.restype = _Mallinfo
        self.libc.fopen.restype = ctypes.c_void_p

    def write(self, stage: str) -> None:
        """Append a line; all values are bytes except ``seconds``, ``arenas`` and ``threads``."""
        malloc = self.libc.mallinfo2()
        resident = _resident()
        line = {
            "seconds": round(time.monotonic() - self._began, 1),
            "stage": stage,
            "resident": sum(resident.values()),
            **resident,
            "malloc_used": malloc.uordblks,
            "malloc_free": malloc.fordblks,
            "malloc_mapped": malloc.hblkhd,
            "arenas": self._arenas(),
            "threads": len(list(Path("/proc/self/task").iterdir())),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def write_every(self, seconds: float) -> None:
        while True:
            time.sleep(seconds)
            self.write("serving")

    def _arenas(self) -> int:
        with tempfile.NamedTemporaryFile() as file:
            stream = ctypes.c_void_p(self.libc.fopen(file.name.encode(), b"w"))
            self.libc.malloc_info(0, stream)
            self.libc.fclose(stream)
            return Path(file.name).read_text().count("<heap nr=")


def _resident() -> dict[str, int]:
    """Resident bytes: pages of files, heaps of malloc, and other anonymous pages.

    The latter are malloc's mapped blocks (the weights among them), objects of Python and stacks.
    """
    sizes = {"files": 0, "heaps": 0, "other": 0}
    kind = "other"
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ \d+\s*(.*)", line):
            aligned = int(mapping[1], 16) % _HEAP_BYTES == 0
            is_heap = mapping[2] == "[heap]" or (not mapping[2] and aligned)
            kind = "heaps" if is_heap else "files" if mapping[2].startswith("/") else "other"
        elif line.startswith("Rss:"):
            sizes[kind] += 1024 * int(line.split()[1])
    return sizes


def main(record: str, seconds: str, allocator: str, *words: str) -> int:
    recorder = Recorder(Path(record))
    recorder.write("Python")
    import torch  # noqa: F401

    recorder.write("torch")
    import uvicorn  # noqa: F401

    from react_clip import cli
    from react_clip.cli import serve
    from react_clip.serve import app, memory  # noqa: F401

    recorder.write("other imports")
    if allocator != "shipped":
        memory.find_malloc_trim = lambda: None
    for owner, name, stage in (
        (serve, "load_encoder", "weights"),
        (serve, "build_classifier", "classes"),
        (serve, "build_app", "first batches"),
    ):
        setattr(owner, name, _recorded(recorder, getattr(owner, name), stage))
    threading.Thread(target=recorder.write_every, args=(float(seconds),), daemon=True).start()
    return cli.main(list(words))


def _recorded(recorder: Recorder, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        recorder.write(stage)
        return result

    return call


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
