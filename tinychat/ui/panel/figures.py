"""Figures as text: numbers, bars and rows of a given width. Every bar can be read without colour."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal
from textual.content import Content

from tinychat.backend.protocol import Prefilling, Stats, Usage
from tinychat.errors import printable
from tinychat.ui.panel.reading import Reading
from tinychat.units import speed, track

BLOCKS = "▁▂▃▄▅▆▇█"
PARTS = (
    ("system", "█"),
    ("history", "▓"),
    ("thinking", "▒"),
    ("tools", "▄"),
    ("answer", "▞"),
    ("free", "░"),
)  # of the context


def seconds(s: float) -> str:
    """0.41 s, 12 s, 3:05."""
    if s >= 60:
        return f"{int(s) // 60}:{int(s) % 60:02}"
    return f"{s:.2f} s" if s < 1 else f"{s:.1f} s" if s < 10 else f"{s:.0f} s"


def size(n: float) -> str:
    """18.3 GB, 54.0 MB."""
    return str(decimal(int(n)))


def spark(values: Sequence[float], width: int) -> str:
    """The last `width` values as a line of blocks on a scale from 0 to their largest."""
    values = values[-width:]
    top = max(values, default=0.0)
    if top <= 0:
        return ""
    return "".join(BLOCKS[min(7, int(v / top * 7.99))] for v in values)


def row(label: str, value: str, width: int) -> Content:
    """The label on the left, dimmed, the value on the right."""
    gap = max(1, width - len(label) - len(value))
    return Content.assemble((label, ".dim"), " " * gap, value)


def heading(text: str, width: int) -> Content:
    """text ─────"""
    return Content.assemble((f"{text} ", ".head"), ("─" * max(0, width - len(text) - 1), ".rule"))


def context_bar(usage: Usage, width: int) -> Content:
    """The context as one bar; every part that is there gets at least one cell, and free what is left."""
    sizes = [getattr(usage, name) for name, _ in PARTS[:-1]]
    cells = [max(round(n / max(usage.limit, 1) * width), 1) if n else 0 for n in sizes]
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    parts = [(char * n, f".{name}") for (name, char), n in zip(PARTS, [*cells, width - sum(cells)])]
    return Content.assemble(*parts)


def context_rows(usage: Usage, width: int, short: bool = False) -> list[Content]:
    """The meter; with its legend unless `short`."""
    share = f"{usage.used / usage.limit:.0%}" if usage.limit else ""
    lines = [context_bar(usage, width), row(f"{usage.used:,} of {usage.limit:,}", share, width)]
    for name, char in () if short else PARTS:
        if name == "tools" and not usage.tools:
            continue
        value = f"{getattr(usage, name):,}"
        gap = " " * max(1, width - 2 - len(name) - len(value))
        lines.append(Content.assemble((char, f".{name}"), " ", (name, ".dim"), gap, value))
    return lines


def now(r: Reading, width: int) -> list[Content]:
    """The engine's present phase, in two lines. The speed of an answer that has ended is in its footer."""
    if r.loading is not None:
        return [Content.assemble((r.loading.stage, ".big")), Content(track(r.loading.fraction, width))]
    s = r.stats
    if s is None:
        return [Content.styled("no model", ".dim"), Content("")]
    if r.prefill is not None and s.phase != "decode":
        return [Content.styled("reading the prompt", ".big"), Content(track(progress(r.prefill), width))]
    chart = Content.styled(spark(r.speeds, width), ".spark")
    if s.phase == "decode" and s.generated_tokens:
        return [Content.styled(f"{speed(s.last_tok_s or s.decode_tok_s)} tok/s", ".big"), chart]
    return [Content.styled("ready", ".big"), chart]


def progress(p: Prefilling) -> float:
    """How much of a prompt is read, 0 to 1."""
    return p.done / max(p.total, 1)


def awaited(prefill: Prefilling | None, stats: Stats | None) -> str:
    """What an answer that has not begun waits for: "reading the prompt, 512 of 1,400 tokens · 1.1 s left"."""
    if prefill is None or stats is None or prefill.done >= prefill.total:
        return "waiting for the first token" if prefill else "waiting for the model"
    rate = stats.prefill_tok_s
    left = f" · {seconds((prefill.total - prefill.done) / rate)} left" if rate > 0 and prefill.done else ""
    return f"reading the prompt, {prefill.done:,} of {prefill.total:,} tokens{left}"


