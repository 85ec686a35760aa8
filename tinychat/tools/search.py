"""Searches files for a regular expression, in a process of its own.

Matching a pattern that a model wrote may take unbounded time in Python's `re`, which holds the interpreter's lock
meanwhile. A process can be ended; a thread cannot.
"""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

from tinychat.errors import TinychatError, printable
from tinychat.tools.folder import Folder
from tinychat.tools.protocol import CallStopped

SECONDS = 20.0
WIDTH = 300  # characters of a line that are shown
MAX_FILE = 4 * 1024 * 1024  # bytes; larger files are not searched
_LOOK = 0.05  # seconds between two checks of `cancel`
_START = "import sys; sys.path.insert(0, sys.argv[1]); from tinychat.tools.search import main; main(sys.argv[2])"


def grep(folder: Folder, pattern: str, where: str, name: str, most: int, cancel: threading.Event) -> list[str]:
    """At most `most` lines "path:line: text" of files below `where` whose name matches `name` ("" = all). Raises
    TinychatError; CallStopped when `cancel` is set."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as e:
        raise TinychatError(f"{printable(pattern)!r} is no regular expression: {e}") from None
    folder.parts(where)
    job = json.dumps([str(folder.path), folder.fd, pattern, where, name, most])
    command = [sys.executable, "-I", "-c", _START, str(Path(__file__).parents[2]), job]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(folder.fd,)
    ) as child:
        until = time.monotonic() + SECONDS
        try:
            while True:
                try:
                    out, _ = child.communicate(timeout=_LOOK)
                    break
                except subprocess.TimeoutExpired:
                    if cancel.is_set():
                        raise CallStopped("stopped") from None
                    if time.monotonic() > until:
                        raise TinychatError(f"the search took more than {SECONDS:.0f} s; search less") from None
        finally:
            child.kill()
    lines = out.decode("utf-8", "surrogateescape").splitlines()
    if child.returncode:
        raise TinychatError("\n".join(lines) or "the search failed")
    return [json.loads(line) for line in lines]


def main(job: str) -> None:
    """The entry point of the process. Writes the lines as JSON to stdout; or the error, with exit code 1."""
    path, fd, pattern, where, name, most = json.loads(job)
    try:
        _search(Folder(Path(path), fd), re.compile(pattern), where, name, most)
    except TinychatError as e:
        print(e)
        sys.exit(1)


def _search(folder: Folder, pattern: re.Pattern[str], where: str, name: str, most: int) -> None:
    try:
        files = [path for path, kind in folder.walk(where) if kind == "file"]
    except TinychatError:
        files = ["/".join(folder.parts(where))]  # a file; reading it raises any other error
        folder.read(where, MAX_FILE)
    found = 0
    for path in files:
        if name and not fnmatch.fnmatchcase(path.rpartition("/")[2], name):
            continue
        try:
            data = folder.read(path, MAX_FILE)
        except TinychatError:
            continue
        if b"\0" in data:
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
            if pattern.search(line):
                shown = line if len(line) <= WIDTH else f"{line[:WIDTH]} …"
                print(json.dumps(f"{path}:{number}: {shown}"))
                found += 1
                if found == most:
                    return
