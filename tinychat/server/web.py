"""The chat in a browser: a page, the way in with the key, and the websocket between a page and its process.

Page and terminal are those of textual-serve (the extra `web`); every page runs a process of its own, which is a client
of this server like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import html
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request as HTTPRequest
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

COOKIE = "tinychat"
PAGES = 8  # at a time: each is a process of some 80 MB
MAX_SIDE = 500  # cells of a terminal
MAX_KEYS = 1 << 18  # characters of one message of a page: a pasted text
WRONG_KEY_S = 1.0
FORM_S, MAX_FORM = 10.0, 4096  # seconds and bytes
KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "SYSTEMROOT")  # of the environment, for a page's process
FILES = {  # of textual-serve, by the only names that are served
    "xterm.css": ("css/xterm.css", "text/css"),
    "textual.js": ("js/textual.js", "text/javascript"),
    "font.ttf": ("fonts/RobotoMono-VariableFont_wght.ttf", "font/ttf"),
}
STYLE = """
@font-face { font-family: "Roboto Mono"; src: url("/chat/font.ttf"); font-weight: 100 700; }
body { background: #0f1115; color: #e6e6e6; font-family: "Roboto Mono", monospace; margin: 0; }
form { margin: 20vh auto; width: 24em; } input, button { font: inherit; padding: .4em; }
.closed { display: none; position: fixed; top: 40vh; width: 100%; text-align: center; }
body.-closed .closed { display: block; } body.-closed .textual-terminal { display: none; }
"""
LOGIN = '<form method="post" action="/chat/key"><p>{title}</p><p>{said}</p><input type="password" name="key" \
placeholder="the server&#39;s key" autofocus> <button>open</button></form>'
TERMINAL = """<div class="closed">The chat has ended. <a href="/">Open it again</a></div>
<div id="terminal" class="textual-terminal" data-font-size="15"></div>
<script nonce="{nonce}">
const at = location.protocol.replace("http", "ws") + "//" + location.host + "/chat/ws";
document.getElementById("terminal").dataset.sessionWebsocketUrl = at;
new MutationObserver(() => document.querySelector(".xterm-helper-textarea")?.focus())
  .observe(document.body, {attributes: true, attributeFilter: ["class"]});
</script><script nonce="{nonce}" src="/chat/textual.js"></script>"""


@dataclass
class Web:
    """`url`: of this server, as its own processes reach it; `key`: what a page must send once, and its process always;
    `program`: what runs in a process, called with the URL, an empty folder and the title,
    which is the model's name."""

    url: str
    key: str | None
    title: str
    program: Sequence[str]
    sessions: set[str] = field(default_factory=set)  # cookies of browsers that sent the key
    pages: int = 0

    def knows(self, cookies: dict[str, str]) -> bool:
        """Whether a browser has shown the key."""
        return self.key is None or cookies.get(COOKIE, "") in self.sessions


def installed() -> bool:
    """Whether the extra `web` is."""
    return all(importlib.util.find_spec(name) is not None for name in ("textual_serve", "websockets"))


def routes(web: Web) -> list[BaseRoute]:
    """The page, its files, the way in and the websocket."""
    static = Path(importlib.util.find_spec("textual_serve").submodule_search_locations[0]) / "static"  # type: ignore[union-attr,index]

    async def page(request: HTTPRequest) -> Response:
        return _html(web, TERMINAL) if web.knows(request.cookies) else _html(web, LOGIN, said="")

    async def enter(request: HTTPRequest) -> Response:
        given = await _given_key(request)
        if web.key is not None and not hmac.compare_digest(given.encode(), web.key.encode()):
            await asyncio.sleep(WRONG_KEY_S)
            return _html(web, LOGIN, 401, said="That is not the key.")
        token = secrets.token_urlsafe(32)
        web.sessions.add(token)
        response = RedirectResponse("/", 303)
        secure = request.headers.get("x-forwarded-proto", request.url.scheme) == "https"
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, path="/")
        return response

    def file(name: str) -> Route:
        path, kind = FILES[name]

        async def send(request: HTTPRequest) -> Response:
            return FileResponse(static / path, media_type=kind, headers={"cache-control": "max-age=86400"})

        return Route(f"/chat/{name}", send)

    async def socket(websocket: WebSocket) -> None:
        if not web.knows(websocket.cookies) or web.pages >= PAGES:
            return await websocket.close(1008)
        web.pages += 1
        try:
            await websocket.accept()
            await _converse(web, websocket)
        finally:
            web.pages -= 1

    return [
        Route("/", page),
        Route("/chat/key", enter, methods=["POST"]),
        *map(file, FILES),
        WebSocketRoute("/chat/ws", socket),
    ]


async def _given_key(request: HTTPRequest) -> str:
    """What was typed into the form; "" for anything else."""
    body = b""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FORM_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM:
                    return ""
    return parse_qs(body.decode("latin-1")).get("key", [""])[0].strip()


