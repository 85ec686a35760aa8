"""Runs a plan on an NVIDIA GPU: source kernels in one graph per step, everything a step needs on the device.

A decode step reads its token and position from device memory and writes the next ones there, so that steps are enqueued
ahead without waiting; sampled ids arrive through page-locked host memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_SIZES

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.device import GPU, Graph, unusable
from tinychat.kernels.cuda.layout import FLOATS, Layout, Tensor, repack, transpose
from tinychat.kernels.cuda.prefill import Prefill
from tinychat.kernels.cuda.profile import kernels, profile, read_bandwidth, seconds_of
from tinychat.kernels.cuda.selfcheck import self_check
from tinychat.kernels.cuda.step import PREFILL, RING, Builder, state_words
from tinychat.kernels.executor import Weights
from tinychat.kernels.ops import Plan, Sampling, weights_of
from tinychat.kernels.profile import Kernel, StepProfile

AHEAD = 4  # decode steps enqueued before the oldest is read
SLOT = 32 << 20  # bytes of one upload
SLOTS = 6  # uploads in flight
FEW = 10  # tokens that the decode step takes one by one rather than prefill
ROWS_OF_LOGITS = 64  # tokens of a prefill step that wants the logits of all
GREEDY = Sampling(temperature=0.0, repeat_penalty=1.0)
EMPTY = 2**64 - 1  # a ring slot nothing was written to


class CUDAExecutor:
    """`Executor` on CUDA. Raises TinychatError where there is no such GPU, no memory left, or a kernel fails its check
    at load."""

    def __init__(
        self, plan: Plan, weights: Weights, max_context: int, progress: Callable[[float], None] | None = None
    ) -> None:
        self.plan, self.max_context = plan, max_context
        names = {w.tensor for op in plan.ops for w in weights_of(op)}
        layout = Layout(plan, {name: weights.raw(name).nbytes for name in names})
        builder = Builder(plan, layout, max_context)
        decode = builder.decode()
        prefill = Prefill(builder, min(PREFILL, max_context)).layers()
        head_all = Prefill(builder, min(ROWS_OF_LOGITS, max_context)).head()
        self.gpu = gpu = GPU()
        self.device = f"CUDA · {gpu.name}"
        try:
            for name, size in builder.buffers.items():
                if name == "ring":
                    self._ring = gpu.pinned(size, name).view(np.uint64)
                else:
                    gpu.allocate(name, size)
            if "tickets" in builder.buffers:  # of attention
                gpu.upload("tickets", np.zeros(builder.buffers["tickets"], np.uint8))
            gpu.compile([*decode, *prefill, *head_all])
            _load(gpu, layout, weights, progress)
            self_check(gpu, sorted({t.kind for t in layout.tensors.values()}, key=int))
            for rope, name in builder.ropes.items():
                gpu.upload(name, rope.table(max_context))
            self._decode: Graph = gpu.graph(decode)
            self._prefill, self._head_all = gpu.sequence(prefill), gpu.sequence(head_all)
            self._head = gpu.sequence([x for x in decode if x.name.startswith("head")])
            gpu.synchronize()
        except BaseException as e:
            with contextlib.suppress(Exception):  # a GPU that stopped frees nothing
                gpu.close()
            if isinstance(e, TinychatError) or not isinstance(e, Exception):
                raise
            raise unusable(e) from e  # a driver without graphs of this kind, a compiler without this architecture, ...
        self.launches, self.computes, self.prefill_launches = decode, builder.computes, prefill
        self.kernels_per_token, self.jit_batches = self._decode.kernels, 1
        self.jit_state = "replaying"  # compiled and captured at load
        self.weight_bytes = layout.nbytes
        self.cache_bytes = sum(size for name, size in builder.buffers.items() if name[:2] in ("k:", "v:"))
        self.device_bytes = gpu.nbytes
        self._last = (0, 0)  # token and position of the step whose result decode() yielded last

    def forward(
        self, ids: Sequence[int], pos: int, logits: Literal["none", "last", "all"] = "none"
    ) -> np.ndarray | None:
        """See Executor.forward. A few tokens go through the decode step one by one, more through prefill steps."""
        self._check(ids, pos)
        out: list[np.ndarray] = []
        size = 1 if len(ids) <= FEW else ROWS_OF_LOGITS if logits == "all" else PREFILL
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            self._know(part, pos + start)
            self._set_state(GREEDY, pos + start, len(part), 0)
            if size == 1:
                self._decode()
            else:
                self._prefill()
            if logits == "all" and size > 1:
                self._head_all()
                out.append(
                    self.gpu.download("logits_all", 4 * self.plan.vocab * len(part))
                    .view(np.float32)
                    .reshape(len(part), -1)
                )
            elif logits == "all" or (logits == "last" and last):
                if size > 1:
                    self._head()
                out.append(self.gpu.download("logits", 4 * self.plan.vocab).view(np.float32)[None])
        return np.concatenate(out) if out else None

    def decode(self, token: int, pos: int, sampling: Sampling, recent: Sequence[int]) -> Iterator[tuple[int, float]]:
        """See Executor.decode. Up to AHEAD steps are enqueued before one is waited for."""
        self._check([token], pos)
        known = list(recent)[-(pos + 1) :] or [token]
        self._know(known, pos + 1 - len(known))
        self._set_state(sampling, pos, 1, pos + 1 - len(known))
        self._ring[:] = EMPTY
        enqueued = pos
        try:
            for at in range(pos, self.max_context):
                while enqueued < min(at + AHEAD, self.max_context):
                    self._decode()
                    enqueued += 1
                word = self._wait((at + 1) % RING)
                self._ring[(at + 1) % RING] = EMPTY
                self._last = (token, at)
                token = word & 0xFFFFFFFF
                yield token, float(np.uint32(word >> 32).view(np.float32))
        finally:
            self.gpu.synchronize()

    def step_logits(self) -> np.ndarray:
        """See Executor.step_logits: the step is run again, since later ones may be under way."""
        token, pos = self._last
        rows = self.forward([token], pos, "last")
        assert rows is not None
        return rows[0]

    def routes(self) -> np.ndarray | None:
        """See Executor.routes: None. Every block chooses for itself, and steps are enqueued ahead."""
        return None

    @property
    def cache_layout(self) -> str:
        """See Executor.cache_layout."""
        return "cuda f16 1"

    def read_cache(self, first: int, rows: int) -> bytes:
        """See Executor.read_cache: K's rows (F16) layer by layer, then V's."""
        return b"".join(
            self.gpu.download(name, rows * width * 2, first * width * 2).tobytes() for name, width in self._caches()
        )

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        at, packed = 0, np.frombuffer(data, np.uint8)
        if packed.size != rows * self.plan.kv_bytes_per_token:
            raise TinychatError(f"a saved cache of {packed.size:,} bytes does not hold {rows} rows of this model")
        for name, width in self._caches():
            self.gpu.upload(name, packed[at : at + rows * width * 2], first * width * 2)
            at += rows * width * 2
        self.gpu.synchronize()

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """See kernels/profile.py."""
        return profile(self, token, pos, steps)

    def seconds_of(self, ops: Sequence[int], pos: int, steps: int) -> np.ndarray:
        """See kernels/cuda/profile.py."""
        return seconds_of(self, ops, pos, steps)

    def kernels(self) -> list[Kernel]:
        """See kernels/profile.py."""
        return kernels(self)

    def read_bandwidth(self) -> float:
        """Measured GB/s of the GPU's memory: the limit of decode."""
        return read_bandwidth(self.gpu)

    def close(self) -> None:
        """See Executor.close."""
        self.gpu.close()

    def _check(self, ids: Sequence[int], pos: int) -> None:
        if not ids or pos < 0 or pos + len(ids) > self.max_context:
            raise TinychatError(f"{len(ids)} tokens at position {pos} do not fit the context of {self.max_context}")
        if min(ids) < 0 or max(ids) >= self.plan.vocab:
            raise TinychatError(f"token id out of range: the vocabulary has {self.plan.vocab} entries")

    def _caches(self) -> list[tuple[str, int]]:
        kinds = [("k", self.plan.k_width)] + ([("v", self.plan.v_width)] if self.plan.v_width else [])
        return [(f"{kind}:{layer}", width) for kind, width in kinds for layer in range(self.plan.layers)]

    def _know(self, ids: Sequence[int], pos: int) -> None:
        """Tells the device the tokens at positions pos, pos + 1, ..."""
        self.gpu.upload("history", np.asarray(ids, np.int32), 4 * pos)

    def _set_state(self, sampling: Sampling, pos: int, count: int, first_known: int) -> None:
        self.gpu.upload("state", np.asarray(state_words(sampling, pos, count, first_known), np.int32))

    def _wait(self, slot: int) -> int:
        """The word the device writes into a ring slot."""
        ring, spins, deadline = self._ring, 0, time.monotonic() + 5
        while (word := int(ring[slot])) == EMPTY:
            spins += 1
            if spins > 20:
                time.sleep(5e-5)
                if time.monotonic() > deadline:
                    self.gpu.synchronize()  # raises for what stopped the GPU
                    if int(ring[slot]) == EMPTY:
                        raise TinychatError("the GPU finished a step without a token")
        return word


