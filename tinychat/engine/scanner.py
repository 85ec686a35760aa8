"""The output of a model as a stream: the unread text, the markup to find in it, and the finished fragments.

A reader is a coroutine over a Scanner. It runs until it needs text that has not arrived.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

from tinychat.engine.tool_calls import ID

TextKind = Literal["thinking", "answer", "call"]
Steps = Generator[None, None, Any]
MARK = "\0"  # in fed text: a special token follows; never part of ordinary text
NO, PARTIAL = -1, -2  # in place of a position

NAME = re.compile(r"[\w./-]+")
_BLANK_LINES = re.compile(r"^\s*[\r\n]")
_DIGITS = re.compile(r"\d*")
_SPACE = re.compile(r"\s*")  # a model that loops makes thousands of line ends, which are looked at with every token


@dataclass(slots=True)
class Fragment:
    """A stretch of output.

    In a call, `text` is more of its arguments (JSON text) and `index` its number. The first fragment of a call has `id`
    and `name`. A fragment with a `note` says why a call could not be read, begun or not; its text follows as answer.
    """

    kind: TextKind
    text: str
    index: int = 0
    id: str = ""
    name: str = ""
    note: str = ""


class Marker:
    """Markup to find in text. White space inside it is optional; numbers and ids in it may vary."""

    def __init__(self, text: str) -> None:
        self.text = text.strip()
        self.tail = text[len(text.rstrip()) :]  # white space behind it
        self.parts = [part for part in re.split(rf"(\s+|\d+|{ID})", self.text.replace("><", "> <")) if part]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def match(self, text: str, at: int, ended: bool) -> int:
        """The end of the markup if it begins at text[at]; NO; or PARTIAL if more text is needed to decide."""
        for part in self.parts:
            if part.isspace():
                at = skip(text, at)
            elif part.isdigit() or part == ID:
                run = (_DIGITS if part.isdigit() else NAME).match(text, at)
                end = run.end() if run else at
                if end == len(text) and not ended:
                    return PARTIAL
                if end == at:
                    return NO
                at = end
            else:
                for c in part:
                    while at < len(text) and text[at] == MARK:
                        at += 1
                    if at == len(text):
                        return NO if ended else PARTIAL
                    if text[at] != c:
                        return NO
                    at += 1
        return at

    def find(self, text: str, at: int, ended: bool) -> tuple[int, int]:
        """The first place where it matches or may match, and what `match` says there; (len(text), NO) if nowhere."""
        while (at := text.find(self.text[0], at)) >= 0:
            if (end := self.match(text, at, ended)) != NO:
                return (at - 1 if at and text[at - 1] == MARK else at), end
            at += 1
        return len(text), NO


def skip(text: str, at: int) -> int:
    """The position after white space at text[at]."""
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


class Malformed(Exception):
    """The text is not a call."""


class Scanner:
    """`text` from `at` on is unread; `ended`: no more text will arrive. `stray` is removed from the fragments."""

    def __init__(self, stray: re.Pattern[str] | None) -> None:
        self.text, self.at, self.ended = "", 0, False
        self.fragments: list[Fragment] = []
        self._stray = stray

    def give(self, kind: TextKind, text: str) -> None:
        if self._stray and MARK in text:
            text = self._stray.sub("", text).replace(MARK, "")
        if text:
            self.fragments.append(Fragment(kind, text))

    def taken(self) -> list[Fragment]:
        """The fragments finished since the last call."""
        fragments, self.fragments = self.fragments, []
        return fragments

    def more(self) -> Steps:
        """Waits for more text. Raises Malformed at the end of the text."""
        if self.ended:
            raise Malformed("the answer ends inside the call")
        yield

    def peek(self) -> Steps:
        """The next character that is not white space, which stays unread."""
        while True:
            at = self.at
            while at < len(self.text) and (self.text[at].isspace() or self.text[at] == MARK):
                at += 1
            if at < len(self.text):
                self.at = at
                return self.text[at]
            yield from self.more()

    def take(self, marker: Marker) -> Steps:
        """Reads `marker` and white space before it; returns False if `marker` is not there."""
        while marker:
            at = skip(self.text, self.at)
            end = marker.match(self.text, at, self.ended)
            if end >= 0:
                self.at = end
            if end != PARTIAL and (at < len(self.text) or self.ended):
                return end >= 0
            yield
        return False

    def drop_blank_lines(self) -> Steps:
        while not (rest := self.text[self.at :]).strip() and not self.ended:
            yield
        self.at = len(self.text) if not rest.strip() else self.at + len(rest) - len(_BLANK_LINES.sub("", rest))
