"""Bytes of a stream: server-sent events, and lines of JSON."""

from __future__ import annotations

import json
from typing import Any

EVENT_STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"
PING = b": waiting\n\n"  # a comment: clients skip it, and proxies do not close the connection as idle


def encode(value: Any) -> bytes:
    """`value` as JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def data(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + encode(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """An event whose name is its type."""
    return f"event: {value['type']}\n".encode() + data(value)
