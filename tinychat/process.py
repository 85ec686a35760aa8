"""What tinychat changes for its whole process. Nothing else in the package does; entry points call these functions."""

from __future__ import annotations

import gc
import sys
from multiprocessing import resource_tracker

# Seconds that the screen's thread may go on computing when the engine's wants the interpreter back, as it does after
# every native call. Python's 5 ms is three tokens of a GPU: with it, painting cost a fifth of the speed at 600 tok/s,
# with this a twentieth.
SWITCH_INTERVAL = 0.0005


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
