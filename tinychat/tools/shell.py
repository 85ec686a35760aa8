"""The built-in tool that runs a command in the folder, confined as far as the system can."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tinychat.errors import TinychatError
from tinychat.tools import confine
from tinychat.tools.folder import Folder
from tinychat.tools.protocol import CallContext, CallStopped, Question, Tool

SECONDS, MOST_SECONDS = 60, 600
KEPT = 256 * 1024  # bytes kept from the beginning of the output, and as many from its end
_LOOK = 0.05  # seconds between two checks of `cancel`
_GRACE = 0.3  # seconds of reading after the command has ended; a process that it left behind may keep the pipe open


@dataclass(frozen=True)
class Confinement:
    """How far the kernel can confine a command."""

    files: bool
    network: bool

    def __str__(self) -> str:
        files = "It can write in this folder only, and read it and the system's files."
        anything = "Not confined on this system: it can read and write whatever you can."
        return f"{files if self.files else anything} {'No network.' if self.network else 'It can use the network.'}"


@cache
def confinement() -> Confinement:
    """The confinement of this system, tested once per process."""
    try:
        done = subprocess.run(_program({"probe": True}), stdout=subprocess.PIPE, timeout=20, check=True)
        found = json.loads(done.stdout)
        return Confinement(found["files"], found["network"])
    except (OSError, ValueError, subprocess.SubprocessError):
        return Confinement(False, False)


def running(folder: Folder) -> tuple[Tool, ...]:
    """The tool that runs commands."""

    def run_command(arguments: Mapping[str, Any], context: CallContext) -> str:
        command, seconds = arguments["command"], min(max(1, arguments.get("seconds", SECONDS)), MOST_SECONDS)
        if "\0" in command or not command.strip():
            raise TinychatError("this is no command")
        how = confinement()
        detail = f"in {folder.path}, for at most {seconds} s. {how}\n\n{command}"
        exact = f"run {folder.path}\n{'confined' if how.files and how.network else 'free'}\n{command}"
        context.ask(Question("run", "Run this command?", detail, exact, f"run {folder.path}"))
        return run(command, folder.path, how, seconds, context.cancel)

    return (
        Tool(
            "run_command",
            "Run a shell command (sh) in the folder; gives its output and exit code. There is no network and no input.",
            {
                "type": "object",
                "properties": {
                    "command": {"type": "string"},
                    "seconds": {"type": "integer", "description": f"time limit (default {SECONDS})"},
                },
                "required": ["command"],
            },
            run_command,
        ),
    )


def run(command: str, folder: Path, how: Confinement, seconds: float, cancel: threading.Event) -> str:
    """The output of `command` and how the command ended, as text. Raises TinychatError; CallStopped when `cancel` is
    set."""
    with tempfile.TemporaryDirectory(prefix="tinychat-") as private:
        readable = [sys.base_prefix, sys.prefix]
        job = {
            "command": command,
            "writable": [str(folder), private],
            "readable": readable,
            "files": how.files,
            "network": how.network,
        }
        kept = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TZ", "USER") if name in os.environ}
        env = {
            **kept,
            "PATH": _programs([str(folder), *readable], how),
            "HOME": private,
            "TMPDIR": private,
            "TERM": "dumb",
            "PWD": str(folder),
        }
        try:
            child = subprocess.Popen(
                _program(job),
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as e:
            raise TinychatError(f"the command cannot be started: {(e.strerror or str(e)).lower()}") from None
        with child:
            output = _Output()
            try:
                late = _wait(child, output, seconds, cancel)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
    if cancel.is_set():
        raise CallStopped("stopped")
    if child.returncode == confine.CANNOT and not output.text():
        raise TinychatError("the command could not be confined as promised; it was not run")
    ended = f"[stopped after {seconds:g} s]" if late else f"[exit code {child.returncode}]" if child.returncode else ""
    return "\n".join(filter(None, [output.text().rstrip("\n"), ended])) or "[no output, exit code 0]"


class _Output:
    """The beginning and the end of a command's output."""

    def __init__(self) -> None:
        self.begin, self.end, self.left_out = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = KEPT - len(self.begin)
        self.begin += data[: max(0, room)]
        self.end += data[max(0, room) :]
        if (over := len(self.end) - KEPT) > 0:
            del self.end[:over]
            self.left_out += over

    def text(self) -> str:
        gap = f"\n[… {self.left_out:,} bytes left out …]\n".encode() if self.left_out else b""
        return bytes(self.begin + gap + self.end).decode("utf-8", "replace")


def _wait(child: subprocess.Popen[bytes], output: _Output, seconds: float, cancel: threading.Event) -> bool:
    """Reads until the command has ended, `cancel` is set or `seconds` have passed. Returns whether the time ran out."""
    assert child.stdout is not None
    until, fd = time.monotonic() + seconds, child.stdout.fileno()
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not cancel.is_set():
            if selector.select(_LOOK):
                data = os.read(fd, 1 << 16)
                output.add(data)
                if not data:
                    selector.unregister(fd)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(max(0.0, until - time.monotonic()))
                    return child.returncode is None
            elif child.poll() is not None:
                until = min(until, time.monotonic() + _GRACE)
            if time.monotonic() > until:
                return child.poll() is None
    return False


def _programs(readable: list[str], how: Confinement) -> str:
    """The command's PATH: folders that a confined command may read; tinychat's Python comes after the system's."""
    found = os.get_exec_path()
    if how.files:
        roots = (*readable, *confine.SYSTEM)
        found = [path for path in found if any(Path(path).is_relative_to(root) for root in roots)]
    return os.pathsep.join([*found, f"{sys.base_prefix}/bin"])


def _program(job: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(confine.__file__)), json.dumps(job)]
