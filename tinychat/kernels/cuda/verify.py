"""The graphs of verify steps, those of a decode step for several tokens at once, and of drafts of multi-token
prediction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import chain

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.builder import SLOTS, Builder, Depth, LaunchedOps
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.step import cycle, decode, draft

COLUMNS = (2, 4, 8, 16)  # tokens of a graph; a step of fewer takes the next larger one
DRAFTED = (1, 2)  # behind an accepted draft two rows lack
OWN_SHARED = 12 << 10  # bytes of shared memory that the kernels declare themselves, at most

MakeStep = Callable[[Builder, int], LaunchedOps]  # of the kind that is taken from a position on


def verifying(builder: Builder, gpu: GPU, kinds: dict[int, Depth]) -> ColumnGraphs:
    """Verify steps; none where two tokens do not fit."""
    counts = [n for n in COLUMNS if n < SLOTS or not builder.plan.state_bytes]  # a state goes back by slots
    return ColumnGraphs(builder, gpu, kinds, lambda b, at: decode(b, kinds[at]), counts)


def drafting(builder: Builder, gpu: GPU, kinds: dict[int, Depth]) -> ColumnGraphs:
    """The draft of the plan's multi-token prediction behind one token or two."""
    return ColumnGraphs(builder, gpu, kinds, lambda b, at: draft(b, kinds[at]), DRAFTED)


def cycles(builder: Builder, gpu: GPU, kinds: dict[int, Depth], drafts: dict[int, Depth]) -> ColumnGraphs:
    """Verify steps of two with the draft behind them, of kinds `kinds` and `drafts`."""

    def at(of: dict[int, Depth], pos: int) -> Depth:
        return of[max(first for first in of if first <= pos)]

    return ColumnGraphs(
        builder, gpu, {*kinds, *drafts}, lambda b, pos: cycle(b, at(kinds, pos), at(drafts, pos)), DRAFTED[1:]
    )


class ColumnGraphs:
    """Graphs of a step for each of `counts` tokens, as many of those asked for as fit. They are compiled and made when
    one of their depth is first needed, for that takes as long as those of single steps."""

    def __init__(
        self, builder: Builder, gpu: GPU, starts: Collection[int], step: MakeStep, counts: Sequence[int]
    ) -> None:
        """Asks `builder` for the buffers of the largest. `starts`: positions from which on there is another kind."""
        self._builder, self._gpu, self._starts, self._step, self.counts = builder, gpu, starts, step, tuple[int, ...]()
        self._graphs: dict[tuple[int, int], Graph] = {}  # by columns and depth
        for columns in reversed(counts):
            try:
                for depth in starts:
                    self._launches(builder.one_of_each(), columns, depth)
            except TinychatError:  # beyond the shared memory of a block
                continue
            self.counts = tuple(n for n in counts if n <= columns)
            break

    def launches(self, columns: int, pos: int) -> list[Launch]:
        """A step of so many tokens from position `pos` on."""
        return self._launches(self._builder, columns, pos)

    def _launches(self, builder: Builder, columns: int, pos: int) -> list[Launch]:
        many = builder.of(columns, self._gpu.max_shared - OWN_SHARED)
        return [launch for launch, _ in self._step(many, self._depth(pos))]

    def graph(self, pos: int, count: int) -> Graph:
        """The graph for a step of `count` tokens from position `pos` on."""
        depth, columns = self._depth(pos), min(n for n in self.counts if n >= count)
        if (columns, depth) not in self._graphs:  # all at once, so that what each costs is told from steps that follow
            launches = {n: self.launches(n, depth) for n in self.counts}
            self._gpu.compile(chain.from_iterable(launches.values()))
            self._graphs |= {(n, depth): self._gpu.graph(step) for n, step in launches.items()}
        return self._graphs[columns, depth]

    def _depth(self, pos: int) -> int:
        return max(depth for depth in self._starts if depth <= pos)
