"""Sends malformed requests to a tinychat server on loopback: no 500, no hang, and the next good request is answered.

    python -m scripts.fuzz_server http://127.0.0.1:8080 [-n 10000] [--seed 0]

Requests are good ones that are broken at random: values of other types and sizes, fields that nobody knows, bodies cut
and flipped, headers, methods, paths, and bytes that are no HTTP. The exit status is 1 where something was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

TIMEOUT_S = 30.0
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "Go on"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "1"},
]
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": MESSAGES,
    "max_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "stream": False,
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 0,
    "logit_bias": {"5": 1},
    "n": 1,
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning_effort": "low",
    "continue_final_message": False,
    "user": "me",
    "metadata": {},
}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "Hi", "max_tokens": 2, "stop": "x", "logprobs": 0, "echo": False},
    "/v1/responses": {
        "model": "m",
        "input": ITEMS,
        "instructions": "Be brief.",
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
        "reasoning": {"effort": "low"},
        "include": [],
        "truncation": "auto",
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 2,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": BLOCKS,
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "stop_sequences": ["x"],
    },
    "/v1/messages/count_tokens": {"model": "m", "messages": BLOCKS},
    "/api/chat": {"model": "m", "messages": MESSAGES[:1], "options": {"num_predict": 2, "stop": ["x"]}, "think": False},
    "/api/generate": {"model": "m", "prompt": "Hi", "options": {"num_predict": 2}, "raw": True, "format": "json"},
    "/api/show": {"model": "m"},
    "/tokenize": {"content": "Hi", "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": MESSAGES},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
}
ODD: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e308,
    -1e308,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    "",
    "x",
    "x" * 100_000,
    "\x00",
    "\ud800",
    "\U0010fffd",
    "<|im_start|>",
    "../../etc/passwd",
    "{{ 7*7 }}",
    [],
    {},
    [None],
    [[]],
    [{}],
    {"": ""},
    {"a": {"b": {"c": []}}},
    ["x"] * 5000,
    {str(i): i for i in range(5000)},
]


HEADERS = ["content-type", "host", "origin", "authorization", "expect", "content-encoding", "x-api-key"]


def broken(rng: random.Random, value: Any) -> Any:
    """`value` with one thing in it that is wrong."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice([*value])
        how = rng.random()
        if how < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if how < 0.2:
            return value | {rng.choice(["no_such_field", "", "images", "x" * 5000, "__class__"]): rng.choice(ODD)}
        return value | {key: broken(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        how = rng.random()
        if how < 0.15:
            return value[:at] + value[at + 1 :]
        if how < 0.25:
            return value * rng.choice([2, 50])
        return [*value[:at], broken(rng, value[at]), *value[at + 1 :]]
    return rng.choice(ODD)


def content(rng: random.Random, body: dict[str, Any]) -> bytes:
    """A body, mostly JSON."""
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        body = broken(rng, body) or {}
        if not isinstance(body, dict):
            break
    data = json.dumps(body).encode()
    how = rng.random()
    if how < 0.05:
        return data[: rng.randrange(len(data) + 1)]
    if how < 0.1:
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 20)):
            flipped[rng.randrange(len(flipped))] = rng.randrange(256)
        return bytes(flipped)
    if how < 0.12:
        return rng.randbytes(rng.randrange(2000))
    if how < 0.13:
        return b"[" * rng.randrange(1, 100_000)
    if how < 0.135:
        return b'{"a":' * rng.randrange(1, 100_000)
    return data


def raw(rng: random.Random) -> bytes:
    """Bytes that are hardly HTTP."""
    return rng.choice(
        [
            rng.randbytes(rng.randrange(1, 500)) + b"\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
            b"GET /health HTTP/1.1\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
            b"GET /%00%ff HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET " + b"/a" * 50_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"GET /health HTTP/1.0\r\n\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}" * 20,
        ]
    )


def attempts(rng: random.Random, n: int) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """(what, bytes for the socket or a body, arguments of a request)."""
    for _ in range(n):
        path = rng.choice([*GOOD])
        if rng.random() < 0.07:
            yield "raw", raw(rng), {}
            continue
        method, headers = "POST", {"content-type": "application/json"}
        if rng.random() < 0.05:
            method = rng.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
        if rng.random() < 0.05:
            path = rng.choice(["/", "/v1", "/v1/models/../x", path + "/x", "/v1/models/" + "x" * 5000, "/api//chat"])
        if rng.random() < 0.1:
            name = rng.choice(HEADERS)
            headers[name] = rng.choice(["", "x", "null", "*", "gzip", "100-continue", "a" * 5000, "Bearer"])
        body = content(rng, GOOD.get(path, CHAT))
        yield "http", body, {"method": method, "url": path, "headers": headers}


def send_raw(url: str, data: bytes) -> int:
    """The status that comes back (0: the connection was closed without)."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=TIMEOUT_S) as s:
        try:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            answer = s.recv(4096)
        except ConnectionError:
            return 0
    words = answer.split(b" ", 2)
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") else 0


def _good(client: httpx.Client) -> str:
    """What is wrong with the answer to a good request."""
    try:
        answer = client.post("/v1/completions", json={"model": "m", "prompt": "Once", "max_tokens": 1})
    except httpx.HTTPError as e:
        return repr(e)
    return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"


def fuzz(url: str, n: int, seed: int, every: int = 50) -> tuple[Counter[int], list[str]]:
    """Statuses and what was wrong. After each `every` attempts a good request must be answered."""
    rng, statuses, wrong = random.Random(seed), Counter[int](), list[str]()
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        for i, (what, data, request) in enumerate(attempts(rng, n)):
            where = f"{request.get('method', what)} {str(request.get('url'))[:60]}"
            shown = f"attempt {i} (seed {seed}): {where} {data[:300]!r}"
            try:
                status = send_raw(url, data) if what == "raw" else client.request(content=data, **request).status_code
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                status = 0  # closed while we were still sending
            except (httpx.TimeoutException, TimeoutError):
                wrong.append(f"hangs: {shown}")
                continue
            except (httpx.ConnectError, ConnectionRefusedError):
                wrong.append(f"no server any more: {shown}")
                break
            except (httpx.HTTPError, ValueError, UnicodeError):
                continue  # the client does not even send it
            statuses[status] += 1
            if status >= 500:
                wrong.append(f"{status}: {shown}")
            if i % every == every - 1 or i == n - 1:
                said = _good(client)
                if said:
                    wrong.append(f"the next good request: {said}, after {shown}")
    return statuses, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("-n", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if urlsplit(args.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        parser.error("loopback only")
    statuses, wrong = fuzz(args.url, args.n, args.seed)
    print(dict(sorted(statuses.items())))
    for line in wrong:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
