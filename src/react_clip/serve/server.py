"""The listening side: a socket, uvicorn, and what uvicorn leaves open (slow heads, unread answers, a quiet end)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from react_clip.errors import ReactClipError
from react_clip.serve.gatekeeper import State
from react_clip.serve.problems import RequestError, busy
from react_clip.serve.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

_MOST_HEAD_BYTES = 16 * 1024
_LINGER = 0.3
"""Seconds an idle connection stays open when the service stops: a request may be on its way, and gets its 503."""


def open_socket(settings: Settings) -> socket.socket:
    """A bound socket, so that a port in use is known before a model is loaded."""
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
    """The URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: FastAPI, settings: Settings, listener: socket.socket, announce: Callable[[], None]) -> None:
    """Answer until SIGTERM or SIGINT; then finish what was accepted and return."""
    import uvicorn

    gate: State = app.state.gate

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            announce()

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            gate.stopping = True
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        http=_guarded_protocol(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]
        timeout_graceful_shutdown=settings.grace,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
    )
    server = Server(config)
    # uvicorn raises the signal again when it is done, and would die of it; a stop that was asked for is a success. Set
    # before it runs, the handler also catches a signal that comes while it starts.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    server.run(sockets=[listener])


def _guarded_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with clocks on heads and unread answers, a limit on connections, and JSON errors."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class GuardedProtocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None
        _write_timer: asyncio.TimerHandle | None = None

        @property
        def _idle(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.max_connections:
                self._say(busy(f"all {settings.max_connections} connections are in use; try again soon", close=True))
            else:
                self._watch_head()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._head_timer, self._write_timer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if not self._idle:
                _cancel(self._head_timer)
                self._head_timer = None
            elif self._head_timer is None:
                self._watch_head()

        def _watch_head(self) -> None:
            self._head_timer = self.loop.call_later(settings.header_timeout, self._head_is_late)

        def _head_is_late(self) -> None:
            self._head_timer = None
            if self._idle and not self.transport.is_closing():
                seconds = f"{settings.header_timeout:g} s"
                self._say(RequestError(408, f"the request's head did not arrive within {seconds}; send it at once"))

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                # The application must not wait for a body that cannot come any more.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
                started = self.cycle.response_started
            else:
                started = False
            if started:
                self.transport.abort()
            else:
                line = f"this is no valid HTTP request, or its head has more than {_MOST_HEAD_BYTES} bytes"
                self._say(RequestError(400, line, kind="malformed_request"))

        def _say(self, problem: RequestError) -> None:
            """Answer outside of the application, and close."""
            response = problem.response()
            head = [f"HTTP/1.1 {problem.status} {problem.kind}", "connection: close"]
            head += [f"{k.decode()}: {v.decode()}" for k, v in response.raw_headers if k != b"connection"]
            self.transport.write(("\r\n".join(head) + "\r\n\r\n").encode("latin-1") + bytes(response.body))
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write_timer = self.loop.call_later(settings.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._write_timer)
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            # Closing waits until everything is read; a caller that reads nothing must not keep its place for ever.
            self._write_timer = self.loop.call_later(settings.write_timeout, self.transport.abort)

        def shutdown(self) -> None:
            if self._idle:
                self.loop.call_later(_LINGER, self._end)
            else:
                super().shutdown()

        def _end(self) -> None:
            if not self._idle:
                self.cycle.keep_alive = False
            elif not self.transport.is_closing():
                with contextlib.suppress(h11.LocalProtocolError):
                    self.conn.send(h11.ConnectionClosed())
                self.transport.close()

    return GuardedProtocol


def _cancel(*timers: Any) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()
