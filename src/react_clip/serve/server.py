"""Listening socket, uvicorn, and the processes of a service."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
from asyncio import Transport
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.supervisors import Multiprocess

from react_clip.errors import ReactClipError
from react_clip.serve.log import JsonLines
from react_clip.serve.metrics import share_between_processes
from react_clip.serve.settings import DRAIN, GRACE, Secrets, Settings

if TYPE_CHECKING:
    from react_clip.serve.model import Model

logger = logging.getLogger("react_clip.serve")

_HEAD_SECONDS = 10.0
"""Time for the head of a request to arrive."""
_HEAD_BYTES = 2**14
"""Longest head of a request."""
_START_SECONDS = 60
"""A process that says nothing for so long is replaced; one that starts is silent while it imports libraries."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits on the time and length of heads: nobody can hold one that asks for nothing."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Await the first head."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Limit a head that is not complete yet: uvicorn knows the method when it is."""
        super().data_received(data)
        if "method" in (self.scope or {}):
            self._head_timer.cancel()
            return
        if self._head_timer.cancelled():
            self._await_head()
        self._head_bytes += len(data)
        if self._head_bytes > _HEAD_BYTES:
            self.send_400_response(f"The head of the request has more than {_HEAD_BYTES:,} bytes.")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_SECONDS, self.transport.close)
        self._head_bytes = 0


def open_socket(settings: Settings) -> socket.socket:
    """A bound socket; binding before the model is loaded reports a port in use at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections have it too
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ReactClipError(
            f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}; choose another --host "
            "or --port (0 takes a free one)"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(
    settings: Settings, secrets: Secrets, load: Callable[[Settings], Model], announce: Callable[[str], None]
) -> None:
    """Answer requests until SIGTERM or SIGINT, then finish the accepted ones.

    ``announce`` gets the URL as soon as the model is loaded.
    """
    from react_clip.serve.app import create_app

    with open_socket(settings) as listener, tempfile.TemporaryDirectory(prefix="react-clip-") as folder:
        if settings.workers > 1:
            share_between_processes(folder)
        model, address = load(settings), f"ipc://{folder}/model"
        listener.listen(128)  # from now on connections wait for uvicorn instead of being refused
        if settings.workers > 1:
            workers = _config(partial(_worker, settings, secrets, address), settings)
            with model.running(address):
                announce(url_of(listener))
                Multiprocess(workers, sockets=[listener]).run()
            return
        # uvicorn raises the signal again when it has stopped; with this handler the process still exits with 0.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        announce(url_of(listener))
        app = partial(_drained, create_app(settings, secrets, model=model))
        uvicorn.Server(_config(app, settings)).run(sockets=[listener])


def _config(app: Callable[[], FastAPI], settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        factory=True,
        workers=settings.workers,
        http=Connection,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=int(GRACE),
        timeout_worker_healthcheck=_START_SECONDS,
    )


def _drained(app: FastAPI) -> FastAPI:
    """The same application; from now on SIGTERM closes the port after a while in which /readyz says that it will.

    uvicorn has set its own handlers when it asks for the application. SIGINT, which people send, stops at once.
    """
    stop: Any = signal.getsignal(signal.SIGTERM)

    def drain(number: int, frame: Any) -> None:
        app.state.service.stopping = True
        threading.Timer(DRAIN, stop, (number, frame)).start()

    signal.signal(signal.SIGTERM, drain)
    return app


def _worker(settings: Settings, secrets: Secrets, address: str) -> FastAPI:
    """The application of a process that answers requests; it ends with the one that computes."""
    import torch

    from react_clip.serve.app import create_app

    torch.set_num_threads(1)
    log_to_stderr(settings)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return _drained(create_app(settings, secrets, address=address))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def log_to_stderr(settings: Settings) -> None:
    """Log the service's own lines at the level of the settings, and warnings of other packages."""
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        handler.setFormatter(JsonLines())
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", handlers=[handler], level="WARNING")
    logger.setLevel(settings.log_level.upper())
