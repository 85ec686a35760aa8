"""Speculation that drafts at every step, right or wrong: what the suites of the engine run under a second time."""

import random
from collections.abc import Sequence

from tinychat.engine.speculation import Clock, Guess, Speculate, Speculation
from tinychat.engine.stats import Stats


class Wild(Speculation):
    """Drafts one to fifteen tokens at every step: those of the text where some match, with a wrong one now and then,
    else any tokens."""

    def __init__(self, mode: Speculate, most: int, context: int, stats: Stats, clock: Clock) -> None:
        super().__init__(most, most, context, stats, clock)
        self._random = random.Random(7)
        self._seen: Sequence[int] = ()

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        self._seen = prompt

    def drafts(self, room: int, guess: Guess | None = None) -> list[int]:
        self.source = "mtp" if guess and room > 0 and self._random.random() < 0.5 else "text"
        if guess and self.source == "mtp":
            return [guess()]
        n = min(self._random.randint(1, 15), self.most, room)
        if n < 1:
            return []
        drafts = self.text.draft(n) or self._random.choices(self._seen, k=n)
        if self._random.random() < 0.3:
            drafts[self._random.randrange(n)] = self._random.choice(self._seen)
        return drafts
