"""Markdown blocks as lines of a given width: wrapping, hanging indents, tables, code. Pure functions on Textual's
Content."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from markdown_it.tree import SyntaxTreeNode
from pygments.token import Token
from rich.cells import cell_len
from textual.content import Content, Span
from textual.highlight import HighlightTheme, highlight
from textual.style import Style

from tinychat.ui.chat.markdown.formulas import formula_rows, formula_text

BULLETS = "•◦▪"
LIVE_HIGHLIGHT = 3000  # characters: a longer open fence is coloured only when it closes
LONGEST_COLOURED = 2000  # characters of a line of code: folding it takes the square of its coloured words
_MARKS = {"strong": ".md-strong", "em": ".md-em", "s": ".md-strike", "link": ".md-link"}


class Colours(HighlightTheme):
    """Textual's, and those of a diff."""

    STYLES = {
        **HighlightTheme.STYLES,
        Token.Generic.Inserted: "$text-success",
        Token.Generic.Deleted: "$text-error",
    }


class Line(NamedTuple):
    """One screen line. `code` is the whole code block when a click here copies it; `gutter` cells are not text; `joint`
    is what was between it and the line before, where the text was only wrapped: "" or a blank."""

    content: Content
    code: str | None = None
    gutter: int = 0
    joint: str | None = None


def lay_out(nodes: Sequence[SyntaxTreeNode], width: int, depth: int = 0, live: bool = False) -> list[Line]:
    """The lines of sibling blocks. `live`: the last of them may still grow, so nothing costly is done for it."""
    lines: list[Line] = []
    for node in nodes:
        block = _block(node, max(width, 4), depth, live)
        if lines and block and _apart(node):
            lines.append(Line(Content("")))
        lines += block
    return lines


def _apart(node: SyntaxTreeNode) -> bool:
    previous = node.previous_sibling
    if previous is None or previous.type != "paragraph" or node.type not in ("bullet_list", "ordered_list"):
        return True
    return not (node.map and previous.map and previous.map[1] == node.map[0])


def _block(node: SyntaxTreeNode, width: int, depth: int, live: bool) -> list[Line]:
    match node.type:
        case "paragraph":
            return wrapped(inline(node), width)
        case "heading":
            return [Line(line.stylize(f".md-{node.tag}")) for line in inline(node).wrap(width)]
        case "bullet_list":
            marker = BULLETS[depth % len(BULLETS)].rjust(2) + " "
            return [line for item in node.children for line in _item(item, marker, width, depth, live)]
        case "ordered_list":
            lines = []
            for item in node.children:
                lines += _item(item, f"{item.info}.".rjust(3) + " ", width, depth, live)
            return lines
        case "blockquote":
            bar = Content.styled("▎ ", ".md-dim")
            quoted = lay_out(node.children, width - 2, depth, live)
            return [
                line._replace(content=bar + line.content, gutter=line.gutter + 2 * (line.joint is not None))
                for line in quoted
            ]
        case "fence" | "code_block":
            return _code(node.content, node.info.strip(), width, live)
        case "table":
            return _table(node, width)
        case "formula_block":
            text = Content.styled(formula_rows(node.content, node.markup), ".md-em")
            return [line._replace(content=Content("  ") + line.content, gutter=2) for line in wrapped(text, width - 2)]
        case "hr":
            return [Line(Content.styled("─" * width, ".md-dim"))]
        case _:
            return wrapped(Content(node.content), width)


def wrapped(content: Content, width: int) -> list[Line]:
    width = max(width, 1)  # a terminal of a few columns leaves none for text
    lines: list[Line] = []
    for source in content.split("\n", allow_blank=True):
        text, at = source.plain, 0
        for number, line in enumerate(source.wrap(width)):
            start = max(at, text.find(line.plain.strip(), at))
            lines.append(Line(line, joint=(" " if start > at else "") if number else None))
            at = start + len(line.plain.strip())
    return lines


def _item(item: SyntaxTreeNode, marker: str, width: int, depth: int, live: bool) -> list[Line]:
    first, rest = Content.styled(marker, ".md-bullet"), Content(" " * len(marker))
    inner = lay_out(item.children, width - len(marker), depth + 1, live) or [Line(Content(""))]
    return [
        line._replace(
            content=(rest if i else first) + line.content,
            gutter=line.gutter + len(marker) if line.gutter or line.joint is not None else 0,
        )
        for i, line in enumerate(inner)
    ]