def speed_rows(r: Reading, width: int) -> list[Content]:
    s = r.stats
    if s is None:
        return []
    rows = [
        row("per token", f"{1000 / s.decode_tok_s:.1f} ms" if s.decode_tok_s else "–", width),
        row("painted", f"{speed(r.painted)} tok/s" if r.painted else "–", width),
        row("prefill", f"{speed(s.prefill_tok_s)} tok/s" if s.prefill_tok_s else "–", width),
    ]
    if s.drafted_tokens or s.forced_tokens:
        per_step = s.generated_tokens / max(1, s.decode_steps)
        rows.append(row("per step", f"{per_step:.2f} tokens, {s.speculation_gain:.1f}×", width))
        drafted, accepted = s.drafted_tokens - s.mtp_drafted_tokens, s.accepted_tokens - s.mtp_accepted_tokens
        sources = [f"{accepted:,} of {drafted:,}"] * bool(drafted)
        sources += [f"{s.forced_tokens:,} forced"] * bool(s.forced_tokens)
        if sources:
            rows.append(row("drafts", ", ".join(sources), width))
        if s.mtp_drafted_tokens:
            rows.append(row("mtp", f"{s.mtp_accepted_tokens:,} of {s.mtp_drafted_tokens:,}", width))
    return rows


def time_rows(r: Reading, width: int) -> list[Content]:
    """Of the last answer, or the one that is being written."""
    s = r.stats
    if s is None or not s.ttft_s:
        return []
    return [
        row("to first token", seconds(s.ttft_s), width),
        row("whole answer", seconds(s.ttft_s + s.decode_s), width),
    ]


def machine_rows(r: Reading, width: int) -> list[Content]:
    s, info = r.stats, r.info
    if s is None or info is None:
        return []
    rows = [Content(printable(info.device, newlines=False)).truncate(width, ellipsis=True)]
    if not _told(r):
        hidden = "kernels, memory" + ("" if info.max_context else ", context size")
        return [*rows, Content.styled("this server does not tell:", ".dim"), Content.styled(hidden, ".dim")]
    kernels = f"{s.kernels_per_token:,}/token" if s.kernels_per_token else "–"
    batches = f" in {s.jit_batches}" if s.jit_batches > 1 else ""
    rows.append(row("kernels", kernels + batches, width))
    if s.jit_state:
        rows.append(row("state", s.jit_state, width))
    limit = f" of {s.limit_gb_s:.1f}" if s.limit_gb_s else ""
    rows.append(row("reads", f"{s.gb_s:.1f}{limit} GB/s" if s.gb_s else "–", width))
    if s.limit_gb_s:
        share = f" {share_of_limit(s)} of limit"
        rows.append(Content.assemble((track(min(s.limit_share, 1), width - len(share)), ".spark"), share))
    return rows


def share_of_limit(s: Stats) -> str:
    """81%; more than all of it says that the limit was measured while other programs read memory, or that weights
    stay in the caches."""
    return f"{s.limit_share:.0%}" if s.limit_share <= 1 else "over 100%"


def _told(r: Reading) -> bool:
    """Whether the engine's own figures are known: it runs here, or behind a server of ours."""
    return r.info is None or r.info.can.instruments or bool(r.stats and r.stats.weight_bytes)


def memory_rows(r: Reading, width: int, short: bool = False) -> list[Content]:
    s = r.stats
    if s is None or not _told(r):
        return []
    rows = [row("weights", size(s.weight_bytes), width), row("KV cache", size(s.kv_bytes), width)]
    return rows if short else [*rows, row("process", size(s.rss_bytes), width)]


def activity(r: Reading) -> Content:
    """The engine's present phase in one line, where there is no room for the panel."""
    if r.loading is not None:
        return Content.assemble(f"{r.loading.stage} ", (track(r.loading.fraction, 10), ".spark"))
    s = r.stats
    if s is None or s.phase != "decode" or not s.generated_tokens:
        return Content("")
    chart = (spark(r.speeds, 8), ".spark")
    return Content.assemble(chart, (f" {speed(s.last_tok_s or s.decode_tok_s)} tok/s", ".now"))
