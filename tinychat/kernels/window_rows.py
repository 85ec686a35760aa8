"""Which cache rows layers with a sliding window keep.

Such a layer attends to the last rows only, so of a long context it keeps Plan.rows of them, in the order of positions:
that of position p is row p - base. `base` is 0 until all are taken; then the last ones move to the front, and it is
what the first one's position is. It is the same for all these layers. Kernels take positions as everywhere else; only
the address of a row depends on `base`.
"""

from __future__ import annotations

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import Cache
from tinychat.kernels.ops import Plan

UNIT = 64  # `base` is a multiple: of the tiles of rows on the CPU and of the keys that CUDA's prompts load together
BACK = 64  # tokens in front of a run's first one at which the next may begin: steps that were enqueued ahead


class WindowRows:
    """The rows `base` .. `base + rows - 1` of an executor's layers with a window; all of them in a shorter context.

    `together`: how many tokens can be run together.
    """

    def __init__(self, plan: Plan, max_context: int) -> None:
        self.window, self.base = plan.window, 0
        self.rows = min((plan.rows(cache, max_context) for cache in plan.caches), default=max_context)
        self.together = max_context if self.rows == max_context else self.rows - self.window - BACK - UNIT
        assert self.together > 0
        self._bytes = sum(cache.row_bytes for cache in plan.caches if cache.window)  # of a row of these layers
        self._others = plan.kv_bytes_per_token - self._bytes

    def reaches(self, pos: int) -> bool:
        """Whether all rows in front of `pos` are there that tokens from it on see."""
        return pos == 0 or self.base <= max(0, pos + 1 - self.window)

    def base_for(self, pos: int, count: int) -> int:
        """The base with which `count` tokens can be run at `pos`. Where rows in front of them lack it is what it would
        be with them: 0 at the start of another sequence."""
        most = max(0, pos + 1 - self.window - BACK) // UNIT * UNIT
        if self.base > max(0, pos + 1 - self.window):
            return most
        return min(most, self._roomy(pos + count)) if pos + count > self.base + self.rows else self.base

    def base_with(self, first: int, rows: int, held: int) -> int:
        """The base with which rows first .. first + rows - 1 are written, of which the last `held` are given. Raises
        TinychatError where they cannot be the first ones."""
        start = first + rows - held
        if held < rows or start < self.base:
            if start % UNIT:
                raise TinychatError(f"a saved cache whose first row is that of token {start:,} does not fit")
            return start
        return self._roomy(start + held) if start + held > self.base + self.rows else self.base

    def held(self, nbytes: int, rows: int) -> int:
        """How many of the last ones of `rows` saved rows these layers have, where all layers' take `nbytes`. Raises
        TinychatError where it cannot be any number."""
        more = nbytes - rows * self._others
        held = more // self._bytes if self._bytes else rows
        if more != held * self._bytes or not 0 <= held <= rows:
            raise TinychatError(f"a saved cache of {nbytes:,} bytes does not fit {rows} rows of this model")
        return held

    def place(self, cache: Cache, first: int, rows: int) -> tuple[int, int]:
        """Which rows (start, end) of a layer's cache are those of positions first .. first + rows - 1."""
        base = self.base if cache.window else 0
        return max(first - base, 0), max(first + rows - base, 0)

    def _roomy(self, end: int) -> int:
        """A base with which there is room behind position `end`, a quarter of all rows."""
        return -(-(end - self.rows + self.rows // 4) // UNIT) * UNIT
