"""Formats numbers with their units for screens, tables and reports."""

from __future__ import annotations

_EIGHTHS = "▏▎▍▌▋▊▉"


def speed(tok_s: float) -> str:
    """72.4, 812, 0.35: about three digits."""
    return f"{tok_s:,.0f}" if tok_s >= 100 else f"{tok_s:.1f}" if tok_s >= 1 else f"{tok_s:.2f}"


def short_time(seconds: float) -> str:
    """1.23 ms, 12.3 µs: three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} µs"


def parameter_count(n: float) -> str:
    """30B, 3.6B, 362M."""
    return f"{n / 1e9:.2g}B" if n >= 1e9 else f"{n / 1e6:.0f}M"


def parameter_counts(total: float, active: float) -> str:
    """30B (3.6B active): all parameters, and those that one token uses where that is fewer; "" for 0."""
    if not total:
        return ""
    return parameter_count(total) + (f" ({parameter_count(active)} active)" if 0 < active < total else "")


def bar(share: float, width: int) -> str:
    """`share` (0 to 1) of `width` cells, in eighths of a cell: "███▌"."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8 - 1] if eighths % 8 else "")


def track(share: float, width: int) -> str:
    """`share` (0 to 1) of a track of `width` cells: "▓▓▓░░"; a share above 0 fills at least one cell."""
    full = min(width, max(round(share * width), 1 if share > 0 else 0))
    return "▓" * full + "░" * (width - full)
