"""What the engine asks of an executor, and what the profiler and the microbenchmarks ask of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from tinychat.kernels.limits import Limits
from tinychat.kernels.ops import Plan
from tinychat.kernels.profile import Calls, Kernel, StepProfile
from tinychat.kernels.sampling import Sampling

ExecutorKind = Literal["cuda", "cpu", "reference"]


Logits = Literal["none", "last", "all"]

Mask = Callable[[], np.ndarray]
"""uint32 ((vocab + 31) // 32,): token i may come where bit i % 32 of word i // 32 is set."""


Watch = Callable[[float], bool]
"""Gets the share of a call's work that is done, and says whether to leave out the rest."""


class StateCopy(Protocol):
    """A copy of what layers carry from token to token, wherever the executor keeps it; a memoryview is one, too."""

    def tobytes(self) -> bytes: ...


class Weights(Protocol):
    """Where an executor gets packed tensors from, once, at load."""

    def size(self, name: str) -> int:
        """Bytes of tensor `name`."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The packed bytes of tensor `name`, uint8 (size,). Raises TinychatError."""
        ...

    def read(self, name: str, at: int, out: np.ndarray) -> None:
        """Fills `out` (uint8) with the packed bytes of tensor `name` from byte `at` on, beside other threads. Raises
        TinychatError."""
        ...

    def place(self, name: str) -> tuple[int, int] | None:
        """An open file and the byte of it at which tensor `name` begins, for who reads it without Python; None: there
        is none."""
        ...


class Executor(Protocol):
    """Runs the steps of one plan. Cache rows are addressed by position, so rolling back is only counting differently,
    as far as `reaches` says. A state (blocks.LayerState) is not: it is that behind the last token that was run. A step
    at position 0 begins with none.

    Built as `Executor(plan, weights, max_context, ...)`, which raises TinychatError for a plan beyond `limits`. Not
    thread-safe: one thread calls it.
    """

    @property
    def kind(self) -> ExecutorKind:
        """The device as Engine.load takes it."""
        ...

    @property
    def device(self) -> str:
        """For people: "CPU · 2 threads · AVX-512 VNNI"."""
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def threads(self) -> int:
        """Threads of this process that compute; 0 where a device of its own does."""
        ...

    @property
    def prefill_chunk(self) -> int:
        """Tokens that one call of `forward` runs together; longer calls are cut into pieces of this size."""
        ...

    @property
    def kernels_per_token(self) -> int:
        """What the host starts or the device runs for one token; 0 before the first step."""
        ...

    @property
    def jit_batches(self) -> int:
        """Graphs, native calls or the like that one token takes; 0 where every kernel is started alone."""
        ...

    @property
    def jit_state(self) -> str:
        """What the next decode step does: "compiling" (which takes far longer) or "replaying"."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Resident packed weights."""
        ...

    @property
    def cache_bytes(self) -> int:
        """The KV cache of max_context rows."""
        ...

    @property
    def sampling_s(self) -> float:
        """Seconds that choosing the last id of decode() took, as part of its step; 0.0 where it is not told apart."""
        ...

    def reaches(self, pos: int) -> bool:
        """Whether the next step may be at `pos`, behind rows that were run: layers with a sliding window keep the last
        rows of a long context only (window_rows.py). At position 0 it always may."""
        ...

    def forward(
        self,
        ids: Sequence[int],
        pos: int,
        logits: Logits = "none",
        *,
        mtp: bool = False,
        following: int | None = None,
        watch: Watch | None = None,
    ) -> np.ndarray | None:
        """Runs tokens `ids` at positions pos, pos+1, ... and stores their cache rows; any length >= 1 up to max_context
        - pos. With `mtp` it runs the plan's MTP instead of its layers: all positions before the last one have to be run
        without it first. `following`: the token that decode() or verify() will go on with, which an executor may run
        with them. `watch`: asked several times a second, on the caller's thread, by an executor that can stop in
        between. Where it says so, the rows from `pos` on and a state are garbage, and None is returned; what it raises
        is raised.

        Returns None, or float32 logits (1, vocab) or (len(ids), vocab).
        """
        ...

    def forward_keeping(self, ids: Sequence[int], pos: int, place: int, watch: Watch | None = None) -> StateCopy:
        """forward(ids, pos) without logits; the state behind the first `place` tokens of the sequence, which is behind
        one of `ids`. `watch` is told how far it is; it must not have anything left out."""
        ...

    def draft(self, ids: Sequence[int], pos: int) -> int:
        """Runs the plan's MTP on `ids` as forward() does; the id that it holds most likely behind the last one."""
        ...

    def decode(
        self, token: int, pos: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None = None
    ) -> Iterator[tuple[int, float]]:
        """Yields (next id, its log-probability under softmax(logits)), one per step.

        `token` is run at `pos`, then each sampled id behind it. `recent` is every token up to and including `token`,
        for the penalties. Endless until max_context rows are used; closing the iterator ends it. Steps may be enqueued
        ahead: rows past the last yielded token are garbage. `mask` is called once a step, after the caller has taken
        the id before: only the tokens that it allows can be chosen.
        """
        ...

    def verify(
        self,
        token: int,
        drafts: Sequence[int],
        pos: int,
        sampling: Sampling,
        recent: Sequence[int],
        mask: Mask | None = None,
        *,
        ahead: bool = False,
    ) -> Iterator[tuple[int, float]]:
        """Yields what decode() with these arguments would, bit for bit: an id behind `token`, and one more for as long
        as each is the next of `drafts`, which are run in the same step.

        At most limits.verified tokens, drafts included, which have to fit max_context. Cache rows behind the last
        accepted draft are garbage; a state is that behind the token that was run before the last id. `recent` and
        `mask` are those of decode(). `ahead`: the next call is like this one, without drafts, or with one that draft()
        said just before, and goes on behind what this one yields, so that its step may be enqueued already; where that
        turns out otherwise, the step was for nothing.
        """
        ...

    def routes(self) -> np.ndarray | None:
        """int32 (MoE layers, top_k): the experts that the token in front of the last id of decode() or verify() chose,
        in order of selection.

        None without experts, or where the device does not tell.
        """
        ...

    @property
    def cache_layout(self) -> str:
        """Names what the bytes of read_cache mean ("cpu f16 1"); a saved cache of another layout is not used."""
        ...

    def read_cache(self, first: int, rows: int) -> bytes:
        """Cache rows first .. first + rows - 1 of all layers, in this executor's layout, without those that layers with
        a sliding window keep no more; `first` is a multiple of 16."""
        ...

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """Puts these rows back, as read_cache gave them, behind those that are there. Raises TinychatError for bytes
        that do not fit them."""
        ...

    @property
    def state_bytes(self) -> int:
        """The state of all layers; 0 for a plan without."""
        ...

    def read_state(self) -> StateCopy:
        """A copy of the state of all layers, in this executor's layout."""
        ...

    def write_state(self, state: StateCopy) -> None:
        """Puts a state back: one that this executor's read_state gave, or the bytes of one. Raises TinychatError for
        bytes that do not fit."""
        ...

    def close(self) -> None:
        """Frees device memory and threads; the executor is not used again."""
        ...


class KeepsInPieces:
    """Base of an executor that stops where a state is to be kept."""

    def forward_keeping(
        self: Executor, ids: Sequence[int], pos: int, place: int, watch: Watch | None = None
    ) -> StateCopy:
        """See Executor.forward_keeping: in two calls of forward()."""
        split = place - pos

        def part(first: int, last: int) -> Watch | None:
            return watch and (lambda share: watch((first + share * (last - first)) / len(ids)))

        self.forward(ids[:split], pos, watch=part(0, split))
        kept = self.read_state()
        if split < len(ids):
            self.forward(ids[split:], place, watch=part(split, len(ids)))
        return kept


class SingleSteps:
    """Base of an executor that has no step of several tokens."""

    def verify(
        self: Executor,
        token: int,
        drafts: Sequence[int],
        pos: int,
        sampling: Sampling,
        recent: Sequence[int],
        mask: Mask | None = None,
        *,
        ahead: bool = False,
    ) -> Iterator[tuple[int, float]]:
        """See Executor.verify: in steps of decode()."""
        for i, (following, logprob) in enumerate(self.decode(token, pos, sampling, recent, mask)):
            yield following, logprob
            if i == len(drafts) or following != drafts[i]:
                return


class MeasurableExecutor(Executor, Protocol):
    """An executor whose decode step can be taken apart (kernels/profile.py)."""

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """Measures `steps` decode steps, `token` at `pos` first. Overwrites cache rows from `pos` on.

        Raises TinychatError where the steps do not fit the context.
        """
        ...

    def kernels(self) -> list[Kernel]:
        """The kernels of a decode step, in order of first use."""
        ...

    def seconds_of(self, groups: Sequence[Sequence[int]], pos: int, steps: int) -> Calls:
        """Times groups of ops (indices into Plan.ops) in decode steps at position `pos`; a group is one call."""
        ...

    def read_bandwidth(self) -> float:
        """Measured GB/s at which the device reads its memory; 0.0 where it cannot be measured."""
        ...

    def stand_in(self, drafts: Sequence[int], pos: int) -> None:
        """From now on the caller verifies `drafts` for the tokens at pos, pos + 1, ... in place of what draft() says,
        so that steps enqueued ahead take them, too. What draft() says for all others."""
        ...