def inline(node: SyntaxTreeNode) -> Content:
    """The text of a paragraph, heading or cell with its marks; a line break of the model stays one."""
    text: list[str] = []
    spans: list[Span] = []
    position = 0

    def add(piece: str) -> None:
        nonlocal position
        text.append(piece)
        position += len(piece)

    def walk(child: SyntaxTreeNode) -> None:
        start = position
        match child.type:
            case "text":
                add(child.content)
            case "code_inline":
                add(child.content)
                spans.append(Span(start, position, ".md-code-inline"))
            case "formula":
                add(formula_text(child.content, child.markup))
                spans.append(Span(start, position, ".md-em"))
            case "softbreak" | "hardbreak":
                add("\n")
            case "image":
                add(f"[image: {child.content or child.attrs.get('src', '')}]")
                spans.append(Span(start, position, ".md-dim"))
            case _:
                if not child.children:
                    add(child.content)
                for grandchild in child.children:
                    walk(grandchild)
        if position > start and child.type in _MARKS:
            spans.append(Span(start, position, _MARKS[child.type]))
            if child.type == "link":
                spans.append(Span(start, position, Style.from_meta({"href": str(child.attrs.get("href", ""))})))

    for top in node.children:
        for child in top.children:
            walk(child)
    return Content("".join(text), spans=spans)


def _code(code: str, info: str, width: int, live: bool) -> list[Line]:
    code = code.rstrip("\n")
    language = info.split()[0] if info else ""
    label = Content(f" {language or 'code'}").truncate(max(width - 7, 1), ellipsis=True)
    copy = Content.assemble(" " * max(0, width - label.cell_length - 5), ("copy", ".md-copy"), " ")
    lines = [Line((label + copy).stylize(".md-code-head"), code)]
    if live and len(code) > LIVE_HIGHLIGHT:
        return lines + [line for text in code.split("\n") for line in _plain_code_line(text, width)]
    for source_line in _highlighted(code, language).split("\n", allow_blank=True):
        lines += _code_line(source_line, width)
    return lines


def _code_line(content: Content, width: int) -> list[Line]:
    """One line of code, folded, on the background of code."""
    folded = content.expand_tabs(4).fold(width - 4)
    padded = (Content.assemble("  ", line, " " * max(0, width - 2 - line.cell_length)) for line in folded)
    return [Line(line.stylize_before(".md-code"), gutter=2) for line in padded]


@lru_cache(maxsize=4096)
def _plain_code_line(text: str, width: int) -> tuple[Line, ...]:
    return tuple(_code_line(Content(text), width))


@lru_cache(maxsize=64)
def _highlighted(code: str, language: str) -> Content:
    if max(map(len, code.split("\n"))) > LONGEST_COLOURED or not code:
        return Content(code)
    return highlight(code, language=language or "text", theme=Colours)


def _table(node: SyntaxTreeNode, width: int) -> list[Line]:
    trs = [row for part in node.children for row in part.children]
    rows = [[(inline(cell), str(cell.attrs.get("style", ""))) for cell in row.children] for row in trs]
    words = [[max(map(cell_len, c.plain.split()), default=1) for c, _ in row] for row in rows]
    widths = _column_widths([[c.cell_length for c, _ in row] for row in rows], words, width)
    if not widths:
        return []
    if sum(widths) + 3 * (len(widths) - 1) > width:  # nothing of it is lost beyond the edge of the screen
        return [line for row in rows for line in wrapped(Content(" │ ").join(content for content, _ in row), width)]
    lines = []
    for number, row in enumerate(rows):
        cells = [_cell(content, w, style) for (content, style), w in zip(row, widths)]
        for i in range(max(len(c) for c in cells)):
            parts = [c[i] if i < len(c) else Content(" " * w) for c, w in zip(cells, widths)]
            line = Content.styled(" │ ", ".md-dim").join(parts)
            lines.append(Line(line.stylize_before(".md-strong") if number == 0 else line))
        if number == 0:
            lines.append(Line(Content.styled("─┼─".join("─" * w for w in widths), ".md-dim")))
    return lines


def _cell(content: Content, width: int, style: str) -> list[Content]:
    out = []
    for line in content.wrap(width):
        free = max(0, width - line.cell_length)
        left = free if "right" in style else free // 2 if "center" in style else 0
        out.append(line.pad(left, free - left))
    return out or [Content(" " * width)]


def _column_widths(cells: list[list[int]], words: list[list[int]], width: int) -> list[int]:
    """Widths of the columns so that the table fits `width`: the widest ones give first, and words are broken only
    where there is no other way. `words` are the lengths of the longest word of each cell."""
    columns = max((len(row) for row in cells), default=0)

    def widest(lengths: list[list[int]]) -> list[int]:
        return [max(max((row[c] for row in lengths if c < len(row)), default=1), 1) for c in range(columns)]

    room = width - 3 * (columns - 1)
    return _narrowed(_narrowed(widest(cells), widest(words), room), [3] * columns, room)


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
