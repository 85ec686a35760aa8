"""What the engine asks of an executor: run a plan's step on one kind of device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from tinychat.kernels.ops import Sampling


class Weights(Protocol):
    """Where an executor gets packed tensors from, once, at load."""

    def raw(self, name: str) -> np.ndarray:
        """uint8 view of the packed bytes of tensor `name`."""
        ...

    def release(self, name: str) -> None:
        """The executor has its own copy of `name` now; its source pages may go."""
        ...


class Executor(Protocol):
    """Runs the steps of one plan. Cache rows are addressed by position, so rolling back is only counting differently.

    Built as `Executor(plan, weights, max_context, ...)`. Not thread-safe: one thread calls it.
    """

    @property
    def device(self) -> str:
        """For people: "CPU · 2 threads · AVX-512 VNNI"."""
        ...

    @property
    def kernels_per_token(self) -> int: ...

    @property
    def jit_batches(self) -> int: ...

    @property
    def jit_state(self) -> str:
        """What the next decode step does: "compiling", "capturing" (both take far longer) or "replaying"."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Resident packed weights."""
        ...

    @property
    def cache_bytes(self) -> int: ...

    def forward(
        self, ids: Sequence[int], pos: int, logits: Literal["none", "last", "all"] = "none"
    ) -> np.ndarray | None:
        """Runs tokens `ids` at positions pos, pos+1, ... and stores their cache rows; any length >= 1 up to max_context
        - pos.

        Returns None, or float32 logits (1, vocab) or (len(ids), vocab).
        """
        ...

    def decode(self, token: int, pos: int, sampling: Sampling, recent: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Yields (next id, its log-probability under softmax(logits)), one per step.

        `token` is run at `pos`, then each sampled id behind it.
        `recent` is every token up to and including `token`, for the repeat penalty. Endless until max_context rows are
        used; closing the iterator ends it. Steps may be enqueued ahead: rows past the last yielded token are garbage.
        """
        ...

    def step_logits(self) -> np.ndarray:
        """float32 (vocab,): the logits behind the last id that decode() yielded."""
        ...

    def routes(self) -> np.ndarray | None:
        """int32 (MoE layers, top_k): the experts that the step behind the last id of decode() chose, in order of
        selection.

        None without experts, or where the device does not tell.
        """
        ...

    @property
    def cache_layout(self) -> str:
        """Names what the bytes of read_cache mean ("cpu f16 1"); a saved cache of another layout is not used.

        Its first word is the device's name, as Engine.load takes it.
        """
        ...

    def read_cache(self, first: int, rows: int) -> bytes:
        """Cache rows first .. first + rows - 1 of all layers, in this executor's layout; `first` is a multiple of
        16."""
        ...

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """Puts these rows back, as read_cache gave them. Raises TinychatError for bytes that do not fit them."""
        ...

    def close(self) -> None:
        """Frees device memory and threads; the executor is not used again."""
        ...
