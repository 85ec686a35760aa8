"""Splits what a reasoning model writes into its thinking and its answer, while it streams."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["thinking", "answer"]


@dataclass(frozen=True)
class Piece:
    """A stretch of output, never empty."""

    kind: Kind
    text: str


class ThinkingSplitter:
    """Fed with text in any portions, says what of it is thinking and what is answer; the tags themselves vanish.

    A model opens its thinking only at the very start (white space aside): a tag in the middle of an answer is text.
    Blank lines after a tag and white space before the closing one are dropped. Text that may turn out to be a tag is
    held back until it is clear; `flush` gives it out.

    `opened`: the prompt ended inside a think block, so the output begins with thinking and without a tag.
    """

    def __init__(self, open_tag: str, close_tag: str, opened: bool) -> None:
        self._open, self._close = open_tag, close_tag
        self._kind: Kind = "thinking" if opened else "answer"
        self._at_start = True  # an opening tag may still come
        self._after_tag = opened  # blank lines are dropped
        self._held = ""

    @property
    def inside(self) -> bool:
        """Is the output inside its thinking now?"""
        return self._kind == "thinking"

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are clear now."""
        self._held += text
        pieces: list[Piece] = []
        if self._at_start and not self._pass_start():
            return pieces
        if self._kind == "thinking":
            if not self._drop_blank_lines():
                return pieces
            thought, closed, rest = self._held.partition(self._close)
            if not closed:
                keep = len(self._held.rstrip()) if self._held[-1].isspace() else self._tag_start()
                _add(pieces, "thinking", self._held[:keep])
                self._held = self._held[keep:]
                return pieces
            _add(pieces, "thinking", thought.rstrip())
            self._kind, self._after_tag, self._held = "answer", True, rest
        if self._drop_blank_lines():
            _add(pieces, "answer", self._held)
            self._held = ""
        return pieces

    def flush(self) -> list[Piece]:
        """What was held back, at the end of the output."""
        pieces: list[Piece] = []
        _add(pieces, self._kind, self._held.rstrip() if self._kind == "thinking" or self._after_tag else self._held)
        self._held = ""
        return pieces

    def _pass_start(self) -> bool:
        """Swallows an opening tag at the start; False while it may still come."""
        text = self._held.lstrip()
        if text.startswith(self._open):
            self._kind, self._after_tag, self._held = "thinking", True, text[len(self._open) :]
        elif self._open.startswith(text):
            return False
        self._at_start = False
        return True

    def _drop_blank_lines(self) -> bool:
        """Drops blank lines after a tag; False while nothing else has come."""
        if not self._after_tag:
            return bool(self._held)
        if not self._held or self._held.isspace():
            return False
        self._held = re.sub(r"^\s*[\r\n]", "", self._held)
        self._after_tag = False
        return True

    def _tag_start(self) -> int:
        """Where the end of the held text, with the white space before it, may be the beginning of the closing tag."""
        for n in range(min(len(self._close) - 1, len(self._held)), 0, -1):
            if self._close.startswith(self._held[-n:]):
                return len(self._held[:-n].rstrip())
        return len(self._held)


def _add(pieces: list[Piece], kind: Kind, text: str) -> None:
    if text:
        pieces.append(Piece(kind, text))
