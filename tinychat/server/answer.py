"""What all dialects share of an answer: the request, the events gathered from the backend, the format's interface."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, Protocol

from tinychat.backend.protocol import (
    END,
    SAMPLING_PARAMETERS,
    Backend,
    DoesNotFit,
    Event,
    Failed,
    Finished,
    Piece,
    Prompted,
    Request,
    Sampling,
    Stats,
    Tokenizing,
    TokenPiece,
    ToolCall,
)
from tinychat.backend.stream import EventStream
from tinychat.server.refusal import RequestRefused, refusal_of

PING_S = 15.0  # without an event, after which a stream sends a ping
# The first events go out as they come; further ones are gathered for so many seconds and joined. One write per token
# wakes this loop and the client once per token; docs/server.md has the measurement.
PROMPT_BATCHES = 3
GATHER_S = 0.05


@dataclass(frozen=True)
class ServedModel:
    """What the dialects know of the server: the model, the name it goes by, and the defaults of what a request does
    not set.

    `seed` None draws one per request; `most` limits the tokens of every answer.
    """

    model: str
    backend: Backend
    tokenizing: Tokenizing
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    most: int | None = None
    started: int = 0  # Unix time

    @property
    def recommended(self) -> dict[str, float]:
        """By field of `sampling`, what a request gets that sets nothing, where it is another value than tinychat's."""
        return {k: v for k in SAMPLING_PARAMETERS if (v := getattr(self.sampling, k)) != getattr(Sampling(), k)}


@dataclass
class WholeCall:
    """A whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class Answer:
    """A whole answer, gathered from events."""

    prompted: Prompted
    finished: Finished
    text: str = ""
    thinking: str = ""
    calls: list[WholeCall] = field(default_factory=list)
    tokens: list[TokenPiece] = field(default_factory=list)  # of the answer
    thought: int = 0  # tokens of the thinking

    @classmethod
    def of(cls, events: Sequence[Event]) -> Answer:
        """Gathers `events`, which end with Finished."""
        prompted = next(e for e in events if isinstance(e, Prompted))
        answer = cls(prompted, events[-1])  # type: ignore[arg-type]
        calls: dict[int, WholeCall] = {}
        for e in events:
            if isinstance(e, Piece) and e.kind == "thinking":
                answer.thinking += e.text
                answer.thought += len(e.tokens)
            elif isinstance(e, Piece):
                answer.text += e.text
                answer.tokens += e.tokens
            elif isinstance(e, ToolCall) and e.note:
                calls.pop(e.index, None)
            elif isinstance(e, ToolCall):
                calls.setdefault(e.index, WholeCall(e.id, e.name, "")).arguments += e.arguments
        answer.calls = list(calls.values())
        return answer


@dataclass(frozen=True)
class Joined(Piece):
    """Consecutive pieces of one kind, sent together; text and tokens are those of all `parts`."""

    parts: tuple[Piece, ...] = ()


def joined(batch: Sequence[Event]) -> list[Event]:
    """The events, with consecutive pieces of one kind joined into one."""
    events: list[Event] = []
    for kind, run in groupby(batch, lambda e: e.kind if isinstance(e, Piece) else None):
        same = list(run)
        parts = tuple(e for e in same if isinstance(e, Piece))
        if kind is None or len(parts) == 1:
            events += same
        else:
            text, tokens = "".join(p.text for p in parts), tuple(t for p in parts for t in p.tokens)
            events.append(Joined(kind, text, tokens, parts))
    return events


class Reply(Protocol):
    """Formats one answer in one dialect, as a stream or whole."""

    media_type: str  # of the stream
    ping: bytes  # sent after PING_S seconds without an event; empty where the format has no such line

    def begin(self, prompted: Prompted) -> bytes:
        """The stream's beginning."""
        ...

    def event(self, event: Event) -> bytes:
        """The bytes to send for an event, Finished included; may be empty."""
        ...

    def fail(self, refused: RequestRefused) -> bytes:
        """The end of a stream that failed."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        ...


@dataclass(frozen=True)
class AnswerJob:
    """A client's request, parsed and checked."""

    request: Request
    reply: Reply
    stream: bool
    one_call: bool = False  # the answer ends with its first tool call


class Arrivals:
    """The events of a backend's stream, for use in an event loop."""

    def __init__(self, stream: EventStream[Event]) -> None:
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._here = asyncio.Event()  # set while no task waits: events then do not wake the loop
        self._due = asyncio.Event()  # set where gathering is to end
        stream.on_event(self._wake)

    def _wake(self) -> None:
        """Called by the backend's thread."""
        over = self._stream.complete
        if (over or not self._here.is_set()) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, over)

    def _tell(self, over: bool) -> None:
        self._here.set()
        if over:
            self._due.set()

    @property
    def ended(self) -> bool:
        return self._stream.ended

    async def next(self) -> list[Event]:
        """All events that came since the last call; waits for one. Empty at the end."""
        while not self.ended:
            if events := self._stream.poll():
                return events
            self._here.clear()
            if not self._stream.waiting and not self.ended:
                await self._here.wait()
        return []

    async def until_prompted(self) -> list[Event]:
        """The first events, up to Prompted at least. Raises RequestRefused where the request fails before."""
        first: list[Event] = []
        while not any(isinstance(e, Prompted) for e in first):
            more = await self.next()
            raise_failure(more)
            if not more:
                raise RequestRefused("internal", "the answer ended before it began")
            first += more
        return first

    async def batches(self) -> AsyncIterator[list[Event]]:
        """All further events; an empty list after PING_S seconds of silence."""
        for n in count():
            if n >= PROMPT_BATCHES:
                timer = self._loop.call_later(GATHER_S, self._due.set)
                await self._due.wait()
                timer.cancel()
                if not self._stream.complete:
                    self._due.clear()
            if self.ended:
                return
            try:
                async with asyncio.timeout(PING_S):
                    events = await self.next()
            except TimeoutError:
                yield []
                continue
            if events:
                yield events


def raise_failure(events: Sequence[Event]) -> None:
    """Raises RequestRefused when the last event is a failure."""
    if events and isinstance(events[-1], Failed | DoesNotFit):
        raise refusal_of(events[-1])


def ended(events: Sequence[Event]) -> bool:
    return bool(events) and isinstance(events[-1], END)


def finish(reason: str, names: Mapping[str, str]) -> str:
    """The dialect's word for a StopReason; `names` has those that differ from the default."""
    return names.get(reason) or names["eos"]


def usage(prompted: Prompted, finished: Finished) -> tuple[int, int, int]:
    """Tokens of the prompt, of those cached, and of the answer with its thinking."""
    before = prompted.usage  # of a continued answer, the existing part counts as prompt
    return before.prompt + before.answer, finished.usage.cached, finished.usage.answer - before.answer


def timings(s: Stats) -> dict[str, float]:
    """A request's times by llama-server's names."""
    prompt_ms, decode_ms = s.prefill_s * 1e3, s.decode_s * 1e3
    prompt_n, steps = s.prompt_tokens - s.reused_tokens, max(0, s.generated_tokens - 1)
    return {
        "cache_n": s.reused_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / prompt_n if prompt_n else 0.0,
        "prompt_per_second": prompt_n / s.prefill_s if s.prefill_s else 0.0,
        "predicted_n": s.generated_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / steps if steps else 0.0,
        "predicted_per_second": steps / s.decode_s if s.decode_s else 0.0,
        **({"draft_n": s.drafted_tokens, "draft_n_accepted": s.accepted_tokens} if s.drafted_tokens else {}),
    }
