"""Access: the key, the Host and the Origin of a request are checked before anything else of it is read."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinychat.server.refusal import RequestRefused

OPEN_PATHS = frozenset({"/health", "/v1/health"})  # need no key: they say only that the server runs
# These ask for the key themselves: a browser has shown it once, and then sends a cookie.
WEB_PATHS = frozenset({"/", "/chat/key", "/chat/ws", "/chat/xterm.css", "/chat/textual.js", "/chat/font.ttf"})
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 << 10

Refuse = Callable[[RequestRefused, Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Policy:
    """Who has access. `key` None: every client that reaches the port. `hosts`: names of this server besides its
    addresses and localhost. `origins`: web pages ("https://chat.example.com") that may use it from a browser."""

    key: str | None = None
    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()


class Guard:
    """Lets through what Policy allows. A page of another site reaches a server on loopback by way of the browser: with
    its own name made to point here (DNS rebinding: the Host is foreign), or directly (the Origin is)."""

    def __init__(self, app: ASGIApp, policy: Policy, refuse: Refuse) -> None:
        self._app, self._policy, self._refuse = app, policy, refuse
        self._key = policy.key.encode() if policy.key is not None else None
        self._hosts = {"localhost", socket.gethostname().lower(), *(h.lower() for h in policy.hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        origin = headers.get("origin")
        if origin in self._policy.origins:
            send = _with_cors(send, origin)
        try:
            self._check(scope, headers)
        except RequestRefused as e:
            if scope["type"] == "websocket":  # before it is accepted: the client sees status 403
                return await send({"type": "websocket.close", "code": 1008})
            return await self._refuse(e, scope, receive, send)
        if scope["type"] == "http" and scope["method"] == "OPTIONS" and origin in self._policy.origins:
            await send({"type": "http.response.start", "status": 204, "headers": []})
            return await send({"type": "http.response.body", "body": b""})
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: dict[str, str]) -> None:
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise RequestRefused("invalid", f"more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES >> 10} KB of them")
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_here(host):
            raise RequestRefused("forbidden", "the Host is not a name of this server; `--allow-host NAME` adds one")
        if origin is not None:
            if origin not in self._policy.origins and not _same(origin, host):
                raise RequestRefused("forbidden", "the Origin may not use this server; `--allow-origin URL` adds one")
        elif scope["type"] == "websocket":
            raise RequestRefused("forbidden", "a websocket needs an Origin")
        elif headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise RequestRefused("forbidden", "web pages of other sites may not use this server")
        if self._key is None or scope["path"] in OPEN_PATHS | WEB_PATHS or scope.get("method") == "OPTIONS":
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), self._key):
            raise RequestRefused("key", "the API key is missing or wrong")

    def _is_here(self, host: str) -> bool:
        """Addresses cannot be rebound, only names can."""
        name = (urlsplit(f"//{host}").hostname or "") if _plain(host) else ""
        try:
            ipaddress.ip_address(name)
            return True
        except ValueError:
            return name in self._hosts


def _plain(host: str) -> bool:
    """Whether `host` is a name and perhaps a port, and nothing that urlsplit would read otherwise or refuse."""
    try:
        parts = urlsplit(f"//{host}")
        return parts.netloc == host and "@" not in host and (parts.port is None or parts.port >= 0)
    except ValueError:
        return False


def _same(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc == host


def _with_cors(send: Send, origin: str | None) -> Send:
    allowed: list[tuple[bytes, bytes]] = [
        (b"access-control-allow-origin", (origin or "").encode("latin-1")),
        (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
        (b"access-control-allow-headers", b"authorization, content-type, x-api-key, anthropic-version, anthropic-beta"),
        (b"access-control-max-age", b"600"),
        (b"vary", b"Origin"),
    ]

    async def sending(message: Message | dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *allowed]
        await send(message)

    return sending
