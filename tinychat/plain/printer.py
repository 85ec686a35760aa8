"""What the chat says, as lines of text: no colours, nothing that moves the cursor. The conversation goes to stdout, all
else to stderr."""

from __future__ import annotations

import sys

from tinychat.chat.changes import Grew
from tinychat.chat.conversation import Conversation, Turn, footer_text, summary_line
from tinychat.errors import printable

NAMES = {"user": "you", "assistant": "answer", "tool": "result", "summary": "summary"}


class Printer:
    """Model output, names and errors pass the filter of control characters."""

    def __init__(self) -> None:
        self._part = ""  # of the answer that is being written: thinking or answer
        self._open = False  # whether stdout is within a line

    def note(self, text: str, error: bool = False) -> None:
        """A line of tinychat's own."""
        self.end_line()
        print(printable(f"error: {text}" if error else text), file=sys.stderr, flush=True)

    def text(self, text: str) -> None:
        """A part of the conversation."""
        if text:
            print(printable(text), end="", flush=True)
            self._open = not text.endswith("\n")

    def end_line(self) -> None:
        if self._open:
            self.text("\n")

    def begin(self) -> None:
        """An answer begins, or goes on."""
        self._part = ""

    def grew(self, change: Grew) -> None:
        """More of the answer; where thinking begins and ends is said in words."""
        for part, text in (("thinking", change.thinking), ("answer", change.answer)):
            if text and part != self._part:
                if part == "thinking" or self._part:
                    self.end_line()
                    self.text(f"[{part}]\n")
                self._part = part
            self.text(text)

    def ended(self, turn: Turn, name: str = "") -> None:
        """An answer, or the call of the tool `name`, has ended."""
        self.end_line()
        if turn.role == "tool":
            self.note(f"[{name}: {turn.stop_reason}]")
        elif line := footer_text(turn):
            self.note(f"[{line}]")

    def turn(self, conversation: Conversation, index: int) -> None:
        """A whole turn, as it was."""
        turn = conversation.turns[index]
        self.end_line()
        name = conversation.call_of(index).name if turn.role == "tool" else NAMES[turn.role]
        version = f", {which}" if (which := conversation.version(index)) else ""
        self.text(f"[{index + 1} {summary_line(turn) if turn.role == 'summary' else name}{version}]\n")
        if turn.thinking:
            self.text(f"[thinking]\n{turn.thinking.strip()}\n[answer]\n")
        self.text(f"{turn.text.strip()}\n" if turn.text.strip() else "")
        self.text("".join(f"+ {file.name}\n" for file in turn.files))
