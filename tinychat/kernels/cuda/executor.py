"""Runs a plan on an NVIDIA GPU: source kernels in one graph per step, everything a step needs on the device.

A decode step reads its token and position from device memory and writes the next ones there, so that steps are enqueued
ahead without waiting; sampled ids arrive through page-locked host memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import MLA
from tinychat.kernels.cuda.builder import RING, Builder
from tinychat.kernels.cuda.device import GPU, unusable
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.launches import head
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.load import load
from tinychat.kernels.cuda.prefill import SIZES, Chip, Prefill
from tinychat.kernels.cuda.profile import DecodeStep, kernels, profile, read_bandwidth, seconds_of
from tinychat.kernels.cuda.quants import QUANTS
from tinychat.kernels.cuda.selfcheck import self_check
from tinychat.kernels.cuda.state import breaker_bits, state_words
from tinychat.kernels.cuda.step import decode_steps
from tinychat.kernels.executor import ExecutorKind, Logits, Mask, SingleSteps, Weights
from tinychat.kernels.limits import Limits, check
from tinychat.kernels.ops import Plan
from tinychat.kernels.profile import Calls, Kernel, StepProfile
from tinychat.kernels.sampler import sample
from tinychat.kernels.sampling import GREEDY, Sampling

AHEAD = 4  # decode steps enqueued before the oldest is read
GRAPH_TOKENS = 128  # tokens from one graph of a prompt's kernels to the next
FEW = 3  # tokens that the decode step takes one by one rather than prefill, in an empty cache
ROWS_OF_STEP = 400  # cache rows whose keys and values MLA's prefill makes in the time of a decode step
CHUNKS = (4096, 2048, 1024)  # tokens of a prefill step, at most: the first whose buffers fit the GPU
SHARE = 0.97  # of the free memory that buffers may take; the rest is for programs and page-locked memory
ROWS_OF_LOGITS = 64  # tokens of a prefill step that wants the logits of all
EMPTY = 2**64 - 1  # a ring slot nothing was written to
LIMITS = Limits(
    frozenset(QUANTS),
    float_multiple=8,
    float_columns=12032,  # staged as floats in 48 KB of shared memory
    head_group=32,  # heads that one block of attention.cu combines
    key_length=512,
    key_multiple=16,
    value_multiple=8,
    latent_row=1024,
    experts=1024,
    experts_used=64,
    expert_groups=32,  # a lane each
    gated_blocks=False,
    prefill_chunk=CHUNKS[0],
)


class CUDAExecutor(SingleSteps):
    """`Executor` on CUDA. Raises TinychatError for a plan beyond LIMITS, and where there is no such GPU, no memory
    left, or a kernel fails its check at load."""

    kind: ExecutorKind = "cuda"
    limits = LIMITS
    threads = 0
    sampling_s = 0.0  # part of the graph, not told apart

    def __init__(
        self, plan: Plan, weights: Weights, max_context: int, progress: Callable[[float], None] | None = None
    ) -> None:
        check(plan, LIMITS, "CUDA", max_context)
        self.plan, self.max_context = plan, max_context
        self._latent = any(isinstance(layer.attention, MLA) for layer in plan.layers)
        layout = Layout(plan, {name: weights.raw(name).nbytes for name in {w.tensor for w in plan.weights}})
        self.gpu = gpu = GPU()
        chip = Chip(gpu.warpgroups, gpu.max_shared)
        for chunk in CHUNKS:
            builder = Builder(plan, layout, max_context)
            steps = decode_steps(builder, clusters=gpu.overlaps)
            self.prefill_chunk = min(chunk, max_context)
            sizes = sorted({min(n, self.prefill_chunk) for n in (*SIZES, chunk)})
            prefill = {n: Prefill(builder, n, chip).layers() for n in sizes}
            head_all = Prefill(builder, min(ROWS_OF_LOGITS, max_context), chip).head()
            if sum(builder.buffers.values()) < SHARE * gpu.free_bytes:
                break
        launches = {depth: [launch for launch, _ in step] for depth, step in steps.items()}
        self.device = f"CUDA · {gpu.name}"
        try:
            for name, size in builder.buffers.items():
                if name == "ring":
                    self._ring = gpu.pinned(size, name).view(np.uint64)
                else:
                    gpu.allocate(name, size)
            if "tickets" in builder.buffers:  # of attention
                gpu.upload("tickets", np.zeros(builder.buffers["tickets"], np.uint8))
            gpu.compile([*chain.from_iterable([*launches.values(), *prefill.values()]), *head_all])
            load(gpu, layout, weights, progress)
            self_check(gpu, sorted({t.kind for t in layout.tensors.values()}, key=int))
            gpu.free("staging")
            gpu.free("params")
            for rope, name in builder.ropes.items():
                gpu.upload(name, rope.table(max_context))
            graphs = {depth: gpu.graph(launches[depth]) for depth in steps}
            self._prefill = {n: self._prompt(n, launches) for n, launches in prefill.items()}
            self._head_all = gpu.sequence(head_all)
            self._head = gpu.sequence([head(builder, plan.head)])
            gpu.synchronize()
        except BaseException as e:
            with contextlib.suppress(Exception):  # a GPU that stopped frees nothing
                gpu.close()
            if isinstance(e, TinychatError) or not isinstance(e, Exception):
                raise
            raise unusable(e) from e  # a driver without graphs of this kind, a compiler without this architecture, ...
        self._steps = {  # by the position from which on they are taken
            depth: DecodeStep(gpu, tuple(step), graphs[depth], max_context, self.decode, self._place)
            for depth, step in steps.items()
        }
        self.launches = launches[0]
        self.kernels_per_token, self.jit_batches = graphs[0].kernels, 1
        self.jit_state = "replaying"  # compiled and captured at load
        self.weight_bytes = layout.nbytes
        self.cache_bytes = max_context * plan.kv_bytes_per_token
        self.state_bytes = 0
        self.device_bytes = gpu.nbytes

    def forward(self, ids: Sequence[int], pos: int, logits: Logits = "none", *, mtp: bool = False) -> np.ndarray | None:
        """See Executor.forward. A few tokens go through the decode step one by one, more through prefill steps.

        Returns when the device has finished.
        """
        assert not mtp, "its limits say so"
        self._check(ids, pos)
        out: list[np.ndarray] = []
        few = FEW + (pos // ROWS_OF_STEP if self._latent else 0)
        size = 1 if len(ids) <= few else self.prefill_chunk
        if size > 1 and logits == "all":
            size = min(ROWS_OF_LOGITS, size)
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            count, keys = len(part), pos + start + len(part)
            self._place(part, pos + start, GREEDY, count)
            if size == 1:
                self._step(pos + start).graph()
            else:
                self._prefill[min(n for n in self._prefill if n >= count)](count, keys)
            if logits == "all" and size > 1:
                self._head_all(count, keys)
                rows = self.gpu.download("logits_all", 4 * self.plan.vocab * count).view(np.float32)
                out.append(rows.reshape(count, -1))
            elif logits == "all" or (logits == "last" and last):
                if size > 1:
                    self._head()
                out.append(self.gpu.download("logits", 4 * self.plan.vocab).view(np.float32)[None])
        self.gpu.synchronize()
        return np.concatenate(out) if out else None

    def draft(self, ids: Sequence[int], pos: int) -> int:
        """See Executor.draft: not supported, as its limits say."""
        raise NotImplementedError

    def decode(
        self, token: int, pos: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None = None
    ) -> Iterator[tuple[int, float]]:
        """See Executor.decode. Up to AHEAD steps are enqueued before one is waited for; with a mask, which depends on
        the token before, none is, and the host samples, as it does for what the kernels do not know: presence and
        frequency penalty and a bias."""
        self._check([token], pos)
        if mask is not None or sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias:
            seen = list(recent)
            for at in range(pos, self.max_context):
                rows = self.forward([token], at, "last")
                assert rows is not None
                token, logprob = sample(rows[0], sampling, at, seen, mask() if mask else None)
                seen.append(token)
                yield token, logprob
            return
        known = list(recent)[-(pos + 1) :] or [token]
        if sampling.has_dry:
            self.gpu.upload("breakers", breaker_bits(sampling.dry_breakers, self.plan.vocab))
        self._place(known, pos + 1 - len(known), sampling)
        self._ring[:] = EMPTY
        enqueued = pos
        try:
            for at in range(pos, self.max_context):
                while enqueued < min(at + AHEAD, self.max_context):
                    self._step(enqueued).graph()
                    enqueued += 1
                word = self._wait((at + 1) % RING)
                self._ring[(at + 1) % RING] = EMPTY
                token = word & 0xFFFFFFFF
                yield token, float(np.uint32(word >> 32).view(np.float32))
        finally:
            self.gpu.synchronize()

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

    def read_state(self) -> bytes:
        """See Executor.read_state."""
        return b""

    def write_state(self, data: bytes) -> None:
        """See Executor.write_state."""
        assert not data

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """See MeasurableExecutor.profile."""
        return profile(self._step(pos), token, pos, steps)

    def seconds_of(self, groups: Sequence[Sequence[int]], pos: int, steps: int) -> Calls:
        """See MeasurableExecutor.seconds_of: all groups in a row, since the clock is coarser than one."""
        return seconds_of(self._step(pos), groups, pos, steps)

    def kernels(self) -> list[Kernel]:
        """See MeasurableExecutor.kernels."""
        return kernels(self._step(0))

    def read_bandwidth(self) -> float:
        """See MeasurableExecutor.read_bandwidth."""
        return read_bandwidth(self.gpu)

    def close(self) -> None:
        """See Executor.close."""
        self.gpu.close()

    def _check(self, ids: Sequence[int], pos: int) -> None:
        if not ids or pos < 0 or pos + len(ids) > self.max_context:
            raise TinychatError(f"{len(ids)} tokens at position {pos} do not fit the context of {self.max_context}")
        if min(ids) < 0 or max(ids) >= self.plan.vocab:
            raise TinychatError(f"token id out of range: the vocabulary has {self.plan.vocab} entries")

    def _step(self, pos: int) -> DecodeStep:
        """The decode step for a token at position `pos`."""
        return self._steps[max(depth for depth in self._steps if depth <= pos)]

    def _prompt(self, most: int, launches: list[Launch]) -> Callable[[int, int], None]:
        """What runs prompts of up to `most` tokens: graphs for the short ones, since a graph's kernels follow each
        other faster than launches. There is one for every GRAPH_TOKENS tokens, made when it is first needed."""
        if most > SIZES[-1]:
            return self.gpu.sequence(launches)
        graphs: dict[int, Graph] = {}

        def run(count: int, keys: int) -> None:
            size = min(-(-count // GRAPH_TOKENS) * GRAPH_TOKENS, most)
            if size not in graphs:
                graphs[size] = self.gpu.graph(launches, count=size, keys=self.max_context)
            graphs[size]()

        return run

    def _caches(self) -> list[tuple[str, int]]:
        keys = [(f"k:{i}", cache.key_width) for i, cache in enumerate(self.plan.caches) if cache.key_width]
        values = [(f"v:{i}", cache.value_width) for i, cache in enumerate(self.plan.caches) if cache.value_width]
        return keys + values

    def _place(self, ids: Sequence[int], pos: int, sampling: Sampling, count: int = 1) -> None:
        """Tells the device the tokens at positions pos, pos + 1, ...; the last `count` of them are the next step's."""
        first = pos + len(ids) - count
        self.gpu.upload("history", np.asarray(ids, np.int32), 4 * pos)
        self.gpu.upload("state", state_words(sampling, first, count, pos))

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
