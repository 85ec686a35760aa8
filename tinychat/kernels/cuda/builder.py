"""The buffers of a plan on the GPU, and what lies in each, as launches name them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinychat.errors import TinychatError
from tinychat.kernels import blocks
from tinychat.kernels.blocks import MLA, Experts, Layer, Weight
from tinychat.kernels.cuda.alike import first_alike
from tinychat.kernels.cuda.constants import NO_MATRIX, Matrix
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.layout import Layout, Placed, keys_of
from tinychat.kernels.cuda.quants import FLOATS
from tinychat.kernels.cuda.spread import QUANTISED_ROWS
from tinychat.kernels.cuda.state import STATE_BYTES
from tinychat.kernels.ops import Plan, weights_of

SLOTS = 5  # of what a layer carries from token to token: steps enqueued ahead, and drafts, can be for nothing
ROUTE_SLOTS = 32  # tokens whose experts are kept; more than steps are enqueued ahead and drafts verified
RING = 64  # slots of the ring of decoded tokens
RING_DRAFTS = RING // 2  # slot of a draft behind position -1: what a step chose may not have been read yet
MAX_SHARED = 48 << 10  # bytes of static shared memory of a block
MAX_DYNAMIC = 227 << 10  # bytes of dynamic shared memory of a block, and of a multiprocessor
Depth = Literal["near", "middle", "deep"]  # how many keys a step is made for: up to NEAR, to DEEP, more
LaunchedOps = list[tuple[Launch, int]]  # launches, and the index in Plan.ops of the op that each computes


@dataclass(frozen=True)
class Activations:
    """What one kernel leaves for the next: `size` floats in buffer `name`, or int8 blocks in `name`_q and `name`_s."""

    name: str
    size: int
    quantised: bool = False


class Builder:
    """Names the buffers of a plan's launches. `buffers`: every buffer that a launch names, with its size in bytes."""

    def __init__(self, plan: Plan, layout: Layout, max_context: int, warpgroups: bool = False) -> None:
        """`warpgroups`: the GPU has wgmma."""
        self.plan, self.layout, self.max_context, self.warpgroups = plan, layout, max_context, warpgroups
        self.buffers: dict[str, int] = {"state": STATE_BYTES, "history": 4 * (max_context + 1), "ring": 8 * RING}
        self.ropes: dict[blocks.Rope, str] = {}
        self.columns, self.room = 1, 0  # tokens of a decode step; dynamic shared memory for their activations
        self._first, self._one_of_each = first_alike(plan, layout), False
        self._renamed = dict[int, Mapping[str, str]]()

    def of(self, columns: int, room: int = MAX_DYNAMIC) -> Builder:
        """For a decode step of so many tokens, over the same buffers, which grow to that many rows. `room`: bytes of
        dynamic shared memory that a block may have."""
        other = copy.copy(self)
        other.columns, other.room = columns, room
        return other

    def one_of_each(self) -> Builder:
        """Over the same buffers, for one layer of each kind: what kernels there are, and how large their buffers."""
        other = copy.copy(self)
        other._one_of_each = True
        return other

    def layers(self) -> Iterator[tuple[int, Layer, int, Mapping[str, str]]]:
        """The number of each layer, the layer, the first like it, and by what to replace the buffers of that one's
        launches."""
        for i, (layer, first) in enumerate(zip(self.plan.layers, self._first)):
            if i == first:
                yield i, layer, i, {}
            elif not self._one_of_each:
                if i not in self._renamed:
                    self._renamed[i] = dict(zip(self._own(first), self._own(i)))
                yield i, layer, first, self._renamed[i]

    def _own(self, i: int) -> list[str]:
        """The buffers of layer `i` alone."""
        layer, cache = self.plan.layers[i], self.plan.caches[i]
        a, keys = layer.attention, list[Weight]()
        if isinstance(a, MLA):
            keys = [keys_of(a.k_b)]
        own = [self.weight(w).tensor.buffer for w in (*weights_of(layer), *keys)]
        own += [self.cache(kind, i) for kind, width in (("k", cache.key_width), ("v", cache.value_width)) if width]
        if self.plan.states[i]:
            own.append(self.carried(i))
        if isinstance(layer.feed_forward, Experts):
            own.append(self.routes_of(i))
        return own

    def buffer(self, name: str, nbytes: int) -> str:
        """Asks for a buffer of at least `nbytes`."""
        self.buffers[name] = max(self.buffers.get(name, 0), nbytes)
        return name

    def act(self, name: str, tokens: int | None = None) -> str:
        """A float32 activation buffer of the plan, for the step's tokens or so many."""
        return self.buffer(name, 4 * self.plan.buffers[name] * (tokens or self.columns))

    def weight(self, w: Weight) -> Placed:
        placed = self.layout[w]
        self.buffer(placed.tensor.buffer, placed.tensor.nbytes)
        return placed

    def matrix(self, w: Weight | None) -> Matrix:
        """Where a kernel finds the weight, as named constants."""
        if w is None:
            return NO_MATRIX
        p = self.weight(w)
        return Matrix(p.tensor.kind, w.rows, w.cols, p.tensor.blocks, p.start, p.stride, w.run)

    def data(self, w: Weight | None) -> str | None:
        """The buffer that holds the weight."""
        return None if w is None else self.weight(w).tensor.buffer

    def kinds(self, *weights: Weight | None) -> tuple[bool, bool]:
        """(any is quantised, any is floating-point)."""
        floating = {self.weight(w).tensor.kind in FLOATS for w in weights if w}
        return False in floating, True in floating

    def rope(self, rope: blocks.Rope) -> str:
        """The buffer with cos and sin of every position."""
        name = self.ropes.setdefault(rope, f"rope:{len(self.ropes)}")
        return self.buffer(name, 4 * self.max_context * rope.dims)

    def cache(self, kind: str, layer: int) -> str:
        """A layer's cache: "k" or "v"."""
        cache = self.plan.caches[layer]
        width = cache.key_width if kind == "k" else cache.value_width
        rows = self.plan.rows(cache, self.max_context)
        return self.buffer(f"{kind}:{layer}", blocks.CACHE_VALUE_BYTES * rows * width)

    @property
    def routes(self) -> tuple[int, int]:
        """The layers with experts, and how many experts a token uses in each, at most."""
        used = [b.router.top_k for layer in self.plan.layers if isinstance(b := layer.feed_forward, Experts)]
        return len(used), max(used, default=0)

    def routes_of(self, layer: int) -> str:
        """Where a layer leaves the experts of a token, for the host."""
        layers, used = self.routes
        before = sum(isinstance(each.feed_forward, Experts) for each in self.plan.layers[:layer])
        return f"{self.buffer('routes', 4 * ROUTE_SLOTS * layers * used)}+{4 * before * used}"

    def carried(self, layer: int) -> str:
        """What a layer carries from token to token, SLOTS times, and behind the token that a prompt keeps it of."""
        state = self.plan.states[layer]
        assert state
        return self.buffer(f"carried:{layer}", (SLOTS + 1) * state.nbytes)

    def source(self, x: Activations) -> dict[str, str | None]:
        """Activations as a kernel's input."""
        if x.quantised:
            return {"src_q": f"{x.name}_q", "src_s": f"{x.name}_s"}
        return {"src": self.act(x.name)}

    def target(self, x: Activations) -> dict[str, str | None]:
        """Activations as a kernel's result."""
        if x.quantised:
            size = x.size * self.columns
            q, scales = self.buffer(f"{x.name}_q", size), self.buffer(f"{x.name}_s", size // 32 * 8)
            return {"dst_q": q, "dst_s": scales}
        return {"dst": self.act(x.name)}

    def agreed(
        self, name: str, size: int, readers: Sequence[Weight | None], rows: Sequence[int], fits: bool
    ) -> Activations:
        """Activations as int8 blocks where all that reads them is quantised, and their producer's blocks make 32 rows
        (`fits`) of matrices of `rows` rows."""
        quantised, floating = self.kinds(*readers)
        whole = not any(n % QUANTISED_ROWS for n in rows)
        return Activations(name, size, quantised and not floating and fits and whole)


def shared_columns(b: Builder, k: int, quantised: bool, floats: bool) -> int:
    """Bytes of dynamic shared memory for the step's columns of `k` activations; 0 for one column, which lies in static
    shared memory. Raises TinychatError where they do not fit."""
    column = (k // 32 * 40 if quantised else 0) + (4 * k if floats else 0)
    if b.columns == 1:
        if column + 1024 > MAX_SHARED:
            longest = (MAX_SHARED - 1024) // 4
            raise TinychatError(f"the CUDA kernels take rows of up to {longest:,} floating-point weights, not {k:,}")
        return 0
    if column * b.columns > b.room:
        raise TinychatError(f"{b.columns} columns of {k:,} activations are too many for shared memory")
    return column * b.columns
