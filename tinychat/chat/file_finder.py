"""Finds files for @: by the letters of their paths, below the working folder, or by a path that is typed out."""

from __future__ import annotations

import contextlib
import mimetypes
import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

SHOWN = 40  # completions
NAMES = 10_000  # most files and folders that a walk returns
SECONDS = 3.0  # that a walk may take
_STARTS = re.compile(r"(?<![a-z0-9]).", re.S)  # of words
RANKED = 1000  # of what one letter matches, the nearest are compared
FRESH = 10.0  # seconds for which its result is used
ENTRIES = 2000  # of one folder whose path is typed out
NOISE = frozenset(
    {"node_modules", "bower_components", "__pycache__", "site-packages", "venv", "target", "build", "dist"}
)
_BINARY = frozenset(
    {"octet-stream", "pdf", "zip", "x-tar", "java-archive", "x-python-code", "x-sqlite3", "vnd.sqlite3", "wasm"}
)
_SUFFIXES = (".gguf", ".safetensors", ".pt", ".npy", ".npz", ".db", ".sqlite", ".7z", ".o", ".a", ".so", ".pyc", ".bin")


def is_binary(name: str) -> bool:
    """Whether a file of this name is no text, as far as a name tells."""
    kind, encoding = mimetypes.guess_type(name)
    top, _, sub = (kind or "").partition("/")
    picture = top in ("image", "audio", "video", "font") and sub != "svg+xml"
    return picture or encoding is not None or sub in _BINARY or name.lower().endswith(_SUFFIXES)


def walk(folder: Path) -> Iterator[str]:
    """The text files and folders (with / at the end) below `folder`, the nearest first: at most NAMES, for SECONDS.
    Hidden ones, binary files and links to folders are left out, and what git ignores; where git says nothing, folders
    that programs fill (NOISE)."""
    if names := _known_to_git(folder):
        yield from names[:NAMES]
    else:
        yield from _walk(folder)


