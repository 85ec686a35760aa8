"""The question before the context overflows: what may be left out?"""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tinychat.chat.changes import Overflow
from tinychat.chat.questions import explain, overflow_label
from tinychat.ui.screens.modal import Modal


class OverflowScreen(Modal[str]):
    """Shows what does not fit; the result is one of Overflow.options. Esc stops and changes nothing."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss('stop')", "stop")]

    def __init__(self, overflow: Overflow) -> None:
        super().__init__()
        self.overflow = overflow

    def compose(self) -> ComposeResult:
        with Vertical(classes="question"):
            yield Static(Content("The context is full").stylize("bold"))
            yield Static(Content(explain(self.overflow)), classes="text")
            yield OptionList(
                *(Option(overflow_label(o, self.overflow), id=o) for o in self.overflow.options), compact=True
            )

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)
