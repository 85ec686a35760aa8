"""The heat strip: how often each expert of each layer was chosen lately, in characters that need no colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from tinychat.backend.instruments import ExpertCounts
from tinychat.ui.panel.figures import heading

if TYPE_CHECKING:
    import numpy as np

SHADES = (("·", ".dim"), ("░", ".dim"), ("▒", ".warm"), ("▓", ".warm"), ("█", ".hot"))
LEAST = 4  # rows, where there are that many layers


def strip(chosen: ExpertCounts, width: int, height: int) -> list[Content]:
    """Lines of `width` cells, at most `height` of them (but LEAST layers and the words are always there): layers from
    top to bottom, named by their number, experts from left to right; several share a row or a cell where there is not
    room for
    each."""
    lines = [heading("experts", width)]
    if not chosen.known:
        return [*lines, Content.styled("not available on this device", ".dim")]
    counts, tokens = chosen.counts, chosen.tokens
    layers, experts = counts.shape
    label = len(str(chosen.layers[-1]))
    per_cell = -(-experts // max(1, width - label - 1))
    per_row = -(-layers // max(min(LEAST, layers), height - 4))
    shares = _pooled(_pooled(counts / max(tokens, 1), per_row).T, per_cell).T
    most = float(shares.max())
    for row, layer in zip(shares.tolist(), chosen.layers[::per_row]):
        lines.append(Content.assemble((f"{layer:>{label}} ", ".dim"), *(SHADES[_level(share, most)] for share in row)))
    words = [f"{experts} experts, {chosen.used} chosen a token"]
    if per_row > 1 or per_cell > 1:
        words.append(f"a row {_some(per_row, 'layer')}, a cell {_some(per_cell, 'expert')}")
    words.append(
        f"{_some(tokens, 'token')}: · never ░▒▓█ to {most:.0%}" if tokens else "filled while an answer is written"
    )
    text = words[0]
    for more in words[1:]:
        text += (" · " if len(text.rpartition("\n")[2]) + len(more) + 3 <= width else "\n") + more
    return [*lines, *(Content.styled(line, ".dim") for line in text.split("\n"))]


def _some(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _pooled(values: np.ndarray, n: int) -> np.ndarray:
    """The means of every `n` rows; of fewer at the end."""
    import numpy as np  # which the engine has imported by now; before the first screen it would take 0.1 s

    starts = np.arange(0, len(values), n)
    return np.add.reduceat(values, starts) / np.minimum(n, len(values) - starts)[:, None]


def _level(share: float, most: float) -> int:
    """0 for never, 1 to 4 for the quarters up to the most chosen."""
    return min(4, int(4 * share / most) + 1) if share else 0
