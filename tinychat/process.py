"""Settings of the process as a whole, made in one place: `cli.main` calls `prepare` before anything else."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import MutableMapping

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
# Seconds until a thread that wants Python's lock gets it. The engine's thread takes the lock back after every native
# call; with Python's 5 ms, painting cost a fifth of the speed at 600 tok/s.
SWITCH_INTERVAL = 0.0005


def prepare() -> None:
    """Output that a terminal cannot encode shows "?"; tinygrad can be imported; threads change over quickly."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    clean(os.environ)
    sys.setswitchinterval(SWITCH_INTERVAL)


def clean(environ: MutableMapping[str, str]) -> None:
    """Removes the variables of _INTEGERS that are no integers; NO_COLOR, whose value has no meaning, becomes 1."""
    for name in _INTEGERS:
        value = environ.get(name)
        if value is not None and not value.removeprefix("-").isdecimal():
            if name == "NO_COLOR" and value:
                environ[name] = "1"
            else:
                del environ[name]
