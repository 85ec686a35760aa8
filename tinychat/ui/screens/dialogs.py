"""The two small questions: yes or no, and one line of text."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Button, Input, Static

from tinychat.errors import printable
from tinychat.ui.screens.modal import Modal


class ConfirmScreen(Modal[bool]):
    """Asks `question`; True when the user chooses `yes`. The safe answer has the focus."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "answer(False)", "no"),
        Binding("y", "answer(True)", "yes"),
        Binding("left,right,up,down", "other", "other", show=False),
    ]

    def __init__(self, question: str, yes: str, no: str = "Cancel") -> None:
        super().__init__()
        self._question, self._yes, self._no = question, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(printable(self._question)))
            with Horizontal(classes="buttons"):
                yield Button(
                    Content.from_markup("$label [dim]y[/]", label=self._yes), id="yes", variant="error", compact=True
                )
                yield Button(Content.from_markup("$label [dim]esc[/]", label=self._no), id="no", compact=True)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def action_answer(self, answer: bool) -> None:
        self.dismiss(answer)

    def action_other(self) -> None:
        self.focus_next(Button)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class AskScreen(Modal[str]):
    """Asks for one line of text, starting from `text`; None when the user gives up."""

    CSS_PATH = "dialogs.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "cancel")]

    def __init__(self, question: str, text: str = "", hint: str = "enter saves, esc cancels") -> None:
        super().__init__()
        self._question, self._text, self._hint = question, text, hint

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(Content(printable(self._question)))
            yield Input(self._text, compact=True, select_on_focus=True)
            yield Static(Content.styled(self._hint, "$foreground-muted"))

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)
