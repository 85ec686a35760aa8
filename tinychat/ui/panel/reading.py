"""One immutable value of everything that the panel shows, made a few times a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tinychat.backend.instruments import ExpertCounts
from tinychat.backend.protocol import ModelInfo, Prefilling, Stats, Usage
from tinychat.chat.state import LoadStage


@dataclass(frozen=True)
class Reading:
    """`stats` and `info` are None until a model is loaded; `speeds` are decode speeds, oldest first, tok/s; `painted`
    tok/s. `experts` are there when they are to be shown."""

    stats: Stats | None = None
    info: ModelInfo | None = None
    usage: Usage = field(default_factory=Usage)
    loading: LoadStage | None = None
    prefill: Prefilling | None = None
    speeds: tuple[float, ...] = ()
    painted: float = 0.0
    experts: ExpertCounts | None = None


class PaintMeter:
    """Counts tokens when they are on the screen: `rate` in tok/s over the painting of the running answer.

    `seconds` is what painting them took: CPU time of the screen's thread from `begin` to `painted`, not its waiting.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, work: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._work = clock, work
        self.restart()

    def restart(self) -> None:
        self.tokens, self._first, self._last, self._at_first = 0, 0.0, 0.0, 0
        self._recent: deque[tuple[float, int]] = deque(maxlen=24)
        self.seconds, self._begun, self._since = 0.0, 0, 0.0

    def begin(self) -> None:
        """A part of the answer is being laid out; a call of `painted` must follow."""
        self._spend(1)

    def painted(self, tokens: int) -> None:
        """The layout that was begun is painted, with `tokens` tokens."""
        self._spend(-1)
        if not tokens:
            return
        now = self._clock()
        self.tokens += tokens
        if not self._first:
            self._first, self._at_first = now, self.tokens
        self._last = now
        self._recent.append((now, self.tokens))

    def _spend(self, change: int) -> None:
        now = self._work()
        if self._begun:
            self.seconds += now - self._since
        self._since, self._begun = now, max(0, self._begun + change)

    @property
    def rate(self) -> float:
        """Over the last second or so."""
        if len(self._recent) < 2:
            return 0.0
        (start, before), (end, after) = self._recent[0], self._recent[-1]
        return (after - before) / (end - start) if end > start else 0.0

    @property
    def average(self) -> float:
        """From the first paint to the last."""
        return (self.tokens - self._at_first) / (self._last - self._first) if self._last > self._first else 0.0
