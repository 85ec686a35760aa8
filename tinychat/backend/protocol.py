"""The seam: code that needs an answer sends messages to a `Backend`; no code above it uses a tokenizer, a template, an
executor or a KV cache.

Everything that crosses the seam is an immutable value, so a panel, a server and a saved conversation never see half of
one. The chat, `tinychat run` and the server use the same Protocol; local.py and remote.py implement it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from tinychat.backend.stream import EventStream
from tinychat.engine.speculation import Source as Source
from tinychat.engine.speculation import Speculate as Speculate
from tinychat.engine.stats import Stats as Stats  # Source, Stats, Message and Sampling are part of the seam
from tinychat.engine.tool_calls import Message as Message
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import SAMPLING_PARAMETERS as SAMPLING_PARAMETERS
from tinychat.kernels.sampling import Parameter as Parameter
from tinychat.kernels.sampling import Sampling as Sampling

ANSWER_RESERVE = 256  # tokens that an answer should at least have

PieceKind = Literal["answer", "thinking"]
StopReason = Literal["eos", "stop", "length", "context", "stopped", "tool_calls"]
"""Why an answer ended: the model ended it, a stop string, max_tokens, the context is full, cancelled, calls tools."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; what it cannot is refused by name or hidden, never ignored."""

    thinking: bool = False  # the model can think, and thinking can be switched
    tools: bool = False
    logprobs: bool = False
    continue_final: bool = False
    exact_counts: bool = False  # measure() counts tokens; otherwise it estimates
    instruments: bool = False  # LocalBackend.run_job: bench, profile, kernels, inspector


@dataclass(frozen=True)
class ModelInfo:
    """What answers, for people and panels. Sizes in bytes; 0 or "" where it is not known."""

    name: str
    max_context: int
    device: str
    can: Capabilities
    architecture: str = ""
    quant: str = ""  # of most weight bytes: "Q4_K"
    parameters: int = 0
    active_parameters: int = 0
    layers: int = 0
    experts: int = 0
    experts_used: int = 0
    trained_context: int = 0
    threads: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    file_bytes: int = 0
    fingerprint: str = ""  # keys saved caches and benchmarks
    path: Path | None = None
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)  # its own defaults, by field of Sampling
    notes: tuple[str, ...] = ()  # one line each, for the user: a slower device, a template that failed


@dataclass(frozen=True)
class Request:
    """The request of one answer.

    `raw` is a prompt sent as it is, without a chat template, in place of `messages`. `thinking` None leaves it to the
    model. `continue_final`: the last message is an unfinished answer, which goes on. `overflow` says what to do when
    prompt and answer do not fit the context: "refuse" ends with DoesNotFit; "oldest" leaves out the oldest turns, so
    many at once that the next messages fit as well; "thinking" leaves out all past thinking. `logprobs` is the number
    of alternatives wanted per token (None: none at all). `conversation` names the one this belongs to, so that what is
    saved of it can be forgotten. `cancel` ends this request and no other: while it waits, within a prefill chunk, or
    within a token.
    """

    messages: tuple[Message, ...] = ()
    raw: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    continue_final: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()  # as OpenAI writes them
    tool_choice: str | Mapping[str, Any] = "auto"
    response_format: Mapping[str, Any] | None = None  # as OpenAI writes it, or {"type": "grammar", "grammar": text}
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    overflow: Literal["refuse", "oldest", "thinking"] = "refuse"
    conversation: str = ""
    cancel: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)


@dataclass(frozen=True)
class Usage:
    """Tokens of the context by what they are. `exact` False: estimated."""

    system: int = 0
    history: int = 0
    thinking: int = 0
    tools: int = 0
    answer: int = 0
    limit: int = 0
    cached: int = 0  # of the prompt, already in the KV cache when the request began
    exact: bool = True

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.system + self.history + self.thinking + self.tools

    @property
    def used(self) -> int:
        return self.prompt + self.answer

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


@dataclass(frozen=True)
class TokenPiece:
    """One token of an answer: `text` is what became visible with it, maybe empty; `top` are (id, logprob) of the
    likeliest alternatives, as many as the request asked for; `source` says how it was made, which is no part of what
    it is."""

    id: int
    text: str
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    source: Source = field(default="", compare=False)


@dataclass(frozen=True)
class Queued:
    """The request waits; `ahead` others come first."""

    ahead: int


