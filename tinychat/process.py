"""What tinychat changes for its process: entry points call these functions, no module does so when it is imported.

Three changes are made elsewhere, because only plain tinygrad needs them: kernels/cpu/compiler.py sets CC and
engine/devices.py sets DEV before tinygrad is imported; kernels/tinygrad/compile_caches.py replaces tinygrad's
lower_and_compile while a profile counts what it does, and puts it back. tests/test_layout.py finds every other one.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, MutableMapping
from multiprocessing import resource_tracker
from types import FrameType

# Variables that tinygrad reads as integers when it is imported, and other programs as words (DEBUG=true, TC=/sbin/tc).
_INTEGERS = (
    "BEAM",
    "CAPTURING",
    "CCACHE",
    "DEBUG",
    "IMAGE",
    "JIT",
    "LRU",
    "NO_COLOR",
    "NOOPT",
    "PARALLEL",
    "PROFILE",
    "RING",
    "SPEC",
    "TC",
    "TRACEMETA",
    "TRAINING",
    "VIZ",
    "WINO",
)
# Seconds that the screen's thread may go on computing when the engine's wants the interpreter back, as it does after
# every native call. Python's 5 ms is three tokens of a GPU: with it, painting cost a fifth of the speed at 600 tok/s,
# with this a twentieth.
SWITCH_INTERVAL = 0.0005
# Seconds that a process may take to end after a signal: storing takes 5 at most, and Python itself may wait for ever at
# its end, for a lock that a compile process of tinygrad held when the same signal ended it.
LAST = 10.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, `kill` and a shutdown, a terminal that is closed


def prepare() -> None:
    """What every command needs, before anything else: output that a terminal cannot encode shows "?", tinygrad can be
    imported, threads change over quickly, signals end it in order, and there are three standard streams: a file that is
    opened would else take the number of one that was closed (`>&-`), and get its output."""
    for name, how in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), how))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    clean(os.environ)
    share_with_engine()
    on_signals(_unwind)


def on_signals(end: Callable[[int, FrameType | None], object]) -> None:
    """Signals that end a process call `end`, but those that whoever started it wants ignored (nohup); LAST seconds
    later the process ends wherever it is."""

    def ends(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(LAST, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()
        end(number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, ends)


def _unwind(number: int, frame: FrameType | None) -> None:
    """The first signal raises, so that files are closed, locks let go and the cursor is back; the second ends the
    process where it is."""
    on_signals(_end_at_once)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
    os._exit(128 + number)


def clean(environ: MutableMapping[str, str]) -> None:
    """Removes the variables of _INTEGERS that are no integers; NO_COLOR, whose value has no meaning, becomes 1."""
    for name in _INTEGERS:
        value = environ.get(name)
        if value is not None and not value.removeprefix("-").isdecimal():
            if name == "NO_COLOR" and value:
                environ[name] = "1"
            else:
                del environ[name]


def share_with_engine() -> None:
    """For a process where an engine's thread runs beside others: it gets the interpreter back soon."""
    sys.setswitchinterval(SWITCH_INTERVAL)


def prepare_for_screen() -> None:
    """Before Textual takes the terminal: tinygrad's compile processes need multiprocessing's resource tracker, which
    cannot start once stderr is taken."""
    share_with_engine()
    resource_tracker.ensure_running()


def freeze() -> None:
    """Takes all objects there are out of garbage collection. Called when a screen is mounted: thousands of objects of
    widgets and parsers live as long as the process."""
    gc.freeze()
