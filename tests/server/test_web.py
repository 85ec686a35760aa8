"""The chat in a browser: who gets in, what its process can reach, and a conversation in a real Chromium."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.sync.client import connect

from tests.support import chromium
from tests.support.serving import Replay, finished, pieces, replaying, serving_app
from tinychat.server.answer import ServedModel
from tinychat.server.app import create_app
from tinychat.server.connection import bind
from tinychat.server.security import Policy
from tinychat.server.web import Web, program

KEY = "sk-of-the-server"


@contextmanager
def pages(served: ServedModel, key: str | None = KEY) -> Iterator[str]:
    """A server with the chat for browsers, whose processes must know its port before it runs."""
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    web = Web(f"http://127.0.0.1:{port}", key, "smollm2:135m", program())
    with serving_app(create_app(served, Policy(key), 16, web), port, websockets=True) as url:
        yield url


def test_the_key_opens_the_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinychat.server.web.WRONG_KEY_S", 0)
    with pages(replaying([finished()])) as url, httpx.Client(base_url=url) as browser:
        assert "password" in browser.get("/").text and "chat/textual.js" not in browser.get("/").text
        assert browser.post("/chat/key", data={"key": "wrong"}).status_code == 401
        assert browser.post("/chat/key", content=b"x" * 10_000).status_code == 401
        assert browser.post("/chat/key", data={"key": KEY}, headers={"origin": "http://evil"}).status_code == 403
        assert not browser.cookies
        entered = browser.post("/chat/key", data={"key": KEY})
        assert entered.status_code == 303
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie and "samesite=strict" in cookie and KEY not in cookie
        page = browser.get("/")
        assert "/chat/textual.js" in page.text and KEY not in page.text
        assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
        assert browser.get("/chat/textual.js").status_code == 200
        assert browser.get("/v1/models").status_code == 401  # a cookie is for the page alone
        for path in ("/chat/../pyproject.toml", "/chat/server.py", "/chat/%2e%2e/x"):
            assert browser.get(path).status_code in (401, 404)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "http://evil.example", "Cookie": "tinychat=x"},
        {"Origin": "{url}"},
        {"Origin": "{url}", "Cookie": "tinychat=x"},
        {"Origin": "{url}", "Host": "evil.example"},
    ],
)
def test_a_websocket_needs_origin_host_and_key(headers: dict[str, str]) -> None:
    with pages(replaying([finished()])) as url:
        at = urlsplit(url)
        lines = {"Host": at.netloc, "Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "13"}
        lines |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="} | {k: v.format(url=url) for k, v in headers.items()}
        text = "GET /chat/ws HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        with socket.create_connection((at.hostname, at.port), timeout=120) as connection:
            connection.sendall(text.encode())
            assert connection.recv(100).startswith(b"HTTP/1.1 403 ")


def test_what_a_page_says_reaches_a_process_that_answers() -> None:
    served = replaying([*pieces(*"Hello"), finished(answer=5)])
    with pages(served, None) as url:
        at = url.replace("http", "ws") + "/chat/ws?width=90&height=30"
        with connect(at, additional_headers={"Origin": url}) as page:
            assert isinstance(served.backend, Replay)
            screen = b""
            while b"f1 is the help" not in screen:  # the last line of the welcome
                said = page.recv(60)
                screen += said if isinstance(said, bytes) else b""
            assert b"lists the commands" in screen and b"attaches" not in screen
            page.send("no message of ours")
            page.send(json.dumps(["resize", {"width": 100, "height": 10**9}]))
            page.send(json.dumps(["stdin", "Hi there"]))
            page.send(json.dumps(["stdin", "\r"]))
            while not served.backend.requests:
                page.recv(60)
    assert served.backend.requests[-1].messages[-1]["content"] == "Hi there"


ATTEMPTS = """
reading: open('/etc/passwd').read()
reading by descriptor: os.open('/etc/passwd', os.O_RDONLY)
writing: open(f'{outside}/new', 'w')
writing into Python: open(os.path.join(sys.prefix, 'new'), 'w')
a way around: open(f'{folder}/../{outside.name}/secret').read()
a link: os.symlink('/etc/passwd', folder / 'link')
listing: os.listdir(outside)
deleting: os.remove(outside / 'secret')
a program: subprocess.run(['cat', '/etc/passwd'])
a shell: os.system('true')
another server: socket.create_connection(('127.0.0.1', 9))
"""
CONFINED = """
import os, socket, subprocess, sys
from pathlib import Path
from tinychat.ui.web import confine
folder, outside = map(Path, sys.argv[1:3])
confine(folder, "http://127.0.0.1:8080")
(folder / "mine").write_text("fine")
assert (folder / "mine").read_text() == "fine" and os.listdir(folder) == ["mine"]
import xml.dom.minidom
for line in sys.argv[3].strip().splitlines():
    name, _, attempt = line.partition(": ")
    try:
        eval(attempt)
    except PermissionError:
        continue
    sys.exit(f"{name} was not forbidden")
"""


def test_the_process_of_a_page_reaches_no_files(tmp_path: Path) -> None:
    folder, outside = tmp_path / "own", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "secret").write_text("secret")
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CONFINED, str(folder), str(outside), ATTEMPTS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (outside / "secret").read_text() == "secret" and len(list(outside.iterdir())) == 1


@pytest.mark.skipif(chromium.PROGRAM is None, reason="no Chromium")
def test_a_conversation_in_chromium(tmp_path: Path) -> None:
    served = replaying([*pieces("hm", kind="thinking"), *pieces(*"Hello"), finished(answer=6)])
    with pages(served) as url, chromium.page() as page:
        page.go(url)
        page.wait(lambda: page.value("!!document.querySelector('input[type=password]')"))
        page.value(f"document.querySelector('input').value = {KEY!r}; document.querySelector('form').submit()")
        page.wait(lambda: page.value("document.body.classList.contains('-first-byte')"))
        assert isinstance(served.backend, Replay)
        requests = served.backend.requests

        def ask() -> bool:  # until the app behind the page has its prompt
            page.type("Hi")
            page.press("Enter", 13)
            return bool(requests)

        page.wait(ask)
        page.screenshot(tmp_path / "page.png")
    assert "Hi" in requests[-1].messages[-1]["content"]
