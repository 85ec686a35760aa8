"""The changes that the controller reports to the screen when the screen polls, in order."""

from __future__ import annotations

from dataclasses import dataclass

from tinychat.backend.protocol import Usage
from tinychat.chat.conversation import Conversation, Turn
from tinychat.tools.protocol import Question


@dataclass(frozen=True)
class Reset:
    """The turns from `start` on were replaced by those of `conversation`. `live`: its last turn is being generated, and
    its further text comes as Grew."""

    start: int
    conversation: Conversation
    live: bool = False


@dataclass(frozen=True)
class Grew:
    """The last turn grew by these pieces, which have `tokens` tokens."""

    thinking: str
    answer: str
    tokens: int


@dataclass(frozen=True)
class Ended:
    """The last turn (number `index`), an answer or a call's result, has ended; `turn` is its final value."""

    index: int
    turn: Turn


@dataclass(frozen=True)
class ModelChanged:
    """Another model, or none, is loaded now."""


@dataclass(frozen=True)
class Notice:
    """One line for the user; `error`: it reports a failure."""

    text: str
    error: bool = False


@dataclass(frozen=True)
class SentBack:
    """A message could not be sent; its text returns to the prompt."""

    turn: Turn


@dataclass(frozen=True)
class Overflow:
    """`conversation` takes `usage` and needs at least `reserve` tokens for an answer, which the context does not have.

    The user decides: load the model with `larger` tokens of context (0: it cannot hold more), leave out the oldest
    exchanges (`droppable` of them), let the model summarise them, leave out past thinking, or stop. `go_on`: its last
    answer would be continued. `typed` is the message that would not be sent then; `start` is the first turn that would
    change.
    """

    conversation: Conversation
    go_on: bool
    usage: Usage
    reserve: int
    droppable: int
    typed: Turn | None = None
    start: int = 0
    larger: int = 0

    @property
    def options(self) -> tuple[str, ...]:
        """The choices that can help, for Controller.resolve."""
        u = self.usage
        turns = ("compact", "turns") if self.droppable else ()
        thinking = ("thinking",) if u.thinking and u.used - u.thinking + self.reserve <= u.limit else ()
        return (*("context",) * bool(self.larger), *turns, *thinking, "stop")


@dataclass(frozen=True)
class Asks:
    """A tool waits for the user's answer to `question`: Controller.permit."""

    question: Question


Change = Reset | Grew | Ended | ModelChanged | Notice | SentBack | Overflow | Asks
