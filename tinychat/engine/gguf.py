"""GGUF files: header, metadata and tensor index, and the bytes of tensors where they are asked for. Nothing is
memory-mapped: a file that another program cuts short, or a disk that fails, is an error and not the end of the process.

Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `gguf.GGUFReader` needs seconds for the strings of a
large vocabulary; this reader needs a fraction of one, and treats every number in the file as hostile.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tinychat.engine import file_limits
from tinychat.engine.file_limits import Bounds
from tinychat.errors import TinychatError, printable
from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U64 = struct.Struct("<Q").unpack_from
_U32 = struct.Struct("<I").unpack_from
_FIRST = 1 << 20  # bytes of a header that are read at once


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the index. `shape` is row-major as NumPy has it (ggml's order reversed): (..., rows, columns)."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    part: int  # which file of a split
    offset: int  # bytes from the start of that file
    nbytes: int


class _File:
    """An open file of `size` bytes. Any thread may read. Raises TinychatError."""

    fd = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe waits for nobody
        except OSError as e:
            raise self._unreadable(e) from None
        found = os.fstat(self.fd)
        if not stat.S_ISREG(found.st_mode):
            kind = "folder" if stat.S_ISDIR(found.st_mode) else "pipe or device"
            raise TinychatError(f"{printable(str(path))}: a {kind}, not a .gguf file")
        self.size = found.st_size

    def fill(self, out: np.ndarray, at: int) -> None:
        """Fills `out` (uint8) with the bytes from `at` on."""
        view, done = out.data, 0
        try:
            while done < len(view) and (n := os.preadv(self.fd, [view[done:]], at + done)):
                done += n
        except OSError as e:
            raise self._unreadable(e) from None
        if done < len(view):
            raise TinychatError(f"{printable(str(self.path))}: the file has become shorter; download it again")

    def read(self, at: int, nbytes: int) -> bytes:
        """So many bytes from `at` on."""
        out = np.empty(nbytes, np.uint8)
        self.fill(out, at)
        return out.tobytes()

    def _unreadable(self, e: OSError) -> TinychatError:
        return TinychatError(f"{printable(str(self.path))}: cannot be read: {(e.strerror or str(e)).lower()}")

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Cursor:
    """Reads little-endian values from the beginning of a file. Raises TinychatError at the end of the file.

    `buf` is what was read so far.
    """

    def __init__(self, file: _File) -> None:
        self.file, self.buf, self.path, self.pos, self.end = file, b"", file.path, 0, file.size
        self.strings_left = int(file_limits.STRINGS.most)

    def fail(self, why: str) -> TinychatError:
        return TinychatError(f"{printable(str(self.path))}: {why}")

    def truncated(self) -> TinychatError:
        return self.fail(f"the file is truncated: its header runs past the end ({self.end:,} bytes); download it again")

    def reach(self, to: int) -> bytes:
        """`buf` with the first `to` bytes of the file at least."""
        if to > self.end:
            raise self.truncated()
        if to > (have := len(self.buf)):
            self.buf += self.file.read(have, min(self.end, max(to, 2 * have, _FIRST)) - have)
        return self.buf

    def limit(self, what: str, value: int, limit: Bounds) -> int:
        """`value`. Raises TinychatError outside `limit`."""
        if not limit.least <= value <= limit.most:
            expected = f"{limit.least:,} to {limit.most:,} ({limit.why})"
            raise self.fail(f"{what} is {value:,}, accepted is {expected}; the file is damaged")
        return value

    def u32(self) -> int:
        self.pos += 4
        return int(_U32(self.reach(self.pos), self.pos - 4)[0])

    def u64(self) -> int:
        self.pos += 8
        return int(_U64(self.reach(self.pos), self.pos - 8)[0])

    def string(self, what: str, limit: Bounds) -> str:
        n = self.limit(f"the length of {what}", self.u64(), limit)
        self.pos += n
        return self.reach(self.pos)[self.pos - n : self.pos].decode("utf-8", "replace")

    def strings(self, n: int) -> list[str]:
        """Reads `n` strings. Opening a file spends most of its time here, so there is no function call per string."""
        buf, pos, have, out = self.buf, self.pos, len(self.buf), []
        if n * 8 > self.end - pos:
            raise self.truncated()
        self.strings_left -= n
        if self.strings_left < 0:
            raise self.fail(f"it has more than {file_limits.STRINGS.most:,} strings in arrays; the file is damaged")
        most = file_limits.ITEM_BYTES.most
        for _ in range(n):
            if pos + 8 > have:
                have = len(buf := self.reach(pos + 8))
            size = _U64(buf, pos)[0]
            pos += 8 + size
            if size > most and pos <= self.end:
                self.limit("the length of a string in an array", size, file_limits.ITEM_BYTES)
            if pos > have:
                have = len(buf := self.reach(pos))
            out.append(buf[pos - size : pos].decode("utf-8", "replace"))
        self.pos = pos
        return out

    def value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self.string(f"the value of {key}", file_limits.STRING_BYTES)
        if kind == _ARRAY:
            inner, n = self.u32(), self.limit(f"the length of array {key}", self.u64(), file_limits.ITEMS)
            if inner == _STRING:
                return self.strings(n)
            if inner == _ARRAY:
                raise self.fail(f"metadata {key} is an array of arrays, which GGUF files do not have")
            dtype = self._dtype(inner)
            size = n * dtype.itemsize
            self.pos += size
            return np.frombuffer(self.reach(self.pos)[self.pos - size : self.pos], dtype)
        size = self._dtype(kind).itemsize
        self.pos += size
        return struct.unpack_from("<" + _SCALARS[kind], self.reach(self.pos), self.pos - size)[0]

    def _dtype(self, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise self.fail(f"metadata value of unknown type {kind}; the file is damaged or of a newer GGUF version")
        return np.dtype(_SCALARS[kind]).newbyteorder("<")


class GGUF:
    """An opened GGUF model: `metadata` (key -> value, arrays as NumPy arrays or lists of str) and `tensors` (name ->
    TensorInfo).

    A split model is opened from its first part and shows the tensors of all of them.
    """

    def __init__(
        self,
        path: Path,
        files: list[_File],
        metadata: dict[str, Any],
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.path, self.metadata, self.tensors, self._files = path, metadata, tensors, files
        self._own = len(files)  # parts of the model itself; those behind them are of joined files

    @classmethod
    def open(cls, path: str | Path) -> GGUF:
        """Opens `path`. Raises TinychatError for a file that is missing, truncated, damaged or no GGUF."""
        path = Path(path)
        file, metadata, tensors = _read(path, 0)
        files = [file]
        count = metadata.get("split.count", 1)
        if isinstance(count, int) and count > 1:
            for n, part in enumerate(_split_paths(path, count)[1:], 1):
                file, _, more = _read(part, n)
                files.append(file)
                if twice := tensors.keys() & more.keys():
                    raise TinychatError(f"{printable(str(part))}: tensor {printable(min(twice))} is in two parts")
                tensors |= more
            expected = metadata.get("split.tensors.count")
            if expected is not None and expected != len(tensors):
                raise TinychatError(
                    f"{printable(str(path))}: the parts hold {len(tensors)} tensors, "
                    f"split.tensors.count says {expected}; download them again"
                )
        return cls(path, files, metadata, tensors)

    def joined(self, other: GGUF, prefix: str) -> GGUF:
        """This model with the tensors of `other` whose names begin with `prefix`."""
        parts = len(self._files)
        more = {name: replace(t, part=parts + t.part) for name, t in other.tensors.items() if name.startswith(prefix)}
        both = GGUF(self.path, self._files + other._files, self.metadata, self.tensors | more)
        both._own = self._own
        return both

    def size(self, name: str) -> int:
        """Bytes of tensor `name`."""
        return self.tensors[name].nbytes

    def raw(self, name: str) -> np.ndarray:
        """The packed bytes of tensor `name`: uint8 (nbytes,). Raises TinychatError."""
        out = np.empty(self.tensors[name].nbytes, np.uint8)
        self.read(name, 0, out)
        return out

    def read(self, name: str, at: int, out: np.ndarray) -> None:
        """Fills `out` (uint8) with the packed bytes of tensor `name` from byte `at` on. Any thread may call. Raises
        TinychatError."""
        t = self.tensors[name]
        self._files[t.part].fill(out, t.offset + at)

    def place(self, name: str) -> tuple[int, int]:
        """The open file of tensor `name`, and the byte of it at which the tensor begins."""
        t = self.tensors[name]
        return self._files[t.part].fd, t.offset

    def fingerprint(self) -> str:
        """Identifies the model without reading the whole file: SHA-256 of the header, the size and a few bytes of every
        tensor. A file that was joined changes nothing."""
        end = min((t.offset for t in self.tensors.values() if t.part == 0), default=self._files[0].size)
        digest = hashlib.sha256(self._files[0].read(0, end))  # of a part without tensors: all of it
        digest.update(str(self.nbytes).encode())
        for t in (t for t in self.tensors.values() if t.part < self._own):
            middle = t.offset + t.nbytes // 2
            digest.update(self._files[t.part].read(middle, min(64, self._files[t.part].size - middle)))
        return digest.hexdigest()

    @property
    def parts(self) -> int:
        """The number of the model's own files."""
        return self._own

    @property
    def nbytes(self) -> int:
        """Size of the model's own files, bytes."""
        return sum(file.size for file in self._files[: self._own])


