"""Tables as lines of a given width. A long one may come in parts, which are laid out with the columns of them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markdown_it.tree import SyntaxTreeNode
from rich.cells import cell_len
from textual.content import Content

from tinychat.ui.chat.markdown.text import Line, inline, wrapped


class Columns(NamedTuple):
    """What the widths of columns depend on: the cells that the widest text of each takes, and its longest word."""

    texts: tuple[int, ...] = ()
    words: tuple[int, ...] = ()

    def joined(self, other: Columns) -> Columns:
        """Those of two parts of a table."""
        return Columns(_widest((self.texts, other.texts)), _widest((self.words, other.words)))

    def widths(self, width: int) -> list[int]:
        """Widths of the columns so that the table fits `width`: the widest ones give first, and words are broken only
        where there is no other way."""
        room = width - 3 * (len(self.texts) - 1)
        return _narrowed(_narrowed(list(self.texts), list(self.words), room), [3] * len(self.texts), room)


class Table:
    """The rows of `node`; of a `part` all but the first, which repeats the head of the table."""

    def __init__(self, node: SyntaxTreeNode, part: bool = False) -> None:
        rows = [[(inline(cell), str(cell.attrs.get("style", ""))) for cell in tr.children] for tr in _rows(node)]
        self.columns = Columns(
            _widest([[content.cell_length for content, _ in row] for row in rows]),
            _widest([[max(map(cell_len, content.plain.split()), default=1) for content, _ in row] for row in rows]),
        )
        self._head, self._rows = ([], rows[1:]) if part else (rows[:1], rows[1:])

    def lines(self, width: int, columns: Columns | None = None) -> list[Line]:
        """Its lines, with the `columns` of the whole table where this is a part of it."""
        widths = (columns or self.columns).widths(width)
        if not widths:
            return []
        if sum(widths) + 3 * (len(widths) - 1) > width:  # nothing of it is lost beyond the edge of the screen
            rows = (Content(" │ ").join(content for content, _ in row) for row in (*self._head, *self._rows))
            return [line for row in rows for line in wrapped(row, width)]
        lines = [Line(line.stylize_before(".md-strong")) for row in self._head for line in _row(row, widths)]
        if self._head:
            lines.append(Line(Content.styled("─┼─".join("─" * w for w in widths), ".md-dim")))
        return lines + [Line(line) for row in self._rows for line in _row(row, widths)]


def _rows(node: SyntaxTreeNode) -> list[SyntaxTreeNode]:
    return [row for part in node.children for row in part.children]


def _row(row: Sequence[tuple[Content, str]], widths: Sequence[int]) -> list[Content]:
    cells = [_cell(content, w, style) for (content, style), w in zip(row, widths)]
    bar, blank = Content.styled(" │ ", ".md-dim"), [Content(" " * w) for w in widths]
    height = max(map(len, cells))
    return [bar.join(c[i] if i < len(c) else empty for c, empty in zip(cells, blank)) for i in range(height)]


def _cell(content: Content, width: int, style: str) -> list[Content]:
    out = []
    for line in content.wrap(width):
        free = max(0, width - line.cell_length)
        left = free if "right" in style else free // 2 if "center" in style else 0
        out.append(line.pad(left, free - left))
    return out or [Content(" " * width)]


def _widest(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The largest number of each column, at least 1; a row may lack the last columns."""
    columns = max(map(len, rows), default=0)
    return tuple(max(1, *(row[c] for row in rows if c < len(row))) for c in range(columns))


def _narrowed(widths: list[int], least: list[int], room: int) -> list[int]:
    """`widths` that add up to at most `room`, none below its `least`, where that can be."""
    low, high = 0, max(widths, default=0)

    def cut(limit: int) -> list[int]:
        return [min(w, max(limit, m)) for w, m in zip(widths, least)]

    if sum(widths) <= room:
        return widths
    while low < high:  # the largest limit with which they fit
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(cut(middle)) <= room else (low, middle - 1)
    narrow = cut(low)
    left = room - sum(narrow)  # by the rounding
    for i in range(len(narrow)):
        if left > 0 and narrow[i] < widths[i]:
            narrow[i], left = narrow[i] + 1, left - 1
    return narrow
