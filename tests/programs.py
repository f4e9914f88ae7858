"""Programs that tests call, ``react-clip`` in processes of its own, and waiting for them."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., tuple[int, str, str]]
"""The fixture ``run``: the words of a command to its exit code, stdout and stderr."""

PRELOAD = (
    *("react_clip.cli.serve", "react_clip.serve.app", "react_clip.encoders.hf", "uvicorn"),
    *("transformers.models.clip.modeling_clip", "transformers.models.auto.tokenization_auto"),
)
"""Modules that commands import, which takes longer than everything else they do in a test."""


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait until a function returns something true, and return it; fails after this many seconds."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"the condition did not become true within {seconds:g} s"
        time.sleep(0.01)
    return value


def find_tool(name: str) -> str:
    """A program beside this Python, or anywhere else; the test that needs it skips and says so without."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@dataclass
class Command:
    """A running ``react-clip`` command."""

    process: BaseProcess
    stdout: Any
    log: Path
    """Its stderr."""

    def read_line(self) -> str:
        """The next line that it prints."""
        with open(self.stdout.fileno(), closefd=False) as stream:
            line = stream.readline()
        assert line, f"the command ended: {self.log.read_text()}"
        return line

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        """Kill it if it is still running."""
        self.process.kill()
        self.process.join()


def start_command(*words: object, log: Path, env: dict[str, str] | None = None) -> Command:
    """Start ``react-clip WORDS...``, forked from a process that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD])
    reader, writer = context.Pipe(duplex=False)
    arguments = ([*map(str, words)], env or {}, str(Path.cwd()), writer, str(log))
    process = context.Process(target=_run, args=arguments)
    process.start()
    writer.close()
    return Command(process, reader, log)


def _run(words: list[str], env: dict[str, str], folder: str, stdout: Any, log: str) -> None:
    from react_clip.cli import main

    os.environ.update(env)
    os.chdir(folder)
    os.dup2(stdout.fileno(), 1)
    stdout.close()
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    sys.stdin = os.fdopen(0)  # multiprocessing has put another file there, which uvicorn would look for in its workers
    sys.exit(main(words))
