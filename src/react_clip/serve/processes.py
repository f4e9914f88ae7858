"""Several processes that answer on one port: one interpreter lets only one thread run Python code at a time.

The first process answers nothing. It holds the port, starts the others, replaces those that end, and stops all of them.
It imports the libraries before it forks, so that processes start fast and share that memory; it never touches a GPU,
which no fork would survive. Every process listens on a socket of its own (SO_REUSEPORT), and Linux gives each new
connection to one of them by a hash of its addresses. On one shared socket the first process to wake up would accept
every connection that waits.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from react_clip.errors import ReactClipError
from react_clip.serve.server import STOP_SIGNALS, address, open_socket, serve, stopped_by_signal
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger("react_clip.serve")

_PAUSE = 1.0
"""Seconds before a process that has ended is replaced, so that one that always fails does not keep a core busy."""
_PR_SET_PDEATHSIG = 1
"""Linux' prctl: the signal that a process gets when its parent ends."""


@dataclass(frozen=True)
class _Child:
    process: BaseProcess
    status: Connection
    """None when it listens, or one line that says why it cannot."""

    def wait_until_ready(self) -> None:
        """Return when the process listens; raises its error where it cannot."""
        try:
            problem = self.status.recv()
        except EOFError:
            self.process.join()
            problem = (
                f"a process ended with exit code {self.process.exitcode} before it was ready; is there memory for "
                "that many --processes?"
            )
        if problem is not None:
            raise ReactClipError(problem)


@dataclass(frozen=True)
class _Group:
    """The processes that answer; ``folder`` is where they keep their metrics."""

    build: Callable[..., FastAPI]
    settings: Settings
    folder: str
    children: list[_Child] = field(default_factory=list)

    def start(self, place: int) -> _Child:
        """Start a process at a place of the list."""
        context = multiprocessing.get_context("fork")
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=self._run, args=(place, writer, os.getpid()), daemon=True)
        # A signal must not find a child that has this process' handlers, or one that is not in the list yet.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            process.start()
            self.children[place : place + 1] = [_Child(process, reader)]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        writer.close()  # later processes must not inherit it, else the reader would not see this one end
        return self.children[place]

    def replace_ended(self) -> None:
        """Wait until a process ends, start another in its place, and wait until that one listens."""
        from react_clip.serve.metrics import forget_process

        wait([child.process.sentinel for child in self.children])
        for place, child in enumerate(self.children):
            if (code := child.process.exitcode) is None:
                continue
            logger.error("process %d ended with exit code %d; another takes its place", child.process.pid, code)
            forget_process(self.folder, place)
            time.sleep(_PAUSE)
            try:
                self.start(place).wait_until_ready()
            except ReactClipError as error:
                logger.error("a process could not start: %s", error)

    def stop(self) -> None:
        """Let all processes finish their requests, and wait for that."""
        for child in self.children:
            child.process.terminate()
        for child in self.children:
            child.process.join()

    def _run(self, place: int, status: Connection, parent: int) -> None:
        """Answer requests, in a process of its own."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
        # Ctrl-C reaches every process of a terminal: SIGINT stays blocked here, and the parent sends SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        from react_clip.serve.metrics import share_between_processes

        share_between_processes(self.folder, place)
        try:
            app = self.build(quiet=place > 0)
            listener = open_socket(self.settings, shared=True)
        except ReactClipError as error:
            status.send(str(error))
            sys.exit(2)
        serve(app, self.settings, listener, lambda: status.send(None))


def serve_in_processes(build: Callable[..., FastAPI], settings: Settings, announce: Callable[[str], None]) -> None:
    """Answer in ``settings.processes`` processes until SIGTERM or SIGINT, then finish the accepted requests and return.

    ``build(quiet=...)`` makes the app, with a running engine; ``quiet`` prints no notices. ``announce`` is called with
    the URL when all processes listen. Raises the error of a process that cannot start.
    """
    if sys.platform != "linux":
        raise ReactClipError(
            f"--processes is {settings.processes}, but only Linux gives the connections of one port to several "
            "processes; leave it out"
        )
    open_socket(settings).close()  # a shared port could be bound even where another server of this user shares it
    with open_socket(settings, shared=True) as holder, tempfile.TemporaryDirectory(prefix="react-clip-") as folder:
        import uvicorn  # noqa: F401

        from react_clip.serve import app  # noqa: F401

        group = _Group(build, settings.model_copy(update={"port": holder.getsockname()[1]}), folder)
        with stopped_by_signal():
            try:
                for child in [group.start(place) for place in range(settings.processes)]:
                    child.wait_until_ready()
                announce(address(holder))
                while True:
                    group.replace_ended()
            finally:
                group.stop()
