"""Replaces files atomically and one process at a time, and expands the paths that users type."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tinychat.errors import TinychatError, printable

PATIENCE = 2.0  # seconds


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """For who reads a file of `folder` and replaces it: waits for another process or thread that does so, which may
    have been stopped, at most PATIENCE seconds. Nobody waits where folders cannot be locked."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fd, end = os.open(folder, os.O_RDONLY), time.monotonic() + PATIENCE
            stack.callback(os.close, fd)
            while time.monotonic() < end:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.005)
        yield


def replace_file(path: Path, *parts: bytes, mode: int = 0o600, durable: bool = False) -> None:
    """Writes the concatenated `parts` to `path`: readers see the old file or the new one, never a part of it.

    The folder must exist. `durable` also flushes the data to the disk first, so that after a power cut one of the two
    files is whole. Raises OSError, and then the old file is unchanged.
    """
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.tmp-")
    try:
        with open(fd, "wb") as f:
            for part in parts:
                f.write(part)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def expand(path: str) -> Path:
    """`path` with the home of ~ or ~user. Raises TinychatError for a user who does not exist."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise TinychatError(f"{printable(path, newlines=False)}: there is no such user's home here") from None
