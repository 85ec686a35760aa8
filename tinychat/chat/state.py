"""The state of the chat as one value: idle, loading a model, answering, stopping an answer, running a tool call, or
summarising."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinychat.backend.protocol import Backend, Event, Piece, PieceKind, Prefilling, Usage
from tinychat.backend.stream import EventStream
from tinychat.chat.calling import Asked, Run, Written
from tinychat.chat.changes import Overflow
from tinychat.chat.compacting import Summarising
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.repetition import Repetition


@dataclass(frozen=True)
class ModelChoice:
    """A model to load: what the user calls it, its file, the options to open it with, and its context in tokens (None:
    the default)."""

    name: str
    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    context: int | None = None


@dataclass(frozen=True)
class LoadStage:
    """The stage of loading, in words, and the fraction done (0..1)."""

    stage: str
    fraction: float


@dataclass(frozen=True)
class LoadFailed:
    """A model could not be loaded; `kept`: the previous model is still loaded."""

    message: str
    kept: bool


LoadEvent = LoadStage | Backend | LoadFailed


@dataclass(frozen=True)
class Idle:
    """Nothing runs. The controller's `backend` says whether a model is loaded."""


@dataclass(frozen=True)
class Loading:
    """`choice` is being loaded. `kept` is what was loaded before, and is again if this fails in time; `outcome` is the
    backend that is loaded afterwards, None for none."""

    stage: LoadStage
    choice: ModelChoice
    kept: ModelChoice | None
    events: EventStream[LoadEvent]
    outcome: Future[Backend | None]


@dataclass(frozen=True)
class Answering:
    """A request runs. Times are on the controller's clock, in seconds.

    The turns from `start` on differ from `before`, which comes back if the request is refused before its prompt is
    made; `typed` then goes back to the user. `goes_on`: an answer is continued. `seed` is what it samples with. `round`
    counts the answers since the user's message that may call tools; `written` has the calls of this one so far.
    `before_tokens` are those the turn had already (it is being continued), `thought_s` the seconds of thinking before
    the present stretch of it. `left_out` old turns do not fit into its prompt.
    """

    events: EventStream[Event]
    cancel: threading.Event
    start: int
    before: Conversation
    asked: Conversation
    typed: Turn | None
    goes_on: bool
    seed: int
    round: int = 1
    written: Written = field(default_factory=Written)
    before_tokens: int = 0
    thought_s: float = 0.0
    repetition: Repetition | None = None  # None: it may repeat itself
    usage: Usage | None = None  # of the prompt; None until it is made
    prefill: Prefilling | None = None
    tokens: int = 0
    thinking_tokens: int = 0
    thinking_since: float | None = None
    kind: PieceKind = "answer"
    left_out: int = 0

    def take(self, piece: Piece, now: float) -> Answering:
        """With `piece` added."""
        thinks, n, since, thought_s = piece.kind == "thinking", len(piece.tokens), self.thinking_since, self.thought_s
        if thinks:
            since = since or now
        elif since is not None:
            thought_s += now - since
            since = None
        return replace(
            self,
            tokens=self.tokens + n,
            thinking_tokens=self.thinking_tokens + n * thinks,
            thinking_since=since,
            thought_s=thought_s,
            kind=piece.kind,
        )

    def thinking_s(self, now: float) -> float:
        """Seconds of thinking, including those before the answer was continued."""
        return self.thought_s + (now - self.thinking_since if self.thinking_since is not None else 0.0)


@dataclass(frozen=True)
class Stopping:
    """`answer` was cancelled and has not ended yet; `skip`: then it goes on behind its thinking; `repeats`: because it
    repeated itself."""

    answer: Answering
    skip: bool = False
    repeats: bool = False


@dataclass(frozen=True)
class Calling:
    """A call of a tool runs, whose result becomes turn `index`, the last one; `asked` while it waits for the user.
    `round` is that of the answer that made it; `kept` are results of calls beside it, by id, that are not run again."""

    run: Run
    index: int
    round: int
    kept: Mapping[str, Turn]
    asked: Asked | None = None


@dataclass(frozen=True)
class Compacting:
    """The oldest turns of `conversation` are being summarised; then `overflow`, where it was the reason, is asked
    again."""

    job: Summarising
    conversation: Conversation
    overflow: Overflow | None


State = Idle | Loading | Answering | Stopping | Calling | Compacting
