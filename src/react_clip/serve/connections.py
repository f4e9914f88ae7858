"""Two changes to uvicorn: heads of requests are bounded, and processes share connections evenly."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from react_clip.serve.errors import RequestError

MAX_HEAD_BYTES = 16 * 1024
"""Most bytes of a request's line and headers."""
_TURN = 0.005
"""Seconds that a process leaves to those that have fewer connections, for each connection that it has more."""
_PAUSE = 1.0
"""Seconds until the next attempt if a connection cannot be accepted, for instance with too many open files."""


class HttpConnection(HttpToolsProtocol):
    """uvicorn's protocol with a limit on heads: the parser itself would collect any number of bytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._head_bytes, self._refusal = False, 0, ""

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


class SharingServer(uvicorn.Server):
    """Answers on a listener that other processes share; ``counts`` has the connections of each, its own at ``place``.

    Left to themselves, the first process to wake up would accept every connection that waits; and where each has a
    listener of its own (SO_REUSEPORT), Linux chooses one by a hash of the addresses, so that one process may have no
    connection and another six. So a process accepts one at a time, and lets those that have fewer go first.
    """

    def __init__(self, config: uvicorn.Config, counts: memoryview[int], place: int) -> None:
        super().__init__(config)
        self._counts, self._place = counts, place
        self._opening: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections from the one listener in ``sockets``."""
        await super().startup(sockets=[])
        [self._listener] = sockets or []
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._take_turn)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and finish the requests of those that are open."""
        self._loop.remove_reader(self._listener)
        await super().shutdown(sockets)

    def _take_turn(self) -> None:
        """Accept the connection that waits; if others have fewer, later, and only if it is still there."""
        own = self._counts[self._place] = len(self.server_state.connections) + len(self._opening)
        more = own - min(self._counts)
        if more == 0:
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
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        self._counts[self._place] += 1

    async def _open(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio's own loop does not
        with suppress(OSError):  # the caller is gone already
            await self._loop.connect_accepted_socket(self._protocol, connection)

    def _protocol(self) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self.lifespan.state)
