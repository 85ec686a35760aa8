"""The HTTP protocol on a socket: uvicorn's, and a limit on the time that a request's headers may take."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tinychat.console import say
from tinychat.errors import TinychatError

HEADER_SECONDS = 10.0
HEADER_BYTES = 64 << 10  # of headers that are still incomplete; complete ones are checked by the guard
IDLE_SECONDS = 30.0  # between two requests of one connection
CONNECTIONS = 256
WS_BYTES = 1 << 20
WAITING = 64  # connections that nobody has accepted yet; asyncio tries to accept as many at a time
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # with which accept() fails for a time
AGAIN = 60.0  # seconds after which that is said again


class HttpProtocol(H11Protocol):
    """Closes a connection whose headers do not come in time (slow loris). The body's time is limited where it is
    read."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # garbage behind a request that is being answered
            self.transport.close()

    def _watch(self) -> None:
        """The time limit runs from the connection, or from the first byte after a response, to the end of the
        headers."""
        if self.conn.their_state is not h11.IDLE:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens once it is served; `port` 0 takes a free one. Raises TinychatError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        return listening
    except OSError as e:
        raise TinychatError(f"cannot listen on {host} port {port}: {(e.strerror or str(e)).lower()}") from None


class HttpServer(uvicorn.Server):
    """Leaves the signals to the process: uvicorn knows two of the three that end it, and raises them again inside of a
    task, whose exceptions are reported as lost. Where no more files can be open, connections wait, and one line says
    so; asyncio would write a traceback for each, thousands a second."""

    _said = -math.inf  # when

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._lost)
        await super().serve(sockets)

    def _lost(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        e = context.get("exception")
        if not isinstance(e, OSError) or e.errno not in FULL:
            loop.default_exception_handler(context)
        elif loop.time() - self._said > AGAIN:
            self._said = loop.time()
            say(f"new connections wait: {(e.strerror or '').lower()}")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: ASGIApp, websockets: bool = False) -> HttpServer:
    """A server for `app`: `run(sockets=[bind(...)])` serves until `handle_exit` is called or `should_exit` is set."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="websockets-sansio" if websockets else "none",
        ws_max_size=WS_BYTES,
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        backlog=WAITING,
        timeout_keep_alive=int(IDLE_SECONDS),
        timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=HEADER_BYTES,
    )
    return HttpServer(config)
