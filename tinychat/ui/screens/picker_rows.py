"""A row of the picker: the model's facts, and their line of text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rich.filesize import decimal
from textual.content import Content
from textual.fuzzy import Matcher

from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.models import cache
from tinychat.models.fit import Fit, Sizes, available_memory, fit, predicted_tok_s
from tinychat.models.registry import MODELS, Model, resolve
from tinychat.ui.screens.downloads import Download
from tinychat.ui.screens.sheet import cell
from tinychat.units import parameter_count, speed

_WIDE = 84  # from this many cells on, the context has a column of its own
_NARROW = 62  # below this many, there is the size alone, or what keeps a model from running
FITS, TIGHT, TOO_LARGE = (
    "to download",
    "to download, with little memory to spare",
    "too large for this computer's memory",
)


@dataclass(frozen=True)
class Row:
    """A model as the picker knows it. `path` when its file is here; `partial` bytes of it otherwise; `speed` in tok/s
    as it was measured here, `predicted` as the memory allows (0: not known)."""

    model: Model
    path: Path | None
    partial: int
    fit: Fit
    speed: float | None
    predicted: float
    deletable: bool  # there are bytes of it in our cache
    size: int = 0  # of its file in bytes, as the registry, the file or its header says; 0 = not known yet
    loaded: bool = False

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
    extra: Iterable[Model],
    context: int,
    freed: int,
    speeds: Mapping[str, float],
    sizes: Mapping[str, Sizes],
    gb_s: float = 0.0,
    loaded: Model | None = None,
) -> list[Row]:
    """All models there are to choose from: the user's own, the registry's, what else the cache holds, and the `loaded`
    one, which may be a file that none of them knows.

    `freed`: bytes of memory that unloading the present model gives back; `sizes`: what the headers of files told, by
    model name; `gb_s`: the memory limit of this machine, 0 = not known.
    """
    models = {m.name: m for m in (*extra, *MODELS)}
    whole: dict[str, cache.CachedFile] = {}
    partial: dict[str, cache.CachedFile] = {}
    for e in cache.entries(extra):
        model = e.model or _unknown(e, models)
        models.setdefault(model.name, model)
        (partial if e.partial else whole)[model.name] = e
    paths = {name: m.path or (whole[name].path if name in whole else None) for name, m in models.items()}
    places = {name: os.path.realpath(path) for name, path in paths.items() if path}
    present = os.path.realpath(loaded.path) if loaded is not None and loaded.path else None
    if loaded is not None and present not in places.values():
        name = loaded.name if loaded.name not in models else str(loaded.path)
        models[name], paths[name], places[name] = replace(loaded, name=name), loaded.path, present or ""
    free = available_memory()
    free += freed * bool(free)
    out = []
    for name, model in models.items():
        path = paths[name]
        entry = partial.get(name)
        size = model.size or _bytes(path) or (sizes[name][0] if name in sizes else 0)
        out.append(
            Row(
                model,
                path,
                entry.size if entry and not path else 0,
                verdict(model, context, free, sizes),
                speeds.get(str(path)),
                predicted_tok_s(model, size, gb_s),
                name in whole or name in partial,
                size,
                present is not None and places.get(name) == present,
            )
        )
    return out


def _bytes(path: Path | None) -> int:
    try:
        return path.stat().st_size if path else 0
    except OSError:
        return 0


def _unknown(e: cache.CachedFile, taken: Mapping[str, Model]) -> Model:
    """A model for a file of the cache that is not in the registry, named by its file name where that is telling."""
    name = unquote(urlsplit(e.url).path.rsplit("/", 1)[-1]) if e.url else ""
    name = e.name if not name or name in taken else name
    return Model(name, (e.url,) if e.url else (), e.total or 0, path=None if e.url else e.path, family="in the cache")


def verdict(model: Model, context: int, available: int, sizes: Mapping[str, Sizes]) -> Fit:
    """Whether `model` fits, by the header of its file where we have seen it, else by the registry."""
    weights, context_bytes = sizes.get(model.name, (model.size, model.kv_bytes))
    context = min(context, model.context or context)
    return fit(weights, context_bytes(context), context, available)


def matching(rows: Iterable[Row], search: str) -> list[Row]:
    """The rows that have every word of `search`; where there is none, those with a name that has the letters of every
    word in their order."""
    rows, words = list(rows), search.casefold().split()
    found = [r for r in rows if all(w in r.words for w in words)]

    def like(row: Row) -> bool:
        names = (row.model.name, *row.model.aliases)
        return all(any(Matcher(w).match(n) > 0 for n in names) for w in words)

    return found or [r for r in rows if like(r)]


def sections(rows: Iterable[Row], search: str) -> list[tuple[str, list[Row]]]:
    """The rows that match `search`: what is here first, then what can be downloaded, the smaller first, by how it
    fits."""
    found: dict[str, list[Row]] = {name: [] for name in ("on this computer", "not complete", FITS, TIGHT, TOO_LARGE)}
    last = found["cannot run here"] = []
    for row in sorted(matching(rows, search), key=lambda r: r.size):
        if row.path:
            found["on this computer"].append(row)
        elif row.partial:
            found["not complete"].append(row)
        elif row.model.why_not:
            last.append(row)
        else:
            found[{"tight": TIGHT, "does not fit": TOO_LARGE}.get(row.fit.verdict, FITS)].append(row)
    return [(name, some) for name, some in found.items() if some]


def is_place(text: str) -> bool:
    """Whether the user is typing a URL or a path rather than searching."""
    text = text.strip()
    return bool(re.match(r"https?://|~?/|\.\.?/|~$", text, re.I)) or text.lower().endswith(".gguf")


def at_place(text: str, known: Iterable[Model]) -> list[Model]:
    """The models that a URL or path stands for: one, or the .gguf files of a folder. Raises TinychatError where there
    is none."""
    folder = expand(text.strip()).absolute()
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
    return Content(_line(["model", "quant", "params", "size", "context", "speed"], width))


def line(row: Row, width: int, job: Download | None = None) -> Content:
    """One row in `width` cells; a running or paused download takes the place of the right half."""
    m = row.model
    if (job and job.state in ("running", "paused")) or (not row.path and row.partial):
        return _progress(row, width, job)
    size = row.size_shown if row.path or not row.size_shown else f"↓ {row.size_shown}"
    last, bad = speed_shown(row), False
    if m.why_not:
        last, bad = "✗ unsupported", True
    elif job and job.state == "failed" and not row.path:
        last, bad = "✗ failed", True
    elif row.fit.verdict == "does not fit":
        last, bad = f"✗ {decimal(row.fit.needed)}", True
    text = _line([m.name, m.quant, params(m), size, tokens(m.context), last], width)
    if row.loaded:
        return Content.assemble(("●", "$accent"), text[1:])
    content = Content(text)
    return content.stylize("$text-error", len(text.rstrip()) - len(last)) if bad else content


def speed_shown(row: Row) -> str:
    """72.4 tok/s where it was measured, ~72.4 tok/s where it is predicted."""
    if row.speed:
        return f"{speed(row.speed)} tok/s"
    return f"~{speed(row.predicted)} tok/s" if row.predicted else ""


def explain(row: Row, job: Download | None, header_error: str | None) -> tuple[str, bool]:
    """The line below the list for one model, and whether it is about something that went wrong."""
    m = row.model
    if job and job.state == "failed" and not row.path:
        return f"{job.error} (enter tries again)", True
    if trouble := m.why_not or header_error:
        return trouble, True
    facts = ["loaded"] * row.loaded
    facts += [] if row.path or not row.size else [f"a download of {decimal(row.size)}"]
    facts.append(f"{_FIT_WORDS[row.fit.verdict]}: {row.fit.explanation}")
    facts += [f"context up to {m.context:,} tokens"] * bool(m.context)
    if row.speed:
        facts.append(f"{speed(row.speed)} tok/s measured here")
    elif row.predicted:
        facts.append(f"~{speed(row.predicted)} tok/s is what this machine's memory allows")
    return " · ".join(facts), False


_FIT_WORDS = {"fits": "memory", "tight": "tight", "does not fit": "does not fit", "unknown": "unknown"}


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
    name, quant, size_, bytes_, context, last = texts
    if width < _NARROW:
        return f" {cell(name, _name_width(width))} {cell(last if last.startswith('✗') else bytes_, 14, True)}"
    columns = [cell(quant, 10), cell(size_, 11), cell(bytes_, 11, True)]
    columns += [cell(context, 7, True)] if width >= _WIDE else []
    return f" {cell(name, _name_width(width))}  {' '.join([*columns, cell(last, 14, True)])}"


def _name_width(width: int) -> int:
    """The cells that the other columns leave to the name; the widest names need no more than 40."""
    return max(8, min(40, width - (61 if width >= _WIDE else 53 if width >= _NARROW else 16)))


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
    name, gap = _name_width(width), 2 if width >= _NARROW else 1
    start = 1 + name + gap
    bar = 20 if width >= _WIDE else 8 if width >= _NARROW else 0
    full = round(share * bar)
    head = f" {cell(row.model.name, name)}{' ' * gap}{mark} "
    tail = cell(f" {share:4.0%}  {text}", width - start - 2 - bar)
    line = Content(f"{head}{'━' * bar}{tail}").stylize("$foreground 20%", start + 2, start + 2 + bar)
    return line.stylize(style, start + 2, start + 2 + full)