def _load(gpu: GPU, layout: Layout, weights: Weights, progress: Callable[[float], None] | None) -> None:
    """File bytes through page-locked memory to the GPU, repacked there. Threads copy, so that page faults overlap."""
    pinned = [gpu.pinned(SLOT) for _ in range(SLOTS)]
    total, done = sum(weights.raw(t.name).nbytes for t in layout.tensors.values()), 0
    gpu.allocate("staging", SLOT)
    gpu.allocate("params", 24)
    busy: list[Any] = [None] * SLOTS
    work: list[tuple[Tensor, np.ndarray, int]] = []
    for t in layout.tensors.values():
        raw, unit = (
            weights.raw(t.name),
            GGML_QUANT_SIZES[t.kind][1] * 8,
        )  # whole super-blocks, and 32-weight blocks in eights
        step = SLOT // unit * unit
        work += [(t, raw[i : i + step], i) for i in range(0, raw.nbytes, step)]

    def fill(n: int) -> None:
        part = work[n][1]
        np.copyto(pinned[n % SLOTS][: part.nbytes], part)

    with ThreadPoolExecutor(SLOTS - 1) as pool:
        filling: list[Future[None]] = []
        for n in range(len(work) + SLOTS - 1):
            if n < len(work):
                if busy[n % SLOTS] is not None:
                    gpu.wait(busy[n % SLOTS])
                filling.append(pool.submit(fill, n))
            if (m := n - (SLOTS - 1)) < 0:
                continue
            filling[m].result()
            t, part, offset = work[m]
            data = pinned[m % SLOTS][: part.nbytes]
            if t.kind in FLOATS:
                gpu.upload(t.buffer, data, offset)
            else:
                block, size = GGML_QUANT_SIZES[t.kind]
                count = part.nbytes // size * block // 32
                gpu.upload("staging", data)
                gpu.upload("params", np.array([t.blocks, offset // size * block // 32, count], np.uint64))
                gpu.run(repack(t, count))
            busy[m % SLOTS] = gpu.event()
            done += part.nbytes
            if offset + part.nbytes == weights.raw(t.name).nbytes:
                weights.release(t.name)
            if progress:
                progress(done / total)
    for w, source in layout.transposed.values():
        gpu.run(transpose(w, source, layout[w].tensor))
    gpu.synchronize()
