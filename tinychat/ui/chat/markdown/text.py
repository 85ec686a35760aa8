"""A run of text as Textual's Content, and its lines on the screen."""

from __future__ import annotations

from typing import NamedTuple

from markdown_it.tree import SyntaxTreeNode
from textual.content import Content, Span
from textual.style import Style

from tinychat.ui.chat.markdown.formulas import formula_text

_MARKS = {"strong": ".md-strong", "em": ".md-em", "s": ".md-strike", "link": ".md-link"}


class Line(NamedTuple):
    """One screen line. `code` is the whole code block when a click here copies it; `gutter` cells are not text; `joint`
    is what was between it and the line before, where the text was only wrapped: "" or a blank."""

    content: Content
    code: str | None = None
    gutter: int = 0
    joint: str | None = None


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
