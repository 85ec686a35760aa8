"""@file and @folder/ in a message: which files were meant, and their text."""

from __future__ import annotations

import mimetypes
import os
import re
from collections.abc import Mapping
from pathlib import Path

from rich.filesize import decimal

from tinychat.chat.conversation import Attachment
from tinychat.chat.file_finder import path_of, walk
from tinychat.errors import TinychatError, printable

MAX_BYTES = 256 * 1024  # of a file, and of a folder's files together
MAX_FILES = 100  # of a folder
_AT = re.compile(r'(?<!\S)@(?:"([^"\n]+)"|(\S+))')


def attachments(
    text: str,
    folder: Path | None = None,
    known: Mapping[str, Attachment] | None = None,
    notes: list[str] | None = None,
) -> tuple[Attachment, ...]:
    """The files that `text` names with @path or @"path with blanks", and the text files in @folder/; what is `known`
    has been read already. Another word after @ is left alone. `notes` gets what of a folder was left out.

    Raises TinychatError for a missing file, a binary or a file that is too large, naming it.
    """
    found: dict[str, Attachment] = {}
    for match in _AT.finditer(text):
        name = match[1] or match[2]
        if known and name in known:
            found[name] = known[name]
            continue
        path = path_of(name, folder)
        if match[2] and not os.path.exists(path):
            name = name.rstrip(".,;:!?)")
            path = path_of(name, folder)
        if not os.path.exists(path) and (match[1] or _means_a_file(name)):
            raise TinychatError(f"{printable(name)}: no such file; the message was not sent")
        if name.endswith("/") and os.path.isdir(path):
            found |= {file.name: file for file in read_folder(path, name, notes if notes is not None else [])}
        elif os.path.exists(path) and name not in found:
            found[name] = read(path, name)
    return tuple(found.values())


def read_folder(path: Path, name: str, notes: list[str]) -> list[Attachment]:
    """The text files below `path`, the nearest first, as many as the limits allow. Raises TinychatError where there is
    none."""
    if path.resolve() in (Path.home(), Path(path.anchor)):
        raise TinychatError(f"{printable(name, newlines=False)} is too much to attach; name a folder in it")
    files: list[Attachment] = []
    size, left = 0, 0
    for below in walk(path):
        if below.endswith("/"):
            continue
        try:
            bytes = (path / below).stat().st_size
            if len(files) == MAX_FILES or size + bytes > MAX_BYTES:
                left += 1
                continue
            files.append(read(path / below, name + below))
            size += bytes
        except (OSError, TinychatError):  # a binary, or not readable
            continue
    if left:
        limit = f"at most {MAX_FILES} files and {decimal(MAX_BYTES)} together"
        notes.append(f"{printable(name, newlines=False)}: {len(files)} files attached, {left} left out ({limit})")
    if not files:
        raise TinychatError(f"{printable(name, newlines=False)} has no text file; the message was not sent")
    return files


def _means_a_file(name: str) -> bool:
    """Whether a word after @ that is no file was meant as one: it is written as a path from here, home or the root, or
    has the ending of a text file. @angular/core and @bob are words."""
    return bool(re.match(r"(\.{1,2}|~[^/]*)?/", name)) or (mimetypes.guess_type(name)[0] or "").startswith("text/")


def read(path: Path, name: str) -> Attachment:
    """The text of `path`. Raises TinychatError when it is not a text file of at most MAX_BYTES."""
    shown = printable(name, newlines=False)
    try:
        if not path.is_file():
            folder = f"a folder; @{shown}/ attaches the text files in it" if path.is_dir() else "a device, not a file"
            raise TinychatError(f"{shown} is {folder}")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise TinychatError(f"{shown} has {decimal(size)}; at most {decimal(MAX_BYTES)} can be attached")
        with open(path, "rb", opener=_at_once) as f:
            data = f.read(MAX_BYTES + 1)
        if len(data := data or b"") > MAX_BYTES:  # None: nothing is there yet
            raise TinychatError(f"{shown} has more than {decimal(MAX_BYTES)}")
        if b"\0" in data:
            raise TinychatError(f"{shown} is a binary file; only text can be attached")
        return Attachment(name, data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise TinychatError(f"{shown} is not UTF-8 text; convert it or paste what matters") from None
    except (OSError, ValueError) as e:
        why = getattr(e, "strerror", None) or str(e)
        raise TinychatError(f"{shown}: {why.lower()}") from None


def _at_once(path: str, flags: int) -> int:
    """Opens a file that is not waited for: some of /proc have nothing to read yet, for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def quoted(name: str) -> str:
    """The @ form of a path."""
    return f'@"{name}"' if re.search(r"\s", name) else f"@{name}"
