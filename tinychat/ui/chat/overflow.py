"""The question before the context overflows: what may be left out?"""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tinychat.chat.context import Room


class OverflowScreen(ModalScreen[str]):
    """Shows what does not fit; the result is one of Room.options. Esc stops and changes nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('stop')", "stop")]

    def __init__(self, room: Room, trained: int) -> None:
        super().__init__()
        self.room, self.trained = room, trained

    def compose(self) -> ComposeResult:
        with Vertical(classes="question"):
            yield Static(Content("The context is full").stylize("bold"))
            yield Static(Content(explain(self.room, self.trained)), classes="text")
            yield OptionList(*(Option(label(o, self.room), id=o) for o in self.room.options), compact=True)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


def explain(room: Room, trained: int) -> str:
    """What is too much, and the way to a larger context where there is one."""
    if room.tokens >= room.limit:
        lines = f"The conversation has {room.tokens:,} tokens, the context holds {room.limit:,}."
    else:
        left = room.limit - room.tokens
        lines = f"{room.tokens:,} of {room.limit:,} tokens are used; that leaves {left:,} for an answer."
    if trained > room.limit:
        lines += f" This model can hold up to {trained:,}: /set context N loads it again with more."
    return lines


def label(option: str, room: Room) -> str:
    """The words of a choice."""
    questions = "one question" if room.droppable == 1 else f"up to {room.droppable} questions"
    return {
        "turns": f"leave out the oldest turns ({questions}, with what was answered)",
        "thinking": f"leave out the thinking ({room.thinking:,} tokens)",
        "stop": "stop here; the message stays in the prompt" if room.typed else "stop here; the answer stays as it is",
    }[option]
