"""Listening socket, uvicorn and signals."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from react_clip.errors import ReactClipError
from react_clip.serve.memory import spare_loaded_objects
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the service."""


def open_socket(settings: Settings) -> socket.socket:
    """A bound socket; binding before the model is loaded reports a port in use at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ReactClipError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; choose another --host "
            "or --port (0 takes a free one)"
        ) from None
    return listener


def address(listener: socket.socket) -> str:
    """URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: FastAPI,
    settings: Settings,
    listener: socket.socket,
    announce: Callable[[], None],
    *,
    counts: memoryview[int] | None = None,
    place: int = 0,
) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish the accepted ones and return.

    Processes that share a listener give the memory in which they count their connections, and their place in it.
    """
    import uvicorn

    from react_clip.serve.connections import HttpConnection, SharingServer

    config = uvicorn.Config(
        app,
        http=HttpConnection,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=settings.grace,  # type: ignore[arg-type]
    )
    server = uvicorn.Server(config) if counts is None else SharingServer(config, counts, place)
    app.state.stopping = lambda: server.should_exit

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn raises the signal again when it has stopped; with this handler the process still exits with 0. It also
    # catches a signal that arrives before uvicorn has installed its own handler.
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    spare_loaded_objects()
    listener.listen()  # from now on connections wait for uvicorn instead of being refused
    announce()
    server.run(sockets=[listener])


@contextmanager
def stopped_by_signal() -> Iterator[None]:
    """End the block at the first SIGTERM or SIGINT; a second one ends the process."""

    class StopError(BaseException):
        pass

    def stop(_: int, __: FrameType | None) -> None:
        for number in earlier:
            signal.signal(number, signal.SIG_DFL)
        raise StopError

    earlier = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        with suppress(StopError):
            yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
