"""The graphs of verify steps: those of a decode step for several tokens at once."""

from __future__ import annotations

from itertools import chain

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.builder import SLOTS, Builder, Depth
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.step import decode

COLUMNS = (2, 4, 8, 16)  # tokens of a graph; a step of fewer takes the next larger one
OWN_SHARED = 12 << 10  # bytes of shared memory that the kernels declare themselves, at most


class Verifying:
    """Graphs for each of `counts` tokens, none where two do not fit. They are compiled and made when one of their depth
    is first needed, for that takes as long as those of single steps."""

    def __init__(self, builder: Builder, gpu: GPU, kinds: dict[int, Depth]) -> None:
        """Asks `builder` for the buffers of the largest. `kinds`: step.depths()."""
        self._builder, self._gpu, self._kinds, self.counts = builder, gpu, kinds, tuple[int, ...]()
        self._graphs: dict[tuple[int, int], Graph] = {}  # by columns and depth
        choices = [n for n in COLUMNS if n < SLOTS or not builder.plan.state_bytes]  # a state goes back by slots
        for columns in reversed(choices):
            try:
                for depth in kinds:
                    self.launches(columns, depth)
            except TinychatError:  # beyond the shared memory of a block
                continue
            self.counts = COLUMNS[: COLUMNS.index(columns) + 1]
            break

    def launches(self, columns: int, pos: int) -> list[Launch]:
        """A step of so many tokens from position `pos` on."""
        many = self._builder.of(columns, self._gpu.max_shared - OWN_SHARED)
        return [launch for launch, _ in decode(many, self._kinds[self._depth(pos)])]

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
