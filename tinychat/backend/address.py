"""Where a server is and what opens it: its address and its key."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tinychat.errors import TinychatError, printable

KEY_VARIABLE = "TINYCHAT_API_KEY"


@dataclass(frozen=True)
class Server:
    """A server and its model (None: the only one it has). The key is shown nowhere."""

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)


def address(url: str) -> str:
    """The server's address without /v1. Raises TinychatError for what is no address."""
    given = (url if "://" in url else f"http://{url}").strip()
    try:
        parts = urlsplit(given)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        fine = False
    if not fine or not given.isprintable() or " " in given or parts.query or parts.fragment:
        raise TinychatError(f"{printable(url, newlines=False)} is no server's address, as http://127.0.0.1:8080")
    if "@" in parts.netloc:
        raise TinychatError("a server's address must not hold a user name or password; give a key instead")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def read_key(file: str | None, variable: str = KEY_VARIABLE) -> str | None:
    """The key in `file`, which must be readable by its owner alone, or else that of the environment `variable`; None
    where neither has one. Raises TinychatError."""
    if file is None:
        key = os.environ.get(variable)
        return _checked(key, f"the variable {variable}") if key else None
    path = Path(file).expanduser()
    try:
        if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise TinychatError(f"{printable(file)} can be read by others; `chmod 600` it first")
        key = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError, RuntimeError) as e:
        raise TinychatError(f"{printable(file)}: the key cannot be read: {getattr(e, 'strerror', e)}") from None
    return _checked(key, printable(file))


def _checked(key: str, where: str) -> str:
    if not key or not key.isascii() or not key.isprintable():
        raise TinychatError(f"{where}: expected a key of printable ASCII characters")
    return key
