"""Textual's driver of a terminal, for one that may be closed while the app runs."""

from __future__ import annotations

import codecs
import math
import os
import re
import select
import signal
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import groupby
from typing import Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver
from textual.events import Key, Paste, Resize
from textual.geometry import Size
from textual.messages import Message, TerminalSupportsSynchronizedOutput

from tinychat.ui.announcer import RESTORE_TITLE, SAVE_TITLE

ASK = "\x1b[?2026$p"  # whether it knows synchronised output
SLACK = 0.1  # seconds that an answer may take longer than the quickest one
AHEAD = 8  # frames: at 20 a second enough for answers after 0.4 s
LOST = 10.0  # seconds after which no answer is expected any more
SETTLE = 1.0  # seconds
LARGEST = Size(2000, 1000)  # of a wall of screens; a larger size, which nobody sees, is laid out for minutes
POLL = 0.1  # seconds
KEY = 4  # bytes: the longest character
LINES, BURST = 12, 100  # characters at once that nobody has typed if a line ends among them, and in one line
LONGEST = 1 << 24  # bytes of a paste
ON = 0.02  # seconds in which the next piece of a paste comes
PIECES = 10  # of less than BURST bytes in all: a key that is held comes as quickly
_NO_TEXT = re.compile(r"\x1b[\[O][0-9;?]*.|[^\n\t -~\x80-\U0010ffff]")  # arrows and the like, control characters


class TerminalDriver(LinuxDriver):
    """When the terminal has gone, the app is left in order; no byte and no sequence that a terminal sends ends it.

    Textual's thread that writes ends with the first write that fails. The app would then wait for ever for room in that
    thread's queue: a process that nobody sees any more and that holds a model. Its thread that reads ends the app at a
    byte that is no UTF-8 and at a key that is no character.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._file: Any = _Lasting(self._file, self._gone)
        self._taken = False  # whether it ever was the app's
        self._suspended = False  # by SIGTSTP: the terminal was left before
        self.link = Link(self.write)
        self.typed_ahead = ""  # lines that were typed before the terminal was the app's

    def start_application_mode(self) -> None:
        before = None
        if not self._taken:  # not again after an editor had the terminal
            before = keep_enter(self.fileno)
            self._taken, self.typed_ahead = True, typed_ahead(self.fileno)
        try:
            super().start_application_mode()
        except RuntimeError:  # one of its two threads cannot be started: it must not be waited for
            self._key_thread, self.attrs_before = None, before
            if self._writer_thread and self._writer_thread.is_alive():
                super().stop_application_mode()
            else:
                self._writer_thread = None
                restore(self.fileno, before)
            raise
        self.attrs_before = before or self.attrs_before
        self.write(SAVE_TITLE)

    def _sigtstp_application(self, *_: object) -> None:
        self._suspended = True
        super()._sigtstp_application()

    def _sigcont_application(self, *_: object) -> None:
        if self._suspended:
            self._suspended = False
            super()._sigcont_application()
        else:  # after a SIGSTOP, which nobody hears
            self._loop.call_soon_threadsafe(self._begin_again)

    def _begin_again(self) -> None:
        """Leaves the terminal and takes it again, with its modes and a whole screen. Begun twice, the app would have
        two threads that read, and leave a terminal without lines and echo."""
        if self._auto_restart:
            self.suspend_application_mode()
            self.resume_application_mode()

    def _get_terminal_size(self) -> tuple[int, int]:
        width, height = super()._get_terminal_size()
        return min(width, LARGEST.width), min(height, LARGEST.height)

    def stop_application_mode(self) -> None:
        self.write(RESTORE_TITLE)
        super().stop_application_mode()

    def disable_input(self) -> None:
        self.link.settle()
        super().disable_input()

    def process_message(self, message: Message) -> None:
        if isinstance(message, TerminalSupportsSynchronizedOutput):
            self.link.answered()
        if isinstance(message, Resize) and not (self._in_band_window_resize and within(message.size)):
            return  # of pasted text
        super().process_message(message)

    def run_input_thread(self) -> None:
        decode, parser = codecs.getincrementaldecoder("utf-8")("replace").decode, XTermParser()
        try:
            while not self.exit_event.is_set():
                ready = select.select([self.fileno], [], [], POLL)[0]
                messages = list[Message]()
                for character in decode(self._read()) if ready else "":
                    try:
                        messages += parser.feed(character)
                    except (ValueError, OverflowError):  # a key with a number that is no character's
                        parser, old = XTermParser(), parser
                        parser.mouse_pixels, parser.terminal_size = old.mouse_pixels, old.terminal_size
                        parser.terminal_pixel_size = old.terminal_pixel_size
                for message in (*pasted(messages), *parser.tick()):
                    self.process_message(message)
        except OSError:  # EIO
            self._gone()

    def _read(self) -> bytes:
        """What the terminal has sent; of a paste that it does not mark as one, which comes in pieces, all. A key comes
        alone and is not waited behind. Other input, the mouse's for example, may never pause."""
        if not (data := os.read(self.fileno, 4096)):
            raise OSError("end of file")
        pieces = 1
        while (
            KEY < len(data) < LONGEST
            and (pieces < PIECES or len(data) >= BURST)
            and b"\x1b" not in data[-4096:]
            and select.select([self.fileno], [], [], ON)[0]
        ):
            if not (piece := os.read(self.fileno, 4096)):
                break
            data, pieces = data + piece, pieces + 1
        return data

    def _gone(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)  # what is still buffered goes there
        os.dup2(nowhere, 2)
        self._app.call_later(self._app.exit, None, 128 + signal.SIGHUP)


