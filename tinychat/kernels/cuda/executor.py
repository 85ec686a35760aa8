"""Runs a plan on an NVIDIA GPU: source kernels in one graph per step, everything a step needs on the device.

A decode step reads its token and position from device memory and writes the next ones there, so that steps are enqueued
ahead without waiting; sampled ids arrive through page-locked host memory.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import CACHE_VALUE_BYTES, Cache
from tinychat.kernels.cuda.builder import RING, RING_DRAFTS, ROUTE_SLOTS, SLOTS, Builder
from tinychat.kernels.cuda.device import GPU, unusable
from tinychat.kernels.cuda.kept import KeptStates
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.launches import head
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.load import Upload
from tinychat.kernels.cuda.prefill import ABSORBED, SIZES, Chip, Prefill
from tinychat.kernels.cuda.profile import DecodeStep, kernels, profile, read_bandwidth, seconds_of
from tinychat.kernels.cuda.quants import QUANTS
from tinychat.kernels.cuda.recurrent import CHUNK, TOGETHER
from tinychat.kernels.cuda.selfcheck import self_check
from tinychat.kernels.cuda.state import WORDS, bias_values, breaker_bits, state_words
from tinychat.kernels.cuda.step import decode, depths
from tinychat.kernels.cuda.verify import cycles, drafting, verifying
from tinychat.kernels.executor import ExecutorKind, KeepsInPieces, Logits, Mask, StateCopy, Watch, Weights
from tinychat.kernels.limits import Limits, check
from tinychat.kernels.ops import Plan
from tinychat.kernels.profile import Calls, Kernel, StepProfile
from tinychat.kernels.sampling import GREEDY, Sampling
from tinychat.kernels.window_rows import WindowRows

AHEAD = 4  # decode steps enqueued before the oldest is read; at most SLOTS
GRAPH_TOKENS = 128  # tokens from one graph of a prompt's kernels to the next
FEW = 3  # tokens that the decode step takes one by one rather than prefill, in an empty cache
FRESH = 128  # cache rows up to which queries of latent attention are not absorbed
ROWS_OF_STEP = 400  # cache rows whose keys and values MLA's prefill makes in the time of a decode step
ROWS_OF_PIECES = 900  # behind n * n times as many n pieces of ABSORBED tokens, absorbed, take less than them together
CHUNKS = (4096, 2048, 1024)  # tokens of a prefill step, at most: the first whose buffers fit the GPU
SHARE = 0.97  # of the free memory that buffers may take; the rest is for programs and page-locked memory
ROWS_OF_LOGITS = 64  # tokens of a prefill step that wants the logits of all
PAUSE = 5e-5  # seconds
EMPTY = 2**64 - 1  # a ring slot nothing was written to
# Buffers of zeros at first: attention's counts; what is read beside what was written, though not used: experts' tiles
# before they are counted, free places of lists, what is above the diagonal of triangular matrices.
ZEROS = ("tickets", "half_tickets", "tiles", "candidates", "solve", "mixing")
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

    steps: dict[tuple[int, int], Callable[[int, int], None]]  # by the largest numbers of both
    head: Callable[..., None]  # the logits of the last token
    head_all: Callable[..., None]  # those of all

    def step(self, count: int, keys: int) -> None:
        """Enqueues the layers for `count` tokens, the last of `keys` rows."""
        self.steps[min(most for most in self.steps if most[0] >= count and most[1] >= keys)](count, keys)


@dataclass
class Cycle:
    """A verify step of two that was enqueued before the host knew its tokens. `tokens`: as far as they are known."""

    tokens: list[int]
    pos: int
    sampling: Sampling
    turn: int  # state[TURN]


class CUDAExecutor(KeepsInPieces):
    """`Executor` on CUDA. Raises TinychatError for a plan beyond LIMITS, and where there is no such GPU, no memory
    left, or a kernel fails its check at load. `number`: of the GPU, by default the first of `driver.gpus`."""

    kind: ExecutorKind = "cuda"
    threads = 0
    sampling_s = 0.0  # part of the graph, not told apart

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        max_context: int,
        progress: Callable[[float], None] | None = None,
        *,
        number: int | None = None,
    ) -> None:
        check(plan, LIMITS, "CUDA", max_context)
        self.plan, self.max_context = plan, max_context
        layout = Layout(plan, {name: weights.size(name) for name in {w.tensor for w in plan.weights}})
        self.gpu = gpu = GPU(number)
        self._windows = WindowRows(plan, max_context)
        chip, upload, free = Chip(gpu.warpgroups, gpu.max_shared), None, SHARE * gpu.free_bytes
        try:
            if layout.nbytes < free:  # otherwise this is refused below
                for t in layout.buffers:
                    gpu.allocate(t.buffer, t.nbytes)
                upload = Upload(gpu, layout, weights)
            for chunk in CHUNKS:
                builder = Builder(plan, layout, max_context, gpu.warpgroups)
                kinds = depths(builder, gpu.overlaps, plan.layers)
                steps = {first: decode(builder, kind) for first, kind in kinds.items()}
                self.prefill_chunk = min(chunk, self._windows.together)
                sizes = sorted({min(n, self.prefill_chunk) for n in (*SIZES, chunk)})
                prefill = {(n, max_context): Prefill(builder, n, chip) for n in sizes}
                self._absorbed = prefill[sizes[0], max_context].absorbs
                absorbing = [n for (n, _), p in prefill.items() if p.absorbs and max_context > FRESH]
                prefill |= {(n, FRESH): Prefill(builder, n, chip, fresh=True) for n in absorbing}
                prompts = [({n: p.layers for n, p in prefill.items()}, plan.head)]
                kernels_of = [p.one_of_each().layers() for p in prefill.values()]
                self._verifying = verifying(builder, gpu, kinds)
                if plan.mtp:
                    prompts.append(({n: p.mtp for n, p in prefill.items()}, plan.mtp.head))
                    kernels_of += [p.mtp() for p in prefill.values()]
                    drafts = depths(builder, gpu.overlaps, [plan.mtp.layer])
                    self._drafting, self._cycles = drafting(builder, gpu, drafts), cycles(builder, gpu, kinds, drafts)
                many = Prefill(builder, min(ROWS_OF_LOGITS, max_context), chip)
                self._row = 4 * plan.vocab  # bytes of a token's logits
                self._left_at = f"logits+{(size := builder.buffers['logits'])}"  # behind those of a step
                builder.buffer("logits", size + self._row)
                heads = [(head(builder, op), many.head(op)) for _, op in prompts]
                if (needed := sum(builder.buffers.values())) < free:
                    break
            else:
                rows = plan.kv_bytes(max_context)
                raise TinychatError(
                    f"the model needs {needed / 1e9:,.1f} GB of the GPU's memory (weights {layout.nbytes / 1e9:,.1f}, "
                    f"context {rows / 1e9:,.1f}), of which {free / 1e9:,.1f} GB are free for it; take a smaller quant "
                    f"or context"
                )
            launches = {depth: [launch for launch, _ in step] for depth, step in steps.items()}
            self.limits = replace(LIMITS, verified=max(self._verifying.counts, default=1))
            self.device = f"CUDA · {gpu.name}"
            for name, size in builder.buffers.items():
                if name == "ring":
                    self._ring = gpu.pinned(size, name).view(np.uint64)
                elif name == "allowed":
                    self._allowed = gpu.pinned(size, name).view(np.uint32)
                elif name not in gpu.buffers:
                    gpu.allocate(name, size)
            if plan.mtp:
                gpu.upload("greedy", state_words(GREEDY, 0, 0, 0))
                self._stand_ins = np.full(max_context + 1, -1, np.int32)
                gpu.upload("stand_ins", self._stand_ins)
            for name in ZEROS:
                if name in builder.buffers:
                    gpu.upload(name, np.zeros(builder.buffers[name], np.uint8))
            gpu.compile(chain.from_iterable([*launches.values(), *(rows for _, rows in heads), *kernels_of]))
            self_check(gpu, sorted({t.kind for t in layout.tensors.values()}, key=int))
            for rope, name in builder.ropes.items():
                gpu.upload(name, rope.table(max_context))
            graphs = {depth: gpu.graph(launches[depth]) for depth in steps}
            self._prompts = [
                Prompts(
                    {n: self._prompt(*n, make) for n, make in steps_of.items()},
                    gpu.sequence([last]),
                    gpu.sequence(rows),
                )
                for (steps_of, _), (last, rows) in zip(prompts, heads)
            ]
            assert upload, "since all of it fits"
            upload.wait(progress)
            gpu.synchronize()
        except BaseException as e:
            if upload:
                upload.stop()
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
        self._behind: tuple[int, list[int], int] | None = None  # a draft: of these tokens from here on; its turn
        self._running: Cycle | None = None  # the one that is enqueued
        self._uploaded: Sampling | None = None  # whose penalties the buffers hold
        self._routes = builder.routes
        self.launches = launches[0]
        self.kernels_per_token, self.jit_batches = graphs[0].kernels, 1
        self.jit_state = "replaying"  # compiled and captured at load
        self.weight_bytes = layout.nbytes
        self.cache_bytes = plan.kv_bytes(max_context)
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
        watch: Watch | None = None,
    ) -> np.ndarray | None:
        """See Executor.forward. A few tokens go through the decode step one by one, more through prefill steps. What
        follows is run with them where the same kernels take one token more, but for a plan with a state, of which
        nobody could have that in front of it any more.

        Returns when the device has finished, which takes too little time for `watch`.
        """
        self._check(ids, pos)
        out, prompts = list[np.ndarray](), self._prompts[mtp]
        few = 0 if mtp else FEW + (pos // ROWS_OF_STEP if self.plan.latent and not self._absorbed else 0)
        size = 1 if len(ids) <= few else self._together(len(ids), pos)
        if size > 1 and logits == "all":
            size = min(ROWS_OF_LOGITS, size)
        end = pos + len(ids)
        takes_more = size > 1 and (len(ids) - 1) % size + 1 not in {n for n, _ in prompts.steps}
        if following is not None and takes_more and end < self.max_context and not self.state_bytes:
            ids = [*ids, following]
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            count, keys = len(part), pos + start + len(part)
            self._place(part, pos + start, GREEDY, count, runs=not mtp)
            if size == 1:
                self._step(pos + start).graph()
            else:
                prompts.step(count, keys)
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

    def _together(self, count: int, pos: int) -> int:
        """How many of `count` prompt tokens run at once: of MLA few where absorbing their queries takes less than the
        keys and values of all rows."""
        pieces = -(-count // ABSORBED)
        few = self._absorbed and pieces**2 * ROWS_OF_PIECES <= pos
        return min(ABSORBED, self.prefill_chunk) if few else self.prefill_chunk

    def forward_keeping(self, ids: Sequence[int], pos: int, place: int, watch: Watch | None = None) -> StateCopy:
        """See Executor.forward_keeping. Prompts leave the state at the end of any of their chunks."""
        split, count = place - pos, len(ids)
        if split == count or split % CHUNK or count > self.prefill_chunk:
            return super().forward_keeping(ids, pos, place, watch)
        self._check(ids, pos)
        self._place(ids, pos, GREEDY, count, kept=split)
        self._prompts[0].step(count, pos + count)
        self.gpu.synchronize()
        self._seen = pos + count
        return self._kept.copy(SLOTS)

    def draft(self, ids: Sequence[int], pos: int) -> int:
        """See Executor.draft. The last tokens go through a graph as a verify step's."""
        self._check(ids, pos)
        self._asked = True
        if behind := self._behind:
            first, made, turn = behind
            last = pos + len(ids) - 1
            if first <= pos and list(ids) == made[pos - first :]:
                self._behind = None
                found = self._drafted(first, turn, PAUSE if self._running else 0)
                if self._running:
                    stand_in = int(self._stand_ins[last + 1])
                    self._running.tokens.append(found if stand_in < 0 else stand_in)
                return found
        count = min(len(ids), max(self._drafting.counts))
        first = pos + len(ids) - count
        if first > pos:
            self.forward(ids[:-count], pos, mtp=True)
        self._place(ids[-count:], first, GREEDY, count, runs=False)
        self._ring[:] = EMPTY
        self._drafting.graph(first, count)()
        return self._drafted(first)

    def stand_in(self, drafts: Sequence[int], pos: int) -> None:
        """See MeasurableExecutor.stand_in."""
        if not self.plan.mtp:
            return
        self._settle()
        self._stand_ins[:] = -1
        n = min(len(drafts), len(self._stand_ins) - pos)
        self._stand_ins[pos : pos + n] = drafts[:n]
        self.gpu.upload("stand_ins", self._stand_ins)
        self.gpu.synchronize()

    def _drafted(self, first: int, turn: int = 0, pause: float = 0) -> int:
        """The draft behind tokens from position `first` on."""
        return self._word(RING_DRAFTS + first + 1 + turn, pause) & 0xFFFFFFFF

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
                    self._make_room(at, 1)
                    self._masked_step(at, mask, left and at == pos)
                while not mask and enqueued < min(at + AHEAD, self.max_context):
                    self._make_room(enqueued, 1)
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
        fits = self._alike(pos) >= 2 and pos + 2 < self.max_context
        begun = self._left == (token, pos)
        if asked and not mask and not begun and len(tokens) == 2 and fits and self._cycles.counts:
            yield from self._cycle(tokens, pos, sampling, recent, ahead)
            return
        seen, first = list(recent) if drafts else recent, 0
        single = not drafts and mask is None
        if single and self._enqueued == (token, pos, sampling):
            yield self._following(pos, sampling, ahead)
            return
        self._upload_penalties(sampling)
        while first < len(tokens):
            at, left = pos + first, begun and not first
            count = 1 if left else min(len(tokens) - first, self._alike(at))
            alone = count == 1  # only then is the mask known before the step
            step, masked = tokens[first : first + count], mask is not None and alone
            self._place_step(step, at, sampling, seen, masked=masked, runs=not left)
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
            made = [self._chosen(at + i) for i in range(count)]
            for i, (following, logprob) in enumerate(made):
                if mask and not alone:
                    following, logprob = self._masked_choice(at + i, i, sampling, seen, mask)
                self._seen = at + i + 1
                yield following, logprob
                if first == len(drafts) or following != drafts[first]:
                    return
                first += 1
                seen.append(following)  # type: ignore[attr-defined]

    def _cycle(
        self, tokens: list[int], pos: int, sampling: Sampling, recent: Sequence[int], ahead: bool
    ) -> Iterator[tuple[int, float]]:
        """verify() of a token and its draft, and the draft behind what they choose, which is wanted next most likely.
        With `ahead` the next such step is enqueued as well: the device knows its tokens first."""
        running = self._running
        if running and (running.tokens, running.pos, running.sampling) == (tokens, pos, sampling):
            turn = running.turn
        else:
            turn = 0
            self._upload_penalties(sampling)
            self._place_step(tokens, pos, sampling, recent)
            self._cycles.graph(pos, 2)()
        if ahead := ahead and pos + 4 < self.max_context and self._alike(pos) >= 4:
            self._make_room(pos + 1, 3)
            self._cycles.graph(pos + 1, 2)()
        made = [self._chosen(pos + i, PAUSE if ahead else 0, turn) for i in range(2)]
        right = made[0][0] == tokens[1]
        made = made[: 1 + right]
        self._behind = pos + 1, [following for following, _ in made], turn
        self._running = Cycle([made[-1][0]], pos + 1 + right, sampling, turn + 1) if ahead else None
        for i, each in enumerate(made, 1):
            self._seen = pos + i
            yield each

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
        return b"".join(self.gpu.download(*part).tobytes() for part in self._places(first, rows))

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        self._settle()
        self._left = None
        at, packed = 0, np.frombuffer(data, np.uint8)
        self._slide(self._windows.base_with(first, rows, self._windows.held(packed.size, rows)))
        for name, size, offset in self._places(first, rows):
            self.gpu.upload(name, packed[at : at + size], offset)
            at += size
        self.gpu.synchronize()

    def read_state(self) -> StateCopy:
        """See Executor.read_state: float32, layer by layer the convolution's inputs, then (heads, value, key)."""
        return self._kept.copy(self._seen % SLOTS) if self.state_bytes else memoryview(b"")

    def write_state(self, state: StateCopy) -> None:
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

    def reaches(self, pos: int) -> bool:
        """See Executor.reaches."""
        return self._windows.reaches(pos)

    def _check(self, ids: Sequence[int], pos: int) -> None:
        if not ids or pos < 0 or pos + len(ids) > self.max_context:
            raise TinychatError(f"{len(ids)} tokens at position {pos} do not fit the context of {self.max_context}")
        if min(ids) < 0 or max(ids) >= self.plan.vocab:
            raise TinychatError(f"token id out of range: the vocabulary has {self.plan.vocab} entries")

    def _step(self, pos: int) -> DecodeStep:
        """The decode step for a token at position `pos`."""
        return self._steps[max(depth for depth in self._steps if depth <= pos)]

    def _alike(self, pos: int) -> int:
        """How many tokens from `pos` on take steps of one kind."""
        return min((depth for depth in self._steps if depth > pos), default=self.max_context) - pos

    def _following(self, pos: int, sampling: Sampling, ahead: bool) -> tuple[int, float]:
        """What the single step at `pos`, which is enqueued, chooses; with `ahead` the next one is enqueued, too."""
        if ahead := ahead and pos + 1 < self.max_context:
            self._make_room(pos + 1, 1)
            self._step(pos + 1).graph()
        following, logprob = self._chosen(pos, PAUSE if ahead else 0)
        self._enqueued = (following, pos + 1, sampling) if ahead else None
        return following, logprob

    def _prompt(self, most: int, rows: int, make: Callable[[], list[Launch]]) -> Callable[[int, int], None]:
        """What runs prompts of up to `most` tokens and `rows` cache rows: graphs for the short ones, since a graph's
        kernels follow each other faster than launches. There is one for every GRAPH_TOKENS tokens, made when it is
        first needed, by `make`."""
        launches = functools.cache(make)
        if most > SIZES[-1]:
            sequence = functools.cache(lambda: self.gpu.sequence(launches()))
            return lambda count, keys: sequence()(count, keys)
        graph = functools.cache(lambda size: self.gpu.graph(launches(), count=size, keys=rows))
        return lambda count, keys: graph(min(-(-count // GRAPH_TOKENS) * GRAPH_TOKENS, most))()

    def _caches(self) -> list[tuple[str, int, Cache]]:
        """The buffers of the KV cache, with the bytes of a row."""
        caches = list(enumerate(self.plan.caches))
        keys = [(f"k:{i}", CACHE_VALUE_BYTES * cache.key_width, cache) for i, cache in caches if cache.key_width]
        return keys + [(f"v:{i}", CACHE_VALUE_BYTES * c.value_width, c) for i, c in caches if c.value_width]

    def _places(self, first: int, rows: int) -> Iterator[tuple[str, int, int]]:
        """(buffer, bytes, offset) of these rows, as far as they are kept."""
        for name, size, cache in self._caches():
            start, end = self._windows.place(cache, first, rows)
            yield name, (end - start) * size, start * size

    def _make_room(self, pos: int, count: int) -> None:
        """For `count` tokens at `pos`, behind everything enqueued before."""
        if (base := self._windows.base_for(pos, count)) != self._windows.base:
            self._slide(base)
            self.gpu.upload("state", np.array([base], np.int32), 4 * WORDS.index("BASE"))

    def _slide(self, base: int) -> None:
        """From the next step on the first row of layers with a window is that of position `base`."""
        by, rows = base - self._windows.base, self._windows.rows
        self._windows.base = base
        for name, size, cache in self._caches() if by > 0 else []:
            for at in range(by, rows, by) if cache.window else ():  # in parts that do not overlap
                self.gpu.copy(f"{name}+{(at - by) * size}", f"{name}+{at * size}", min(by, rows - at) * size)

    def _place(
        self,
        ids: Sequence[int],
        pos: int,
        sampling: Sampling,
        count: int = 1,
        *,
        masked: bool = False,
        kept: int = 0,
        runs: bool = True,
    ) -> None:
        """Tells the device the tokens at positions pos, pos + 1, ...; the last `count` of them are the next step's.
        `masked`: its token has to be one of the buffer `allowed`. `kept`: the state behind so many of its tokens stays
        in the slot SLOTS. `runs`: it runs the layers, so that logits that depend on its cache rows are not kept."""
        first = pos + len(ids) - count
        self._settle()
        if runs and self._left and first <= self._left[1]:
            self._left = None
        self._slide(self._windows.base_for(first, count))
        self.gpu.upload("history", np.asarray(ids, np.int32), 4 * pos)
        self.gpu.upload("state", state_words(sampling, first, count, pos, masked, self._windows.base, kept))

    def _place_step(
        self,
        tokens: Sequence[int],
        pos: int,
        sampling: Sampling,
        seen: Sequence[int],
        *,
        masked: bool = False,
        runs: bool = True,
    ) -> None:
        """_place() for a step of `tokens` at `pos`, the first of which is the last of `seen`; empties the ring."""
        known = [*(seen[-_window(sampling, pos + 1) :] or tokens[:1]), *tokens[1:]]
        self._place(known, pos + len(tokens) - len(known), sampling, len(tokens), masked=masked, runs=runs)
        self._ring[:] = EMPTY

    def _settle(self) -> None:
        """Waits for a step or drafts that verify() enqueued ahead, whose result is not wanted."""
        if self._enqueued or self._behind or self._running:
            self.gpu.synchronize()
            self._enqueued = self._behind = self._running = None

    def _chosen(self, pos: int, pause: float = 0, turn: int = 0) -> tuple[int, float]:
        """What a step chooses behind position `pos`, and its log-probability, as soon as the device has written it."""
        word = self._word(pos + 1 + turn, pause)
        self._seen = pos + 1
        return word & 0xFFFFFFFF, float(np.uint32(word >> 32).view(np.float32))

    def _word(self, slot: int, pause: float = 0) -> int:
        """The word the device writes into a slot of the ring, looked at every `pause` seconds. The device waits for the
        host meanwhile unless it has another step, so only then is there a pause."""
        ring, spins, deadline, slot = self._ring, 0, time.monotonic() + 5, slot % RING
        while (word := int(ring[slot])) == EMPTY:
            spins += 1
            if spins > 20:
                time.sleep(pause)
                if time.monotonic() > deadline:
                    self.gpu.synchronize()  # raises for what stopped the GPU
                    if int(ring[slot]) == EMPTY:
                        raise TinychatError("the GPU finished a step without a token")
        ring[slot] = EMPTY
        return word


def _window(sampling: Sampling, known: int) -> int:
    """How many of the `known` last tokens the kernels look at to choose the next one; at least the step's own."""
    dry = sampling.dry_penalty_last_n if sampling.has_dry else 0
    repeat = sampling.repeat_last_n if sampling.counts else 1
    return min(max(1, repeat, dry if dry >= 0 else known), known)
