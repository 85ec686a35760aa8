"""KV caches on disk, so that a reopened conversation prefills only what is new.

One file per cache: a header line (JSON), the token ids (int32), the rows as `Executor.read_cache` gave them. A file is
used only when model, layout and checksum agree; anything else in the folder is ignored, and what is damaged is deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from platformdirs import user_cache_dir

from tinychat.files import replace_file

_MAGIC = "tinychat-kv-1"
_STALE = 3600.0  # seconds after which a temporary file belongs to nobody
_WORTH = 16, 16  # a file is read for at least so many tokens, and one in so many of those it holds


@dataclass(frozen=True)
class Saved:
    """A cache found on disk: its tokens, and how many of them are a prefix of what was asked for."""

    path: Path
    tokens: list[int]
    usable: int


class KVStore:
    """The saved caches of one folder, within `budget` bytes; the one unused for longest goes first.

    `layout` names everything that shapes the bytes besides the model: executor, version, cache type. Methods never
    raise for what is wrong on the disk: a cache that cannot be saved or read is one that is not there.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self.budget = budget
        self.folder = folder or Path(user_cache_dir("tinychat", appauthor=False)) / "kv"

    def save(self, fingerprint: str, layout: str, tokens: Sequence[int], rows: bytes) -> bool:
        """Stores the cache `rows` of `tokens`, replacing those it continues. False when it does not fit or cannot be
        written."""
        ids = np.asarray(tokens, np.int32).tobytes()
        digest = hashlib.sha256(ids)
        digest.update(rows)
        header = {
            "format": _MAGIC,
            "fingerprint": fingerprint,
            "layout": layout,
            "tokens": len(tokens),
            "bytes": len(rows),
            "sha256": digest.hexdigest(),
        }
        head = json.dumps(header).encode() + b"\n"
        if not tokens or len(head) + len(ids) + len(rows) > self.budget:
            return False
        prefix = self._prefix(fingerprint, layout)
        name = f"{prefix}-{hashlib.sha256(ids).hexdigest()[:16]}.kv"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shorter = [
                path
                for path in self._files(f"{prefix}-")
                if path.name != name and (old := _tokens(path, fingerprint, layout)) and old == list(tokens[: len(old)])
            ]
            replace_file(self.folder / name, head, ids, rows)
            self._shrink(self.folder / name, shorter)
            return True
        except OSError:
            return False

    def best(self, fingerprint: str, layout: str, ids: Sequence[int]) -> Saved | None:
        """The saved cache that shares the longest prefix with `ids`, if that is worth reading. Reads headers and ids
        only."""
        best: Saved | None = None
        wanted = np.asarray(ids, np.int32)
        for path in self._files(f"{self._prefix(fingerprint, layout)}-"):
            tokens = _tokens(path, fingerprint, layout)
            if tokens is None:
                continue
            usable = _common(np.asarray(tokens, np.int32), wanted)
            if usable >= max(_WORTH[0], len(tokens) // _WORTH[1]) and (best is None or usable > best.usable):
                best = Saved(path, tokens, usable)
        return best

    def read(self, saved: Saved) -> bytes | None:
        """The rows of all of `saved.tokens`, checked; None when the file is gone or damaged (then it is deleted)."""
        try:
            with open(saved.path, "rb") as f:
                header = _header(f)
                data = f.read() if header else b""
            ids = 4 * len(saved.tokens)
            if header and hashlib.sha256(data).hexdigest() == header["sha256"] and len(data) == ids + header["bytes"]:
                os.utime(saved.path)  # used now: the last to go
                return data[ids:]
            saved.path.unlink()
        except OSError:
            pass
        return None

    def clear(self) -> int:
        """Deletes every saved cache; returns how many bytes that freed."""
        freed = 0
        for path in self._files(""):
            with contextlib.suppress(OSError):
                size = path.stat().st_size
                path.unlink()
                freed += size
        return freed

    def _prefix(self, fingerprint: str, layout: str) -> str:
        return hashlib.sha256(f"{fingerprint}\n{layout}".encode()).hexdigest()[:16]

    def _files(self, prefix: str) -> list[Path]:
        """Saved caches, the one unused for longest first."""
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{prefix}*.kv"):
                with contextlib.suppress(OSError):
                    found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def _shrink(self, new: Path, gone: Sequence[Path]) -> None:
        """Deletes `gone`, what killed processes left, and the oldest caches but `new` until the rest fits the
        budget."""
        old = time.time() - _STALE
        for path in [*gone, *(p for p in self.folder.glob("*.tmp-*") if p.stat().st_mtime < old)]:
            path.unlink(missing_ok=True)
        files = self._files("")
        sizes = {path: path.stat().st_size for path in files}
        used = sum(sizes.values())
        for path in files:
            if used > self.budget and path != new:
                path.unlink(missing_ok=True)
                used -= sizes[path]


def _header(f: BinaryIO) -> dict[str, Any] | None:
    """The header line at the start of `f`, which is then behind it; None when this is no cache of ours."""
    try:
        header = json.loads(f.readline(4096))
        right = header["format"] == _MAGIC and all(
            isinstance(header[k], int) and header[k] >= 0 for k in ("tokens", "bytes")
        )
        return header if right else None
    except (ValueError, KeyError, TypeError):
        return None


def _tokens(path: Path, fingerprint: str, layout: str) -> list[int] | None:
    """The tokens of the cache in `path`, when it is one of this model and layout."""
    try:
        with open(path, "rb") as f:
            header = _header(f)
            if header is None or (header["fingerprint"], header["layout"]) != (fingerprint, layout):
                return None
            if path.stat().st_size != f.tell() + 4 * header["tokens"] + header["bytes"]:
                return None
            return np.frombuffer(f.read(4 * header["tokens"]), np.int32).tolist()
    except (OSError, KeyError):
        return None


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading values are the same."""
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n
