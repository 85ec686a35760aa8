"""Drafts of which a given share is right: what an acceptance would be worth, for models whose own is not known."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence

from tinychat.engine.session import Session
from tinychat.engine.speculation import Guess, Speculation


class Synthetic(Speculation):
    """`drafts` in every step, each right with chance `rate`.

    `answers`: what the model says to each prompt, as single steps gave it. A right draft is taken from there, so the
    real verify step accepts it. The model's own guess is run for its cost, and only used where a draft shall be wrong.
    """

    def __init__(
        self, session: Session, rate: float, drafts: int, answers: Mapping[tuple[int, ...], Sequence[int]]
    ) -> None:
        super().__init__(drafts, session.executor.limits.verified - 1, session.max_context, session.stats)
        self.rate, self.answers, self.vocab = rate, answers, session.plan.vocab
        self._random = random.Random(1)
        self._answer: Sequence[int] = ()
        self._place = 0

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        self._answer, self._place = self.answers[tuple(prompt)], 0

    def add(self, token: int) -> None:
        super().add(token)
        self._place += 1

    def drafts(self, room: int, guess: Guess | None = None) -> list[int]:
        self.source = "mtp"
        found = list(self._answer[self._place : self._place + min(self.most, room)])
        began = time.perf_counter()
        own = guess() if guess and found else -1
        self._guessing = time.perf_counter() - began
        for i, right in enumerate(found):
            if self._random.random() >= self.rate:
                found[i] = own if i == 0 and own not in (-1, right) else (right + 1) % self.vocab
                break
        return found


def break_even(cost: float, drafts: int) -> float:
    """The acceptance at which steps of `drafts` drafts, that cost `cost` single steps each, are as fast as single
    steps; over 1 where none is."""
    low, high = 0.0, max(1.0, cost)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < cost else (low, middle)
    return high
