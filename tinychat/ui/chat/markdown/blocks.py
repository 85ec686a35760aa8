"""Splits growing Markdown into blocks that are done and one that still grows, so that only the last is laid out
again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode

from tinychat.ui.chat.markdown.formulas import formulas

PARSER = MarkdownIt("gfm-like", {"html": False})  # html off: `List<int>` and <think> are text
formulas(PARSER)
LONG = 4000  # characters of a block from which on its end is looked for when it has grown by an eighth, not a line
_SPACED = ("heading", "fence", "code_block", "table", "hr", "blockquote", "formula_block")


class Block:
    """One top-level block, or one item of a top-level list: its source (with the blank lines after it) and syntax
    tree."""

    def __init__(self, source: str, references: dict[str, object] | None = None) -> None:
        self.source = source
        tokens = PARSER.parse(source, {"references": dict(references or {})})
        self.nodes: Sequence[SyntaxTreeNode] = SyntaxTreeNode(tokens).children
        self.kind = self.nodes[0].type if self.nodes else ""

    def gap_before(self, previous: Block | None) -> int:
        """Blank lines between `previous` and this block."""
        if previous is None or not previous.kind:
            return 0
        spaced = self.kind in _SPACED or previous.kind in _SPACED[1:]
        return int(spaced or previous.source.endswith("\n\n") or not previous.source.rstrip(" \t").endswith("\n"))


def split_lines(text: str) -> list[str]:
    """Lines with their ends, split where the parser splits (str.splitlines knows more separators)."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def starts(tokens: Sequence[Token]) -> list[int]:
    """First lines of the blocks in `tokens`, ascending, the first of them 0 (what defines nothing belongs to a
    neighbour)."""
    found = []
    for token in tokens:
        if token.map is None or token.nesting < 0:
            continue
        if (token.level == 0 and not token.type.endswith("_list_open")) or (
            token.level == 1 and token.type == "list_item_open"
        ):
            found.append(token.map[0])
    return [0, *found[1:]] if found else [0]


class Splitter:
    """`feed` text; `done` blocks never change again, `tail` is the rest of the source (its block may still change).

    A block is done when a complete line starts another one after it.
    """

    def __init__(self) -> None:
        self.done: list[Block] = []
        self.tail = ""
        self._looked = 0  # characters of the tail that have no end of a block

    @property
    def source(self) -> str:
        return "".join(b.source for b in self.done) + self.tail

    def feed(self, text: str) -> int:
        """Takes `text`; returns how many blocks became done."""
        self.tail += text
        complete = self.tail.rfind("\n") + 1
        goes_on = LONG < complete < self._looked * 9 / 8
        if "\n" not in text or goes_on or in_open_fence(self.tail[:complete]):
            return 0
        lines = split_lines(self.tail[:complete])
        begins = starts(PARSER.parse("".join(lines)))
        for first, end in pairwise(begins):
            self.done.append(Block("".join(lines[first:end])))
        last = "".join(lines[begins[-1] :])
        self.tail, self._looked = last + self.tail[complete:], len(last)
        return len(begins) - 1

    def finish(self) -> int:
        """Makes everything done, exactly as one parse of the whole source splits it; returns how many blocks stayed
        valid."""
        source = self.source
        env: dict[str, dict[str, object]] = {}
        lines = split_lines(source)
        begins = starts(PARSER.parse(source, env)) if source else []
        references = env.get("references") or {}
        kept = 0
        blocks: list[Block] = []
        for i, (first, end) in enumerate(zip(begins, [*begins[1:], len(lines)])):
            text = "".join(lines[first:end])
            if not references and kept == i and i < len(self.done) and self.done[i].source == text:
                blocks.append(self.done[i])
                kept += 1
            else:
                blocks.append(Block(text, references))
        self.done, self.tail = blocks, ""
        return kept


def in_open_fence(source: str) -> bool:
    """Whether `source`, which starts with a block, is a code fence that has not closed yet."""
    lines = source.split("\n")
    head = lines[0].lstrip(" ")
    fence = head[: len(head) - len(head.lstrip(head[:1]))] if head[:1] in ("`", "~") else ""
    if len(fence) < 3 or len(lines[0]) - len(head) > 3 or (fence[0] == "`" and "`" in head[len(fence) :]):
        return False
    return not any(_closes(line, fence) for line in lines[1:])


def _closes(line: str, fence: str) -> bool:
    text = line.strip()
    return len(text) >= len(fence) and not text.strip(fence[0]) and len(line) - len(line.lstrip(" ")) <= 3
