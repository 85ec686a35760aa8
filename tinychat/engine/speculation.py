"""How many drafts a step verifies: as many as pay, by what they brought and cost before.

The measure is tokens per time, in single steps. A draft of n tokens brings one token and those that are accepted; the
chance of each depends on the length of its match in the text (drafts.py) and is learned from every token, whether its
draft was run or not, so that drafts begin again where they would pay. What a step of n + 1 tokens costs is measured;
there are few sizes of steps, so that each is soon known.

A model with multi-token prediction also guesses one token itself (mtp.py). That costs time of its own, which is
measured too, so where its guess does not pay it is asked for now and then only, to see whether it would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from tinychat.engine.drafts import LONGEST, TextIndex
from tinychat.engine.stats import Stats

Speculate = Literal["auto"] | int
"""How many drafts a step verifies: as many as pay, or at most so many wherever there are some; 0: none."""

Source = Literal["", "text", "mtp", "grammar"]
"""Where a token came from: a step of its own, an accepted draft of the text or of the model's multi-token prediction,
or a grammar that allows nothing else."""

Clock = Callable[[], float]
"""Seconds since some moment, in which the thread that decodes measures its steps."""

Guess = Callable[[], int]
"""Runs the model's multi-token prediction; the token that it expects behind the one that the next step runs."""

SIZES = (2, 4, 8, 16)  # tokens of a step with drafts of the text; the kernels have as many columns
MARGIN = 1.06  # what a draft must promise to be run
RATE = 0.05  # of what was learned before, that a token replaces
COST_RATE = 0.2  # the same for a measured time
FORGOTTEN = 0.1  # of what is known of costs, with every answer
CAUTION = 0.7  # of what is known of chances
UNLIKELY = 0.1
COST = 0.2  # single steps that one more token costs, until it is measured
GUESSED = 0.6  # chance of a guess of the model, to begin with
GUESSING = 0.1  # single steps that a guess costs, until it is measured
PROBE = 32  # tokens from one guess to the next where they do not pay
WARM = 3  # single steps in front of the first guess
SINGLES = 64  # steps with a guess from one single step to the next, which all costs are measured against
_KIND = [n if n < 4 else n.bit_length() + 1 for n in range(LONGEST + 1)]  # 1, 2, 3, 4 to 7, 8 to 15, ...
_CHANCES = (0.0, 0.2, 0.1, 0.2, 0.5, 0.85, 0.9, 0.95)  # of a draft's token by the kind of its match, to begin with


