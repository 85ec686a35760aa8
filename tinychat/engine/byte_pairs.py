"""Byte-pair vocabularies: text is cut by regular expressions, and bytes merge within the pieces.

The merging is our own: the library that has the expressions takes a second to build its tables of 320,000 merges, holds
the interpreter meanwhile, and is a tenth faster with usual text, in which the expressions take most of the time.
"""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Stages

from tinychat.engine.merging import merged
from tinychat.engine.pretokenizers import PreTokenizer


class BytePairs:
    """Byte-pair encoding as llama.cpp does it. `merges`: "a b" each, in order of rank; one that makes no token of
    `ids` is left out, and so is a byte that is no token."""

    def __init__(self, ids: dict[str, int], merges: list[str], pre: PreTokenizer) -> None:
        self._ids, self._whole = ids, pre.ignore_merges
        self._ranks = dict(zip(reversed(merges), range(len(merges), 0, -1)))  # of two equal ones the first counts
        splits = [Split(Regex(stage), "isolated") for stage in pre.stages]
        self._pieces = Stages([*splits, ByteLevel(add_prefix_space=False, use_regex=False)]).pre_tokenize_str
        self._piece = lru_cache(1 << 16)(self._merge)

    def encode(self, text: str) -> list[int]:
        return [token for piece, _ in self._pieces(text) for token in self._piece(piece)]

    def _merge(self, piece: str) -> tuple[int, ...]:
        ids = self._ids
        if self._whole and piece in ids:
            return (ids[piece],)
        return tuple([ids[symbol] for symbol in merged([c for c in piece if c in ids], self._order)])

    def _order(self, a: str, b: str) -> int | None:
        rank = self._ranks.get(f"{a} {b}")
        return rank if rank is not None and a + b in self._ids else None
