"""The one exception users see, and the one filter between untrusted text and the terminal."""

import errno
import os
import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


SLOW = "slow: "  # begins a note, shown in red, that the engine fell back to plain tinygrad
MAX_LINE = 1000  # characters of a message; names in it come from files


class TinychatError(Exception):
    """A failure with a message for the user: one line that names the cause and the way out.

    Names in it may come from untrusted files: a newline is shown as \\n, and a line longer than MAX_LINE loses its
    middle.
    """

    def __init__(self, line: str = "") -> None:
        line = line.replace("\n", "\\n")
        if len(line) > MAX_LINE:
            line = f"{line[: MAX_LINE // 2]} … {line[-MAX_LINE // 2 :]}"
        super().__init__(line)


def printable(text: str, *, newlines: bool = True) -> str:
    """`text` with control characters (C0 but tab and newline, C1, bidi overrides) shown as `\\xNN`, never executed.

    Text of models, file names, templates and metadata is untrusted and passes here before it is written to a terminal.
    """
    out = _CONTROL.sub(lambda m: f"\\x{ord(m[0]):02x}" if ord(m[0]) < 256 else f"\\u{ord(m[0]):04x}", text)
    return out if newlines else out.replace("\n", "\\n")


def encodable(text: str) -> str:
    """`text` with lone surrogates, which UTF-8 cannot carry, as U+FFFD."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)


def shortage(e: Exception) -> str | None:
    """What to say of an exception that is the machine's: no memory, no more threads or processes. None for others."""
    if isinstance(e, MemoryError) or getattr(e, "errno", None) == errno.ENOMEM:
        return "out of memory; try a smaller model or context"
    forked = isinstance(e, BlockingIOError) and e.strerror == os.strerror(errno.EAGAIN)  # a full pipe has other words
    if forked or (isinstance(e, RuntimeError) and str(e) == "can't start new thread"):
        return "no thread can be started: this user has too many processes (ulimit -u), or there is no memory"
    return None
