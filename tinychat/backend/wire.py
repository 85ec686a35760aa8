"""What servers send, checked, as events and values of the Protocol."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import httpx

from tinychat.backend.protocol import (
    DoesNotFit,
    Event,
    Failed,
    Finished,
    ModelInfo,
    Piece,
    PieceKind,
    Prefilling,
    Prompted,
    StopReason,
    TokenPiece,
    ToolCall,
    Usage,
)
from tinychat.engine.stats import Stats
from tinychat.errors import printable

MAX_LINE = 16 << 20  # characters of a line of a stream, and bytes of what is no stream
LONGEST = 400  # characters of a note
MOST = 2.0**53  # of any number
# vLLM and SGLang tell a full context by words alone.
_FULL = re.compile(r"context length (?:is |of |\()(\d+)")
_COUNT = re.compile(  # of the prompt, not of the answer that was asked for
    r"contains (?:at least )?(\d+) input|\((\d+) in the|(\d+) tokens from the input|input \((\d+) tokens"
)


class ChunkReader:
    """Makes events of the chunks of one answer."""

    def __init__(self, limit: int, dropped: int, model: Stats) -> None:
        """`limit`: tokens of the context; `dropped`: messages left out so far; `model`: what is known of the model."""
        self._limit, self._dropped = limit, dropped
        self._began = time.perf_counter()
        self._first = 0.0
        self._prompted = False
        self._deltas = 0
        self._reason: str | None = None
        self._stop: Any = None  # vLLM: the stop string
        self._usage: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] = {}
        self._details: Mapping[str, Any] = {}  # tinychat: the last chunk's
        self._named: set[int] = set()
        self._told = False  # tinychat: the figures come from the server
        self.stats = replace(model, phase="prefill", context_max=limit)

    def read(self, chunk: Mapping[str, Any]) -> list[Event]:
        details = as_dict(chunk.get("details"))
        events: list[Event] = []
        if not self._prompted:
            self._prompted = True
            known = "usage" in details
            usage = usage_of(details["usage"], self._limit) if known else Usage(limit=self._limit, exact=False)
            note = printable(str(details.get("note", "")), newlines=False)[:LONGEST]
            events.append(Prompted(usage, as_int(details.get("dropped")) + self._dropped, note))
        if progress := as_dict(chunk.get("prompt_progress")):
            total, cache, done = (as_int(progress.get(k)) for k in ("total", "cache", "processed"))
            events.append(Prefilling(done - cache, total - cache, cache))
        self._usage = as_dict(chunk.get("usage")) or self._usage
        self._timings = as_dict(chunk.get("timings")) or self._timings
        self._details = details if "stats" in details else self._details
        for choice in map(as_dict, as_list(chunk.get("choices"))):
            events += self._choice(choice, details)
        return events

    def _choice(self, choice: Mapping[str, Any], details: Mapping[str, Any]) -> list[Event]:
        delta, events = as_dict(choice.get("delta")), list[Event]()
        tokens = _tokens(choice)
        said = delta.get("content") if "delta" in choice else choice.get("text")
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if "pieces" in details:
            kind: PieceKind = "thinking" if details.get("kind") == "thinking" else "answer"
            events += [Piece(kind, str(text), _own_tokens(own)) for text, own in details["pieces"]]
        elif isinstance(thought, str) and thought:
            events.append(Piece("thinking", thought, tokens))
        elif isinstance(said, str) and said:
            events.append(Piece("answer", said, tokens))
        for i, call in enumerate(map(as_dict, as_list(delta.get("tool_calls")))):
            function = as_dict(call.get("function"))
            index = as_int(call.get("index", i))
            new, name = index not in self._named, str(function.get("name") or "")
            self._named.add(index)
            id = str(call.get("id") or (f"call_{index}" if new else "")) if new else ""
            events.append(ToolCall(index, str(function.get("arguments") or ""), id, name if new else ""))
        self._reason = choice.get("finish_reason") or self._reason
        self._stop = choice.get("stop_reason") or self._stop
        if events:
            self._count(max(1, sum(len(e.tokens) for e in events if isinstance(e, Piece))))
        if "now" in details:
            self._told, self.stats = True, stats_of(details["now"])
        return events

    def _count(self, tokens: int) -> None:
        """Keeps the figures that a clock on this side can tell."""
        now = time.perf_counter()
        self._deltas += tokens
        if self._told:
            self.stats = replace(self.stats, generated_tokens=self._deltas)
            return
        if not self._first:
            self._first = now
        decode_s = now - self._first
        rate = (self._deltas - 1) / decode_s if decode_s > 0 else 0.0
        self.stats = replace(
            self.stats,
            phase="decode",
            ttft_s=self._first - self._began,
            generated_tokens=self._deltas,
            decode_s=decode_s,
            decode_tok_s=rate,
            last_tok_s=rate,
        )

    def end(self) -> Event:
        """The last event, when the server has closed the stream."""
        if self._reason is None:
            return Failed("the connection broke before the answer's end", "lost")
        counted = self._details.get("usage")
        usage = usage_of(counted, self._limit) if counted else _counted(self._usage, self._limit, self._deltas)
        self.stats = _final(self.stats, self._details, self._timings, usage)
        return Finished(self._why(usage), usage, self.stats, self._stop_string())

    def _why(self, usage: Usage) -> StopReason:
        said = self._details.get("reason")
        if said in ("eos", "stop", "length", "context", "stopped", "tool_calls"):
            return said
        if self._reason == "length":
            return "context" if self._limit and usage.used >= self._limit else "length"
        if self._reason in ("tool_calls", "function_call"):
            return "tool_calls"
        return "stop" if isinstance(self._stop, str) else "eos"

    def _stop_string(self) -> str:
        said = self._details.get("stop_string")
        return said if isinstance(said, str) else self._stop if isinstance(self._stop, str) else ""


def read_chunk(reading: ChunkReader, chunk: Mapping[str, Any]) -> list[Event]:
    """The events of a chunk. Raises httpx.RemoteProtocolError for fields of wrong types."""
    try:
        return reading.read(chunk)
    except (TypeError, ValueError):
        raise httpx.RemoteProtocolError("what came is no answer") from None


async def whole(response: httpx.Response) -> bytes:
    """The whole of a response that is no stream. Raises httpx.RemoteProtocolError where that is too much."""
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > MAX_LINE:
            raise httpx.RemoteProtocolError("its answer is too long")
        parts.append(part)
    return b"".join(parts)


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """httpx's own would keep a line that never ends."""
    rest, size = list[str](), 0
    async for text in response.aiter_text():
        *lines, last = text.split("\n")
        for line in lines:
            yield "".join((*rest, line))
            rest, size = [], 0
        rest.append(last)
        size += len(last)
        if size > MAX_LINE:
            raise httpx.RemoteProtocolError("a line is too long")
    yield "".join(rest)


