"""SentencePiece vocabularies: greedy merging of neighbours. llama.cpp breaks a tie between equal scores by position,
which a list of ranked merges cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property, lru_cache

from tinychat.engine.merging import merged


class SentencePiece:
    """SentencePiece's greedy merging as llama.cpp does it.

    Of all neighbours that `order` knows, those with the lowest number merge first, the leftmost of equals; what is no
    token in the end is written in byte tokens. `lines`: nothing merges across the ends of lines, and a run of them is
    its own token where there is one (Gemma 4).
    """

    def __init__(
        self, ids: dict[str, int], order: Callable[[str, str], float | None], unknown: int | None, lines: bool = False
    ) -> None:
        self._ids, self._order, self._lines = ids, order, lines
        fallback = [ids.get(f"<0x{b:02X}>", ids.get(chr(b), unknown)) for b in range(256)]
        self._bytes = [None if i is None else [i] for i in fallback]
        self._word = lru_cache(1 << 16)(self._merge)

    @cached_property
    def _splits_at_words(self) -> bool:
        """No token has a space after anything else, so that no merge crosses the start of a word."""
        return not any(re.search("[^▁]▁", text) for text in self._ids)

    def encode(self, text: str) -> list[int]:
        text = text.replace(" ", "▁")
        if self._lines:
            parts = re.findall(r"[^\n]+|\n+", text)
            return [i for part in parts for i in self._line(part)]
        return self._merged(text)

    def _line(self, part: str) -> list[int]:
        return [self._ids[part]] if part[0] == "\n" and part in self._ids else self._merged(part)

    def _merged(self, text: str) -> list[int]:
        words = re.findall("▁+[^▁]*|[^▁]+", text) if self._splits_at_words else [text]
        return [token for word in words for token in self._word(word)]

    def _merge(self, word: str) -> tuple[int, ...]:
        out: list[int] = []
        for symbol in merged(list(word), self._order):
            token = self._ids.get(symbol)
            out += [token] if token is not None else [i for byte in symbol.encode() for i in self._bytes[byte] or ()]
        return tuple(out)
