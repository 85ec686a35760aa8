"""A call of a tool in the transcript: one line, which unfolds to the arguments and the result."""

from __future__ import annotations

import json
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.style import Style
from textual.widgets import Static

from tinychat.chat.conversation import Call, Turn
from tinychat.errors import printable
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.message import ActionLine, TurnMessage
from tinychat.ui.panel.figures import seconds

SHOWN = 400  # lines of a result that are laid out; the rest is in the saved conversation


class CallMessage(TurnMessage):
    """The turn of a result. `live` while the call runs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("t,enter", "unfold", "unfold"),
        Binding("r", "act('retry')", "run again"),
        Binding("e", "act('edit_call')", "edit and run"),
    ]

    def __init__(self, index: int, turn: Turn, call: Call, live: bool = False) -> None:
        super().__init__(index, turn)
        self.line = CallLine("", ".action", always=False, classes="head")
        self.call, self.live, self.folded, self.waits, self.elapsed = call, live, True, False, 0.0
        self._body: list[MarkdownView | Static] = []

    def compose(self) -> ComposeResult:
        yield self.line

    def update(self, turn: Turn, live: bool, elapsed: float = 0.0, waits: bool = False) -> None:
        """Shows the state of `turn`; of a running call its seconds, and whether it waits for the user."""
        ended = self.live and not live
        self.turn, self.live, self.elapsed, self.waits = turn, live, elapsed, waits
        if ended and not self.folded:
            self.action_unfold()
            self.action_unfold()
        self.line.refresh()

    def on_click(self, event: events.Click) -> None:
        if event.style.meta.get("act"):
            super().on_click(event)
        elif isinstance(event.widget, CallLine):
            event.stop()
            self.action_unfold()

    def action_unfold(self) -> None:
        """Unfolds to the arguments and the result, or folds."""
        self.folded = not self.folded
        for widget in self._body:
            widget.remove()
        self._body = []
        if not self.folded:
            result = self.turn.text if not self.live else "…"
            self._body = [
                Static("arguments", classes="call-part"),
                MarkdownView(unfolded(self.call.arguments), plain=True, classes="call-text"),
                Static("result", classes="call-part"),
                MarkdownView(shortened(result), plain=True, classes="call-text"),
            ]
            self.mount_all(self._body)
        self.line.refresh()


class CallLine(ActionLine):
    """▸ read_file src/a.py · 0.02 s · 312 tokens"""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"tool", "failed"}

    def render(self) -> Content:
        message = self.parent
        assert isinstance(message, CallMessage)
        versions = f"  {message.version[0]}/{message.version[1]}" if message.version[1] > 1 else ""
        tail = state_of(message.turn, message.live, message.elapsed, message.waits)
        bad = message.turn.stop_reason in ("failed", "refused", "stopped")
        fold = "▸" if message.folded else "▾"
        head = Content.assemble(f"{fold} ", (printable(message.call.name, newlines=False), ".tool"))
        room = self.size.width - head.cell_length - len(tail) - len(versions) - 3
        words = brief(message.call.arguments)
        short = Content(f" {words}" if words else "").truncate(max(0, room), ellipsis=True)
        line = Content.assemble(head, short, versions, (f" · {tail}", ".failed" if bad else ".action"))
        if not message.is_mouse_over and not message.has_focus:
            return line
        links = Content("  ").join(
            Content.styled(text, ".action").stylize(Style.from_meta({"act": action}))
            for text, action in (("retry", "retry"), ("edit", "edit_call"))
        )
        gap = self.size.width - line.cell_length - links.cell_length
        return Content.assemble(line, " " * gap, links) if gap > 1 else line


def state_of(turn: Turn, live: bool, elapsed: float, waits: bool) -> str:
    """running 3.2 s, or: 0.02 s · 312 tokens."""
    if live:
        return "waits for you" if waits else f"running {seconds(elapsed)}"
    tokens = int(turn.stats.get("tokens", 0))
    parts = [
        turn.stop_reason if turn.stop_reason != "done" else "",
        seconds(turn.stats["seconds"]) if "seconds" in turn.stats else "",
        f"{tokens:,} token{'s' * (tokens != 1)}" if tokens else "",
    ]
    return " · ".join(filter(None, parts))


def brief(arguments: str) -> str:
    """The values of the arguments, each on a few words."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = arguments
    values = found.values() if isinstance(found, dict) else [found]
    words = (v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in values)
    return ", ".join(printable(" ".join(word[:200].split()), newlines=False) for word in words)


def unfolded(arguments: str) -> str:
    """One argument after the other: short ones on one line, texts as they are."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        return arguments
    lines = []
    for name, value in found.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return shortened("\n".join(lines))


def shortened(text: str) -> str:
    """`text` with the middle left out of more lines than can be laid out quickly."""
    lines = text.split("\n")
    if len(lines) <= SHOWN:
        return text
    half = SHOWN // 2
    return "\n".join([*lines[:half], f"[… {len(lines) - 2 * half:,} lines not shown …]", *lines[-half:]])
