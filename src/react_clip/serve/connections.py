"""uvicorn with two changes: connections are shared evenly among processes, and the head of a request is bounded."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from react_clip.serve.errors import RequestError
from react_clip.serve.settings import Settings

MAX_HEAD_BYTES = 16 * 1024
"""Most bytes of a request's line and headers."""
_TURN = 0.005
"""Seconds that a process leaves to those that have fewer connections, for each connection that it has more."""
_PAUSE = 1.0
"""Seconds until the next attempt if a connection cannot be accepted, for instance with too many open files."""


class HttpServer(uvicorn.Server):
    """Answers on a listener that other processes may share.

    Left to themselves, the first process to wake up would accept every connection that waits, and one that Linux
    chooses by a hash of the addresses (SO_REUSEPORT) may have none while another has six. So a process accepts one
    connection at a time, and lets those with fewer ``connections`` go first.
    """

    def __init__(
        self, app: FastAPI, settings: Settings, listener: socket.socket, connections: memoryview[int], place: int
    ) -> None:
        config = uvicorn.Config(
            app,
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
        super().__init__(config)
        self._listener, self._connections, self._place = listener, connections, place
        self._opening: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections."""
        await super().startup(sockets=[])
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self.count_connections()
        self._loop.add_reader(self._listener, self._take_turn)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and finish the requests of those that are open."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        await super().shutdown()

    def count_connections(self) -> None:
        """Tell the other processes how many connections this one has."""
        self._connections[self._place] = len(self.server_state.connections)

    def _take_turn(self) -> None:
        """Accept the connection that waits, now or, if it is still there, after those with fewer connections."""
        more = self._connections[self._place] - min(self._connections)
        if more <= 0:
            self._accept()
        else:
            self._accept_after(_TURN * min(more, 10))

    def _accept_after(self, seconds: float) -> None:
        def resume() -> None:
            if not self.should_exit:
                self._loop.add_reader(self._listener, self._take_turn)
                self._accept()

        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, resume)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return  # another process has accepted it
        except OSError:
            self._accept_after(_PAUSE)
            return
        self._connections[self._place] += 1
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio's own loop does not
        with suppress(OSError):  # the caller is gone already
            await self._loop.connect_accepted_socket(lambda: HttpConnection(self), connection)


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on heads: the parser itself would collect any number of bytes."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._count_connections = server.count_connections
        self._in_head, self._head_bytes, self._refusal = False, 0, ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by the event loop."""
        super().connection_made(transport)
        self._count_connections()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        super().connection_lost(exc)
        self._count_connections()

    def data_received(self, data: bytes) -> None:
        """Parse some bytes; a head that is too long and not complete yet ends the connection."""
        super().data_received(data)
        self._head_bytes = self._head_bytes + len(data) if self._in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _too_long(self._head_bytes)
            self.send_400_response(self._refusal)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser, or this class, does not take, in the shape of all errors."""
        line = self._refusal or "these bytes are no HTTP request; let your client library write it"
        response = RequestError(400, line, kind="malformed_request").response()
        headers = [b"%b: %b\r\n" % header for header in [*response.raw_headers, (b"connection", b"close")]]
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n%b\r\n%b" % (b"".join(headers), bytes(response.body)))
        self.transport.close()

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called by the parser; what it raises becomes an answer with status 400."""
        self._in_head = False
        length = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if length > MAX_HEAD_BYTES:
            self._refusal = _too_long(length)
            raise ValueError(self._refusal)
        super().on_headers_complete()


def _too_long(length: int) -> str:
    return f"the head of the request has {length:,} bytes or more; the limit is {MAX_HEAD_BYTES:,}; send less"
