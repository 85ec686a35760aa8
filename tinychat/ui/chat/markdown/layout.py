"""Markdown blocks as lines of a given width: hanging indents, code. Pure functions on Textual's
Content."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from markdown_it.tree import SyntaxTreeNode
from pygments.token import Token
from textual.content import Content
from textual.highlight import HighlightTheme, highlight

from tinychat.ui.chat.markdown.formulas import formula_rows
from tinychat.ui.chat.markdown.tables import Table
from tinychat.ui.chat.markdown.text import Line, inline, wrapped

BULLETS = "•◦▪"
_LEADS = ("paragraph", "heading")  # between them and
_FOLLOWS = ("paragraph", "bullet_list", "ordered_list")  # is no blank line that the model has not written
LIVE_HIGHLIGHT = 3000  # characters: a longer open fence is coloured only when it closes
LONGEST_COLOURED = 2000  # characters of a line of code: folding it takes the square of its coloured words


class Colours(HighlightTheme):
    """Textual's, and those of a diff."""

    STYLES = {
        **HighlightTheme.STYLES,
        Token.Generic.Inserted: "$text-success",
        Token.Generic.Deleted: "$text-error",
    }


def lay_out(
    nodes: Sequence[SyntaxTreeNode], width: int, depth: int = 0, live: bool = False, above: Sequence[Line] = ()
) -> list[Line]:
    """The lines of sibling blocks behind those of the one `above`. `live`: the last of them may still grow, so nothing
    costly is done for it."""
    lines = [*above]
    for node in nodes:
        block = _block(node, max(width, 4), depth, live)
        if lines and block and _apart(node):
            lines.append(Line(Content("")))
        lines += block
    return lines


def _apart(node: SyntaxTreeNode) -> bool:
    previous = node.previous_sibling
    if previous is None or previous.type not in _LEADS or node.type not in _FOLLOWS:
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
            return Table(node).lines(width)
        case "formula_block":
            text = Content.styled(formula_rows(node.content, node.markup), ".md-em")
            return [line._replace(content=Content("  ") + line.content, gutter=2) for line in wrapped(text, width - 2)]
        case "hr":
            return [Line(Content.styled("─" * width, ".md-dim"))]
        case _:
            return wrapped(Content(node.content), width)


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