async def chunks(response: httpx.Response) -> AsyncIterator[Mapping[str, Any]]:
    """The objects of a stream of server-sent events, up to [DONE]; some servers send an error as a bare object."""
    async for line in _lines(response):
        text = line.removeprefix("data:").strip() if line.startswith(("data:", "{")) else ""
        if text == "[DONE]":
            return
        if not text:
            continue
        try:
            yield as_dict(json.loads(text))
        except (ValueError, RecursionError):
            raise httpx.RemoteProtocolError("what came is not JSON") from None


def _own_tokens(tokens: Any) -> tuple[TokenPiece, ...]:
    """The tokens of a piece as tinychat tells them."""
    return tuple(TokenPiece(i, t, p, tuple(map(tuple, top)), *more) for i, t, p, top, *more in tokens)


def _tokens(choice: Mapping[str, Any]) -> tuple[TokenPiece, ...]:
    """The tokens of a chunk, as servers tell them with log-probabilities: without ids."""
    entries = as_list(as_dict(choice.get("logprobs")).get("content"))
    return tuple(TokenPiece(-1, str(e.get("token")), float(e.get("logprob", 0.0))) for e in map(as_dict, entries))


def refused(status: int, content: bytes, headers: Mapping[str, str], info: ModelInfo) -> Event:
    """What a status other than 200 means."""
    error = _error(content)
    message = message_of(status, content)
    if "exceed_context" in str(error.get("type")) or "context_length" in str(error.get("code")):
        limit = as_int(error.get("n_ctx")) or info.max_context
        return DoesNotFit(Usage(history=as_int(error.get("n_prompt_tokens")), limit=limit), 1, 0)
    if (full := _FULL.search(message)) is not None:
        count = _COUNT.search(message)
        usage = Usage(history=int(count[count.lastindex or 0]) if count else 0, limit=int(full[1]))
        return DoesNotFit(usage, 1, 0)
    if status in (429, 503):
        retry = headers.get("retry-after", "")
        return Failed(message, "busy", float(retry) if retry.isdecimal() else 1.0)
    return Failed(message, "invalid" if 400 <= status < 500 else "internal")


