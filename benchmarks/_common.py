"""Helpers of the scripts in this folder: start a server, describe the machine, write the result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from react_clip.environment import versions

RESULTS = Path(__file__).parent / "results"
SERVICE = ("fastapi", "httptools", "pyzmq", "uvicorn", "uvloop", "starlette", "pillow")
"""Packages of the service, whose versions belong to its measurements."""


@dataclass
class Server:
    """A process of ``react-clip serve``."""

    process: subprocess.Popen[str]
    url: str
    command: str

    @classmethod
    def start(
        cls, flags: Sequence[str], program: Sequence[str] = ("-m", "react_clip"), source: Path | None = None
    ) -> Server:
        """Start a server on a free port and wait until it answers.

        ``program`` are Python's arguments before serve; ``source`` is the src folder of another version of the package.
        """
        words = ["serve", "--port", "0", "--json", "--quiet", *flags]
        environment = {**os.environ, "PYTHONPATH": str(source)} if source else None
        process = subprocess.Popen(
            [sys.executable, *program, *words], stdout=subprocess.PIPE, text=True, env=environment
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            sys.exit(f"the server ended with {process.wait()}")
        return cls(process, json.loads(line)["url"], shlex.join(["react-clip", *words]))

    def pids(self) -> list[int]:
        """The server's process and those that it has started (--workers)."""
        found = [self.process.pid]
        for pid in found:  # it grows: children of all threads of each process
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):
                    found += map(int, children.read_text().split())
        return found

    def memory(self) -> int:
        """Resident bytes of all its processes; a page that several of them share counts once."""
        pids = self.pids()
        field = "Rss:" if len(pids) == 1 else "Pss:"
        lines: list[str] = []
        for pid in pids:
            with suppress(OSError):  # it has ended just now
                lines += Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(field))

    def work(self) -> tuple[float, int]:
        """Seconds that its threads have spent on processors, and page faults without reading from a disk."""
        seconds, faults = 0.0, 0
        for pid in self.pids():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            faults += int(fields[7])
        return seconds, faults

    def stop(self) -> tuple[int, float]:
        """Send SIGTERM; returns the exit code and the seconds until the process ended."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(900), time.monotonic() - began


def where(*packages: str) -> dict[str, Any]:
    """Command, versions (those of ``packages`` too) and machine of a measurement."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions() | {name: version(name) for name in packages},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "cores": os.cpu_count(),
    }


def _cpu() -> str:
    """The CPU's name as Linux gives it, or its architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(name: str, result: dict[str, Any]) -> None:
    """Print a result and write it to ``benchmarks/results``."""
    text = json.dumps(result, indent=2)
    path = RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    print(text)
