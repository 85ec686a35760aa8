"""Counts, per layer, the experts that the last tokens chose."""

from __future__ import annotations

import numpy as np

from tinychat.kernels.blocks import Experts
from tinychat.kernels.ops import Plan

RECENT = 128  # tokens


class RecentExperts:
    """A ring buffer of the choices of the last RECENT decoded tokens. The engine's thread writes, any thread may read.

    `layers`: the numbers of the layers with experts; each has `experts` experts, of which a token uses `used`. `known`
    becomes False when the executor does not report choices.
    """

    def __init__(self, layers: tuple[int, ...], experts: int, used: int) -> None:
        self.layers, self.experts, self.used = layers, experts, used
        self.known = True
        self._ring = np.zeros((RECENT, len(layers), used), np.int32)
        self._added = 0

    @classmethod
    def of(cls, plan: Plan) -> RecentExperts | None:
        """A ring for the experts of `plan`; None where it has none."""
        found = {i: b.router for i, layer in enumerate(plan.layers) if isinstance(b := layer.feed_forward, Experts)}
        if not found:
            return None
        return cls(tuple(found), max(r.experts for r in found.values()), max(r.top_k for r in found.values()))

    def add(self, chosen: np.ndarray | None) -> None:
        """Adds a token's choices as Executor.routes() returns them: int32 (layers, used), or None."""
        self.known = chosen is not None
        if chosen is not None:
            self._ring[self._added % RECENT] = chosen
            self._added += 1

    @property
    def tokens(self) -> int:
        """The number of tokens in `counts`."""
        return min(self._added, RECENT)

    def counts(self) -> np.ndarray:
        """How many of the last tokens chose each expert: int64 (layers, experts)."""
        n = len(self.layers)
        places = self._ring[: self.tokens] + np.arange(n)[:, None] * self.experts
        return np.bincount(places.reshape(-1), minlength=n * self.experts).reshape(n, self.experts)
