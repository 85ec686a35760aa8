"""The profile as text, in seven parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tinychat.errors import printable
from tinychat.kernels.profile import ONE_BY_ONE
from tinychat.measure.profile.flags import NOTABLE, SLOW
from tinychat.measure.profile.report import OpTime, Profile
from tinychat.units import bar, short_time

TOP = 12
BAR = 24


def view(r: Profile) -> RenderableType:
    """The whole report, with control characters in names escaped (they come from model files)."""
    return Group(
        _head("1", f"{r.model} on {r.device}"),
        _speed(r),
        _head("2", "kernels per token"),
        _kernels(r),
        _head("3", "schedule and compile caches (since the model was loaded)"),
        _caches(r),
        _head("4", f"top {'ops' if r.how == 'in the batch' else 'kernels'} by time (measured {r.how})"),
        _rows(r.rows[:TOP], r),
        *_by_calls(r),
        _head("5", "categories (seconds of work, waiting apart)"),
        _categories(r),
        _head("6", "steady state (complete steps, without clocks)"),
        _batches(r),
        _head("7", "files, and how to look deeper"),
        _lines([*r.files, *r.deeper]),
        *((_head("!", "red flags"), _flags(r)) if r.flags else (Text("\nno red flags"),)),
    )


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text, newlines=False), style=style)


def _head(number: str, title: str) -> Text:
    return Text.assemble((f"\n{number} ", "bold cyan"), (printable(title, newlines=False), "bold"))


def _lines(lines: Iterable[str]) -> RenderableType:
    return Padding(Group(*map(_text, lines)), (0, 0, 0, 2))


def _speed(r: Profile) -> RenderableType:
    limit = f" · {r.limit_share:.0%} of the memory limit of {r.limit_gb_s:.1f} GB/s" if r.limit_gb_s else ""
    lines = [
        f"{r.tok_s:,.1f} tok/s · {short_time(r.token_s)} a token (median of {r.steps}; "
        f"{short_time(r.fastest_s)} to {short_time(r.slowest_s)}) "
        f"at depth {r.depth}",
        f"{r.bytes_per_token / 1e6:,.1f} MB to read per token · {r.gb_s:.1f} GB/s{limit}",
    ]
    if r.how == "in the batch":
        lines.append(f"explained: {r.explained:.1%} of the measured time · measuring adds {r.clocks:+.1%}")
    else:
        alone = sum(row.seconds for row in r.rows)
        why = "launches and the host" if alone < r.token_s else "what running in a row saves: overlap and warm caches"
        lines.append(
            f"kernels alone add up to {short_time(alone)}, {r.explained:.0%} of a complete token; "
            f"the difference of {short_time(abs(r.token_s - alone))} is {why}"
        )
    return _lines(lines)


def _kernels(r: Profile) -> RenderableType:
    word = "ops" if r.how == "in the batch" else "kernels"
    many = f"in {len(r.batches)} batch{'es' * (len(r.batches) != 1)}"
    batches = many if any(b["name"] != ONE_BY_ONE for b in r.batches) else ONE_BY_ONE
    lines = [f"{r.kernels:,} {word} {batches} · {short_time(r.overhead_s)} of idle device per {word[:-1]} (derived)"]
    if r.threads > 1:
        lines.append("waiting at barriers: " + ", ".join(f"thread {i} {w:.1%}" for i, w in enumerate(r.waits)))
    return _lines(lines)


def _caches(r: Profile) -> RenderableType:
    def told(count: int | None, one: str, many: str) -> str:
        return f"{many} not measured" if count is None else f"{count:,} {one if count == 1 else many}"

    lines = []
    for c in r.caches:
        took = "time not measured" if c["seconds"] is None else short_time(c["seconds"])
        parts = f"{told(c['hits'], 'hit', 'hits')}, {told(c['misses'], 'miss', 'misses')}", took, c["place"]
        lines.append(f"{c['name']}: {' · '.join(filter(None, parts))}")
    steps = "the first step" if len(r.first_s) == 1 else f"the first {len(r.first_s)} steps"
    lines.append(f"{steps} took {', '.join(map(short_time, r.first_s))}; {short_time(r.token_s)} is the steady state")
    return _lines(lines)


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="right" if i in right else "left", overflow="fold", no_wrap=i in right or column == "op"
        )
    return table


def _rows(rows: Sequence[OpTime], r: Profile) -> RenderableType:
    first = "op" if r.how == "in the batch" else "kernel"
    table = _table(
        first, "shape", "type", "calls", "time", "share", "a call", "MB", "GB/s", "limit", right=range(3, 10)
    )
    for row in rows:
        name = row.name if row.op in ("", row.name) else f"{row.name} ({row.op})"
        slow = row.nbytes and row.limit_share and row.limit_share < SLOW and row.share >= NOTABLE
        cells = [name, row.shape, row.quant, f"{row.calls:,}", short_time(row.seconds), f"{row.share:.1%}"]
        cells.append(short_time(row.seconds / row.calls))
        if row.nbytes:
            cells += [
                f"{row.nbytes / 1e6:,.1f}",
                f"{row.gb_s:.1f}",
                f"{row.limit_share:.0%}" if row.limit_share else "–",
            ]
        table.add_row(*(_text(cell, "red" if slow else "") for cell in cells))
    return Padding(table, (0, 0, 0, 2))


def _by_calls(r: Profile) -> Iterable[RenderableType]:
    most = sorted(r.rows, key=lambda row: -row.calls)[:5]
    if len(r.rows) > 5:
        yield _lines(["by calls: " + ", ".join(f"{row.name} {row.calls:,}" for row in most)])


def _categories(r: Profile) -> RenderableType:
    table = _table("", "time", "share", "", right=(1, 2))
    total = sum(r.categories.values())
    for name, seconds in r.categories.items():
        table.add_row(
            _text(name), short_time(seconds), f"{seconds / total:.1%}", Text(bar(seconds / total, BAR), "cyan")
        )
    table.show_header = False
    return Padding(table, (0, 0, 0, 2))


def _batches(r: Profile) -> RenderableType:
    return _lines(
        f"{b['name']}: {b['kernels']:,} kernels, {short_time(b['seconds'])} ±{b['spread']:.0%}" for b in r.batches
    )


def _flags(r: Profile) -> RenderableType:
    lines = [Text.assemble((f"{flag.kind}: ", "bold red"), printable(flag.text, newlines=False)) for flag in r.flags]
    return Padding(Group(*lines), (0, 0, 0, 2))
