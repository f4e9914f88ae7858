"""Several processes that answer on one port: one interpreter lets only one thread run Python code at a time.

One process has the model; HTTP processes read and decode images and ask it (:mod:`react_clip.serve.remote`). The first
process answers nothing. It holds the port, starts the others, replaces those that end, and stops all of them. It
imports the libraries before it forks, so that processes start fast and share that memory; it never touches a GPU, which
no fork would survive. All HTTP processes listen on one socket (:mod:`react_clip.serve.connections`): connections that
still wait are not lost when a process ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from react_clip.errors import ReactClipError
from react_clip.preprocess import Preprocessing
from react_clip.serve.memory import spare_loaded_objects
from react_clip.serve.server import STOP_SIGNALS, address, open_socket, serve, stopped_by_signal
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from react_clip.serve.engine import Engine
    from react_clip.serve.remote import SharedMemory
    from react_clip.serve.responses import Info

logger = logging.getLogger("react_clip.serve")

_MODEL = 0
"""Place of the process with the model; HTTP processes follow it."""
_MANY = 2**31
"""Connections of a process that has ended, so that no other leaves new ones to it."""
_PAUSE = 1.0
"""Seconds before a process that has ended is replaced, so that one that always fails does not keep a core busy."""
_PR_SET_PDEATHSIG = 1
"""Linux' prctl: the signal that a process gets when its parent ends."""


@dataclass(frozen=True)
class _Child:
    process: BaseProcess
    status: Connection
    """Pipe from the process, which sends one value: its result when it is ready, or the line of its error, a string."""

    def wait_until_ready(self) -> Any:
        """Wait for that value and return it; a string is raised as an error.

        The result is :attr:`_Group.model` from the model's process and None from an HTTP process.
        """
        try:
            status = self.status.recv()
        except EOFError:
            self.process.join()
            status = (
                f"a process ended with exit code {self.process.exitcode} before it was ready; is there memory for it?"
            )
        if isinstance(status, str):
            raise ReactClipError(status)
        return status


@dataclass
class _Group:
    """All processes; ``folder`` is where they keep their metrics and the model's socket."""

    build: Callable[[], Engine]
    secret: bytes
    keys: frozenset[bytes]
    settings: Settings
    listener: socket.socket
    memory: SharedMemory
    folder: str
    model: tuple[Info, Preprocessing] | None = None
    """Description and preprocessing of the model, for the HTTP processes; None until it is loaded."""
    children: list[_Child] = field(default_factory=list)

    def start_all(self) -> None:
        """Start the process with the model, and when it is ready the HTTP processes."""
        self.model = self.start(_MODEL).wait_until_ready()
        for child in [self.start(place) for place in range(1, 1 + self.settings.processes)]:
            child.wait_until_ready()

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
            if place != _MODEL:
                self.memory.connections[place - 1] = _MANY
            time.sleep(_PAUSE)
            try:
                self.start(place).wait_until_ready()
            except ReactClipError as error:
                logger.error("a process could not start: %s", error)

    def stop(self) -> None:
        """Refuse new connections, let the HTTP processes finish their requests, then end the model's."""
        with suppress(OSError):  # no process has listened yet
            self.listener.shutdown(socket.SHUT_RDWR)
        for children in (self.children[_MODEL + 1 :], self.children[:1]):
            for child in children:
                child.process.terminate()
            for child in children:
                child.process.join()

    def _run(self, place: int, status: Connection, parent: int) -> None:
        """The work of a process."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
        # Ctrl-C reaches every process of a terminal: SIGINT stays blocked here, and the parent sends SIGTERM.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        from react_clip.serve.metrics import share_between_processes

        share_between_processes(self.folder, place)
        try:
            if place == _MODEL:
                self._compute(status)
            else:
                self._answer(place - 1, status)
        except ReactClipError as error:
            status.send(str(error))
            sys.exit(2)

    def _compute(self, status: Connection) -> None:
        from uvicorn.loops.auto import auto_loop_factory

        from react_clip.serve.remote import ModelServer
        from react_clip.serve.responses import Info

        engine = self.build()
        server = ModelServer(engine, self.memory, self.folder)
        spare_loaded_objects()

        async def answer_until_stopped() -> None:
            stopped = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
            async with server.listening():
                status.send((Info.of(engine, demo=False), engine.preprocessing))
                await stopped.wait()

        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
            runner.run(answer_until_stopped())

    def _answer(self, place: int, status: Connection) -> None:
        import torch

        from react_clip.serve.app import create_app
        from react_clip.serve.remote import RemoteEngine

        torch.set_num_threads(1)
        assert self.model is not None, "the model is ready before HTTP processes start"
        engine = RemoteEngine(
            *self.model,
            memory=self.memory,
            place=place,
            folder=self.folder,
            secret=self.secret,
            settings=self.settings,
        )
        app, counts = create_app(engine, keys=self.keys), self.memory.connections
        serve(app, self.settings, self.listener, lambda: status.send(None), counts=counts, place=place)


def serve_in_processes(
    build: Callable[[], Engine],
    settings: Settings,
    announce: Callable[[str], None],
    *,
    secret: bytes,
    keys: frozenset[bytes],
) -> None:
    """Answer with ``settings.processes`` HTTP processes and one for the model until SIGTERM or SIGINT.

    Accepted requests are then finished. ``build`` loads the model and starts its engine. ``announce`` is called with
    the URL when all processes are ready. Raises the error of a process that cannot start.
    """
    if sys.platform != "linux":
        raise ReactClipError(
            f"--processes is {settings.processes}, but only Linux gives the connections of one port to several "
            "processes; leave it out"
        )
    with open_socket(settings) as listener, tempfile.TemporaryDirectory(prefix="react-clip-") as folder:
        import uvicorn  # noqa: F401

        from react_clip.serve import app  # noqa: F401
        from react_clip.serve.remote import SharedMemory

        group = _Group(build, secret, keys, settings, listener, SharedMemory(settings.processes), folder)
        spare_loaded_objects()
        with stopped_by_signal():
            try:
                group.start_all()
                announce(address(listener))
                while True:
                    group.replace_ended()
            finally:
                group.stop()
