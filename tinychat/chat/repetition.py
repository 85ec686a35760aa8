"""Notices an answer that repeats one block of text without end.

The rule looks at the end of the text: it is one block, exactly the same, again and again. In prose it takes 5 copies
and 800 characters; in code, and where a block has no letters (rows of a table, numbers), 10 copies and 4,000
characters. Lists, tables and code that people ask for have something else in every line, or end before that.

Rows that differ only in a number that counts up are not noticed, however many: "count to 1000" and a thousand rows of
test data look the same as a model that is stuck in a table. The end of the context, max_tokens and Esc stop these.
"""

from __future__ import annotations

LONGEST = 2000  # characters of a block
PROSE = (5, 800)  # copies and characters in all
OTHER = (10, 4000)
_KEPT = 2 * LONGEST * OTHER[0]  # characters of the text that are looked at
_KEY = 24  # characters at the end, whose place before says how long the block is
_EVERY = 64  # characters between two looks


class Repetition:
    """The text of one answer so far, or of its thinking. `code`: all of it is code."""

    def __init__(self, code: bool = False) -> None:
        self._code = code
        self._text = ""
        self._fences = 0  # ``` so far; an odd number: inside code
        self._new = 0  # characters since the last look

    def feed(self, text: str) -> bool:
        """Adds `text`; True where the end is a repetition."""
        self._fences += (self._text[-2:] + text).count("```")
        self._text = (self._text + text)[-_KEPT:]
        self._new += len(text)
        if self._new < _EVERY:
            return False
        self._new = 0
        return self._repeats()

    def _repeats(self) -> bool:
        text = self._text
        before = text.rfind(text[-_KEY:], 0, len(text) - 1)
        length = len(text) - _KEY - before
        if before < 0 or length > LONGEST:
            return False
        block = text[-length:]
        plain = not (self._code or self._fences % 2) and any(c.isalpha() for c in block)
        copies, characters = PROSE if plain else OTHER
        needed = max(copies, -(-characters // length))
        return text.endswith(block * needed)
