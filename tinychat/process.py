"""The changes that tinychat makes to its process. Entry points call these functions; no module calls them at import.

Three changes are made elsewhere, because only plain tinygrad needs them: kernels/cpu/compiler.py sets CC and
engine/devices.py sets DEV before tinygrad is imported; kernels/tinygrad/compile_caches.py replaces tinygrad's
lower_and_compile while a profile counts what it does, and puts it back. tests/test_layout.py finds every other one.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
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
# Seconds that another thread may keep the interpreter while the engine's thread waits for it, as it does after every
# native call. With Python's default of 5 ms, which is three tokens of a GPU, painting cost a fifth of the speed at 600
# tok/s; with this value a twentieth.
SWITCH_INTERVAL = 0.0005
# Seconds that a process may take to end after a signal. Storing takes at most 5; the end of Python may block forever on
# a lock that a compile process of tinygrad held when the same signal ended it.
LAST = 10.0
FULL_COLLECTION = 10  # collections of younger objects before one of all: Python's default
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C; `kill` or a shutdown; a closed terminal


def prepare() -> None:
    """Called first by every command. Output that a terminal cannot encode shows "?"; tinygrad can be imported; threads
    switch quickly; signals unwind the command; and descriptors 0 to 2 are open, because the next file that is opened
    would otherwise take the number of a closed stream (`>&-`) and get its output."""
    for name, how in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), how))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    clean(os.environ)
    # numpy's BLAS, which only self-checks use, would start a thread a core when it is imported; where none can be
    # started it writes lines of its own and ends the process.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    share_with_engine()
    on_signals(_unwind)


def on_signals(end: Callable[[int, FrameType | None], object]) -> None:
    """Makes the signals of ENDING call `end`, except those that the parent process set to be ignored (nohup). LAST
    seconds after a signal the process ends in any case."""

    def ends(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(LAST, _end_now, (128 + number,))
        timer.daemon = True
        timer.start()
        end(number, frame)

    if threading.current_thread() is threading.main_thread():
        for number in ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, ends)


def on_interrupt(act: Callable[[int, FrameType | None], object]) -> None:
    """Makes Ctrl-C call `act` and end nothing, unless the parent process set it to be ignored."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, act)


@contextlib.contextmanager
def signals_to(end: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """For an event loop, in which an exception may be raised between any two lines of others' code: a signal calls
    `end`, which must make the block end, and unwinds the command behind the block."""
    heard: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        end(number, frame)

    on_signals(note)
    try:
        yield
    finally:
        on_signals(_unwind)
    if heard:
        _unwind(heard[0], None)


def _unwind(number: int, frame: FrameType | None) -> None:
    """The first signal raises, so that files are closed, locks released and the cursor shown; the second ends the
    process at once."""
    on_signals(_end_at_once)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        os.write(2, b"\x1b[?25h\n")  # a progress bar may have hidden the cursor
    _end_now(128 + number)


def _end_now(code: int) -> None:
    """Without Python's own end, which would also end the compile processes of tinygrad."""
    try:
        if multiprocessing := sys.modules.get("multiprocessing"):  # who has not imported it has no child of it
            for child in multiprocessing.active_children():
                child.kill()
    finally:
        os._exit(code)


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
    """For a process in which an engine's thread runs beside others: shortens Python's thread switch interval."""
    sys.setswitchinterval(SWITCH_INTERVAL)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around imports and the loading of a model. They make much that lives as long as the process and little garbage:
    collections took an eighth of the time of imports and a third of that of a GPU's launches. What was made is excluded
    from later ones."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    freeze()


def prepare_for_screen() -> None:
    """Called before Textual replaces stderr: tinygrad's compile processes need multiprocessing's resource tracker,
    which cannot start afterwards. Full garbage collections, which stop the screen for 15 to 75 ms, are left to
    `collect_if_due`; Python begins one itself only after ten times as many new objects."""
    from multiprocessing import resource_tracker

    share_with_engine()
    resource_tracker.ensure_running()
    gc.set_threshold(*gc.get_threshold()[:2], 10 * FULL_COLLECTION)


def collect_if_due() -> None:
    """A full garbage collection, where Python would have begun one by now. Called while no key is pressed."""
    if gc.get_count()[2] > FULL_COLLECTION:
        gc.collect()


def run_in_front(command: Sequence[str]) -> int:
    """Runs a program that has the terminal until it ends, and returns its exit code. Ctrl-C is for that program: here a
    handler does nothing, which a child process does not inherit."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run(command, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)


def freeze() -> None:
    """Excludes all present objects from garbage collection: modules, widgets, parsers and a tokenizer's tables live as
    long as the screen or the model. Called when a screen is mounted and when a model is loaded."""
    gc.freeze()


def collect_frozen() -> None:
    """Frees what `freeze` has excluded and nothing refers to any more, as a model that was replaced."""
    gc.unfreeze()
    gc.collect()