def _html(web: Web, body: str, status: int = 200, **values: str) -> Response:
    nonce = secrets.token_urlsafe(16)
    title = html.escape(web.title)
    for name, value in {"nonce": nonce, "title": title, **values}.items():
        body = body.replace(f"{{{name}}}", value)
    head = f'<meta charset="utf-8"><title>{title}</title><link rel="stylesheet" href="/chat/xterm.css">'
    policy = (
        f"default-src 'self'; script-src 'nonce-{nonce}' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self' ws: wss:; frame-ancestors 'none'"
    )
    headers = {"content-security-policy": policy, "cache-control": "no-store", "referrer-policy": "same-origin"}
    text = f"<!doctype html><html><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>"
    return Response(text, status, headers, "text/html")


async def _converse(web: Web, websocket: WebSocket) -> None:
    """Runs a process for this page until either ends."""
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="tinychat-web-")
    process = None
    try:
        process = await asyncio.create_subprocess_exec(
            *web.program,
            web.url,
            folder,
            web.title,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(web, folder, websocket),
            cwd=folder,
        )
        sides = [asyncio.create_task(_shown(process, websocket)), asyncio.create_task(_typed(process, websocket))]
        _, rest = await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
        for side in rest:
            side.cancel()
        await asyncio.gather(*sides, return_exceptions=True)
    finally:
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        with contextlib.suppress(RuntimeError):
            await websocket.close()


def _environment(web: Web, folder: str, websocket: WebSocket) -> dict[str, str]:
    """Of the server's environment only the paths of programs and the locale; the home is the empty folder."""
    size = websocket.query_params
    kept = {name: value for name, value in os.environ.items() if name in KEPT}
    return kept | {
        "TEXTUAL_DRIVER": "textual.drivers.web_driver:WebDriver",
        "TEXTUAL_COLOR_SYSTEM": "truecolor",
        "TERM_PROGRAM": "textual",
        "COLUMNS": str(_side(size.get("width"), 80)),
        "ROWS": str(_side(size.get("height"), 24)),
        "HOME": folder,
        "XDG_CONFIG_HOME": folder,
        "XDG_CACHE_HOME": folder,
        "XDG_DATA_HOME": folder,
        "XDG_STATE_HOME": folder,
        **({"TINYCHAT_API_KEY": web.key} if web.key else {}),
    }


def _side(value: Any, default: int) -> int:
    """A length of the terminal in cells."""
    try:
        return max(1, min(MAX_SIDE, int(value)))
    except (TypeError, ValueError):
        return default


async def _shown(process: asyncio.subprocess.Process, websocket: WebSocket) -> None:
    """From the process to the page: packets of a letter, a length and what is painted (D) or meant (M)."""
    out = process.stdout
    assert out is not None
    with contextlib.suppress(asyncio.IncompleteReadError, RuntimeError, WebSocketDisconnect):
        while await out.readline() != b"__GANGLION__\n":
            if out.at_eof():
                return
        while True:
            kind, size = await out.readexactly(1), await out.readexactly(4)
            data = await out.readexactly(int.from_bytes(size, "big"))
            if kind == b"D":
                await websocket.send_bytes(data)
            elif kind == b"M":
                meant = json.loads(data)
                if meant.get("type") == "exit":
                    return
                if meant.get("type") == "open_url":
                    await websocket.send_text(json.dumps(["open_url", {k: meant.get(k) for k in ("url", "new_tab")}]))


async def _typed(process: asyncio.subprocess.Process, websocket: WebSocket) -> None:
    """From the page to the process: keys, the size of the terminal, the focus."""
    into = process.stdin
    assert into is not None
    with contextlib.suppress(WebSocketDisconnect, ConnectionError, RuntimeError):
        while True:
            text = await websocket.receive_text()
            packet = _packet(text) if len(text) <= MAX_KEYS else None
            if packet is not None:
                into.write(packet)
                await into.drain()
            elif '"ping"' in text[:8]:
                await websocket.send_text(text.replace("ping", "pong", 1)[:256])


def _packet(text: str) -> bytes | None:
    """What the web driver reads, for a message of the page; None for one that it does not know."""
    try:
        kind, *rest = json.loads(text)
        if kind == "stdin":
            letter, data = b"D", str(rest[0]).encode("utf-8", "replace")
        elif kind == "resize":
            sides = {k: _side(rest[0][k], 80) for k in ("width", "height")}
            letter, data = b"M", json.dumps({"type": "resize", **sides}).encode()
        elif kind in ("blur", "focus"):
            letter, data = b"M", json.dumps({"type": kind}).encode()
        else:
            return None
    except (ValueError, TypeError, KeyError, IndexError):
        return None
    return letter + len(data).to_bytes(4, "big") + data


def program() -> list[str]:
    """What runs in the process of a page."""
    return [sys.executable, "-m", "tinychat.ui.web"]
