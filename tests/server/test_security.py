"""Who may ask, and what a request may be."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import time
from typing import Any

import httpx
import pytest

from tests.support.serving import finished, pieces, replaying, serving
from tinychat.backend.address import read_key
from tinychat.commands.serve import serve
from tinychat.errors import TinychatError
from tinychat.server import body, connection
from tinychat.server.security import Policy

BODY: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


def ask(url: str, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=BODY, headers=headers, **options)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer secre"}, 401),
        ({"Authorization": "Bearer secretx"}, 401),
        ({"Authorization": "Basic secret"}, 401),
        ({"Authorization": "Bearer sécret".encode("latin-1")}, 401),
        ({"X-Api-Key": ""}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "bearer  secret"}, 200),
        ({"X-Api-Key": "secret"}, 200),
    ],
)
def test_the_key(headers: dict[str, str], status: int) -> None:
    with serving(replaying([finished()]), Policy(key="secret")) as url:
        answer = ask(url, headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.json()["error"]["type"] == "authentication_error" and "secret" not in answer.text
            for path in ("/v1/models", "/props", "/metrics", "/api/tags", "/nothing"):
                assert httpx.get(url + path, headers=headers).status_code == 401
        assert httpx.get(f"{url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("192.168.1.7:8080", 200),  # an address cannot be rebound
        ("box.example.com", 200),
        ("evil.example.com", 403),
        ("localhost.evil.com", 403),
        ("localhost@evil.com", 403),
        ("localhost:99999999", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
def test_the_host(host: str, status: int) -> None:
    """A page of evil.example.com whose name was made to point here (DNS rebinding) reaches nothing."""
    with serving(replaying([finished()]), Policy(hosts=frozenset({"box.example.com"}))) as url:
        assert ask(url, {"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://[bad"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "https://chat.example.com"}, 200),
    ],
)
def test_the_origin(headers: dict[str, str], status: int) -> None:
    with serving(replaying([finished()]), Policy(origins=frozenset({"https://chat.example.com"}))) as url:
        answer = ask(url, headers)
        assert answer.status_code == status
        allowed = answer.headers.get("access-control-allow-origin")
        assert allowed == ("https://chat.example.com" if "chat" in headers.get("Origin", "") else None)
        own = ask(url, {"Origin": url})
        assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


def test_preflights_are_answered_to_named_origins_only() -> None:
    policy = Policy(key="secret", origins=frozenset({"https://chat.example.com"}))
    with serving(replaying([finished()]), policy) as url:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        good = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": "https://chat.example.com"} | ask)
        assert good.status_code == 204 and "authorization" in good.headers["access-control-allow-headers"]
        evil = httpx.options(f"{url}/v1/chat/completions", headers={"Origin": "https://evil.example.com"} | ask)
        assert evil.status_code == 403 and "access-control-allow-origin" not in evil.headers


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"text"', 400),
        (b'{"model": NaN}', 400),
        (b'{"temperature": 1e999, "model": "m"}', 400),
        (b'{"seed": ' + b"9" * 10_000 + b"}", 400),
        (b"\xff\xfe", 400),
        (b'{"model": "\\ud800"}', 400),
        (b'{"a":' * 100 + b"1" + b"}" * 100, 400),
        (b"[" * 200_000, 400),
        (b'{"x":' * 200_000, 400),
        (b'{"model": "' + b"m" * (9 << 20) + b'"}', 413),
        (b'{"model": "m", "messages": [' + b'{"role":"user","content":""},' * 5000 + b"1]}", 400),
    ],
)
def test_bodies_that_are_no_request(content: bytes, status: int) -> None:
    with serving(replaying([finished()])) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", content=content)
        assert answer.status_code == status
        assert len(answer.json()["error"]["message"]) < 200
        assert ask(url).status_code == 200


def test_a_body_without_a_length_is_limited_too() -> None:
    with serving(replaying([finished()])) as url:
        with httpx.Client() as client:
            answer = client.post(f"{url}/v1/chat/completions", content=(b" " * (1 << 20) for _ in range(9)))
        assert answer.status_code == 413


def test_headers_are_limited() -> None:
    with serving(replaying([finished()])) as url:
        assert httpx.get(f"{url}/health", headers={"X": "a" * (1 << 16)}).status_code == 400
        many = [(f"x-{i}", "a") for i in range(150)]
        assert httpx.get(f"{url}/health", headers=many).status_code == 400
        assert ask(url).status_code == 200


def test_slow_clients_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers and bodies that trickle (slow loris) do not hold a connection longer than they may."""
    with serving(replaying([finished()])) as url:
        port = int(url.rpartition(":")[2])
        monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
        for start in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"):
            with socket.create_connection(("127.0.0.1", port), timeout=120) as s:
                s.sendall(start)
                assert trickle(s, b"X") == b""  # closed
        monkeypatch.undo()  # the headers that follow have time enough
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
        monkeypatch.setattr(body, "MAX_SECONDS", 0.3)
        with socket.create_connection(("127.0.0.1", port), timeout=120) as s:
            s.sendall(head)
            assert b" 408 " in trickle(s, b" ").split(b"\r\n")[0]
        monkeypatch.undo()
        assert ask(url).status_code == 200


