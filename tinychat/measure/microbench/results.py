"""What the lower rungs measured, kept as one JSON object per line, and shown as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from platformdirs import user_data_dir
from rich.console import RenderableType

from tinychat.console import grids
from tinychat.measure import log
from tinychat.measure.profile.view import times


@dataclass(frozen=True)
class Rung:
    """What one op or layer took: seconds of a call, median and quartiles over all copies and steps, waiting
    included."""

    kind: str  # kernel, block
    what: str
    model: str
    fingerprint: str
    quant: str
    device: str
    threads: int
    how: str  # in the batch, alone
    copies: int
    steps: int
    seconds: float
    low: float
    high: float
    nbytes: int  # to read per call
    gb_s: float
    limit_gb_s: float
    limit_share: float
    versions: dict[str, str]
    machine: str
    date: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def store_path() -> Path:
    """Where results are kept: one JSON object per line, oldest first."""
    return Path(user_data_dir("tinychat", appauthor=False)) / "ladder.jsonl"


def save(rungs: Iterable[Rung]) -> None:
    """Appends results. Raises TinychatError when the file cannot be written."""
    for rung in rungs:
        log.append(rung.as_dict(), store_path())


def history() -> list[Rung]:
    """Saved results, oldest first; lines that cannot be read are left out."""
    return list(_parsed(log.objects(store_path())))


def _parsed(lines: Iterable[Any]) -> Iterator[Rung]:
    for data in lines:
        if isinstance(data, dict) and all(isinstance(data.get(f.name), _TYPES[str(f.type)]) for f in fields(Rung)):
            yield Rung(**{f.name: data[f.name] for f in fields(Rung)})


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "dict[str, str]": (dict,)}


def table(rungs: Iterable[Rung]) -> RenderableType:
    """Results for a terminal of 80 columns, by what they were measured with."""
    head = ("date", "what", "type", "a call", "quartiles", "MB", "GB/s", "limit")
    rows = (
        (
            " · ".join(filter(None, (r.model, r.device, f"tinychat {r.versions.get('tinychat', '?')}"))),
            (
                r.date[2:16].replace("T", " "),
                r.what,
                r.quant,
                times(r.seconds),
                _span(r.low, r.high),
                f"{r.nbytes / 1e6:,.2f}",
                f"{r.gb_s:,.1f}",
                f"{r.limit_share:.0%}" if r.limit_share else "–",
            ),
        )
        for r in rungs
    )
    return grids(rows, head, right=(3, 4, 5, 6, 7))


def _span(low: float, high: float) -> str:
    """30.2–42 µs."""
    first, last = times(low).split(), times(high).split()
    return f"{first[0]}–{' '.join(last)}" if first[1] == last[1] else f"{' '.join(first)}–{' '.join(last)}"
