"""The question of a tool: exactly what it will do, and what may be allowed."""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tinychat.chat.questions import permission_label
from tinychat.errors import printable
from tinychat.tools.protocol import Question
from tinychat.ui.chat.prompt import PromptEditor
from tinychat.ui.screens.modal import Modal

_COLOURS = {"+": "$text-success", "-": "$text-error", "@": "$primary"}


class PermissionScreen(Modal[str]):
    """The result is one of Question.options; esc means no. The safe answer has the focus.

    It may come in the middle of a word: what is typed goes on into `prompt`, Enter behind it included, until another
    key is pressed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss('no')", "no"),
        Binding("pageup", "page(-1)", "up", show=False),
        Binding("pagedown", "page(1)", "down", show=False),
    ]

    def __init__(self, question: Question, prompt: PromptEditor) -> None:
        super().__init__()
        self.question, self._prompt, self._types = question, prompt, False

    def compose(self) -> ComposeResult:
        options = [Option(permission_label(o, self.question), id=o) for o in self.question.options]
        lines = self.question.detail.count("\n")
        title = self.question.title + (f" ({lines:,} lines)" if lines > 10 else "")
        with Vertical(classes="question permission"):
            yield Static(Content(printable(title)).stylize("bold"))
            with VerticalScroll(classes="detail", can_focus=False):
                yield Static(detail_of(self.question))
            yield OptionList(*options, compact=True)

    def on_mount(self) -> None:
        choices = self.query_one(OptionList)
        choices.highlighted = len(self.question.options) - 1
        choices.focus()

    def on_key(self, event: events.Key) -> None:
        if event.is_printable and event.character:
            self._types = True
            self._prompt.insert(event.character)
        elif self._types and event.key == "enter":
            self._prompt.submit()
        elif self._types and event.key == "backspace":
            self._prompt.action_delete_left()
        else:
            self._types = False
            return
        event.stop()

    def action_page(self, step: int) -> None:
        detail = self.query_one(".detail", VerticalScroll)
        detail.scroll_relative(y=step * max(1, detail.size.height - 1), animate=False)

    @on(OptionList.OptionSelected)
    def _chosen(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(event.option.id)


def detail_of(question: Question) -> Content:
    """What will happen, character by character; a diff in colours."""
    text = printable(question.detail).removesuffix("\n")
    if question.kind != "write":
        return Content(text)
    lines = text.split("\n")
    return Content("\n").join(Content.styled(line, _COLOURS.get(line[:1], "")) for line in lines)
