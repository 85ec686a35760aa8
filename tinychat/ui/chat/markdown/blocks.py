"""Splits growing Markdown into blocks that are done and one that still grows, so that only the last is laid out
again."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markdown_it.tree import SyntaxTreeNode

from tinychat.ui.chat.markdown.formulas import formulas
from tinychat.ui.chat.markdown.tables import Table

PARSER = MarkdownIt("gfm-like", {"html": False})  # html off: `List<int>` and <think> are text
formulas(PARSER)
STRUCTURE = MarkdownIt("gfm-like", {"html": False})  # blocks without what is in them
formulas(STRUCTURE)
STRUCTURE.core.ruler.enableOnly(["normalize", "block"])
LONG = 4000  # characters of a block from which on its end is looked for when it has grown by an eighth, not a line
ROWS, TEXT = 1000, 2000  # characters of rows, and of a paragraph, that are done together
WORD = "x"  # in place of a paragraph before its further text
_MARK = re.compile(r"[*_~`$\[\\<]")
_SPACED = ("heading", "fence", "code_block", "table", "hr", "blockquote", "formula_block")


class Block:
    """One top-level block, one item of a top-level list, further rows of the table before it, whose first two lines are
    `head`, or further text of the paragraph before it, of which the `head` WORD is: its source (with the blank lines
    after it) and syntax tree (of a part: with the head)."""

    def __init__(self, source: str, references: dict[str, object] | None = None, head: str | None = None) -> None:
        self.source, self.part, self.joins = source, head is not None, head == WORD
        tokens = PARSER.parse((head or "") + source, {"references": dict(references or {})})
        self.nodes: Sequence[SyntaxTreeNode] = SyntaxTreeNode(tokens).children
        self.kind = self.nodes[0].type if self.nodes else ""

    @cached_property
    def table(self) -> Table | None:
        """The table that it begins with."""
        return Table(self.nodes[0], self.part) if self.kind == "table" else None

    def gap_before(self, previous: Block | None) -> int:
        """Blank lines between `previous` and this block."""
        if previous is None or not previous.kind or self.part:
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

    A block is done when a complete line starts another one after it; of a long table the rows so far are done, too, and
    of a long paragraph all but its end.
    """

    def __init__(self) -> None:
        self.done: list[Block] = []
        self.tail = ""
        self._head: str | None = None  # of the table or paragraph whose further rows or text the tail begins with
        self._looked = 0  # characters of the tail that have no end of a block

    @property
    def source(self) -> str:
        return "".join(b.source for b in self.done) + self.tail

    @property
    def open_block(self) -> Block | None:
        """The block of the tail as it is now."""
        return Block(self.tail, head=self._head) if self.tail.strip() or self._head == WORD else None

    def feed(self, text: str) -> int:
        """Takes `text`; returns how many blocks became done."""
        self.tail += text
        before, complete = len(self.done), self.tail.rfind("\n") + 1
        if len(self.tail) - complete > TEXT:
            complete = len(self.tail)  # a line that long is no mere beginning
        elif "\n" not in text and (self._looked or complete <= TEXT):
            return 0
        goes_on = LONG < complete < self._looked * 9 / 8
        if goes_on or (self._head is None and in_open_fence(self.tail[:complete])):
            return 0
        is_paragraph = self._split(complete)
        if len(text) > TEXT:
            self._looked = 0  # what comes at once may be all
        elif is_paragraph:
            self._shorten()
        return len(self.done) - before

    def _split(self, complete: int) -> bool:
        """Makes done what is done of the first `complete` characters of the tail, which are whole lines; returns
        whether the tail is a paragraph then."""
        lines = split_lines(self.tail[:complete])
        head = self._head or ""
        tokens = STRUCTURE.parse(head + self.tail[:complete])
        lines_above = head.count("\n")
        begins = [0, *(line - lines_above for line in starts(tokens)[1:])]
        for first, end in pairwise(begins):
            if end > first:
                self.done.append(Block("".join(lines[first:end]), head=self._head))
            self._head = None  # what follows is another block
        last = "".join(lines[begins[-1] :])
        self.tail, self._looked = last + self.tail[complete:], len(last)
        if len(last) > ROWS and last.endswith("\n") and (head := _open_table(tokens, split_lines(head) + lines)):
            self.done.append(Block(last, head=self._head))
            self.tail, self._looked, self._head = self.tail[len(last) :], 0, head
        begun = tokens[-3] if tokens and tokens[-1].type == "paragraph_close" else None
        return begun is not None and begun.map is not None and begun.map[0] == begins[-1] + lines_above

    def _shorten(self) -> None:
        """Makes done all but the end of a paragraph, of which the characters that were looked at are. What marks text
        across a cut is not known as such before the end of the whole text."""
        while self._looked > TEXT:
            cut = _cut(self.tail)
            self.done.append(Block(self.tail[:cut], head=self._head))
            self.tail, self._looked, self._head = self.tail[cut:], self._looked - cut, WORD

    def finish(self) -> int:
        """Makes everything done, exactly as one parse of the whole source splits it (but for parts of tables, which are
        shown as the whole one); returns how many blocks stayed valid."""
        source = self.source
        self._split(len(self.tail))
        if (block := self.open_block) is not None:
            self.done.append(block)
        env: dict[str, dict[str, object]] = {}
        lines = split_lines(source)
        begins = starts(STRUCTURE.parse(source, env)) if source else []
        references = env.get("references") or {}
        kept = 0
        blocks: list[Block] = []
        for first, end in zip(begins, [*begins[1:], len(lines)]):
            text = "".join(lines[first:end])
            if not references and kept == len(blocks) and (same := self._same(kept, text)):
                blocks += same
                kept += len(same)
            else:
                blocks.append(Block(text, references))
        self.done, self.tail, self._head = blocks, "", None
        return kept

    def _same(self, first: int, text: str) -> list[Block]:
        """Block number `first` with the parts behind it, if its source is `text`."""
        behind = (i for i in range(first + 1, len(self.done)) if not self.done[i].part)
        blocks = self.done[first : next(behind, len(self.done))]
        whole = "".join(b.source for b in blocks) == text and not any(b.joins for b in blocks)
        return blocks if whole else []


def _open_table(tokens: Sequence[Token], lines: Sequence[str]) -> str:
    """The first two lines of the table that `lines` end with, of which `tokens` are the blocks; "" where there is
    none."""
    tables = [t.map for t in tokens if t.type == "table_open" and t.level == 0 and t.map]
    first, end = tables[-1] if tables else (0, 0)
    return "".join(lines[first : first + 2]) if tables and end == len(lines) else ""


def _cut(text: str) -> int:
    """Where a paragraph is divided: in front of a blank if there is one, where no mark, or few, lose their other
    half."""
    ends = range(TEXT, TEXT // 2, -TEXT // 8)
    blanks = (max(text.rfind(" ", TEXT // 2, end), text.rfind("\n", TEXT // 2, end)) for end in ends)
    found = list[tuple[int, int, int]]()
    for place in (end if blank < 0 else blank for end, blank in zip(ends, blanks)):
        if not (before := _marks_in_text(text[:place])):
            return place
        found.append((before + _marks_in_text(text[place : TEXT * 2]), before, place))
    return min(found)[-1]


def _marks_in_text(text: str) -> int:
    tokens = PARSER.parseInline(text)[0].children or ()
    return sum(len(_MARK.findall(t.content)) for t in tokens if t.type == "text")


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
