"""The benchmark lock of this machine: one measurement runs at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tinychat.engine.devices import OnProgress
from tinychat.errors import TinychatError


def lock_path() -> Path:
    """The file that is locked, the same for every user of the machine."""
    return Path(tempfile.gettempdir()) / "tinychat-bench.lock"


@contextlib.contextmanager
def machine_lock(
    report: OnProgress | None = None, stop: threading.Event | None = None, *, wait: bool = True
) -> Iterator[None]:
    """Holds the lock during a measurement. Waits for another measurement to end, and reports that it waits.

    Raises TinychatError when the lock is taken and not `wait`, or when `stop` is set.
    """
    fd = _open_lock()
    try:
        told = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not wait:
                    raise TinychatError(
                        "another benchmark is running on this machine; try again when it has ended"
                    ) from None
            if report and not told:
                report("waiting: another benchmark is running on this machine", 0.0)
                told = True
            if stop and stop.is_set():
                raise TinychatError("the benchmark was stopped; nothing was saved")
            time.sleep(0.1)
        yield
    finally:
        os.close(fd)  # releases the lock; the kernel does so when the process is killed


def _open_lock() -> int:
    path, plain = lock_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            return os.open(path, plain)  # flock needs no right to write: the file may be another user's
        except FileNotFoundError:
            return os.open(path, plain | os.O_CREAT, 0o644)
    except OSError as e:
        raise TinychatError(f"{path}: the benchmark lock cannot be opened: {(e.strerror or str(e)).lower()}") from None
