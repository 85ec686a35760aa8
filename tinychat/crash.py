"""Crash reports: the traceback of an unexpected exception, in a file that the user can send."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
import traceback
from pathlib import Path

from platformdirs import user_state_dir

from tinychat import __version__
from tinychat.errors import encodable, printable, shortage

KEPT = 20  # reports; older ones are deleted


def folder() -> Path:
    """The folder of the reports."""
    return Path(user_state_dir("tinychat", appauthor=False)) / "crashes"


def reports() -> list[Path]:
    """The paths of all reports, oldest first."""
    return sorted(folder().glob("crash-*.txt"))


def report(error: Exception) -> str:
    """Writes the traceback of `error` without the values of variables, so that no conversation gets into a report.

    Returns the line for the user; it names the report, or says that none could be written. What is the machine's fault
    is said without one.
    """
    if short := shortage(error):
        return short
    what = printable(f"{type(error).__name__}: {error}", newlines=False)[:200]
    try:
        path = _write("".join(traceback.format_exception(error)))
    except OSError as e:
        return f"internal error: {what} (no report could be written: {(e.strerror or str(e)).lower()})"
    return f"internal error: {what} (details in {printable(str(path), newlines=False)})"


def _write(trace: str) -> Path:
    folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    now = time.strftime("%Y%m%d-%H%M%S")
    fd, name = tempfile.mkstemp(dir=folder(), prefix=f"crash-{now}-", suffix=".txt")  # of mode 0600
    with open(fd, "w", encoding="utf-8") as f:
        f.write(
            f"tinychat {__version__}\nPython {platform.python_version()}, {platform.platform()}\n"
            f"TERM {os.environ.get('TERM', '')}\n{now}\n\n{encodable(trace)}"
        )
    for old in reports()[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return Path(name)
