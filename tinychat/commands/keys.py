"""The key of a server: of the one that is started here, or of the one that is spoken to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tinychat.errors import TinychatError, printable

KEY_VARIABLE = "TINYCHAT_API_KEY"


def read_key(file: str | None) -> str | None:
    """The key in `file`, which nobody else may read, or else that of the environment; None where neither has one."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    path = Path(file)
    try:
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise TinychatError(f"{printable(file)} can be read by others; `chmod 600` it first")
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise TinychatError(f"{printable(file)}: the key cannot be read: {getattr(e, 'strerror', e)}") from None
    if not key or not key.isascii() or not key.isprintable():
        raise TinychatError(f"{printable(file)}: expected a key of printable ASCII characters")
    return key
