"""What the picker shows of one model: the facts, and their line of text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rich.filesize import decimal
from textual.content import Content

from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.models import cache
from tinychat.models.fit import Fit, available_memory, fit
from tinychat.models.registry import MODELS, Model, resolve
from tinychat.ui.screens.downloads import Download
from tinychat.ui.screens.sheet import cell
from tinychat.units import parameter_count, speed

_WIDE = 92  # from this many cells on, context and speed have columns of their own
_VERDICTS = {
    "fits": ("✓ fits", "$text-success"),
    "tight": ("~ tight", "$text-warning"),
    "does not fit": ("✗ does not fit", "$text-error"),
    "unknown": ("? unknown", "$foreground-muted"),
}


@dataclass(frozen=True)
class Row:
    """A model as the picker knows it. `path` when its file is here; `partial` bytes of it otherwise; `speed` in
    tok/s."""

    model: Model
    path: Path | None
    partial: int
    fit: Fit
    speed: float | None
    deletable: bool  # there are bytes of it in our cache
    size: int = 0  # of its file in bytes, as the registry, the file or its header says; 0 = not known yet

    @property
    def size_shown(self) -> str:
        """5.0 GB; with a ~ where only the weights are known, from the header."""
        told = self.model.size or self.path
        return f"{'' if told else '~'}{decimal(self.size)}" if self.size else ""

    @property
    def words(self) -> str:
        """What the search looks at."""
        m = self.model
        return " ".join((m.name, m.family, m.quant, m.architecture, *m.aliases)).casefold()


def rows(
    extra: Iterable[Model], context: int, freed: int, speeds: Mapping[str, float], sizes: Mapping[str, tuple[int, int]]
) -> list[Row]:
    """All models there are to choose from: the user's own, the registry's, and what else the cache holds.

    `freed`: bytes of memory that unloading the present model gives back; `sizes`: (weight bytes, KV bytes per token)
    that the headers of files told, by model name.
    """
    models = {m.name: m for m in (*extra, *MODELS)}
    whole: dict[str, cache.Entry] = {}
    partial: dict[str, cache.Entry] = {}
    for e in cache.entries(extra):
        model = e.model or _unknown(e, models)
        models.setdefault(model.name, model)
        (partial if e.partial else whole)[model.name] = e
    free = available_memory()
    free += freed * bool(free)
    out = []
    for name, model in models.items():
        path = model.path if model.path else whole[name].path if name in whole else None
        entry = partial.get(name)
        out.append(
            Row(
                model,
                path,
                entry.size if entry and not path else 0,
                verdict(model, context, free, sizes),
                speeds.get(str(path)),
                name in whole or name in partial,
                model.size or _bytes(path) or sizes.get(name, (0, 0))[0],
            )
        )
    return out


def _bytes(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _unknown(e: cache.Entry, taken: Mapping[str, Model]) -> Model:
    """A model for a file of the cache that nobody knows: it goes by its file name, where that says which one it is."""
    name = unquote(urlsplit(e.url).path.rsplit("/", 1)[-1]) if e.url else ""
    name = e.name if not name or name in taken else name
    return Model(name, (e.url,) if e.url else (), e.total or 0, path=None if e.url else e.path, family="in the cache")


def verdict(model: Model, context: int, available: int, sizes: Mapping[str, tuple[int, int]]) -> Fit:
    """Whether `model` fits, by the header of its file where we have seen it, else by the registry."""
    weights, kv = sizes.get(model.name, (model.size, model.kv_bytes_per_token))
    return fit(weights, kv, min(context, model.context or context), available)


def matches(row: Row, search: str) -> bool:
    """Whether every word of `search` occurs in the row."""
    return all(word in row.words for word in search.casefold().split())


def families(rows: Mapping[str, Row], search: str) -> list[tuple[str, list[Row]]]:
    """Families with their rows that match `search`."""
    found: dict[str, list[Row]] = {}
    for row in rows.values():
        if matches(row, search):
            found.setdefault(row.model.family or "other", []).append(row)
    return list(found.items())


def is_place(text: str) -> bool:
    """Whether the user is typing a URL or a path rather than searching."""
    text = text.strip()
    return bool(re.match(r"https?://|~?/|\.\.?/|~$", text, re.I)) or text.lower().endswith(".gguf")


def at_place(text: str, known: Iterable[Model]) -> list[Model]:
    """The models that a URL or path stands for: one, or the .gguf files of a folder. Raises TinychatError where there
    is none."""
    folder = expand(text.strip())
    if not os.path.isdir(folder):
        return [resolve(text, known)]
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".gguf" and p.is_file())
    except OSError as e:
        raise TinychatError(f"{printable(text.strip())}: {(e.strerror or str(e)).lower()}") from None
    if not files:
        raise TinychatError(f"{printable(text.strip())}: a folder without .gguf files")
    return [Model(p.name, path=p) for p in files]


def heading(width: int) -> Content:
    """The names of the columns."""
    names = ["model", "quant", "params", "size", "  here", "context", "speed", "  in memory"]
    return Content(_line(names, width))


def line(row: Row, width: int, job: Download | None = None) -> Content:
    """One row in `width` cells; a running or paused download takes the place of the right half."""
    m = row.model
    if (job and job.state in ("running", "paused")) or (not row.path and row.partial):
        return _progress(row, width, job)
    here = "● here" if row.path else "✗ failed" if job and job.state == "failed" else "○ –"
    word, style = ("✗ unsupported", "$text-error") if m.why_not else _VERDICTS[row.fit.verdict]
    texts = [
        m.name,
        m.quant,
        params(m),
        row.size_shown,
        here,
        tokens(m.context),
        f"{speed(row.speed)} tok/s" if row.speed else "",
        word,
    ]
    text = _line(texts, width)
    return Content(text).stylize(style, len(text) - 14, len(text))


def explain(row: Row, job: Download | None, header_error: str | None) -> tuple[str, bool]:
    """The line below the list for one model, and whether it is about something that went wrong."""
    m = row.model
    if job and job.state == "failed" and not row.path:
        return f"{job.error} (enter tries again)", True
    if trouble := m.why_not or header_error:
        return trouble, True
    facts = [f"{row.fit.verdict}: {row.fit.explanation}"]
    facts += [f"context up to {m.context:,} tokens"] * bool(m.context)
    facts += [f"{speed(row.speed)} tok/s here"] if row.speed else []
    return " · ".join(facts), False


def params(m: Model) -> str:
    """'30B (3.6B)': all parameters, and in brackets those that one token uses."""
    if not m.parameters:
        return ""
    active = parameter_count(m.active_parameters) if 0 < m.active_parameters < m.parameters else ""
    return parameter_count(m.parameters) + (f" ({active})" if active else "")


def tokens(n: int) -> str:
    """A context length: '128K'."""
    return f"{n / 1024:.3g}K" if n >= 1024 else str(n) if n else ""


def duration(seconds: float) -> str:
    """'45 s', '8 min', '1 h 20 min'."""
    s = round(seconds)
    return f"{s} s" if s < 90 else f"{round(s / 60)} min" if s < 5400 else f"{s // 3600} h {s % 3600 // 60} min"


def _line(texts: list[str], width: int) -> str:
    name, quant, size_, bytes_, here, context, tok_s, fits = texts
    columns = [cell(quant, 7), cell(size_, 11), cell(bytes_, 8, True), "  " + cell(here, 8)]
    if width >= _WIDE:
        columns += [cell(context, 7, True), cell(tok_s, 11, True), ""]
    return f" {cell(name, _name_width(width))}  {' '.join([*columns, cell(fits, 14)])}"


def _name_width(width: int) -> int:
    """The cells that the other columns leave to the name; the widest names need no more than 40."""
    return max(8, min(40, width - (79 if width >= _WIDE else 57)))


def _progress(row: Row, width: int, job: Download | None) -> Content:
    done, total = (
        (job.done, job.total) if job and (job.done or job.state == "running") else (row.partial, row.model.size or None)
    )
    share = min(1.0, done / total) if total else 0.0
    text = decimal(done) + (f" of {decimal(int(total))}" if total else "")
    if job and job.state == "running":
        mark, style = "↓", "$accent"
        text += f" · {decimal(int(job.speed))}/s" if job.speed else f" · {job.stage}"
        text += f" · {duration(job.eta)}" if job.eta is not None else ""
    else:
        mark, style = "◐", "$foreground-muted"
        text += " · paused"
    start = _name_width(width) + 3
    bar = 20 if width >= _WIDE else 8
    full = round(share * bar)
    head = f" {cell(row.model.name, start - 3)}  {mark} "
    tail = cell(f" {share:4.0%}  {text}", width - start - 2 - bar)
    line = Content(f"{head}{'━' * bar}{tail}").stylize("$foreground 20%", start + 2, start + 2 + bar)
    return line.stylize(style, start + 2, start + 2 + full)
