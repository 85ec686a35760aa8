"""Our server on a thread of its own, and a backend that replays events."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.types import ASGIApp

from tinychat.backend.protocol import (
    Capabilities,
    Event,
    Finished,
    ModelInfo,
    Piece,
    Prompted,
    Request,
    StopReason,
    Tokenizing,
    TokenPiece,
    Usage,
)
from tinychat.backend.stream import EventStream
from tinychat.engine.stats import Stats
from tinychat.server.answer import ServedModel
from tinychat.server.app import create_app
from tinychat.server.connection import bind, make_server
from tinychat.server.security import Policy


def serving(
    served: ServedModel, policy: Policy | None = None, queue_size: int = 16
) -> AbstractContextManager[str, bool | None]:
    """Our server; its URL, without /v1."""
    return serving_app(create_app(served, policy or Policy(), queue_size))


@contextmanager
def serving_app(app: ASGIApp, port: int = 0, websockets: bool = False) -> Iterator[str]:
    """Any application behind HTTP on loopback; its URL."""
    listening = bind("127.0.0.1", port)
    listening.listen()
    server = make_server(app, websockets)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@contextmanager
def asking(url: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """A client that has sent a request, and hangs up at the end of the `with`, whatever it got by then."""
    at, content = urlsplit(url), json.dumps(body).encode()
    with socket.create_connection((at.hostname, at.port)) as s:
        s.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(content)))
        s.sendall(content)
        yield


def figure(url: str, name: str) -> int:
    """What /metrics says of `name`."""
    lines = httpx.get(f"{url}/metrics", timeout=120).text.splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"tinychat_{name} ")))


def until(url: str, name: str, value: int) -> None:
    """Waits until /metrics says `value`."""
    end = time.monotonic() + 120
    while figure(url, name) != value:
        assert time.monotonic() < end
        time.sleep(0.005)


def finished(reason: StopReason = "eos", prompt: int = 7, answer: int = 0, cached: int = 0) -> Finished:
    """A Finished whose usage and figures agree."""
    stats = Stats(prompt_tokens=prompt, reused_tokens=cached, generated_tokens=answer, prefill_s=0.5, decode_s=0.25)
    return Finished(reason, Usage(history=prompt, answer=answer, cached=cached, limit=512), stats)


def pieces(*texts: str, kind: str = "answer") -> list[Event]:
    """One token each."""
    return [Piece(kind, t, (TokenPiece(i + 1, t, -0.5, ((i + 1, -0.5),)),)) for i, t in enumerate(texts)]  # type: ignore[arg-type]


class Replay(Tokenizing):
    """Answers every request with `events` behind a Prompted; a threading.Event among them is waited for. `requests` is
    what was asked. Its tokens are Unicode characters."""

    def __init__(self, events: Sequence[Event | threading.Event]) -> None:
        self.events = events
        self.requests: list[Request] = []
        can = Capabilities(thinking=True, tools=True, logprobs=True, continue_final=True, exact_counts=True)
        self.info = ModelInfo("replay", 512, "nowhere", can)

    def answer(self, request: Request) -> EventStream[Event]:
        stream: EventStream[Event] = EventStream()
        self.requests.append(request)

        def run() -> None:
            for event in (Prompted(Usage(history=7, limit=512)), *self.events):
                if isinstance(event, threading.Event):
                    event.wait(120)
                    continue
                if request.cancel.is_set() and not isinstance(event, Prompted | Finished):
                    continue
                if isinstance(event, Finished) and request.cancel.is_set():
                    event = replace(event, reason="stopped")
                stream.put(event)
            stream.end()

        threading.Thread(target=run, daemon=True).start()
        return stream

    def measure(self, request: Request) -> Usage:
        self.requests.append(request)
        return Usage(history=7, limit=512)

    def snapshot(self) -> Stats | None:
        return None

    def close(self) -> None:
        pass

    def tokenize(self, text: str, *, special: bool, whole: bool) -> list[int]:
        return [*map(ord, text)]

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [chr(i).encode() for i in ids]

    def prompt_text(self, request: Request) -> str:
        return "".join(m["content"] for m in request.messages)


def replaying(events: Sequence[Event | threading.Event]) -> ServedModel:
    """A Replay as the served model."""
    backend = Replay(events)
    return ServedModel("replay", backend, backend)
