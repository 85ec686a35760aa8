"""Copies of a plan's state at some places of the sequence, from which it can go on.

A state (blocks.LayerState) is that behind the last token, so a prompt that leaves the sequence before its end goes on
from the nearest snapshot in front of that place. Snapshots are made at equal distances and shortly before the end of a
prompt, at places where the KV store's blocks end.
"""

from __future__ import annotations

from tinychat.engine.kvstore import BLOCK
from tinychat.kernels.executor import StateCopy
from tinychat.kernels.ops import Plan

NEAREST, FARTHEST = 1024, 4096  # tokens from one snapshot to the next; multiples of BLOCK
MARGIN = 8  # tokens at the end of a prompt that may be others the next time, such as those that open the thinking
BUDGET = 512 << 20  # bytes of all snapshots, where that is enough for LEAST of them
LEAST, MOST = 3, 16
_NONE = memoryview(b"")


def kept(plan: Plan) -> int:
    """How many snapshots are kept; 0 for a plan without a state."""
    return max(LEAST, min(MOST, BUDGET // plan.state_bytes)) if plan.state_bytes else 0


def memory(plan: Plan) -> int:
    """Bytes of the state and of all snapshots; independent of the context."""
    return plan.state_bytes * (1 + kept(plan))


def distance(chunk: int) -> int:
    """Tokens from one snapshot to the next where `chunk` tokens run together: what runs many at once has run them again
    in less time than its states take to be read."""
    return max(NEAREST, min(FARTHEST, chunk // BLOCK * BLOCK))


def places(first: int, last: int, every: int) -> list[int]:
    """Where snapshots are made while tokens first .. last - 1 are run, at least every `every` tokens."""
    end = (last - MARGIN) // BLOCK * BLOCK
    found = {*range(first // every * every + every, last + 1, every), *([end] if end > first else [])}
    return sorted(found)


class Snapshots:
    """States by the number of tokens that they have seen, at most `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._states: dict[int, StateCopy] = {}

    def add(self, tokens: int, state: StateCopy) -> None:
        """Keeps the state behind `tokens` tokens; of too many, the one goes whose neighbours are nearest."""
        self._states[tokens] = state
        if len(self._states) <= self.most:
            return
        at = sorted(self._states)
        gaps = {at[i]: at[i + 1] - (at[i - 1] if i else 0) for i in range(len(at) - 1)}
        del self._states[min(gaps, key=lambda n: gaps[n])]

    def due(self, tokens: int, every: int) -> bool:
        """Whether decode, which has run `tokens` tokens, is so far behind the last one that it makes another."""
        return tokens % BLOCK == 0 and tokens - self.newest() >= every

    def cut(self, tokens: int) -> None:
        """Forgets those behind the first `tokens` tokens."""
        self._states = {n: state for n, state in self._states.items() if n <= tokens}

    def last(self, tokens: int) -> tuple[int, StateCopy]:
        """(tokens, state) of the last snapshot within the first `tokens` tokens; (0, an empty one) without one."""
        n = max((n for n in self._states if n <= tokens), default=0)
        return n, self._states.get(n, _NONE)

    def newest(self) -> int:
        """The tokens of the last one; 0 without one."""
        return max(self._states, default=0)
