"""KV caches on disk, so that a reopened conversation prefills only what is new.

A cache is stored as a chain of blocks of BLOCK tokens, one file each. The name of a block is a hash of all tokens up to
its end, so that blocks that two caches share are stored once, and saving writes only missing blocks. The last tokens,
fewer than BLOCK, are a shorter block of their own.

A file holds a header (_HEADER), the token ids (int32) and the rows as the engine gave them: `Executor.read_cache`, with
the state behind them where a plan has one and it is known (engine.py). Its name
has the model and layout, the chain before the block, the chain with it, and the conversation that wrote it. A block is
used only if its checksum over name, ids and rows is right; damaged files are deleted. Methods do not raise for errors
of the disk: a cache that cannot be read counts as missing, one that cannot be written is not saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from platformdirs import user_cache_dir

BLOCK = 64  # tokens; a multiple of the tiles in which executors keep rows
LEAST = 16  # tokens: a shorter end is not saved, a shorter beginning not read
HALF_LIFE = 86400.0  # seconds in which a block's hits count half
_STALE = 3600.0  # seconds after which a temporary file is deleted, because its writer must have ended
_MAGIC = b"tinychat-kv-2\n\0\0"
_HEADER = struct.Struct("<16sddIIIQ32s")  # magic, heat, used, reason, first token, tokens, bytes of rows, sha256
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{24})-([0-9a-f]{24})-([0-9a-f]{16})\.kv")
_ROOT = "0" * 24  # the chain before the first block

Reason = Literal["idle", "switch", "exit"]  # why a block was saved; decides which blocks are deleted first
_REASONS: tuple[Reason, ...] = ("idle", "switch", "exit")
_HEAT = {"idle": 1.0, "switch": 2.0, "exit": 2.0}  # of a new block


@dataclass(frozen=True)
class CacheBlock:
    """A block on the disk, with rows first .. first + tokens - 1 of a cache."""

    path: Path
    first: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Saved:
    """A chain of blocks, the first `usable` tokens of which begin the wanted prompt."""

    blocks: tuple[CacheBlock, ...]
    usable: int


@dataclass(frozen=True)
class Cost:
    """The cost of saving: rows and bytes written, seconds. `whole`: the whole cache is on the disk now."""

    rows: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    whole: bool = False


class KVStore:
    """The saved blocks of one folder, within `budget` bytes.

    `layout` names everything besides the model that determines the format of the rows: executor, version, cache type.
    `tag` names the conversation: `forget` deletes the blocks written under it. Each read increases a block's heat,
    which halves every HALF_LIFE seconds. The coldest block is deleted first; of equally cold ones the last in its
    chain.
    """

    def __init__(self, budget: int, folder: Path | None = None) -> None:
        self.budget = budget
        self.folder = folder or Path(user_cache_dir("tinychat", appauthor=False)) / "kv"

    def save(
        self,
        fingerprint: str,
        layout: str,
        tokens: Sequence[int],
        read: Callable[[int, int], bytes],
        *,
        tag: str = "",
        reason: Reason = "idle",
        seconds: float = math.inf,
        stop: threading.Event | None = None,
        least: int = LEAST,
    ) -> Cost:
        """Writes the missing blocks of `tokens`; `read(first, rows)` returns their rows. An end of fewer than `least`
        tokens is left out.

        Ends between two blocks when `seconds` have passed, `stop` is set or the budget is full; the next call
        continues.
        """
        started, rows, nbytes = time.monotonic(), 0, 0
        model, whole, kept = _short(f"{fingerprint}\n{layout}"), False, set[Path]()
        try:
            used, found, chain = self._sweep(), self._chains(model), _ROOT
            for first in range(0, len(tokens), BLOCK):
                part = tuple(tokens[first : first + BLOCK])
                before, chain = chain, _chain(chain, part)
                if held := found.get(before, {}).get(chain):
                    kept.add(held)
                    continue
                if len(part) < min(least, BLOCK):
                    break
                if (stop and stop.is_set()) or time.monotonic() - started > seconds:
                    return Cost(rows, nbytes, time.monotonic() - started)
                path = self.folder / f"{model}-{before}-{chain}-{_short(tag)}.kv"
                data = read(first, len(part))
                used += _HEADER.size + 4 * len(part) + len(data)
                if used > self.budget:
                    used -= self._evict(used - self.budget, kept)
                if used > self.budget:
                    return Cost(rows, nbytes, time.monotonic() - started)
                self._write(path, first, part, data, reason)
                kept.add(path)
                rows, nbytes = rows + len(part), nbytes + len(data)
                for old in found.get(before, {}).values():  # the shorter ends that this one continues
                    block = _look(old)
                    if old.name.endswith(f"-{_short(tag)}.kv") and block and block.tokens == part[: len(block.tokens)]:
                        old.unlink(missing_ok=True)  # counted as used until the next call
            whole = True
        except OSError:
            pass
        return Cost(rows, nbytes, time.monotonic() - started, whole)

    def best(self, fingerprint: str, layout: str, ids: Sequence[int], most: int | None = None) -> Saved | None:
        """The longest chain of blocks that begins as `ids` does and ends within `most` tokens, if it is long enough.

        Reads names, and the ids of blocks in which `ids` may end or leave the chain."""
        found, chain, blocks = self._chains(_short(f"{fingerprint}\n{layout}")), _ROOT, list[CacheBlock]()
        most = len(ids) + BLOCK if most is None else most
        while (at := BLOCK * len(blocks)) + BLOCK <= min(len(ids), most):
            part = tuple(ids[at : at + BLOCK])
            path = found.get(chain, {}).get(_chain(chain, part))
            if path is None:
                break
            blocks.append(CacheBlock(path, at, part))
            chain = _chain(chain, part)
        usable, rest = at, np.asarray(ids[at : at + BLOCK], np.int32)
        last: CacheBlock | None = None
        for path in found.get(chain, {}).values():
            block = _look(path)
            if block is None:
                with contextlib.suppress(OSError):
                    path.unlink()
            elif block.first == at and at + len(block.tokens) <= most:
                common = at + _common(np.asarray(block.tokens, np.int32), rest)
                if common > usable:
                    usable, last = common, block
        blocks += [last] if last else []
        return Saved(tuple(blocks), usable) if usable >= LEAST else None

    def read(self, saved: Saved, beyond: int = 0) -> Iterator[tuple[CacheBlock, bytes]]:
        """The blocks of `saved` that reach past its first `beyond` tokens, with their rows, in order.

        Ends before the first missing or damaged block; a damaged one is deleted."""
        for block in saved.blocks:
            if block.first + len(block.tokens) <= beyond:
                continue
            rows = _read(block)
            if rows is None:
                with contextlib.suppress(OSError):
                    block.path.unlink()
                return
            yield block, rows

    def forget(self, tag: str) -> int:
        """Deletes the blocks written under `tag`, with their ids and rows; returns the number of bytes freed."""
        return self._delete(f"*{_short(tag)}*")

    def clear(self) -> int:
        """Deletes every saved cache; returns the number of bytes freed."""
        return self._delete("*.kv") + self._delete("tmp-*")

    def usage(self) -> tuple[int, int]:
        """(files, bytes) on the disk."""
        sizes = [size for _, size in self._files()]
        return len(sizes), sum(sizes)

    # --- the folder ---

    def _files(self, pattern: str = "*.kv") -> list[tuple[Path, int]]:
        found = []
        with contextlib.suppress(OSError):
            for path in self.folder.glob(pattern):
                with contextlib.suppress(OSError):
                    found.append((path, path.stat().st_size))
        return found

    def _chains(self, model: str) -> dict[str, dict[str, Path]]:
        """The blocks of one model and layout: chain before -> chain with it -> file."""
        found: dict[str, dict[str, Path]] = {}
        for path, _ in self._files(f"{model}-*.kv"):
            if name := _NAME.fullmatch(path.name):
                found.setdefault(name[2], {})[name[3]] = path
        return found

    def _delete(self, pattern: str) -> int:
        freed = 0
        for path, size in self._files(pattern):
            with contextlib.suppress(OSError):
                path.unlink()
                freed += size
        return freed

    def _write(self, path: Path, first: int, tokens: Sequence[int], rows: bytes, reason: Reason) -> None:
        ids = np.asarray(tokens, np.int32).tobytes()
        head = _HEADER.pack(
            _MAGIC,
            _HEAT[reason],
            time.time(),
            _REASONS.index(reason),
            first,
            len(tokens),
            len(rows),
            _digest(path, ids, rows),
        )
        fd, temporary = tempfile.mkstemp(dir=self.folder, prefix=f"tmp-{path.stem[-16:]}-")  # of mode 0600
        try:
            with open(fd, "wb") as f:
                for part in (head, ids, rows):
                    f.write(part)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _sweep(self) -> int:
        """Creates the folder (mode 0700), deletes invalid and stale files, and returns the bytes of the blocks."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        now, used = time.time(), 0
        for path, size in self._files("*"):
            with contextlib.suppress(OSError):
                if _NAME.fullmatch(path.name):
                    used += size
                elif path.suffix == ".kv" or abs(now - path.stat().st_mtime) > _STALE:
                    path.unlink()
        return used

    def _evict(self, excess: int, keep: set[Path]) -> int:
        """Deletes the coldest blocks, except `keep`, until `excess` bytes are freed; returns the number of bytes
        freed."""
        now, freed = time.time(), 0
        candidates = [(_heat(path, now), size, path) for path, size in self._files() if path not in keep]
        for _, size, path in sorted(candidates, key=lambda entry: entry[0]):
            if freed < excess:
                path.unlink(missing_ok=True)
                freed += size
        return freed


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _chain(before: str, tokens: Sequence[int]) -> str:
    return hashlib.sha256(before.encode() + np.asarray(tokens, np.int32).tobytes()).hexdigest()[:24]