def _error(content: bytes) -> Mapping[str, Any]:
    try:
        value = as_dict(json.loads(content))
    except (ValueError, RecursionError):
        return {}
    inner = value.get("error", value)
    return inner if isinstance(inner, dict) else {"message": inner}


def message_of(status: int, content: bytes) -> str:
    """One line about a refusal, in the server's own words where it has some."""
    said = one_line(_error(content).get("message") or "")
    return said or f"the server answered with status {status}"


def one_line(value: Any) -> str:
    return printable(" ".join(str(value).split())[:500], newlines=False)


def usage_of(value: Any, limit: int) -> Usage:
    """A Usage as tinychat's server writes it."""
    given = as_dict(value)
    known = {f.name: as_int(given.get(f.name)) for f in fields(Usage) if f.name != "exact"}
    return Usage(**known | {"limit": as_int(given.get("limit")) or limit}, exact=given.get("exact") is not False)


def _counted(usage: Mapping[str, Any], limit: int, deltas: int) -> Usage:
    """OpenAI's usage; without one, the answer's tokens are estimated by the pieces that came."""
    if not usage:
        return Usage(answer=deltas, limit=limit, exact=False)
    cached = as_int(as_dict(usage.get("prompt_tokens_details")).get("cached_tokens"))
    prompt, answer = as_int(usage.get("prompt_tokens")), as_int(usage.get("completion_tokens"))
    return Usage(history=prompt, answer=answer, limit=limit, cached=cached)


def _final(stats: Stats, details: Mapping[str, Any], timings: Mapping[str, Any], usage: Usage) -> Stats:
    """The figures at the end: tinychat's own, or llama-server's timings, or what the clock here has seen."""
    if own := as_dict(details.get("stats")):
        return stats_of(own)
    decode_s = stats.decode_s
    steps = max(0, usage.answer - 1)
    rate = _float(timings.get("predicted_per_second")) or (steps / decode_s if decode_s > 0 else 0.0)
    return replace(
        stats,
        phase="idle",
        prompt_tokens=usage.prompt,
        reused_tokens=usage.cached,
        prefilled_tokens=max(0, usage.prompt - usage.cached),
        generated_tokens=usage.answer,
        prefill_s=_float(timings.get("prompt_ms")) / 1e3,
        prefill_tok_s=_float(timings.get("prompt_per_second")),
        decode_tok_s=rate,
        token_s=1 / rate if rate else 0.0,
        context_used=usage.used,
    )


def stats_of(value: Any) -> Stats:
    """Stats as tinychat's server writes them."""
    own = as_dict(value)
    kinds: dict[str, tuple[tuple[type, ...], Callable[[Any], Any]]] = {
        "str": ((str,), str),
        "int": ((int,), as_int),
        "float": ((int, float), _float),
    }
    read = {f.name: kinds[str(f.type)] for f in fields(Stats)}
    return Stats(**{name: made(own[name]) for name, (types, made) in read.items() if type(own.get(name)) in types})


def as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def as_int(value: Any) -> int:
    return int(_float(value))


def _float(value: Any) -> float:
    """A number of a server, with which one can go on reckoning: 1e999 is infinity for Python, and NaN is itself."""
    return float(min(max(value, -MOST), MOST)) if isinstance(value, int | float) and value == value else 0.0