@dataclass(frozen=True)
class Prompted:
    """The prompt is made: what it takes of the context, and how many messages were left out of it. `note` is a line for
    the user, once: the model's template cannot write this conversation, and another format took its place."""

    usage: Usage
    dropped: int = 0
    note: str = ""


@dataclass(frozen=True)
class Prefilling:
    """`done` of `total` new tokens are in the KV cache; `reused` were there before."""

    done: int
    total: int
    reused: int


@dataclass(frozen=True)
class Piece:
    """Text of the answer or of the thinking. `tokens` made it: none for text that was held back and is released,
    several where speculation accepted several."""

    kind: PieceKind
    text: str
    tokens: tuple[TokenPiece, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A piece of call number `index`: the first one carries `id` and `name`, later ones more of `arguments` (JSON
    text). One with a `note` says why a call could not be read, and takes back what came of it; its text follows as
    answer."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""
    note: str = ""


@dataclass(frozen=True)
class Finished:
    """The answer ended. `stats` are the figures of this request, read after the device has finished."""

    reason: StopReason
    usage: Usage
    stats: Stats
    stop_string: str = ""  # the one of Request.stop that ended it


@dataclass(frozen=True)
class DoesNotFit:
    """Refused: the prompt takes `usage.prompt` tokens and an answer needs at least `reserve`; `droppable` of the
    oldest exchanges (0 where the last one alone does not fit) and `usage.thinking` tokens of thinking can be left
    out."""

    usage: Usage
    reserve: int
    droppable: int


@dataclass(frozen=True)
class Failed:
    """The request failed; `message` is one line for the user. "invalid": the request asks for what cannot be done, in
    `field`, as OpenAI names it, where it is one field; "busy": come again after `retry_s` seconds; "lost": the
    connection broke, what came stays; "internal": the rest."""

    message: str
    cause: Literal["invalid", "busy", "lost", "internal"] = "internal"
    retry_s: float = 0.0
    field: str = ""


Event = Queued | Prompted | Prefilling | Piece | ToolCall | Finished | DoesNotFit | Failed
"""The events of one request, in this order; exactly one Finished, DoesNotFit or Failed, and it is the last."""

END = (Finished, DoesNotFit, Failed)


class OldModelLost(TinychatError):
    """A model could not be loaded, and the one that it was to replace is closed already."""


class Backend(Protocol):
    """Something that answers messages. Any thread may call any method."""

    @property
    def info(self) -> ModelInfo: ...

    def answer(self, request: Request) -> EventStream[Event]:
        """Starts to answer and returns at once; the stream ends behind its last event. Never raises: what is wrong
        comes as Failed. Requests are answered one at a time, in the order of the calls."""
        ...

    def measure(self, request: Request) -> Usage:
        """What the request's prompt would take of the context, part by part. Waits for the backend: not for a screen's
        thread. Raises TinychatError when the prompt cannot be made."""
        ...

    def snapshot(self) -> Stats | None:
        """Figures of the running or last request and of the loaded model, a value of this moment; None: not known."""
        ...

    def close(self) -> None:
        """Cancels what runs, frees the model; the backend is not used again. Returns at once."""
        ...


class Tokenizing(Protocol):
    """What a server tells of tokens beside answering, where a backend has the tokenizer. Any thread may call."""

    def tokenize(self, text: str, *, special: bool, whole: bool) -> list[int]:
        """Ids of `text`. `special`: control tokens that are written in it are recognised. `whole`: with the tokens that
        the model wants at the begin and the end of a prompt."""
        ...

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens written out. Raises TinychatError for an id outside the vocabulary."""
        ...

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for."""
        ...

    def prompt_text(self, request: Request) -> str:
        """The prompt of `request` as it would be written down. Raises TinychatError when it cannot be made."""
        ...


def reserve_for(max_tokens: int | None, limit: int) -> int:
    """Tokens of a context of `limit` that are kept free for an answer of at most `max_tokens`."""
    return min(max_tokens or ANSWER_RESERVE, ANSWER_RESERVE, limit // 4)


def text_of(events: Sequence[Event], kind: PieceKind = "answer") -> str:
    """The text of one kind that `events` carry."""
    return "".join(e.text for e in events if isinstance(e, Piece) and e.kind == kind)
