"""What the transcript is made of: your messages, answers, and lines of tinychat's own."""

from __future__ import annotations

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
from tinychat.chat.conversation import ENDINGS, Turn
from tinychat.errors import printable
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.thinking import ThinkingBlock
from tinychat.ui.panel.figures import seconds
from tinychat.units import speed


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

    class Acted(Message):
        """The user wants `action` (copy, code, edit, fork, regenerate, previous, next, leave, up, down) on turn
        `index`."""

        def __init__(self, action: str, index: int) -> None:
            super().__init__()
            self.action, self.index = action, index

    version = (1, 1)  # which of how many versions this is

    def __init__(self, index: int, turn: Turn, name: str) -> None:
        super().__init__()
        self.index, self.turn, self.speaker = index, turn, name

    def on_click(self, event: events.Click) -> None:
        if action := event.style.meta.get("act"):
            event.stop()
            self.action_act(str(action))

    def on_enter(self) -> None:
        self.query_one(Head).refresh()

    on_leave = on_focus = on_blur = on_enter

    def action_act(self, action: str) -> None:
        self.post_message(self.Acted(action, self.index))

    def action_move(self, step: int) -> None:
        self.post_message(self.Acted("up" if step < 0 else "down", self.index))


class Head(Widget):
    """The line above a message: who speaks, ‹ 2/3 › where there are versions of it, and on the right, under the mouse
    or with the focus, what a click can do."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"speaker", "action"}

    def render(self) -> Content:
        message = self.parent
        assert isinstance(message, TurnMessage)
        speaker = Content.styled(printable(message.speaker, newlines=False), ".speaker")
        number, total = message.version
        if total > 1:
            older = Content.styled("‹", ".action").stylize(Style.from_meta({"act": "previous"}))
            newer = Content.styled("›", ".action").stylize(Style.from_meta({"act": "next"}))
            speaker = Content.assemble(speaker, "  ", older, (f" {number}/{total} ", ".action"), newer)
        if not message.is_mouse_over and not message.has_focus:
            return speaker
        links = [Content.styled(a, ".action").stylize(Style.from_meta({"act": a})) for a in message.ACTIONS]
        actions = Content("  ").join(links)
        return Content.assemble(
            speaker, " " * max(2, self.size.width - speaker.cell_length - actions.cell_length), actions
        )


class UserMessage(TurnMessage):
    """What the user wrote, as it is, and the names of attached files."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("e,enter", "act('edit')", "edit and ask again")]
    ACTIONS = ("edit", "copy", "fork")

    def compose(self) -> ComposeResult:
        yield Head()
        yield MarkdownView(self.turn.text, plain=True, classes="text")
        if self.turn.files:
            names = ", ".join(
                f"{printable(f.name, newlines=False)} ({len(f.text):,} characters)" for f in self.turn.files
            )
            yield Static(Content(f"+ {names}"), classes="files")


class AnswerMessage(TurnMessage):
    """An answer: its thinking, its text while it grows, and a line of figures when it ends."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "act('code')", "copy its code"),
        Binding("r", "act('regenerate')", "answer again"),
        Binding("t", "toggle_thinking", "thinking"),
    ]
    ACTIONS = ("copy", "fork")

    def __init__(self, index: int, turn: Turn, name: str, live: bool = False) -> None:
        super().__init__(index, turn, name)
        self.live = live
        self.thinking = ThinkingBlock()
        self.view = MarkdownView(plain=turn.raw, classes="text")
        self.footer = Static(classes="footer")  # not queried: it is mounted before its children when the app closes
        if turn.thinking:
            self.thinking.feed(turn.thinking)
        if turn.text:
            self.view.feed(turn.text)

    def compose(self) -> ComposeResult:
        yield Head()
        if self.turn.thinking:
            yield self.thinking
        yield self.view
        yield self.footer

    def on_mount(self) -> None:
        if not self.live:
            self.view.finish()
        self.update(self.turn, self.live)

    def grew(self, grew: Grew) -> None:
        if grew.thinking:
            self.thinking.feed(grew.thinking)
        if grew.answer:
            self.view.feed(grew.answer)

    def update(self, turn: Turn, live: bool, thinking_tokens: int = 0, elapsed: float = 0.0, writes: str = "") -> None:
        """Shows the state of `turn`; of a live one the thinking figures are given, and what it `writes` that is no
        text."""
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
        only_calls = turn.stop_reason == "tool_calls" and not turn.note
        self.footer.display = bool(writes) if live else not only_calls
        if not live or writes:
            self.footer.update(Content(printable(writes, newlines=False) if live else footer_text(turn)))
        self.set_class(only_calls and not turn.text and not turn.thinking, "-empty")

    def action_toggle_thinking(self) -> None:
        if self.thinking.display:
            self.thinking.toggle()


class NoticeLine(Static):
    """One line of tinychat itself; errors have a sign as well as a colour."""

    def __init__(self, text: str, error: bool = False) -> None:
        super().__init__(
            Content(f"{'✗' if error else '·'} {printable(text)}"), classes="note -error" if error else "note"
        )


def footer_text(turn: Turn) -> str:
    """412 tokens · 72.4 tok/s · reused 1,812 · prefilled 43."""
    s = turn.stats
    tokens = int(s.get("generated_tokens", 0))
    parts = [ENDINGS.get(turn.stop_reason, "")]
    parts.append(f"a call could not be read: {printable(turn.note, newlines=False)}" if turn.note else "")
    parts.append(f"{tokens:,} token{'s' * (tokens != 1)}" if tokens else "")
    parts.append(f"{speed(s['decode_tok_s'])} tok/s" if s.get("decode_tok_s") else "")
    parts.append(f"first after {seconds(s['ttft_s'])}" if s.get("ttft_s", 0) >= 1 else "")
    parts.append(f"reused {s['reused_tokens']:,}" if s.get("reused_tokens") else "")
    parts.append(f"prefilled {s['prefilled_tokens']:,}" if s.get("prefilled_tokens") else "")
    return " · ".join(filter(None, parts))
