"""The clipboard of the desktop or of tmux, by their own tools. OSC 52 alone is a request that many terminals ignore."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tinychat.errors import encodable

_LIMIT = 5.0  # seconds for a tool to take the text


def tools() -> list[list[str]]:
    """The commands that take text on their standard input, best first: those that are installed and have a display
    or a server to give it to."""
    wanted = [
        (sys.platform == "darwin", ["pbcopy"]),
        (bool(os.environ.get("WAYLAND_DISPLAY")), ["wl-copy"]),
        (bool(os.environ.get("DISPLAY")), ["xclip", "-selection", "clipboard"]),
        (bool(os.environ.get("DISPLAY")), ["xsel", "--clipboard", "--input"]),
        (bool(os.environ.get("TMUX")), ["tmux", "load-buffer", "-w", "-"]),
    ]
    return [command for there, command in wanted if there and shutil.which(command[0])]


def give(text: str) -> str:
    """Gives `text` to the first tool that takes it and returns the tool's name; "" when none did. Waits for the tool,
    at most 5 s each."""
    for command in tools():
        try:  # no pipes for its output: wl-copy and xclip leave a process behind that holds them open
            done = subprocess.run(
                command,
                input=encodable(text).encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=_LIMIT,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return command[0]
    return ""
