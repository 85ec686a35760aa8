"""What the controller tells the screen: what changed since it last asked, in order."""

from __future__ import annotations

from dataclasses import dataclass

from tinychat.chat.context import Room
from tinychat.chat.conversation import Conversation, Turn


@dataclass(frozen=True)
class Reset:
    """The turns from `start` on are others than before: those of `conversation`, as it was then. `live`: its last
    answer is being written, and what grows of it comes as Grew."""

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
    """The last turn, number `index`, is complete for now, and this is it."""

    index: int
    turn: Turn


@dataclass(frozen=True)
class ModelChanged:
    """A model is loaded, or none any more."""


@dataclass(frozen=True)
class Note:
    """One line for the user; `error` says that something did not work."""

    text: str
    error: bool = False


@dataclass(frozen=True)
class Refused:
    """A message could not be sent; its text goes back to where it was typed."""

    turn: Turn


Change = Reset | Grew | Ended | ModelChanged | Note | Refused | Room
