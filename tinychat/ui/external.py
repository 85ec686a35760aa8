"""A text in the user's own editor, in place of the app's screen."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from textual.app import App, SuspendNotSupported

from tinychat import process
from tinychat.errors import TinychatError, encodable, printable


def edit(app: App[Any], text: str) -> str:
    """Returns `text` as $VISUAL or else $EDITOR has left it, without the line end that editors add. The app is
    suspended meanwhile. Raises TinychatError where there is no editor or it fails."""
    command = _editor()
    try:
        temporary = tempfile.TemporaryDirectory(prefix="tinychat-")
    except OSError as e:
        raise TinychatError(f"the text cannot be given to the editor: {(e.strerror or str(e)).lower()}") from None
    with temporary as folder:
        file = Path(folder, "prompt.md")
        try:
            file.write_text(encodable(text) + "\n" * bool(text), encoding="utf-8")
            with app.suspend():
                code = process.run_in_front([*command, str(file)])
        except SuspendNotSupported:
            raise TinychatError("no editor can be opened here; only in a terminal") from None
        except OSError as e:
            raise TinychatError(f"{printable(command[0])}: {(e.strerror or str(e)).lower()}") from None
        if code:
            how = f"exit code {code}" if code > 0 else f"signal {-code}"
            raise TinychatError(f"{printable(command[0])} failed ({how}); the prompt is as it was")
        try:
            return file.read_text(encoding="utf-8", errors="replace").removesuffix("\n")
        except OSError as e:
            raise TinychatError(f"what was edited cannot be read: {(e.strerror or str(e)).lower()}") from None


def _editor() -> list[str]:
    """The command of the user's editor, with its arguments."""
    name = "VISUAL" if os.environ.get("VISUAL") else "EDITOR"
    try:
        command = shlex.split(os.environ.get(name, ""))
    except ValueError:
        raise TinychatError(f"${name} has a quotation mark without its other half") from None
    if not command:
        raise TinychatError("set $VISUAL or $EDITOR to your editor, as EDITOR=nano")
    if shutil.which(command[0]) is None:
        raise TinychatError(f"${name}: there is no program {printable(command[0], newlines=False)!r}")
    return command