class Speculation:
    """Proposes drafts for one session, and keeps its part of Stats. `most`: drafts that the executor verifies; `clock`:
    seconds, in which steps are measured."""

    def __init__(
        self, mode: Speculate, most: int, context: int, stats: Stats, clock: Clock = time.perf_counter
    ) -> None:
        self.mode, self.stats, self.clock = mode, stats, clock
        self.most = most if mode == "auto" else min(most, mode)
        self.text = TextIndex(4 * context)
        self.source: Source = "text"  # of the last drafts
        self._chances = list(_CHANCES)
        self._guess: int | None = None  # what the next token is expected to be
        self._guessed = GUESSED  # chance of a guess
        self._since_guess = PROBE  # tokens
        self._since_single = 0  # steps
        self._guessing = 0.0  # seconds of the guess that the next step waits for
        self._guess_cost = GUESSING  # single steps
        self._single = 0.0  # seconds of a single step
        self._singles = 0  # steps that it was measured in
        self._costs: dict[int, float] = {}  # tokens of a step -> its time in single steps
        self._more = COST  # single steps that one more token costs, over all sizes
        self._seconds = 0.0  # of the steps of this answer
        self._alone = 0.0  # seconds that its tokens would have taken in single steps

    def start(self, prompt: Sequence[int]) -> None:
        """An answer to `prompt` begins."""
        self._seconds = self._alone = 0.0
        if self.most:
            self.text.start(prompt)
        for size, cost in self._costs.items():  # a measurement that was wrong must not last for ever
            self._costs[size] = cost + FORGOTTEN * (1 + (size - 1) * self._more - cost)
        self._more += FORGOTTEN * (COST - self._more)
        for kind, chance in enumerate(_CHANCES):  # another text: what one copies, the next may not
            self._chances[kind] += CAUTION * (chance - self._chances[kind])
        self._guessed += CAUTION * (GUESSED - self._guessed)
        self._guess = None

    def add(self, token: int) -> None:
        """The answer goes on with `token`."""
        if not self.most:
            return
        self._since_guess += 1
        if self._guess is not None:
            self._guessed += RATE * ((self._guess == token) - self._guessed)
            self._guess = None
        if (expected := self.text.expected) is not None:
            kind = _KIND[self.text.length]
            self._chances[kind] += RATE * ((expected == token) - self._chances[kind])
        self.text.add(token)

    def drafts(self, room: int, guess: Guess | None = None) -> list[int]:
        """What the next step shall verify: at most `room` tokens, none where that does not pay. `source` says whose
        they are. `guess`: of a model with multi-token prediction."""
        self._guessing, most = 0.0, min(self.most, room)
        if most < 1:
            return []
        n, gain = (
            self._paying(most, self.text.length) if self.mode == "auto" else (most if self.text.length else 0, MARGIN)
        )
        if guess is not None and self._guess_pays(gain, n):
            began = self.clock()
            self._guess, self._since_guess = guess(), 0
            self._guessing = self.clock() - began
            if self._gain_of_guess(self._guessed) > gain or self.mode != "auto":
                self.source = "mtp"
                return [self._guess]
        self.source = "text"
        return self.text.draft(n)

    def alike(self, drafts: int, guesses: bool) -> bool:
        """Whether the next step will have no draft either, or a guess of the model's multi-token prediction again, as
        this one with `drafts`. `guesses`: the model has such."""
        if drafts:
            return self.source == "mtp" and self._guesses_again()
        if self.mode != "auto":
            return False
        n, gain = self._paying(self.most, self.text.reach)  # a match grows by one token a step
        return not n and not (guesses and self._guess_pays(gain, 0, later=1))

    def _guesses_again(self) -> bool:
        if self.mode != "auto":
            return not self.text.length
        _, gain = self._paying(self.most, min(max(self.text.reach, self.text.length + 2), LONGEST))
        return self._since_single + 1 < SINGLES and self._gain_of_guess(self._guessed) > gain

    def _guess_pays(self, gain: float, n: int, later: int = 0) -> bool:
        """Whether the model's guess brings more than `n` drafts of the text with their `gain`, or might by now or in so
        many tokens."""
        if self.mode != "auto":
            return not n
        if self._singles + later < WARM or self._since_single >= SINGLES:
            return False
        if self._gain_of_guess(self._guessed) > gain:
            return True
        return not n and self._since_guess + later >= PROBE and self._gain_of_guess(1.0) > MARGIN

    def _gain_of_guess(self, chance: float) -> float:
        return (1 + chance) / (self._costs.get(2, 1 + self._more) + self._guess_cost)

    def _paying(self, most: int, length: int) -> tuple[int, float]:
        """How many drafts behind a match of `length` tokens bring most, and their gain over single steps; 0 and MARGIN
        where none do."""
        best, found, chance, tokens = MARGIN, 0, 1.0, 1.0
        if not self._single or not length:
            return found, best
        for n in range(1, most + 1):
            chance *= self._chances[_KIND[min(length + n - 1, LONGEST)]]
            if chance < UNLIKELY:
                break
            tokens += chance
            if n + 1 not in SIZES:
                continue
            gain = tokens / self._costs.get(n + 1, 1 + n * self._more)
            if gain > best:
                best, found = gain, n
        return found, best

    def took(self, source: Source, drafts: int, seconds: float) -> None:
        """A token came after `seconds` of `clock`, those of a guess included; `drafts` were verified in the step that
        it belongs to."""
        s = self.stats
        self._seconds += seconds
        if source == "grammar":
            s.forced_tokens += 1
        elif source:
            s.accepted_tokens += 1
            s.mtp_accepted_tokens += source == "mtp"
        else:
            s.decode_steps += 1
            s.drafted_tokens += drafts
            s.mtp_drafted_tokens += drafts if self.source == "mtp" else 0
            self._since_single = self._since_single + 1 if drafts else 0
            self._measure(drafts + 1, seconds - self._guessing)
            if self._guessing and self._single:
                cost = min(self._guessing / self._single, 2 * self._guess_cost)
                self._guess_cost += COST_RATE * (cost - self._guess_cost)
        self._alone += self._single  # as long as it takes behind so many tokens
        if s.drafted_tokens or s.forced_tokens:
            s.speculation_gain = self._alone / self._seconds

    def _measure(self, size: int, seconds: float) -> None:
        """A step of `size` tokens took so long; a disturbance counts at most double."""
        if size == 1:
            self._singles += 1
            if seconds < self._single / 2:  # the steps before were disturbed: a first one may compile
                self._single = seconds
            self._single += COST_RATE * (min(seconds, 2 * self._single) - self._single) if self._single else seconds
        elif self._single:
            cost = seconds / self._single
            if size not in self._costs:  # a first one may compile
                cost = min(cost, 2 * size)
            before = self._costs.get(size, cost)
            self._costs[size] = before + COST_RATE * (min(cost, 2 * before) - before)
            self._more += COST_RATE * ((self._costs[size] - 1) / (size - 1) - self._more)
