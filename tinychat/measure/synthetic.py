"""Drafts of which a given share is right: what an acceptance would be worth, for models whose own is not known."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tinychat.engine.engine import Engine
from tinychat.engine.speculation import Guess, Speculation


class Synthetic(Speculation):
    """`drafts` in every step, each right with chance `rate`.

    `answers`: what the model says to each prompt, as single steps gave it. A right draft is taken from there, so the
    real verify step accepts it. The model's own guess is run for its cost.
    """

    def __init__(
        self, engine: Engine, rate: float, drafts: int, answers: Mapping[tuple[int, ...], Sequence[int]]
    ) -> None:
        executor = engine.executor
        super().__init__(
            drafts, executor.limits.verified - 1, engine.info.max_context, engine.stats, engine.session.clock
        )
        self.rate, self.answers, self.executor, self.vocab = rate, answers, executor, engine.plan.vocab
        self._random = random.Random(1)
        self._drafts = list[int]()  # for each token of the answer
        self._place = 0

    def start(self, prompt: Sequence[int]) -> None:
        super().start(prompt)
        answer, self._place = self.answers[tuple(prompt)], 0
        self._drafts = [t if self._random.random() < self.rate else (t + 1) % self.vocab for t in answer]
        self.executor.stand_in(self._drafts, len(prompt))

    def add(self, token: int) -> None:
        super().add(token)
        self._place += 1

    def drafts(self, room: int, guess: Guess | None = None) -> list[int]:
        self.source, self._guessing = "mtp", 0.0
        found = self._drafts[self._place : self._place + min(self.most, room)]
        if guess and found:
            began = self.clock()
            guess()
            self._guessing = self.clock() - began
        return found

    def alike(self, drafts: int, guesses: bool) -> bool:
        return drafts == 1 and guesses


@contextmanager
def synthetic(
    engine: Engine, rate: float | None, drafts: int, answers: Mapping[tuple[int, ...], Sequence[int]]
) -> Iterator[Synthetic | None]:
    """`Synthetic` drafts for a block, none without a rate."""
    try:
        yield None if rate is None else Synthetic(engine, rate, drafts, answers)
    finally:
        engine.executor.stand_in((), 0)


def break_even(cost: float, drafts: int) -> float:
    """The acceptance at which steps of `drafts` drafts, that cost `cost` single steps each, are as fast as single
    steps; over 1 where none is."""
    low, high = 0.0, max(1.0, cost)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(drafts + 1)) < cost else (low, middle)
    return high
