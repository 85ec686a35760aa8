"""What the transcript is made of: your messages, answers, and lines of tinychat's own."""

from __future__ import annotations

import time
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Static

from tinychat.chat.changes import Grew
from tinychat.chat.conversation import Turn, footer_text
from tinychat.errors import printable
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.thinking import ThinkingBlock

FILES = 5  # attached files whose names are shown
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class TurnMessage(Vertical, can_focus=True):
    """A turn in the transcript. A click leaves the focus in the prompt; ctrl+up comes here, and then keys act on it."""

    FOCUS_ON_CLICK = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "previous", show=False),
        Binding("down,j", "move(1)", "next", show=False),
        Binding("left,h", "act('previous')", "previous version", show=False),
        Binding("right,l", "act('next')", "next version", show=False),
        Binding("c", "act('copy')", "copy"),
        Binding("f", "act('fork')", "fork"),
        Binding("escape", "act('leave')", "back to the prompt"),
    ]
    ACTIONS: ClassVar[tuple[str, ...]] = ("copy", "fork")
    line: ActionLine

    class Acted(Message):
        """The user wants `action` (copy, code, edit, delete, fork, regenerate, previous, next, leave, up, down) on
        turn `index`."""

        def __init__(self, action: str, index: int) -> None:
            super().__init__()
            self.action, self.index = action, index

    version = (1, 1)  # which of how many versions this is
    by = ""  # the model that answered, where the conversation has answers of several

    def __init__(self, index: int, turn: Turn) -> None:
        super().__init__()
        self.index, self.turn = index, turn

    def unfolded(self, thinking: bool) -> MarkdownView | None:
        """The view of the text, or of the thinking, which is shown now; None where there is none."""
        return None

    def on_click(self, event: events.Click) -> None:
        if action := event.style.meta.get("act"):
            event.stop()
            self.action_act(str(action))

    def on_enter(self) -> None:
        self.line.refresh()

    on_leave = on_focus = on_blur = on_enter

    def action_act(self, action: str) -> None:
        self.post_message(self.Acted(action, self.index))

    def action_move(self, step: int) -> None:
        self.post_message(self.Acted("up" if step < 0 else "down", self.index))


class ActionLine(Widget):
    """A line of a message: some words on the left; on the right ‹ 2/3 › where there are versions of it, and what a
    click can do: `always`, or under the mouse and with the focus."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"speaker", "figures", "action"}

    def __init__(self, words: str, style: str, always: bool, classes: str) -> None:
        super().__init__(classes=classes)
        self._words, self._style, self._always = words, style, always

    def say(self, words: str) -> None:
        if words != self._words:
            self._words = words
            self.refresh()

    def render(self) -> Content:
        message = self.parent
        assert isinstance(message, TurnMessage)
        parts = []
        number, total = message.version
        if total > 1:
            parts.append(Content.assemble(_action("‹", "previous"), f" {number}/{total} ", _action("›", "next")))
        if self._always or message.is_mouse_over or message.has_focus:
            parts += [_action(name, name) for name in message.ACTIONS]
        right = Content("  ").join(parts).stylize_before(".action")
        words, room = self._words, self.size.width - right.cell_length - 2
        while len(words) > room and " · " in words:  # the least important last
            words = words.rpartition(" · ")[0]
        left = Content.styled(words, self._style)
        return Content.assemble(left, " " * max(2, self.size.width - left.cell_length - right.cell_length), right)


def _action(text: str, action: str) -> Content:
    return Content(text).stylize(Style.from_meta({"act": action}))


class UserMessage(TurnMessage):
    """What the user wrote, as it is, and the names of attached files."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e,enter", "act('edit')", "edit"),
        Binding("d,delete", "act('delete')", "delete", tooltip="delete the question and its answer"),
    ]
    ACTIONS = ("edit", "copy", "fork")

    def __init__(self, index: int, turn: Turn) -> None:
        super().__init__(index, turn)
        self.line = ActionLine("you", ".speaker", always=False, classes="head")
        self.view = MarkdownView(turn.text, plain=True, classes="text")

    def compose(self) -> ComposeResult:
        yield self.line
        yield self.view
        if self.turn.files:
            names = [f"{printable(f.name, newlines=False)} ({len(f.text):,} characters)" for f in self.turn.files]
            if len(names) > FILES:
                names[FILES:] = [f"{len(names) - FILES} more ({sum(len(f.text) for f in self.turn.files):,} in all)"]
            yield Static(Content(f"+ {', '.join(names)}"), classes="files")

    def unfolded(self, thinking: bool) -> MarkdownView | None:
        return self.view


