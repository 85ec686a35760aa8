"""How many drafts a step verifies: as many as pay, by what they brought and cost before.

The measure is tokens per time, in single steps. A draft of n tokens brings one token and those that are accepted; the
chance of each depends on the length of its match in the text (drafts.py) and is learned from every token, whether its
draft was run or not, so that drafts begin again where they would pay. What a step of n + 1 tokens costs is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tinychat.engine.drafts import LONGEST, TextIndex
from tinychat.engine.stats import Stats

Speculate = Literal["auto"] | int
"""How many drafts a step verifies: as many as pay, or at most so many wherever there are some; 0: none."""

Source = Literal["", "text", "grammar"]
"""Where a token came from: a step of its own, a draft that was accepted, or a grammar that allows nothing else."""

MARGIN = 1.06  # what a draft must promise to be run
RATE = 0.05  # of what was learned before, that a token replaces
COST_RATE = 0.2  # the same for a measured time
FORGOTTEN = 0.1  # of what is known of costs, with every answer
CAUTION = 0.7  # of what is known of chances
UNLIKELY = 0.1
COST = 0.2  # single steps that one more token costs, until it is measured
_KIND = [n if n < 4 else n.bit_length() + 1 for n in range(LONGEST + 1)]  # 2, 3, 4 to 7, 8 to 15, ...
_CHANCES = (0.0, 0.0, 0.1, 0.2, 0.5, 0.7, 0.85, 0.95)  # of a draft's token by the kind of its match, to begin with


class Speculation:
    """Proposes drafts for one session, and keeps its part of Stats. `most`: drafts that the executor verifies."""

    def __init__(self, mode: Speculate, most: int, context: int, stats: Stats) -> None:
        self.mode, self.stats = mode, stats
        self.most = most if mode == "auto" else min(most, mode)
        self.text = TextIndex(4 * context)
        self._chances = list(_CHANCES)
        self._single = 0.0  # seconds of a single step
        self._costs: dict[int, float] = {}  # tokens of a step -> its time in single steps
        self._more = COST  # single steps that one more token costs, over all sizes
        self._seconds = 0.0  # of the steps of this answer

    def start(self, prompt: Sequence[int]) -> None:
        """An answer to `prompt` begins."""
        self._seconds = 0.0
        if self.most:
            self.text.start(prompt)
        for size, cost in self._costs.items():  # a measurement that was wrong must not last for ever
            self._costs[size] = cost + FORGOTTEN * (1 + (size - 1) * self._more - cost)
        self._more += FORGOTTEN * (COST - self._more)
        for kind, chance in enumerate(_CHANCES):  # another text: what one copies, the next may not
            self._chances[kind] += CAUTION * (chance - self._chances[kind])

    def add(self, token: int) -> None:
        """The answer goes on with `token`."""
        if not self.most:
            return
        if (expected := self.text.expected) is not None:
            kind = _KIND[self.text.length]
            self._chances[kind] += RATE * ((expected == token) - self._chances[kind])
        self.text.add(token)

    def drafts(self, room: int) -> list[int]:
        """What the next step shall verify: at most `room` tokens, none where that does not pay."""
        most = min(self.most, room)
        if most < 1 or not self.text.length:
            return []
        return self.text.draft(self._paying(most) if self.mode == "auto" else most)

    def _paying(self, most: int) -> int:
        if not self._single:
            return 0
        best, found, chance, tokens = MARGIN, 0, 1.0, 1.0
        for n in range(1, most + 1):
            chance *= self._chances[_KIND[min(self.text.length + n - 1, LONGEST)]]
            if chance < UNLIKELY:
                break
            tokens += chance
            gain = tokens / self._costs.get(n + 1, 1 + n * self._more)
            if gain > best:
                best, found = gain, n
        return found

    def took(self, source: Source, drafts: int, seconds: float) -> None:
        """A token came after `seconds`; `drafts` were verified in the step that it belongs to."""
        s = self.stats
        self._seconds += seconds
        if source == "grammar":
            s.forced_tokens += 1
        elif source == "text":
            s.accepted_tokens += 1
        else:
            s.decode_steps += 1
            s.drafted_tokens += drafts
            self._measure(drafts + 1, seconds)
        if s.drafted_tokens or s.forced_tokens:  # what single steps would have taken, by what it took
            tokens = s.decode_steps + s.accepted_tokens + s.forced_tokens
            s.speculation_gain = tokens * self._single / self._seconds

    def _measure(self, size: int, seconds: float) -> None:
        """A step of `size` tokens took so long; a disturbance counts at most double."""
        if size == 1:
            self._single += COST_RATE * (min(seconds, 2 * self._single) - self._single) if self._single else seconds
        elif self._single:
            cost = seconds / self._single
            before = self._costs.get(size, cost)
            self._costs[size] = before + COST_RATE * (min(cost, 2 * before) - before)
            self._more += COST_RATE * ((self._costs[size] - 1) / (size - 1) - self._more)
