"""The graphs of verify steps, those of a decode step for several tokens at once, and of drafts of multi-token
prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.builder import SLOTS, Builder, Depth, LaunchedOps
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.step import decode, draft, draft_behind

COLUMNS = (2, 4, 8, 16)  # tokens of a graph; a step of fewer takes the next larger one
DRAFTED = (1, 2)  # behind an accepted draft two rows lack
OWN_SHARED = 12 << 10  # bytes of shared memory that the kernels declare themselves, at most

MakeStep = Callable[[Builder, Depth], LaunchedOps]


def verifying(builder: Builder, gpu: GPU, kinds: dict[int, Depth]) -> ColumnGraphs:
    """Verify steps; none where two tokens do not fit."""
    counts = [n for n in COLUMNS if n < SLOTS or not builder.plan.state_bytes]  # a state goes back by slots
    return ColumnGraphs(builder, gpu, kinds, decode, counts)


def drafting(builder: Builder, gpu: GPU, kinds: dict[int, Depth]) -> tuple[ColumnGraphs, ColumnGraphs]:
    """Drafts of the plan's multi-token prediction behind one token or two; those that follow a verify step of two."""
    alone = ColumnGraphs(builder, gpu, kinds, draft, DRAFTED)
    return alone, ColumnGraphs(builder, gpu, kinds, draft_behind, DRAFTED[1:])


class ColumnGraphs:
    """Graphs of a step for each of `counts` tokens, as many of those asked for as fit. They are compiled and made when
    one of their depth is first needed, for that takes as long as those of single steps."""

    def __init__(
        self, builder: Builder, gpu: GPU, kinds: dict[int, Depth], step: MakeStep, counts: Sequence[int]
    ) -> None:
        """Asks `builder` for the buffers of the largest. `kinds`: step.depths()."""
        self._builder, self._gpu, self._kinds, self._step, self.counts = builder, gpu, kinds, step, tuple[int, ...]()
        self._graphs: dict[tuple[int, int], Graph] = {}  # by columns and depth
        for columns in reversed(counts):
            try:
                for depth in kinds:
                    self.launches(columns, depth)
            except TinychatError:  # beyond the shared memory of a block
                continue
            self.counts = tuple(n for n in counts if n <= columns)
            break

    def launches(self, columns: int, pos: int) -> list[Launch]:
        """A step of so many tokens from position `pos` on."""
        many = self._builder.of(columns, self._gpu.max_shared - OWN_SHARED)
        return [launch for launch, _ in self._step(many, self._kinds[self._depth(pos)])]

    def graph(self, pos: int, count: int) -> Graph:
        """The graph for a step of `count` tokens from position `pos` on."""
        depth, columns = self._depth(pos), min(n for n in self.counts if n >= count)
        if (columns, depth) not in self._graphs:  # all at once, so that what each costs is told from steps that follow
            launches = {n: self.launches(n, depth) for n in self.counts}
            self._gpu.compile(chain.from_iterable(launches.values()))
            self._graphs |= {(n, depth): self._gpu.graph(step) for n, step in launches.items()}
        return self._graphs[columns, depth]

    def _depth(self, pos: int) -> int:
        return max(depth for depth in self._kinds if depth <= pos)