class AnswerMessage(TurnMessage):
    """An answer: its thinking, its text while it grows, before that what it waits for, and a line of figures and
    actions when it has ended."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "act('edit')", "edit"),
        Binding("c", "act('copy')", "copy"),
        Binding("y", "act('code')", "copy code"),
        Binding("r", "act('regenerate')", "regenerate"),
        Binding("d,delete", "act('delete')", "delete", tooltip="delete this version, or the question and its answer"),
        Binding("t", "toggle_thinking", "thinking"),
    ]
    ACTIONS = ("edit", "copy", "regenerate", "fork")

    def __init__(self, index: int, turn: Turn, live: bool = False) -> None:
        super().__init__(index, turn)
        self.live = live
        self.thinking = ThinkingBlock()
        self.view = MarkdownView(plain=turn.raw, classes="text")
        # not queried: they are mounted before their children when the app closes
        self.waiting = Static(classes="waiting")
        self.line = ActionLine("", ".figures", always=True, classes="foot")
        if turn.thinking:
            self.thinking.feed(turn.thinking)
        if turn.text:
            self.view.feed(turn.text)

    def compose(self) -> ComposeResult:
        if self.turn.thinking:
            yield self.thinking
        yield self.view
        yield self.waiting
        yield self.line

    def on_mount(self) -> None:
        if not self.live:
            self.view.finish()
        self.update(self.turn, self.live)

    def unfolded(self, thinking: bool) -> MarkdownView | None:
        return self.thinking.unfolded() if thinking else self.view

    def grew(self, grew: Grew) -> None:
        if grew.thinking:
            self.thinking.feed(grew.thinking)
        if grew.answer:
            self.view.feed(grew.answer)

    def update(self, turn: Turn, live: bool, thinking_tokens: int = 0, elapsed: float = 0.0, awaited: str = "") -> None:
        """Shows the state of `turn`; of a live one the thinking figures are given, and what is
        `awaited` if anything is."""
        ended, self.turn, self.live = self.live and not live, turn, live
        if turn.thinking or (live and thinking_tokens):
            tokens = thinking_tokens if live else turn.thinking_tokens
            thinks = live and not turn.text
            if self.thinking.parent is None and self.view.parent is self:
                self.mount(self.thinking, before=self.view)
            self.thinking.show(
                tokens, elapsed if live else turn.thinking_s, live=thinks, cut=not thinks and turn.thinking_open
            )
        if ended:
            self.view.finish()
        self.waiting.display = bool(awaited)
        if awaited:
            frame = SPINNER[int(10 * time.monotonic()) % len(SPINNER)]
            shown = printable(awaited, newlines=False)
            self.waiting.update(Content.assemble((frame, "$primary"), f" {shown}"), layout=False)
        only_calls = turn.stop_reason == "tool_calls" and not turn.note
        self.line.display = not live and not only_calls
        if not live:
            self.line.say(" · ".join(filter(None, (printable(self.by, newlines=False), footer_text(turn)))))
        self.set_class(only_calls and not turn.text and not turn.thinking, "-empty")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "toggle_thinking":
            return bool(self.turn.thinking)
        return "```" in self.turn.text if parameters == ("code",) else True

    def action_toggle_thinking(self) -> None:
        if self.thinking.display:
            self.thinking.toggle()


class NoticeLine(Static):
    """A note of tinychat itself, behind a dashed bar; errors have a sign as well as a colour."""

    def __init__(self, text: str, error: bool = False) -> None:
        super().__init__(Content("✗ " * error + printable(text)), classes="note -error" if error else "note")
