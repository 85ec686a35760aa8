"""Lines that the user types, edited by readline where there is a terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from types import FrameType

from tinychat import process
from tinychat.errors import encodable

try:
    import readline
except ImportError:  # a Python without it: the terminal's own line editing remains
    readline = None  # type: ignore[assignment]

BLOCK = '"""'  # around a text of several lines


class LineReader:
    """`interrupts` counts Ctrl-C since the last line was read. While a line is read Ctrl-C raises KeyboardInterrupt;
    at other times nothing else happens, so that no change is left half made."""

    def __init__(self, past: Sequence[str] = ()) -> None:
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self.interrupts = 0
        self._reading = False
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")
        if readline is not None and self.terminal:
            readline.set_auto_history(False)
            for text in past:
                if "\n" not in text:
                    readline.add_history(encodable(text))
        process.on_interrupt(self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupts += 1
        if self._reading:
            raise KeyboardInterrupt

    def read(self, prompt: str, filled: str = "") -> str | None:
        """A message: one line, lines that end in a backslash with the one behind them, or several between two lines
        of three quotes; None at the end of the input. The line holds `filled` at first. Raises KeyboardInterrupt."""
        line = self.line(prompt, filled)
        if line is None:
            return None
        if line.startswith(BLOCK):
            lines = [line.removeprefix(BLOCK)]
            while not lines[-1].rstrip().endswith(BLOCK) and (line := self.line("... ")) is not None:
                lines.append(line)
            text = "\n".join(lines).rstrip().removesuffix(BLOCK).strip("\n")
        else:
            text = line
            while text.endswith("\\") and (line := self.line("... ")) is not None:
                text = f"{text[:-1]}\n{line}"
        return text

    def line(self, prompt: str, filled: str = "") -> str | None:
        """One line; None at the end of the input."""
        if readline is not None and self.terminal:
            readline.set_startup_hook(lambda: readline.insert_text(encodable(filled)) if filled else None)
        try:
            self._reading = True
            return input(prompt if self.terminal else "")
        except EOFError:
            return None
        finally:
            self._reading = False

    def remember(self, text: str) -> None:
        """Puts `text` behind the arrow up."""
        if readline is not None and self.terminal and text.strip() and "\n" not in text:
            with contextlib.suppress(ValueError):  # a null character
                readline.add_history(encodable(text))
