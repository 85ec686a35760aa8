"""A request's body: read within limits of size and time, and parsed into a JSON object within limits of shape."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.types import Receive, Scope

from tinychat.server.refusal import RequestRefused, invalid

MAX_BYTES = 8 << 20  # a prompt of 128k tokens is about half a megabyte
MAX_DEPTH = 64  # of nested arrays and objects
MAX_SECONDS = 30.0  # from the headers to the last byte of the body


class HungUp(Exception):
    """The client has closed the connection; no response is sent."""


async def read_object(scope: Scope, receive: Receive) -> dict[str, Any]:
    """The JSON object that a request carries. Raises RequestRefused, or HungUp."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > MAX_BYTES:  # digits only: h11 has checked
            raise _too_large()
        if name == b"content-encoding" and value.lower() != b"identity":
            raise invalid("a compressed body is not supported", "Content-Encoding")
    try:
        async with asyncio.timeout(MAX_SECONDS):
            body = await _read(receive)
    except TimeoutError:
        raise RequestRefused("slow", f"the body did not come within {MAX_SECONDS:g} seconds") from None
    return parse_object(body)


async def _read(receive: Receive) -> bytes:
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that `body` is. Raises RequestRefused."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as e:  # also no UTF-8, and integers of thousands of digits
        raise invalid(f"the body is not JSON: {' '.join(str(e).split())[:120]}") from None
    if not isinstance(value, dict):
        raise invalid("the body is not a JSON object")
    _check(value)
    return value


def _check(value: Any) -> None:
    """Raises RequestRefused for what is nested too deeply and for strings that cannot be written as UTF-8."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper += item.keys()
                deeper += item.values()
            elif isinstance(item, list):
                deeper += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise invalid("a string has half of a surrogate pair") from None
            elif isinstance(item, float) and item in (float("inf"), float("-inf")):
                raise invalid("a number is too large")
        if not deeper:
            return
        level = deeper
    raise _too_deep()


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _too_large() -> RequestRefused:
    return RequestRefused("large", f"the body is larger than {MAX_BYTES >> 20} MB")


def _too_deep() -> RequestRefused:
    return invalid(f"the body is nested more than {MAX_DEPTH} levels deep")