def _known_to_git(folder: Path) -> list[str]:
    """What `walk` returns of a git repository; [] where there is none, or no git."""
    # A repository may be a stranger's: its configuration must not name a program that git would run (fsmonitor).
    argv = ("git", "-c", "core.fsmonitor=false", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    try:
        found = subprocess.run(argv, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    names: set[str] = set()
    for path in map(os.fsdecode, found.stdout.split(b"\0") if found.returncode == 0 else ()):
        hidden = not path.isprintable() or path.startswith(".") or "/." in path
        if not hidden and not is_binary(path) and os.path.isfile(folder / path):  # else deleted, or a submodule
            names |= {path, *(f"{above}/" for above in PurePosixPath(path).parents if above.name)}
    return sorted(names, key=_by_depth)


def _by_depth(path: str) -> tuple[int, str, bool, str]:
    """In the order of _walk."""
    above, _, name = path.lower().rstrip("/").rpartition("/")
    return path.rstrip("/").count("/"), above, path.endswith("/"), name


def _walk(folder: Path) -> Iterator[str]:
    end, left = time.monotonic() + SECONDS, NAMES
    waiting = deque([""])
    while waiting and left > 0:
        prefix = waiting.popleft()
        for name, is_folder in _entries(folder / prefix):
            if time.monotonic() > end or left <= 0:
                return
            if name.startswith(".") or (name in NOISE if is_folder else is_binary(name)):
                continue
            left -= 1
            path = f"{prefix}{name}{'/' * is_folder}"
            if is_folder:
                waiting.append(path)
            yield path


def _entries(folder: Path) -> list[tuple[str, bool]]:
    """Names of a folder and whether each is a folder, folders last; [] where it cannot be read."""
    with contextlib.suppress(OSError, ValueError), os.scandir(folder) as entries:
        found = [(e.name, e.is_dir(follow_symlinks=False)) for e in islice(entries, NAMES) if e.name.isprintable()]
        return sorted(found, key=lambda e: (e[1], e[0].lower()))
    return []


def complete(typed: str, folder: Path | None = None) -> list[str]:
    """Paths in the folder that `typed` (without the @) names up to its last /, which begin with the rest: folders end
    in /, hidden ones only when asked for."""
    head, slash, tail = typed.replace("\\", "/").rpartition("/")
    base = path_of(head + slash or ".", folder)
    found: list[tuple[bool, str]] = []
    with contextlib.suppress(OSError, ValueError), os.scandir(base) as entries:
        for e in islice(entries, ENTRIES):
            hidden = e.name.startswith(".") and not tail.startswith(".")
            if e.name.lower().startswith(tail.lower()) and e.name.isprintable() and not hidden:
                found.append((not e.is_dir(), e.name))
    return [f"{head}{slash}{name}{'/' * (not is_file)}" for is_file, name in sorted(found, key=_by_name)[:SHOWN]]


def _by_name(entry: tuple[bool, str]) -> tuple[bool, str]:
    return entry[0], entry[1].lower()


def path_of(name: str, folder: Path | None) -> Path:
    path = Path(name)
    with contextlib.suppress(RuntimeError):  # no such user: a file of that name
        path = path.expanduser()
    return path if folder is None or path.is_absolute() else folder / path


class Finder:
    """The paths below the working folder, as `look` found them last; `find` only searches them."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._looked = -FRESH
        self._last: tuple[str, Sequence[str]] = ("", ())  # what was typed last, and all that it matched

    def due(self) -> bool:
        """Whether it is time to `look`; True once."""
        due = time.monotonic() - self._looked > FRESH
        self._looked = float("inf") if due else self._looked
        return due

    def look(self) -> tuple[str, ...]:
        """Walks through the working folder. Takes up to SECONDS: not on a screen's thread, which then calls `take`."""
        try:
            return tuple(walk(Path.cwd()))
        except OSError:  # there is no working folder any more
            return ()

    def take(self, names: Sequence[str]) -> None:
        """From now on `find` searches `names`."""
        self._names, self._last, self._looked = names, ("", names), time.monotonic()

    def find(self, typed: str) -> list[str]:
        """At most SHOWN paths for what is typed behind @, best first; only what is in the folder that is typed out,
        for an absolute path or one from home or a parent."""
        if re.match(r"[/~.]", typed):
            return self._exact(typed) + complete(typed)
        folded = typed.lower()
        before, names = self._last
        names = names if folded.startswith(before) else self._names
        # ".*?" between the letters would try every place of every letter
        pattern = re.compile("".join(f"[^{re.escape(c)}]*{re.escape(c)}" for c in folded))
        hits = [name for name in names if pattern.match(name.lower())]
        self._last = folded, hits
        ranked = sorted(hits[:RANKED], key=lambda name: _rank(name.lower(), folded)) if folded else hits
        direct = complete(typed) if "/" in typed or not self._names else []
        return list(dict.fromkeys([*self._exact(typed), *direct, *ranked]))[:SHOWN]

    def _exact(self, typed: str) -> list[str]:
        return [typed] if typed.endswith("/") and os.path.isdir(path_of(typed, None)) else []


def _rank(name: str, typed: str) -> tuple[int, int, str]:
    """The better the lower: the start of the last part, of the path, anywhere in them, starts of words (chscr of
    chat/screen), or only the letters."""
    last = name.rstrip("/").rpartition("/")[2]
    how = [last.startswith(typed), name.startswith(typed), typed in last, typed in name]
    place = next((i for i, yes in enumerate(how) if yes), None)
    return place if place is not None else 4 + (not _starts_words(name, typed)), len(name), name


def _starts_words(name: str, typed: str) -> bool:
    """Whether the letters of `typed` are in `name`, each at the start of a word or right behind the one before."""
    starts = {found.start() for found in _STARTS.finditer(name)}
    places = {at for at in starts if name[at] == typed[0]}  # where the letters so far may end
    for letter in typed[1:]:
        first = min(places, default=len(name))
        following = {at + 1 for at in places} | {at for at in starts if at > first}
        places = {at for at in following if name[at : at + 1] == letter}
    return bool(places)
