"""What was measured on this machine, kept as one JSON object per line, and shown as tables."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from platformdirs import user_data_dir
from rich.console import RenderableType

from tinychat.console import grids
from tinychat.errors import TinychatError, printable


@dataclass(frozen=True)
class BenchResult:
    """What was measured (medians over `decode_runs`) and on what. Speeds per second, times in seconds, sizes in bytes.

    `decode_tok_s` counts the tokens behind the first; `ttft_s` is from the prompt's ids to the first token, nothing
    reused.
    """

    model: str
    path: str
    fingerprint: str
    quant: str
    device: str
    threads: int
    n_prompt: int
    n_gen: int
    decode_tok_s: float
    prefill_tok_s: float
    ttft_s: float
    load_s: float
    kernels_per_token: int
    jit_batches: int
    bytes_per_token: int
    gb_s: float
    limit_gb_s: float
    limit_share: float
    kv_bytes_per_token: int
    rss_bytes: int
    decode_runs: tuple[float, ...]
    max_context: int
    versions: dict[str, str]
    machine: str
    date: str  # ISO 8601, UTC

    @property
    def spread(self) -> float:
        """Half of the distance between the fastest and the slowest run, as a share of the median."""
        return (max(self.decode_runs) - min(self.decode_runs)) / 2 / self.decode_tok_s if self.decode_tok_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return asdict(self) | {"spread": self.spread}


def store_path() -> Path:
    """Where results are kept: one JSON object per line, oldest first."""
    return Path(user_data_dir("tinychat", appauthor=False)) / "benchmarks.jsonl"


def save(result: BenchResult, file: Path | None = None) -> None:
    """Appends `result`. Raises TinychatError when the file cannot be written."""
    append(result.as_dict(), file or store_path())


def append(data: dict[str, Any], file: Path) -> None:
    """Adds one line to `file`. Raises TinychatError when it cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab", buffering=0) as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            f.write(b"\n" * _cut_short(file) + json.dumps(data).encode() + b"\n")
    except OSError as e:
        raise TinychatError(
            f"{printable(str(file))}: the result cannot be saved: {(e.strerror or str(e)).lower()}"
        ) from None


def history(fingerprint: str | None = None, file: Path | None = None) -> list[BenchResult]:
    """Saved results, oldest first, of one model file or all. Lines that cannot be read are left out."""
    found = []
    for data in objects(file or store_path()):
        with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
            result = _parse(data)
            if fingerprint in (None, result.fingerprint):
                found.append(result)
    return found


def objects(file: Path) -> Iterator[Any]:
    """What the lines of `file` say, oldest first; lines that cannot be read are left out."""
    with contextlib.suppress(OSError):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def speeds(results: Iterable[BenchResult]) -> dict[str, float]:
    """Path of a model file -> the decode speed measured last."""
    return {r.path: r.decode_tok_s for r in results}


def _cut_short(file: Path) -> bool:
    """Whether the last line has no end: a process was killed, or the disk was full, while writing it."""
    with open(file, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        f.seek(max(0, size - 1))
        return f.read() not in (b"", b"\n")


def _parse(data: dict[str, Any]) -> BenchResult:
    """Raises TypeError, KeyError or ValueError when `data` is no result; keys of a newer version are ignored."""
    values = {f.name: data[f.name] for f in fields(BenchResult)}
    for f in fields(BenchResult):
        value = values[f.name]
        kinds: tuple[type, ...] = {"str": (str,), "int": (int,), "float": (int, float)}.get(str(f.type), (object,))
        if not isinstance(value, kinds):
            raise TypeError(f.name)
    runs, versions = (
        tuple(float(r) for r in values["decode_runs"]),
        {str(k): str(v) for k, v in values["versions"].items()},
    )
    if not runs:
        raise ValueError("no runs")
    return BenchResult(**{**values, "decode_runs": runs, "versions": versions})


# tables

_WORDS = ("date", "model", "quant", "device")  # to the left; numbers to the right
COLUMNS = (*_WORDS, "prompt+gen", "prefill tok/s", "decode tok/s", "TTFT s", "GB/s", "limit", "version")


def row(r: BenchResult) -> tuple[str, ...]:
    """One result as the texts of COLUMNS; safe for a terminal."""
    limit = f"{r.limit_share:.0%}" if r.limit_share else "–"
    spread = f" ±{r.spread:.0%}" if len(r.decode_runs) > 1 else ""
    words = r.date[:16].replace("T", " "), r.model, r.quant, r.device
    numbers = f"{r.prefill_tok_s:,.1f}", f"{r.decode_tok_s:,.1f}{spread}", f"{r.ttft_s:.2f}", f"{r.gb_s:,.1f}"
    cells = *words, f"{r.n_prompt}+{r.n_gen}", *numbers, limit, r.versions.get("tinychat", "?")
    return tuple(printable(cell, newlines=False) for cell in cells)


def markdown_row(r: BenchResult) -> str:
    """One result as a row of a Markdown table."""
    return _markdown(row(r))


def markdown_table(results: Sequence[BenchResult]) -> str:
    """Results as a Markdown table with its head."""
    head = [_markdown(COLUMNS), _markdown(["---" if c in _WORDS else "---:" for c in COLUMNS])]
    return "\n".join([*head, *map(markdown_row, results)]) + "\n"


def table(results: Iterable[BenchResult]) -> RenderableType:
    """Results for a terminal of 80 columns, by what they were measured with."""
    shown = []
    for r in results:
        cells = dict(zip(COLUMNS, row(r)))
        title = f"{cells['device']} · tinychat {cells['version']} · prefill and decode in tok/s"
        shown.append(
            (title, (cells["date"][2:], *(cells[c] for c in COLUMNS if c not in ("date", "device", "version"))))
        )
    head = ("date", "model", "type", "tokens", "prefill", "decode", "TTFT s", "GB/s", "limit")
    return grids(shown, head, right=(3, 4, 5, 6, 7, 8))


def _markdown(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"
