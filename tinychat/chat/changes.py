"""What the controller tells the screen: what changed since it last asked, in order."""

from __future__ import annotations

from dataclasses import dataclass

from tinychat.backend.protocol import Usage
from tinychat.chat.conversation import Conversation, Turn
from tinychat.tools.protocol import Question


@dataclass(frozen=True)
class Reset:
    """The turns from `start` on are others than before: those of `conversation`, as it was then. `live`: its last
    turn is being written, and what grows of an answer comes as Grew."""

    start: int
    conversation: Conversation
    live: bool = False


@dataclass(frozen=True)
class Grew:
    """The last turn grew by these pieces, made of `tokens` tokens."""

    thinking: str
    answer: str
    tokens: int


@dataclass(frozen=True)
class Ended:
    """The last turn, number `index`, an answer or a call's result, is complete for now, and this is it."""

    index: int
    turn: Turn


@dataclass(frozen=True)
class ModelChanged:
    """A model is loaded, or none any more."""


@dataclass(frozen=True)
class Notice:
    """One line for the user; `error` says that something did not work."""

    text: str
    error: bool = False


@dataclass(frozen=True)
class Refused:
    """A message could not be sent; its text goes back to where it was typed."""

    turn: Turn


@dataclass(frozen=True)
class Overflow:
    """`conversation` takes `usage` and needs at least `reserve` tokens for an answer, which the context does not have.

    The user decides: load the model with `larger` tokens of context (0: it cannot hold more), leave out the oldest
    turns (`droppable` of them), leave out past thinking, or stop. `go_on`: its last answer would be continued. `typed`
    is the message that would not be sent then; `start` is the first turn that would change.
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
        turns = ("turns",) if self.droppable else ()
        thinking = ("thinking",) if u.thinking and u.used - u.thinking + self.reserve <= u.limit else ()
        return (*("context",) * bool(self.larger), *turns, *thinking, "stop")


@dataclass(frozen=True)
class Asks:
    """A tool waits for the user's answer to `question`: Controller.permit."""

    question: Question


Change = Reset | Grew | Ended | ModelChanged | Notice | Refused | Overflow | Asks
