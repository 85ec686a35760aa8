"""Greedy merging of neighbours, the second half of byte-pair and of SentencePiece vocabularies."""

from __future__ import annotations

import heapq
from collections.abc import Callable


def merged(symbols: list[str], order: Callable[[str, str], float | None]) -> list[str]:
    """What is left of `symbols` when no neighbours merge any more. Of all that `order` knows, those with the lowest
    number merge first, the leftmost of equals."""
    symbols, count = [*symbols], len(symbols)  # "" once it has merged into its left neighbour
    left, right = list(range(-1, count - 1)), list(range(1, count + 1))
    queue: list[tuple[float, int, int, int]] = []

    def offer(a: int, b: int) -> None:
        if a >= 0 and b < count and (place := order(symbols[a], symbols[b])) is not None:
            heapq.heappush(queue, (place, a, b, len(symbols[a]) + len(symbols[b])))

    for i in range(1, count):
        offer(i - 1, i)
    while queue:
        _, a, b, size = heapq.heappop(queue)
        if not symbols[a] or not symbols[b] or len(symbols[a]) + len(symbols[b]) != size:
            continue  # one of the two has merged with another since
        symbols[a] += symbols[b]
        symbols[b] = ""
        right[a] = right[b]
        if right[b] < count:
            left[right[b]] = a
        offer(left[a], a)
        offer(a, right[a])
    return [symbol for symbol in symbols if symbol]
