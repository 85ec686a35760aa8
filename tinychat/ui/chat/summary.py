"""A summary in the transcript: one line, which unfolds to what the model wrote in place of the turns above it."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from tinychat.chat.conversation import Turn, summary_line
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.message import ActionLine, TurnMessage


class SummaryMessage(TurnMessage):
    """Folded at first."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("t,enter", "unfold", "unfold")]

    def __init__(self, index: int, turn: Turn) -> None:
        super().__init__(index, turn)
        self.line = ActionLine("", ".figures", always=False, classes="head")
        self.view = MarkdownView(turn.text, classes="text")

    def compose(self) -> ComposeResult:
        yield self.line
        yield self.view

    def on_mount(self) -> None:
        self.view.display = True
        self.action_unfold()

    def unfolded(self, thinking: bool) -> MarkdownView | None:
        if not self.view.display:
            self.action_unfold()
        return self.view

    def on_click(self, event: events.Click) -> None:
        if event.style.meta.get("act"):
            super().on_click(event)
        elif event.widget is self.line:
            event.stop()
            self.action_unfold()

    def action_unfold(self) -> None:
        """Shows or hides the text."""
        self.view.display = not self.view.display
        self.line.say(f"{'▾' if self.view.display else '▸'} {summary_line(self.turn)}")
