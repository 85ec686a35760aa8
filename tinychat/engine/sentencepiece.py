"""SentencePiece vocabularies: greedy merging of neighbours. llama.cpp breaks a tie between equal scores by position,
which a list of ranked merges cannot express."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable
from functools import cached_property, lru_cache


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
        symbols: list[str] = list(word)  # "" once it has merged into its left neighbour
        left, right = list(range(-1, len(word) - 1)), list(range(1, len(word) + 1))
        queue: list[tuple[float, int, int, int]] = []

        def offer(a: int, b: int) -> None:
            if a >= 0 and b < len(symbols) and (place := self._order(symbols[a], symbols[b])) is not None:
                heapq.heappush(queue, (place, a, b, len(symbols[a]) + len(symbols[b])))

        for i in range(1, len(symbols)):
            offer(i - 1, i)
        while queue:
            _, a, b, size = heapq.heappop(queue)
            if not symbols[a] or not symbols[b] or len(symbols[a]) + len(symbols[b]) != size:
                continue  # one of the two has merged with another since
            symbols[a] += symbols[b]
            symbols[b] = ""
            right[a] = right[b]
            if right[b] < len(symbols):
                left[right[b]] = a
            offer(left[a], a)
            offer(a, right[a])
        out: list[int] = []
        for symbol in filter(None, symbols):
            token = self._ids.get(symbol)
            out += [token] if token is not None else [i for byte in symbol.encode() for i in self._bytes[byte] or ()]
        return tuple(out)
