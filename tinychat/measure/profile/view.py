"""The report for people, in seven parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tinychat.errors import printable
from tinychat.kernels.profile import ONE_BY_ONE
from tinychat.measure.profile.flags import NOTABLE, SLOW
from tinychat.measure.profile.report import Report, Row

TOP = 12
BAR = 24


def view(r: Report) -> RenderableType:
    """All of the report, safe for a terminal (models name themselves)."""
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
        _head("6", "steady state (measured as a whole, without clocks)"),
        _batches(r),
        _head("7", "files, and how to look deeper"),
        _lines([*r.files, *r.deeper]),
        *((_head("!", "red flags"), _flags(r)) if r.flags else (Text("\nno red flags"),)),
    )


def times(seconds: float) -> str:
    """1.234 ms, 12.3 µs: three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} µs"


def bar(share: float, width: int = BAR) -> str:
    """A bar of `share` of `width` cells."""
    return "█" * round(min(1.0, max(0.0, share)) * width)


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text, newlines=False), style=style)


def _head(number: str, title: str) -> Text:
    return Text.assemble((f"\n{number} ", "bold cyan"), (printable(title, newlines=False), "bold"))


def _lines(lines: Iterable[str]) -> RenderableType:
    return Padding(Group(*map(_text, lines)), (0, 0, 0, 2))


def _speed(r: Report) -> RenderableType:
    limit = f" · {r.limit_share:.0%} of the memory limit of {r.limit_gb_s:.1f} GB/s" if r.limit_gb_s else ""
    lines = [
        f"{r.tok_s:,.1f} tok/s · {times(r.token_s)} a token (median of {r.steps}; "
        f"{times(r.fastest_s)} to {times(r.slowest_s)}) "
        f"at depth {r.depth}",
        f"{r.bytes_per_token / 1e6:,.1f} MB to read per token · {r.gb_s:.1f} GB/s{limit}",
    ]
    if r.how == "in the batch":
        lines.append(f"explained: {r.explained:.1%} of the measured time · the clocks cost {r.clocks:+.1%}")
    else:
        alone = sum(row.seconds for row in r.rows)
        why = "launches and the host" if alone < r.token_s else "what running in a row saves: overlap and warm caches"
        lines.append(
            f"kernels alone add up to {times(alone)}, {r.explained:.0%} of the token as a whole; "
            f"the difference of {times(abs(r.token_s - alone))} is {why}"
        )
    return _lines(lines)


def _kernels(r: Report) -> RenderableType:
    word = "ops" if r.how == "in the batch" else "kernels"
    many = f"in {len(r.batches)} batch{'es' * (len(r.batches) != 1)}"
    batches = many if any(b["name"] != ONE_BY_ONE for b in r.batches) else ONE_BY_ONE
    lines = [f"{r.kernels:,} {word} {batches} · {times(r.overhead_s)} per {word[:-1]} while none works (derived)"]
    if r.threads > 1:
        lines.append("waiting at barriers: " + ", ".join(f"thread {i} {w:.1%}" for i, w in enumerate(r.waits)))
    return _lines(lines)


def _caches(r: Report) -> RenderableType:
    def told(count: int | None, one: str, many: str) -> str:
        return f"{many} not measured" if count is None else f"{count:,} {one if count == 1 else many}"

    lines = []
    for c in r.caches:
        took = "time not measured" if c["seconds"] is None else times(c["seconds"])
        parts = f"{told(c['hits'], 'hit', 'hits')}, {told(c['misses'], 'miss', 'misses')}", took, c["place"]
        lines.append(f"{c['name']}: {' · '.join(filter(None, parts))}")
    steps = "the first step" if len(r.first_s) == 1 else f"the first {len(r.first_s)} steps"
    lines.append(f"{steps} took {', '.join(map(times, r.first_s))}; {times(r.token_s)} is the steady state")
    return _lines(lines)


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 1, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="right" if i in right else "left", overflow="fold", no_wrap=i in right or column == "op"
        )
    return table


def _rows(rows: Sequence[Row], r: Report) -> RenderableType:
    first = "op" if r.how == "in the batch" else "kernel"
    table = _table(
        first, "shape", "type", "calls", "time", "share", "a call", "MB", "GB/s", "limit", right=range(3, 10)
    )
    for row in rows:
        name = row.name if row.op in ("", row.name) else f"{row.name} ({row.op})"
        slow = row.nbytes and row.limit_share and row.limit_share < SLOW and row.share >= NOTABLE
        cells = [name, row.shape, row.quant, f"{row.calls:,}", times(row.seconds), f"{row.share:.1%}"]
        cells.append(times(row.seconds / row.calls))
        if row.nbytes:
            cells += [
                f"{row.nbytes / 1e6:,.1f}",
                f"{row.gb_s:.1f}",
                f"{row.limit_share:.0%}" if row.limit_share else "–",
            ]
        table.add_row(*(_text(cell, "red" if slow else "") for cell in cells))
    return Padding(table, (0, 0, 0, 2))


def _by_calls(r: Report) -> Iterable[RenderableType]:
    most = sorted(r.rows, key=lambda row: -row.calls)[:5]
    if len(r.rows) > 5:
        yield _lines(["by calls: " + ", ".join(f"{row.name} {row.calls:,}" for row in most)])


def _categories(r: Report) -> RenderableType:
    table = _table("", "time", "share", "", right=(1, 2))
    whole = sum(r.categories.values())
    for name, seconds in r.categories.items():
        table.add_row(_text(name), times(seconds), f"{seconds / whole:.1%}", Text(bar(seconds / whole), "cyan"))
    table.show_header = False
    return Padding(table, (0, 0, 0, 2))


def _batches(r: Report) -> RenderableType:
    return _lines(f"{b['name']}: {b['kernels']:,} kernels, {times(b['seconds'])} ±{b['spread']:.0%}" for b in r.batches)


def _flags(r: Report) -> RenderableType:
    lines = [Text.assemble((f"{flag.kind}: ", "bold red"), printable(flag.text, newlines=False)) for flag in r.flags]
    return Padding(Group(*lines), (0, 0, 0, 2))