def _digest(path: Path, ids: bytes, rows: bytes) -> bytes:
    digest = hashlib.sha256(path.name.encode())
    digest.update(ids)
    digest.update(rows)
    return digest.digest()


def _heat(path: Path, now: float) -> tuple[float, int]:
    """(heat at `now`, -first token) of a block, by which blocks are sorted; a file that is not a block sorts first."""
    try:
        with open(path, "rb") as f:
            magic, heat, used, _, first, *_ = _HEADER.unpack(f.read(_HEADER.size))
    except (OSError, struct.error):
        return -1.0, 0
    if magic != _MAGIC or not _NAME.fullmatch(path.name) or not (math.isfinite(heat) and math.isfinite(used)):
        return -1.0, 0
    return max(heat, 0.0) * 0.5 ** (max(now - used, 0.0) / HALF_LIFE), -first  # a clock may have been set back


def _look(path: Path) -> CacheBlock | None:
    """The block in `path`, whose rows are not read or checked; None if the file is not a block."""
    try:
        with open(path, "rb") as f:
            magic, _, _, _, first, n, _, _ = _HEADER.unpack(f.read(_HEADER.size))
            if magic != _MAGIC or not 0 < n <= BLOCK or first % BLOCK:
                return None
            return CacheBlock(path, first, tuple(np.frombuffer(f.read(4 * n), np.int32).tolist()))
    except (OSError, struct.error, ValueError):
        return None


def _read(block: CacheBlock) -> bytes | None:
    """The rows of `block`, checked, and marks them as used now."""
    try:
        with open(block.path, "rb") as f:
            head, data = f.read(_HEADER.size), f.read()
        magic, heat, used, _, first, n, size, digest = _HEADER.unpack(head)
        ids = np.asarray(block.tokens, np.int32).tobytes()
        if (magic, first, n) != (_MAGIC, block.first, len(block.tokens)) or len(data) != len(ids) + size:
            return None
        if data[: len(ids)] != ids or digest != _digest(block.path, ids, data[len(ids) :]):
            return None
        now = time.time()
        with contextlib.suppress(OSError, OverflowError), open(block.path, "r+b") as f:
            f.seek(len(_MAGIC))
            cooled = heat * 0.5 ** (max(now - used, 0.0) / HALF_LIFE) if math.isfinite(heat + used) else 0.0
            f.write(struct.pack("<dd", cooled + 1.0, now))
        return data[len(ids) :]
    except (OSError, struct.error):
        return None


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading values are the same."""
    n = min(len(a), len(b))
    different = np.nonzero(a[:n] != b[:n])[0]
    return int(different[0]) if len(different) else n
