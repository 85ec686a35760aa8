"""@file in a message: which files were meant, their text, and completing a path while it is typed."""

from __future__ import annotations

import contextlib
import mimetypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rich.filesize import decimal

from tinychat.chat.conversation import Attachment
from tinychat.errors import TinychatError, printable

MAX_BYTES = 256 * 1024
_AT = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')
SHOWN = 40  # completions


def attachments(
    text: str, folder: Path | None = None, known: Mapping[str, Attachment] | None = None
) -> tuple[Attachment, ...]:
    """The files that `text` names with @path or @"path with blanks"; what is `known` has been read already. Another
    word after @ is left alone.

    Raises TinychatError for a missing file, a folder, a binary or a file that is too large, naming it.
    """
    found: dict[str, Attachment] = {}
    for match in _AT.finditer(text):
        name = match[1] or match[2]
        if known and name in known:
            found[name] = known[name]
            continue
        path = _path(name, folder)
        if match[2] and not os.path.exists(path):
            name = name.rstrip(".,;:!?)")
            path = _path(name, folder)
        if not os.path.exists(path) and (match[1] or _means_a_file(name)):
            raise TinychatError(f"{printable(name)}: no such file; the message was not sent")
        if os.path.exists(path) and name not in found:
            found[name] = read(path, name)
    return tuple(found.values())


def _means_a_file(name: str) -> bool:
    """Whether a word after @ that is no file was meant as one: it is written as a path from here, home or the root, or
    has the ending of a text file. @angular/core and @bob are words."""
    return bool(re.match(r"(\.{1,2}|~[^/]*)?/", name)) or (mimetypes.guess_type(name)[0] or "").startswith("text/")


def read(path: Path, name: str) -> Attachment:
    """The text of `path`. Raises TinychatError when it is not a text file of at most MAX_BYTES."""
    shown = printable(name, newlines=False)
    try:
        if not path.is_file():
            raise TinychatError(f"{shown} is a folder or device, not a text file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise TinychatError(f"{shown} has {decimal(size)}; at most {decimal(MAX_BYTES)} can be attached")
        data = path.read_bytes()[: MAX_BYTES + 1]
        if b"\0" in data:
            raise TinychatError(f"{shown} is a binary file; only text can be attached")
        return Attachment(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise TinychatError(f"{shown} is not UTF-8 text; convert it or paste what matters") from None
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise TinychatError(f"{shown}: {why.lower()}") from None


def complete(typed: str, folder: Path | None = None) -> list[str]:
    """Paths that begin with `typed` (without the @): folders end in /, hidden ones only when asked for."""
    head, _, tail = typed.replace("\\", "/").rpartition("/")
    base = _path(f"{head}/" if head or typed.startswith("/") else ".", folder)
    try:
        entries = sorted(os.scandir(base), key=lambda e: (not e.is_dir(), e.name.lower()))
    except (OSError, ValueError):
        return []
    prefix = f"{head}/" if head or typed.startswith("/") else ""
    found = [e for e in entries if e.name.lower().startswith(tail.lower()) and e.name.isprintable()]
    shown = [e for e in found if tail.startswith(".") or not e.name.startswith(".")]
    return [f"{prefix}{e.name}{'/' * e.is_dir()}" for e in shown[:SHOWN]]


def quoted(name: str) -> str:
    """The @ form of a path."""
    return f'@"{name}"' if re.search(r"\s", name) else f"@{name}"


def _path(name: str, folder: Path | None) -> Path:
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # the home of somebody who is no user here: a file of that name
        path = path.expanduser()
    return path if folder is None or path.is_absolute() else folder / path