def test_connections_wait_where_no_file_can_be_opened(capfd: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with serving(replaying([finished()])) as url, contextlib.ExitStack() as stack:
        assert ask(url).status_code == 200  # the server's thread has what files it needs
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 9, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        taken: list[Any] = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(stack.enter_context(open(os.devnull)))
        for file in taken[:5]:
            file.close()
        clients = [stack.enter_context(socket.socket()) for _ in range(4)]  # the server can accept one
        for client in clients:
            client.settimeout(60)
            client.connect(address)
        said, end = "", time.monotonic() + 60
        while "new connections wait" not in said and time.monotonic() < end:
            time.sleep(0.01)
            said += capfd.readouterr().err
        for client in clients[:-1]:
            client.close()
        clients[-1].sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in clients[-1].recv(100)
    assert said + capfd.readouterr().err == "new connections wait: too many open files\n"


def trickle(s: socket.socket, byte: bytes) -> bytes:
    """What comes back while a byte goes out now and then."""
    s.settimeout(0.05)
    for _ in range(400):
        try:
            s.sendall(byte)
            return s.recv(1000)
        except TimeoutError:
            continue
        except OSError:
            return b""
    raise AssertionError("the connection stayed open")


def test_a_client_that_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer is given up, and the next one gets the engine."""
    from tinychat.server import app

    monkeypatch.setattr(app, "SEND_SECONDS", 0.3)
    events = [*pieces(*["word " * 20_000] * 200), finished(answer=200)]  # far more than the buffers of two sockets
    with serving(replaying(events)) as url:
        port = int(url.rpartition(":")[2])
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        content = b'{"model": "m", "prompt": "a", "stream": true}'
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.sendall(head % len(content) + content)
            answer = httpx.post(f"{url}/v1/completions", json={"model": "m", "prompt": "a"}, timeout=120)
            assert answer.status_code == 200


def test_garbage_on_the_socket() -> None:
    with serving(replaying([finished()])) as url:
        port = int(url.rpartition(":")[2])
        for garbage in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\x16\x03\x01" * 50):
            with socket.create_connection(("127.0.0.1", port), timeout=120) as s:
                s.sendall(garbage + b"\r\n\r\n")
                assert s.recv(1000).startswith(b"HTTP/1.1 40")
        assert ask(url).status_code == 200


def options(**changes: Any) -> dict[str, Any]:
    """The arguments of `serve`, those of the command line's defaults."""
    return {
        "text": "no-such-model",
        "host": "127.0.0.1",
        "port": 0,
        "key_file": None,
        "no_key": False,
        "context": None,
        "queue_size": 1,
        "hosts": [],
        "origins": [],
        "device": None,
        "threads": None,
        "speculate": 0,
    } | changes


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "box.example.com"])
def test_other_machines_need_a_key(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYCHAT_API_KEY", raising=False)
    with pytest.raises(TinychatError, match="key is needed"):
        serve(**options(host=host))
    with pytest.raises(TinychatError, match="no-such-model"):  # past the key
        serve(**options(host=host, no_key=True))
    monkeypatch.setenv("TINYCHAT_API_KEY", "secret")
    with pytest.raises(TinychatError, match="no-such-model"):
        serve(**options(host=host))


def test_a_key_in_a_file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINYCHAT_API_KEY", raising=False)
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(TinychatError, match="chmod 600"):
        read_key(str(file))
    file.chmod(0o600)
    assert read_key(str(file)) == "secret"
    for bad in ("", "with\nline", "schlüssel"):
        file.write_text(bad, encoding="utf-8")
        with pytest.raises(TinychatError, match="printable ASCII"):
            read_key(str(file))
    with pytest.raises(TinychatError, match="cannot be read"):
        read_key(str(tmp_path / "none"))
    assert read_key(None) is None
