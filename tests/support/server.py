"""A real HTTP server on loopback that misbehaves on purpose, and small GGUF files for it to serve."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import numpy as np
from gguf import GGUFWriter


def make_gguf(path: Path, size: int = 300_000, seed: int = 0, architecture: str = "llama") -> bytes:
    """Writes a GGUF file of about `size` random bytes to `path` and returns it."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(2048)
    writer.add_array("tokenizer.ggml.tokens", [f"word{i}" for i in range(200)])
    values = np.random.default_rng(seed).integers(0, 256, size, np.uint8).view(np.int8)
    writer.add_tensor("blk.0.noise", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@dataclass
class File:
    """What the server has under one path, and how it misbehaves about it."""

    data: bytes = b""
    etag: str | None = '"v1"'
    modified: str | None = None
    ranges: bool = True
    if_range: bool = True  # honours If-Range
    lie: int = 0  # added to Content-Length
    no_length: bool = False  # HTTP/1.0 style: the end of the connection is the end of the file
    drop: list[int] = field(default_factory=list)  # first request: hang up after this many bytes; and so on
    first: list[tuple[int, dict[str, str]]] = field(
        default_factory=list
    )  # answered before anything else, one per request
    always: tuple[int, dict[str, str]] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    shift: int = 0  # a Range answer starts this much too late
    block: int = 16384
    pace: Callable[[int], object] = lambda sent: None  # called with the bytes sent so far before each block


@dataclass
class Request:
    path: str
    headers: dict[str, str]


class Server(ThreadingHTTPServer):
    """`with Server() as s: s.files["/x"] = File(...); s.url("/x")`. `requests` is what was asked for."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, File] = {}
        self.requests: list[Request] = []

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_port}{path}"

    @property
    def ranges(self) -> list[str | None]:
        """The Range header of every request so far."""
        return [r.headers.get("range") for r in self.requests]

    def __enter__(self) -> Server:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients that hang up are what the tests are about


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # what was sent is about what has arrived
        super().setup()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(Request(self.path, {k.lower(): v for k, v in self.headers.items()}))
        file = self.server.files.get(path)
        if file is None:
            return self.refuse(404, {})
        if file.always or file.first:
            return self.refuse(*(file.always or file.first.pop(0)))
        start, end, status = 0, len(file.data), 200
        wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
        if wanted and file.ranges and (not file.if_range or condition in (None, file.etag, file.modified)):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end, status = int(first), min(int(last) + 1, end) if last else end, 206
            if start >= len(file.data):
                return self.refuse(416, {"Content-Range": f"bytes */{len(file.data)}"})
        start += file.shift if status == 206 else 0
        body = file.data[start:end]
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(file.data)}")
        if file.etag:
            self.send_header("ETag", file.etag)
        if file.modified:
            self.send_header("Last-Modified", file.modified)
        for name, value in file.headers.items():
            self.send_header(name, value)
        if file.no_length:
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body) + file.lie))
        self.end_headers()
        limit = file.drop.pop(0) if file.drop else len(body)
        for at in range(0, min(limit, len(body)), file.block):
            file.pace(start + at)
            self.wfile.write(body[at : min(at + file.block, limit)])
        self.close_connection = self.close_connection or limit < len(body) or bool(file.lie) or file.no_length

    def refuse(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()
