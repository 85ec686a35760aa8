"""Results of measurements as tables, for terminals and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType

from tinychat.console import grids
from tinychat.errors import printable
from tinychat.measure.results import ModelResult, PartResult
from tinychat.units import short_time

_WORDS = ("date", "model", "quant", "device")  # columns aligned left; numbers are aligned right
COLUMNS = (*_WORDS, "prompt+gen", "prefill tok/s", "decode tok/s", "TTFT s", "GB/s", "limit", "version")


def row(r: ModelResult) -> tuple[str, ...]:
    """One result as the texts of COLUMNS; safe for a terminal."""
    spread = f" ±{r.spread:.0%}" if len(r.decode_runs) > 1 else ""
    more = f" · speculate {r.speculate}: {r.tokens_per_step:.2f} tokens a step" if r.speculate != "off" else ""
    words = r.date[:16].replace("T", " "), r.model, r.quant, r.device + more
    numbers = f"{r.prefill_tok_s:,.1f}", f"{r.decode_tok_s:,.1f}{spread}", f"{r.ttft_s:.2f}", f"{r.gb_s:,.1f}"
    cells = *words, f"{r.n_prompt}+{r.n_gen}", *numbers, _limit(r), r.versions.get("tinychat", "?")
    return tuple(printable(cell, newlines=False) for cell in cells)


def markdown_row(r: ModelResult) -> str:
    """One result as a row of a Markdown table."""
    return _markdown(row(r))


def markdown_table(results: Sequence[ModelResult]) -> str:
    """Results as a Markdown table with its head."""
    head = [_markdown(COLUMNS), _markdown(["---" if c in _WORDS else "---:" for c in COLUMNS])]
    return "\n".join([*head, *map(markdown_row, results)]) + "\n"


def model_table(results: Iterable[ModelResult]) -> RenderableType:
    """Results of models for a terminal of 80 columns, grouped by the conditions of the measurement."""
    rows = []
    for r in results:
        cells = dict(zip(COLUMNS, row(r)))
        title = f"{cells['device']} · tinychat {cells['version']} · prefill and decode in tok/s"
        shown = (cells["date"][2:], *(cells[c] for c in COLUMNS if c not in ("date", "device", "version")))
        rows.append((title, shown))
    head = ("date", "model", "type", "tokens", "prefill", "decode", "TTFT s", "GB/s", "limit")
    return grids(rows, head, right=(3, 4, 5, 6, 7, 8))


def synthetic_line(r: ModelResult, mtp: bool) -> str:
    """What a measurement with synthetic drafts says, and what it does not."""
    source = "of the model's multi-token prediction, which was run" if mtp else "that cost nothing to make"
    gain = r.decode_tok_s / r.single_tok_s if r.single_tok_s else 0.0
    worth = f"break-even at {r.break_even:.0%}" if r.break_even <= 1 else "no acceptance breaks even"
    return (
        f"SYNTHETIC acceptance: the drafts were made from the known answer, {r.speculate.removeprefix('SYNTHETIC ')} "
        f"right, in place of drafts {source}; this is not what the model reaches. {gain:.2f}× its single steps of "
        f"{r.single_tok_s:,.1f} tok/s; {worth}"
    )


def part_table(results: Iterable[PartResult]) -> RenderableType:
    """Results of kernels and layers for a terminal of 80 columns, grouped by the conditions of the measurement."""
    rows = []
    for r in results:
        title = " · ".join(filter(None, (r.model, r.device, f"tinychat {r.versions.get('tinychat', '?')}")))
        numbers = short_time(r.seconds), _span(r.low, r.high), f"{r.nbytes / 1e6:,.2f}", f"{r.gb_s:,.1f}", _limit(r)
        rows.append((title, (r.date[2:16].replace("T", " "), r.what, r.quant, *numbers)))
    head = ("date", "what", "type", "a call", "quartiles", "MB", "GB/s", "limit")
    return grids(rows, head, right=(3, 4, 5, 6, 7))


def _limit(r: ModelResult | PartResult) -> str:
    return f"{r.limit_share:.0%}" if r.limit_share else "–"


def _span(low: float, high: float) -> str:
    """30.2–42 µs."""
    first, last = short_time(low).split(), short_time(high).split()
    return f"{first[0]}–{' '.join(last)}" if first[1] == last[1] else f"{' '.join(first)}–{' '.join(last)}"


def _markdown(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells) + " |"
