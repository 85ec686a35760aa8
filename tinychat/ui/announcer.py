"""What the terminal is told beside the screen: a title, and a bell or a notification when the user is needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from tinychat.errors import printable

Notify = Literal["off", "bell", "desktop"]
LONG = 30.0  # seconds of an answer after which its end is also announced to who has the terminal in front
LENGTH = 80  # characters
SAVE_TITLE, RESTORE_TITLE = "\x1b[22;2t", "\x1b]2;\x07\x1b[23;2t"  # on the terminal's stack; empty where it has none


def title(text: str) -> str:
    """The sequence that sets the terminal's title."""
    return f"\x1b]2;{_clean(text)}\x07"


def notification(kind: Notify, text: str, environ: Mapping[str, str]) -> str:
    """The sequence that notifies the user: the bell, or OSC 777 where the terminal is known to take it, else OSC 9."""
    if kind != "desktop":
        return "\x07" if kind == "bell" else ""
    if "VTE_VERSION" in environ or environ.get("TERM", "").startswith(("foot", "rxvt")):
        return f"\x1b]777;notify;tinychat;{_clean(text).replace(';', ',')}\x07"
    return f"\x1b]9;tinychat: {_clean(text)}\x07"


def _clean(text: str) -> str:
    """Nothing in it can end the sequence."""
    line = printable(" ".join(text.split()), newlines=False)
    return line if len(line) <= LENGTH else f"{line[: LENGTH - 1]}…"


class Announcer:
    """`write` sends a sequence to the terminal."""

    def __init__(self, write: Callable[[str], object], kind: Notify, environ: Mapping[str, str]) -> None:
        self._write, self.kind, self._environ = write, kind, environ
        self._since: float | None = None  # when the running answer began
        self._done = False  # an answer has ended that the user has not seen
        self._asked = False
        self._title = ""

    def update(self, busy: bool, asks: bool, name: str, focused: bool, now: float) -> None:
        """The state of this moment: whether something is being written in the conversation `name`, or a tool asks."""
        if asks and not self._asked and not focused:
            self._call(f"a tool asks: {name}")
        self._asked = asks
        if busy and self._since is None:
            self._since, self._done = now, False
        elif not busy and self._since is not None:
            self._done = not focused
            if not focused or now - self._since >= LONG:
                self._call(f"the answer is done: {name}")
            self._since = None
        self._done = self._done and not focused
        text = f"{'✓ ' * self._done}{name or 'tinychat'}"
        if text != self._title:
            self._title = text
            self._write(title(text))

    def _call(self, text: str) -> None:
        if sequence := notification(self.kind, text, self._environ):
            self._write(sequence)
