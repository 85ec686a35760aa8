"""Drafts from the text itself: where the last tokens stood before, and what followed them there."""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 32  # tokens of a match that are told apart
SHORTEST = 2
INTERRUPTED = 4  # tokens of a match that is followed beyond one token that differs
CANDIDATES = 16  # earlier places that a search looks at, the latest first


class TextIndex:
    """A text of token ids that grows, and the longest of its last tokens that stands in it before.

    Every place of a pair of tokens is chained to the pair's place before, as in LZ77: a token costs one entry of a
    dictionary and one of a list. A match that the next token continues is not searched for again.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: tokens from which on `start` forgets what is not in its prompt."""
        self.limit = limit
        self.tokens: list[int] = []
        self.length = 0  # of the match: the last tokens that also stand in front of place `_next`; 1 behind another one
        self._next = 0
        self._interrupted = 0  # length of the match that the last token has interrupted
        self._line: list[int] = []  # the conversation as it is; `tokens` also has what was said before an edit
        self._latest: dict[tuple[int, int], int] = {}  # pair -> where its second token stands
        self._earlier: list[int] = []  # per place: where the same pair ends before, or -1

    def start(self, prompt: Sequence[int]) -> None:
        """The conversation is `prompt` now: what of it is not known yet is appended. What the conversation before has
        beyond it stays, for an answer that is written again resembles the first one; but not another conversation."""
        shared = common_prefix(self._line, prompt)
        if shared < len(prompt) // 2 or len(self.tokens) + len(prompt) - shared > self.limit:
            shared, self.tokens, self._latest, self._earlier = 0, [], {}, []
        for token in prompt[shared:]:
            self._append(token)
        self._line = list(prompt)
        self._search()

    def add(self, token: int) -> None:
        """The text goes on with `token`."""
        continued, length, following = self.expected == token, self.length, self._next + 1
        self._append(token)
        self._line.append(token)
        if continued:
            self.length, self._next, self._interrupted = self.reach, following, 0
            return
        self._search()
        if not self.length and length >= INTERRUPTED and following < len(self.tokens) - 1:
            self.length, self._next, self._interrupted = 1, following, length

    @property
    def reach(self) -> int:
        """The length of the match if the next token continues it or begins one."""
        return min(max(self.length + 1, self._interrupted, SHORTEST), LONGEST)

    @property
    def expected(self) -> int | None:
        """The token that followed the match, None without a match."""
        return self.tokens[self._next] if self.length else None

    def draft(self, n: int) -> list[int]:
        """The `n` tokens that followed the match; where the text ends it goes on as it did from there. Empty without a
        match."""
        if not self.length:
            return []
        found = self.tokens[self._next : self._next + n]
        return [found[i % len(found)] for i in range(n)]

    def _append(self, token: int) -> None:
        place = len(self.tokens)
        pair = (self.tokens[-1] if place else -1, token)
        self._earlier.append(self._latest.get(pair, -1))
        self._latest[pair] = place
        self.tokens.append(token)

    def _search(self) -> None:
        tokens, last = self.tokens, len(self.tokens) - 1
        self.length, self._interrupted, place = 0, 0, self._earlier[last] if self.tokens else -1
        for _ in range(CANDIDATES):
            if place < 1:
                break
            n = SHORTEST
            while n < LONGEST and n <= place and tokens[place - n] == tokens[last - n]:
                n += 1
            if n > self.length:
                self.length, self._next = n, place + 1
            place = self._earlier[place]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
