"""The log of measurements on this machine: one JSON object per line, oldest first."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from platformdirs import user_data_dir

from tinychat.errors import TinychatError, printable
from tinychat.measure.results import ModelResult, PartResult

R = TypeVar("R", ModelResult, PartResult)
_FILES = {ModelResult: "benchmarks.jsonl", PartResult: "ladder.jsonl"}
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "tuple[float, ...]": (list,),
    "dict[str, str]": (dict,),
}


def log_path(kind: type[ModelResult] | type[PartResult] = ModelResult) -> Path:
    """The file with results of one kind."""
    return Path(user_data_dir("tinychat", appauthor=False)) / _FILES[kind]


def save(result: ModelResult | PartResult, file: Path | None = None) -> None:
    """Appends `result`. Raises TinychatError when the file cannot be written."""
    file = file or log_path(type(result))
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # private: the folder also holds conversations
        with open(file, "ab") as f:  # buffered, because an unbuffered write may be partial without an error
            fcntl.flock(f, fcntl.LOCK_EX)
            f.write(b"\n" * _cut_short(file) + json.dumps(result.as_dict()).encode() + b"\n")
    except OSError as e:
        raise TinychatError(
            f"{printable(str(file))}: the result cannot be saved: {(e.strerror or str(e)).lower()}"
        ) from None


def history(fingerprint: str | None = None, file: Path | None = None) -> list[ModelResult]:
    """Saved results of models: of the file with `fingerprint`, or of all files."""
    return [r for r in _read(ModelResult, file) if fingerprint in (None, r.fingerprint)]


def parts(file: Path | None = None) -> list[PartResult]:
    """Saved results of kernels and layers."""
    return list(_read(PartResult, file))


def speeds(results: Iterable[ModelResult]) -> dict[str, float]:
    """Path of a model file -> the decode speed measured last, in single steps."""
    return {r.path: r.decode_tok_s for r in results if r.speculate == "off"}


def _read(kind: type[R], file: Path | None) -> Iterator[R]:
    """Results, oldest first; lines that cannot be read are left out."""
    with contextlib.suppress(OSError):
        for line in (file or log_path(kind)).read_bytes().splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                yield _parse(kind, json.loads(line))


def _parse(kind: type[R], data: dict[str, Any]) -> R:
    """Raises TypeError, KeyError or ValueError when `data` is no such result; keys of a newer version are ignored."""
    older = {f.name: f.default for f in fields(kind) if f.default is not MISSING}  # they lack what came since
    values = {f.name: (older | data)[f.name] for f in fields(kind)}
    for f in fields(kind):
        if not isinstance(values[f.name], _TYPES[str(f.type)]):
            raise TypeError(f.name)
    values["versions"] = {str(k): str(v) for k, v in values["versions"].items()}
    if "decode_runs" in values:
        values["decode_runs"] = tuple(float(r) for r in values["decode_runs"])
        if not values["decode_runs"]:
            raise ValueError("no runs")
    return kind(**values)


def _cut_short(file: Path) -> bool:
    """Whether the last line has no line break, because the process was killed or the disk was full."""
    with open(file, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - 1))
        return f.read() not in (b"", b"\n")