class Link:
    """How far the terminal is behind what is written to it: over a slow link megabytes may be on their way, of which
    this process sees nothing. A terminal is asked for something that Textual asks for, too, and answers when it has
    shown what was written before. One that has never answered is not asked.

    The input thread calls `answered`, the app the rest."""

    def __init__(self, write: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._write, self._clock = write, clock
        self._asked = deque[float]()  # when, of what is not answered
        self._answers = False
        self._quickest = math.inf  # seconds to an answer
        self._lately = SETTLE  # seconds to the slowest of the last answers
        self._most = 1
        self._settled = threading.Event()
        self._settled.set()

    def ask(self) -> None:
        """Called behind what a terminal may need long for."""
        if self._answers:
            self._settled.clear()
            self._asked.append(self._clock())
            self._write(ASK)

    def answered(self) -> None:
        self._answers = True
        with suppress(IndexError):  # it answers Textual
            took = self._clock() - self._asked.popleft()
            self._quickest = min(self._quickest, took)
            self._lately = max(took, self._lately / 2)
            self._most = min(self._most + 1, AHEAD) if took <= self._quickest + SLACK else 1
        if not self._asked:
            self._settled.set()

    @property
    def behind(self) -> bool:
        """Whether as much waits to be shown as may: up to AHEAD questions while answers are quick, else one."""
        with suppress(IndexError):
            if self._clock() - self._asked[0] > LOST:
                self._asked.clear()
        return len(self._asked) >= self._most

    @property
    def patience(self) -> float:
        """Seconds that an answer is worth waiting for at the end."""
        return min(SETTLE, 2 * self._lately + SLACK)

    def settle(self) -> None:
        """Waits for what is not answered: whoever has the terminal next would get it as typed text. A terminal that
        answered quickly, and now does not, is not waited for as long as a slow one."""
        self._settled.wait(self.patience)


def pasted(messages: Iterable[Message]) -> list[Message]:
    """`messages`, with a paste in place of more text than anybody types at once: it comes from a terminal that does not
    say so. Taken as keys each line would be sent, and a long text would take minutes. An Enter behind one line stays
    one: a program may have typed it."""
    found = list[Message]()
    for is_text, run in groupby(messages, _is_text):
        keys = list(run)
        text = "".join(key.character or "" for key in keys if isinstance(key, Key)).replace("\r", "\n")
        lines = "\n" in text[:-1] and bool(text.strip())
        if is_text and len(keys) >= (LINES if lines else BURST):
            found += [Paste(text)] if lines or text[-1] != "\n" else [Paste(text[:-1]), keys[-1]]
        else:
            found += keys
    return found


def _is_text(message: Message) -> bool:
    c = message.character if isinstance(message, Key) else None
    return c is not None and (c == "\r" or not _NO_TEXT.search(c))


def within(size: Size) -> bool:
    """Whether a terminal may have this size."""
    return size.width <= LARGEST.width and size.height <= LARGEST.height


def keep_enter(fd: int) -> list[Any] | None:
    """Makes terminal `fd`, which is not the app's yet, keep the Enter that is pressed from now on as it is; otherwise
    it would be a line feed, which the app takes for a new line. Returns what was set before; None where it is no
    terminal."""
    try:
        before = termios.tcgetattr(fd)
        now = termios.tcgetattr(fd)
        now[tty.IFLAG] &= ~termios.ICRNL
        termios.tcsetattr(fd, termios.TCSANOW, now)
    except termios.error:
        return None
    return before


def restore(fd: int, before: list[Any] | None) -> None:
    """Undoes `keep_enter`."""
    if before is not None:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def typed_ahead(fd: int) -> str:
    """The whole lines that wait in terminal `fd`, which still makes lines of what is typed; without the last line's
    end, and without keys that are no text."""
    lines = b""
    with suppress(OSError):  # EIO
        while select.select([fd], [], [], 0)[0] and (line := os.read(fd, 4096)):
            lines += line
    return _NO_TEXT.sub("", lines.decode(errors="replace")).strip("\n")


class _Lasting:
    """A file whose failing writes call `gone`, once, and are otherwise taken for written."""

    def __init__(self, file: Any, gone: Callable[[], object]) -> None:
        self._file = file
        self._on_failure: Callable[[], object] | None = gone

    def write(self, text: str) -> int:
        self._try(self._file.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def fileno(self) -> int:
        return int(self._file.fileno())

    def _try(self, call: Callable[..., object], *args: Any) -> None:
        try:
            call(*args)
        except (OSError, ValueError):
            if self._on_failure is not None:
                gone, self._on_failure = self._on_failure, None
                gone()
