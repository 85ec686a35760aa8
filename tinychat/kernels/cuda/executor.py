"""Runs a plan on an NVIDIA GPU: source kernels in one graph per step, everything a step needs on the device.

A decode step reads its token and position from device memory and writes the next ones there, so that steps are enqueued
ahead without waiting; sampled ids arrive through page-locked host memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import MLA
from tinychat.kernels.cuda.builder import RING, RING_DRAFTS, ROUTE_SLOTS, SLOTS, Builder
from tinychat.kernels.cuda.device import GPU, unusable
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.kept import KeptStates
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.launches import head
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.load import load
from tinychat.kernels.cuda.prefill import SIZES, Chip, Prefill
from tinychat.kernels.cuda.profile import DecodeStep, kernels, profile, read_bandwidth, seconds_of
from tinychat.kernels.cuda.quants import QUANTS
from tinychat.kernels.cuda.recurrent import TOGETHER
from tinychat.kernels.cuda.selfcheck import self_check
from tinychat.kernels.cuda.state import bias_values, breaker_bits, state_words
from tinychat.kernels.cuda.step import decode, depths
from tinychat.kernels.cuda.verify import drafting, verifying
from tinychat.kernels.executor import ExecutorKind, Logits, Mask, State, Weights
from tinychat.kernels.limits import Limits, check
from tinychat.kernels.ops import Plan
from tinychat.kernels.profile import Calls, Kernel, StepProfile
from tinychat.kernels.sampling import GREEDY, Sampling

AHEAD = 4  # decode steps enqueued before the oldest is read; at most SLOTS
GRAPH_TOKENS = 128  # tokens from one graph of a prompt's kernels to the next
FEW = 3  # tokens that the decode step takes one by one rather than prefill, in an empty cache
ROWS_OF_STEP = 400  # cache rows whose keys and values MLA's prefill makes in the time of a decode step
CHUNKS = (4096, 2048, 1024)  # tokens of a prefill step, at most: the first whose buffers fit the GPU
SHARE = 0.97  # of the free memory that buffers may take; the rest is for programs and page-locked memory
ROWS_OF_LOGITS = 64  # tokens of a prefill step that wants the logits of all
PAUSE = 5e-5  # seconds
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
    convolved=TOGETHER + 1,
    state_dim=128,
    state_multiple=4,
    prefill_chunk=CHUNKS[0],
    mtp=True,
)


@dataclass(frozen=True)
class Prompts:
    """What runs prompts, through the layers or through multi-token prediction, for a number of tokens and of cache
    rows."""

    steps: dict[int, Callable[[int, int], None]]  # by the largest number of tokens
    head: Callable[..., None]  # the logits of the last token
    head_all: Callable[..., None]  # those of all


class CUDAExecutor:
    """`Executor` on CUDA. Raises TinychatError for a plan beyond LIMITS, and where there is no such GPU, no memory
    left, or a kernel fails its check at load."""

    kind: ExecutorKind = "cuda"
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
            builder = Builder(plan, layout, max_context, gpu.warpgroups)
            kinds = depths(builder, gpu.overlaps, plan.layers)
            steps = {first: decode(builder, kind) for first, kind in kinds.items()}
            self.prefill_chunk = min(chunk, max_context)
            sizes = sorted({min(n, self.prefill_chunk) for n in (*SIZES, chunk)})
            prefill = {n: Prefill(builder, n, chip) for n in sizes}
            prompts = [({n: p.layers() for n, p in prefill.items()}, plan.head)]
            self._verifying = verifying(builder, gpu, kinds)
            if plan.mtp:
                prompts.append(({n: p.mtp() for n, p in prefill.items()}, plan.mtp.head))
                self._drafting, self._drafting_behind = drafting(
                    builder, gpu, depths(builder, gpu.overlaps, [plan.mtp.layer])
                )
            many = Prefill(builder, min(ROWS_OF_LOGITS, max_context), chip)
            self._row = 4 * plan.vocab  # bytes of a token's logits
            self._left_at = f"logits+{(size := builder.buffers['logits'])}"  # behind those of a step
            builder.buffer("logits", size + self._row)
            heads = [(head(builder, op), many.head(op)) for _, op in prompts]
            if (needed := sum(builder.buffers.values())) < SHARE * gpu.free_bytes:
                break
        else:
            rows, room = max_context * plan.kv_bytes_per_token, SHARE * gpu.free_bytes
            raise TinychatError(
                f"the model needs {needed / 1e9:,.1f} GB of the GPU's memory (weights {layout.nbytes / 1e9:,.1f}, "
                f"context {rows / 1e9:,.1f}), of which {room / 1e9:,.1f} GB are free for it; take a smaller quant or "
                f"context"
            )
        launches = {depth: [launch for launch, _ in step] for depth, step in steps.items()}
        self.limits = replace(LIMITS, verified=max(self._verifying.counts, default=1))
        self.device = f"CUDA · {gpu.name}"
        try:
            for name, size in builder.buffers.items():
                if name == "ring":
                    self._ring = gpu.pinned(size, name).view(np.uint64)
                elif name == "allowed":
                    self._allowed = gpu.pinned(size, name).view(np.uint32)
                else:
                    gpu.allocate(name, size)
            if plan.mtp:
                gpu.upload("greedy", state_words(GREEDY, 0, max(self._drafting_behind.counts, default=1), 0))
            if "tickets" in builder.buffers:  # of attention
                gpu.upload("tickets", np.zeros(builder.buffers["tickets"], np.uint8))
            kernels_of = [*launches.values(), *(rows for _, rows in heads)]
            gpu.compile(chain.from_iterable([*kernels_of, *(step for steps, _ in prompts for step in steps.values())]))
            load(gpu, layout, weights, progress)
            self_check(gpu, sorted({t.kind for t in layout.tensors.values()}, key=int))
            gpu.free("staging")
            gpu.free("params")
            for rope, name in builder.ropes.items():
                gpu.upload(name, rope.table(max_context))
            graphs = {depth: gpu.graph(launches[depth]) for depth in steps}
            self._prompts = [
                Prompts({n: self._prompt(n, s) for n, s in made.items()}, gpu.sequence([last]), gpu.sequence(rows))
                for (made, _), (last, rows) in zip(prompts, heads)
            ]
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
        self._left: tuple[int, int] | None = None  # the token at this position, whose logits a prompt has left
        self._kept = KeptStates(gpu, [(f"carried:{i}", state.nbytes) for i, state in enumerate(plan.states) if state])
        self._seen = 0  # tokens whose state read_state() reads: none of drafts and of steps ahead
        self._enqueued: tuple[int, int, Sampling] | None = None  # the step of this token at this position, by verify()
        self._asked = False  # a draft, in front of the last step
        self._behind: tuple[int, list[int]] | None = None  # drafts that are enqueued: behind these tokens from here on
        self._uploaded: Sampling | None = None  # whose penalties the buffers hold
        self._routes = builder.routes
        self.launches = launches[0]
        self.kernels_per_token, self.jit_batches = graphs[0].kernels, 1
        self.jit_state = "replaying"  # compiled and captured at load
        self.weight_bytes = layout.nbytes
        self.cache_bytes = max_context * plan.kv_bytes_per_token
        self.state_bytes = plan.state_bytes
        self.device_bytes = gpu.nbytes

    def forward(
        self,
        ids: Sequence[int],
        pos: int,
        logits: Logits = "none",
        *,
        mtp: bool = False,
        following: int | None = None,
    ) -> np.ndarray | None:
        """See Executor.forward. A few tokens go through the decode step one by one, more through prefill steps. What
        follows is run with them where the same kernels take one token more, but for a plan with a state, of which
        nobody could have that in front of it any more.

        Returns when the device has finished.
        """
        self._check(ids, pos)
        out, prompts = list[np.ndarray](), self._prompts[mtp]
        few = 0 if mtp else FEW + (pos // ROWS_OF_STEP if self._latent else 0)
        size = 1 if len(ids) <= few else self.prefill_chunk
        if size > 1 and logits == "all":
            size = min(ROWS_OF_LOGITS, size)
        end = pos + len(ids)
        takes_more = size > 1 and (len(ids) - 1) % size + 1 not in prompts.steps
        if following is not None and takes_more and end < self.max_context and not self.state_bytes:
            ids = [*ids, following]
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            count, keys = len(part), pos + start + len(part)
            self._place(part, pos + start, GREEDY, count, runs=not mtp)
            if size == 1:
                self._step(pos + start).graph()
            else:
                prompts.steps[min(n for n in prompts.steps if n >= count)](count, keys)
            if logits == "all" and size > 1:
                prompts.head_all(count, keys)
                rows = self.gpu.download("logits_all", self._row * count).view(np.float32)
                out.append(rows.reshape(count, -1))
            elif logits == "all" or (logits == "last" and last):
                if size > 1:
                    prompts.head()
                out.append(self.gpu.download("logits", self._row).view(np.float32)[None])
        if following is not None and pos + len(ids) > end:
            prompts.head()
            self.gpu.copy(self._left_at, "logits", self._row)
            self._left = following, end
        self.gpu.synchronize()
        if not mtp:
            self._seen = end
        return np.concatenate(out) if out else None

    def draft(self, ids: Sequence[int], pos: int) -> int:
        """See Executor.draft. The last tokens go through a graph as a verify step's."""
        self._check(ids, pos)
        self._asked = True
        if behind := self._behind:
            first, made = behind
            n = pos + len(ids) - first
            if first <= pos and list(ids) == made[pos - first : n]:
                self._behind = None
                return self._drafted(first, len(made))[n - 1]
        count = min(len(ids), max(self._drafting.counts))
        first = pos + len(ids) - count
        if first > pos:
            self.forward(ids[:-count], pos, mtp=True)
        self._place(ids[-count:], first, GREEDY, count, runs=False)
        self._ring[:] = EMPTY
        self._drafting.graph(first, count)()
        return self._drafted(first, count)[-1]

    def _drafted(self, first: int, count: int) -> list[int]:
        """The drafts behind `count` positions, all of them as in verify()."""
        return [self._wait((RING_DRAFTS + first + i + 1) % RING) & 0xFFFFFFFF for i in range(count)]

    def decode(
        self, token: int, pos: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None = None
    ) -> Iterator[tuple[int, float]]:
        """See Executor.decode. Up to AHEAD steps are enqueued before one is waited for; with a mask, which depends on
        the token before, none is."""
        self._check([token], pos)
        known, left = list(recent)[-(pos + 1) :] or [token], self._left == (token, pos)
        self._upload_penalties(sampling)
        self._place(known, pos + 1 - len(known), sampling, masked=mask is not None, runs=not left)
        self._ring[:] = EMPTY
        enqueued = pos
        try:
            for at in range(pos, self.max_context):
                if mask:
                    self._masked_step(at, mask, left and at == pos)
                while not mask and enqueued < min(at + AHEAD, self.max_context):
                    self._single_step(enqueued, left and enqueued == pos)
                    enqueued += 1
                yield self._chosen(at, PAUSE)
        finally:
            self.gpu.synchronize()

    def _upload_penalties(self, sampling: Sampling) -> None:
        """Puts what the kernels read of `sampling` from buffers of its own there, unless it is there."""
        if sampling is self._uploaded:
            return
        self._uploaded = sampling
        if sampling.has_dry:
            self.gpu.upload("breakers", breaker_bits(sampling.dry_breakers, self.plan.vocab))
        if sampling.logit_bias:
            self.gpu.upload("bias", bias_values(sampling.logit_bias, self.plan.vocab))

    def _single_step(self, pos: int, left: bool) -> None:
        """Enqueues a decode step; `left`: a prompt has left its logits."""
        if left:
            self.gpu.copy("logits", self._left_at, self._row)
            self._step(pos).choice()
        else:
            self._step(pos).graph()

    def _masked_step(self, pos: int, mask: Mask, left: bool) -> None:
        """Runs a decode step in two graphs: the layers, during which the host computes the mask, and the choice, which
        reads it from page-locked memory. `left`: a prompt has left its logits. Returns when the device has finished."""
        step = self._step(pos)
        if left:
            self.gpu.copy("logits", self._left_at, self._row)
        else:
            step.layers()
        self._allowed[:] = mask()
        step.choice()
        self.gpu.synchronize()

    def _masked_choice(
        self, pos: int, column: int, sampling: Sampling, seen: Sequence[int], mask: Mask
    ) -> tuple[int, float]:
        """What comes behind position `pos` under the mask, by the kernels of a single step, from the logits of a column
        of a verify step. They are moved to the first place, so columns have to come in order."""
        if column:
            self.gpu.copy("logits", f"logits+{column * self._row}", self._row)
        known = seen[-_window(sampling, pos + 1) :]
        self._place(known, pos + 1 - len(known), sampling, masked=True)
        self._allowed[:] = mask()
        self._step(pos).choice()
        return self._chosen(pos)

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
        """See Executor.verify. Where the kind of graph changes on the way, which single steps would follow, there are
        two steps, and where a prompt has left the logits of `token`."""
        tokens = [token, *drafts]
        asked, self._asked = self._asked, False
        self._check(tokens, pos)
        assert len(tokens) <= self.limits.verified
        seen, first = list(recent) if drafts else recent, 0
        single = not drafts and mask is None
        if single and self._enqueued == (token, pos, sampling):
            yield self._following(pos, sampling, ahead)
            return
        self._upload_penalties(sampling)
        begun = self._left == (token, pos)
        while first < len(tokens):
            at, left = pos + first, begun and not first
            alike = min((depth for depth in self._steps if depth > at), default=self.max_context) - at
            count = 1 if left else min(len(tokens) - first, alike)
            window = _window(sampling, at + 1)
            known = [*(seen[-window:] or [token]), *tokens[first + 1 : first + count]]
            alone = count == 1  # only then is the mask known before the step
            masked = mask is not None and alone
            self._place(known, at + count - len(known), sampling, count, masked=masked, runs=not left)
            self._ring[:] = EMPTY
            if mask and alone:
                self._masked_step(at, mask, left)
            elif alone:
                self._single_step(at, left)
            else:
                self._verifying.graph(at, count)()
            if single:
                yield self._following(pos, sampling, ahead)
                return
            # all of them: what is written later would be taken for the next step's
            guesses = asked and not mask and count == len(tokens) == 2 and at + 2 < self.max_context
            if guesses:  # the next draft is wanted as well, most likely
                self._drafting_behind.graph(at + 1, count)()
            made = [self._chosen(at + i) for i in range(count)]
            if guesses:
                self._behind = at + 1, [following for following, _ in made]
            for i, (following, logprob) in enumerate(made):
                if mask and not alone:
                    following, logprob = self._masked_choice(at + i, i, sampling, seen, mask)
                self._seen = at + i + 1
                yield following, logprob
                if first == len(drafts) or following != drafts[first]:
                    return
                first += 1
                seen.append(following)  # type: ignore[attr-defined]

    def routes(self) -> np.ndarray | None:
        """See Executor.routes. Steps that are enqueued ahead write into other slots."""
        layers, used = self._routes
        if not layers:
            return None
        slot = 4 * layers * used
        ids = self.gpu.peek("routes", slot, (self._seen - 1) % ROUTE_SLOTS * slot).view(np.int32)
        return ids.reshape(layers, used)

    @property
    def cache_layout(self) -> str:
        """See Executor.cache_layout."""
        return f"cuda f16 1{' mtp' * bool(self.plan.mtp)}"

    def read_cache(self, first: int, rows: int) -> bytes:
        """See Executor.read_cache: K's rows (F16) layer by layer, then V's."""
        return b"".join(
            self.gpu.download(name, rows * width * 2, first * width * 2).tobytes() for name, width in self._caches()
        )

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        self._settle()
        self._left = None
        at, packed = 0, np.frombuffer(data, np.uint8)
        if packed.size != rows * self.plan.kv_bytes_per_token:
            raise TinychatError(f"a saved cache of {packed.size:,} bytes does not hold {rows} rows of this model")
        for name, width in self._caches():
            self.gpu.upload(name, packed[at : at + rows * width * 2], first * width * 2)
            at += rows * width * 2
        self.gpu.synchronize()

    def read_state(self) -> State:
        """See Executor.read_state: float32, layer by layer the convolution's inputs, then (heads, value, key)."""
        return self._kept.copy(self._seen % SLOTS) if self.state_bytes else memoryview(b"")

    def write_state(self, state: State) -> None:
        """See Executor.write_state."""
        self._settle()
        if self.state_bytes:
            self._kept.put(state)

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

    def _following(self, pos: int, sampling: Sampling, ahead: bool) -> tuple[int, float]:
        """What the single step at `pos`, which is enqueued, chooses; with `ahead` the next one is enqueued, too."""
        if ahead := ahead and pos + 1 < self.max_context:
            self._step(pos + 1).graph()
        following, logprob = self._chosen(pos, PAUSE if ahead else 0)
        self._enqueued = (following, pos + 1, sampling) if ahead else None
        return following, logprob

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

    def _place(
        self,
        ids: Sequence[int],
        pos: int,
        sampling: Sampling,
        count: int = 1,
        *,
        masked: bool = False,
        runs: bool = True,
    ) -> None:
        """Tells the device the tokens at positions pos, pos + 1, ...; the last `count` of them are the next step's.
        `masked`: its token has to be one of the buffer `allowed`. `runs`: it runs the layers, so that logits that
        depend on its cache rows are not kept."""
        first = pos + len(ids) - count
        self._settle()
        if runs and self._left and first <= self._left[1]:
            self._left = None
        self.gpu.upload("history", np.asarray(ids, np.int32), 4 * pos)
        self.gpu.upload("state", state_words(sampling, first, count, pos, masked))

    def _settle(self) -> None:
        """Waits for a step or drafts that verify() enqueued ahead, whose result is not wanted."""
        if self._enqueued or self._behind:
            self.gpu.synchronize()
            self._enqueued = self._behind = None

    def _chosen(self, pos: int, pause: float = 0) -> tuple[int, float]:
        """What a step chooses behind position `pos`, and its log-probability, as soon as the device has written it."""
        slot = (pos + 1) % RING
        word = self._wait(slot, pause)
        self._ring[slot] = EMPTY
        self._seen = pos + 1
        return word & 0xFFFFFFFF, float(np.uint32(word >> 32).view(np.float32))

    def _wait(self, slot: int, pause: float = 0) -> int:
        """The word the device writes into a ring slot, looked at every `pause` seconds. The device waits for the host
        meanwhile unless it has another step, so only then is there a pause."""
        ring, spins, deadline = self._ring, 0, time.monotonic() + 5
        while (word := int(ring[slot])) == EMPTY:
            spins += 1
            if spins > 20:
                time.sleep(pause)
                if time.monotonic() > deadline:
                    self.gpu.synchronize()  # raises for what stopped the GPU
                    if int(ring[slot]) == EMPTY:
                        raise TinychatError("the GPU finished a step without a token")
        return word


def _window(sampling: Sampling, known: int) -> int:
    """How many of the `known` last tokens the kernels look at to choose the next one; at least the step's own."""
    dry = sampling.dry_penalty_last_n if sampling.has_dry else 0
    repeat = sampling.repeat_last_n if sampling.counts else 1
    return min(max(1, repeat, dry if dry >= 0 else known), known)