def _split_paths(path: Path, count: int) -> list[Path]:
    found = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not found or count > file_limits.PARTS.most:
        raise TinychatError(
            f"{printable(path.name)}: one of {count} parts, but not named NAME-00001-of-{count:05d}.gguf; "
            "give all parts their original names"
        )
    if int(found[2]) != 1:
        raise TinychatError(f"{printable(path.name)}: open the first part of a split model, not part {int(found[2])}")
    return [path.with_name(f"{found[1]}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]


def _read(path: Path, part: int) -> tuple[_File, dict[str, Any], dict[str, TensorInfo]]:
    c = _Cursor(file := _File(path))
    if not c.end:
        raise c.fail("the file is empty; download it again")
    if file.read(0, min(4, c.end)) != b"GGUF":
        raise c.fail("not a GGUF file (its first bytes are not 'GGUF')")
    c.pos = 4
    if (version := c.u32()) not in (2, 3):
        raise c.fail(f"GGUF version {version} is not supported (2 and 3 are)")
    n_tensors = c.limit("the number of tensors", c.u64(), file_limits.TENSORS)
    n_kv = c.limit("the number of metadata keys", c.u64(), file_limits.KEYS)
    if n_tensors > c.end // 24 or n_kv > c.end // 12:
        raise c.truncated()
    metadata: dict[str, Any] = {}
    for _ in range(n_kv):
        key = c.string("a metadata key", file_limits.NAME_BYTES)
        if key in metadata:
            raise c.fail(f"metadata {printable(key)} appears twice")
        metadata[key] = c.value(printable(key), c.u32())
        c.limit("the size of its header", c.pos, file_limits.HEADER_BYTES)
    index = []
    for _ in range(n_tensors):
        name = c.string("a tensor's name", file_limits.NAME_BYTES)
        what = f"tensor {printable(name)}: "
        n_dims = c.limit(f"{what}the number of dimensions", c.u32(), file_limits.DIMENSIONS)
        dims = [c.limit(f"{what}a dimension", c.u64(), file_limits.SIDE) for _ in range(n_dims)]
        index.append((name, dims, c.u32(), c.u64()))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or not 0 < align <= file_limits.ALIGNMENT.most or align & (align - 1):
        raise c.fail(f"general.alignment is {printable(repr(align)[:60])}; expected a power of two")
    data = -(-c.pos // align) * align
    tensors: dict[str, TensorInfo] = {}
    for name, dims, kind, offset in index:
        try:
            quant = GGMLQuantizationType(kind)
        except ValueError:
            raise c.fail(
                f"tensor {printable(name)} has unknown quant type {kind}; a newer tinychat may know it"
            ) from None
        block, size = GGML_QUANT_SIZES[quant]
        elements = math.prod(dims)
        if dims[0] % block:
            raise c.fail(f"tensor {printable(name)} has shape {dims}; rows of {quant.name} hold a multiple of {block}")
        if name in tensors:
            raise c.fail(f"tensor {printable(name)} appears twice")
        info = TensorInfo(name, quant, tuple(reversed(dims)), part, data + offset, elements // block * size)
        if info.offset + info.nbytes > c.end:
            raise c.fail(
                f"the file is truncated: tensor {printable(name)} ends at byte {info.offset + info.nbytes:,}, "
                f"the file at {c.end:,}; download it again"
            )
        tensors[name] = info
    return file, metadata, tensors
