"""Runs a plan on the CPU: weights repacked once at load, then one native call per token (step.c)."""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import CACHE_VALUE_BYTES, GQA, MLA
from tinychat.kernels.cpu import bandwidth, compiler, library
from tinychat.kernels.cpu.cores import default_threads, start_threads
from tinychat.kernels.cpu.library import (
    MAX_GROUP,
    QUANTS,
    SAMPLED,
    STEP,
    STRETCH,
    TILE,
    Library,
    SampleSpec,
    StepContext,
)
from tinychat.kernels.cpu.program import build
from tinychat.kernels.executor import ExecutorKind, KeepsInPieces, Logits, Mask, StateCopy, Watch, Weights
from tinychat.kernels.limits import LATENT_CHUNK, Limits, check, heads_bytes
from tinychat.kernels.ops import (
    Attention,
    Convolve,
    Delta,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GatedConvolve,
    GateInput,
    LayerInputs,
    NormAdd,
    Op,
    Plan,
    matrices_of,
)
from tinychat.kernels.profile import (
    Batch,
    CacheUse,
    Calls,
    Kernel,
    Part,
    StepProfile,
    bytes_of,
    calls_of,
    function_source,
    name_of,
)
from tinychat.kernels.sampler import penalties
from tinychat.kernels.sampling import Sampling
from tinychat.kernels.window_rows import WindowRows

SHORT_CHUNK = 256  # tokens that run together
EXPERTS_CHUNK = 512  # where experts' weights are unpacked, which costs less for each of more tokens
LIMITS = Limits(  # a phase has at most 2^20 tasks (pool.h)
    QUANTS,
    packed_rows=1 << 27,  # load.h counts them
    heads=1 << 16,
    head_group=MAX_GROUP,
    kv_rows=1 << 27,  # 256 rows of a kv head are a task of attention
    experts=1 << 19,  # an expert is a task
    prefill_chunk=LATENT_CHUNK,
    verified=STEP,
    mtp=True,
)
WATCH_S = 0.2  # seconds from one question whether a prompt is wanted any longer to the next


class CPUExecutor(KeepsInPieces):
    """A `MeasurableExecutor` on this machine's CPU.

    Activations are quantised to 16 bits per 32 values, the cache is F16; everything else is float32. `flags` choose the
    instruction set of the compiled code (tests force others); `notice` gets a line before a compilation, `progress` the
    fraction of the weights packed. Raises TinychatError without a compiler or memory.
    """

    kind: ExecutorKind = "cpu"
    kernels_per_token = 1
    jit_batches = 1
    jit_state = "replaying"  # compiled at load

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        max_context: int,
        threads: int | None = None,
        *,
        flags: Sequence[str] = ("-march=native",),
        notice: Callable[[str], None] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        check(plan, LIMITS, "CPU", max_context)
        # a state does not go back behind drafts that were wrong
        self.limits = replace(LIMITS, verified=1) if plan.state_bytes else LIMITS
        self.plan, self.max_context = plan, max_context
        self._windows = WindowRows(plan, max_context)
        self._compiled = False
        self._sampled = 0  # which of the last step's tokens the last id stands behind
        self._sampling: Sampling | None = None  # the last parameters
        self._spec = SampleSpec()  # what step.c was told of them

        def compiling(line: str) -> None:
            self._compiled = True
            if notice:
                notice(line)

        started = time.perf_counter()
        self._library = Library(flags, compiling)
        self._lib = self._library.lib
        self._library_s = time.perf_counter() - started
        routed = any(isinstance(op, ExpertsUp) for op in plan.ops)
        chunk = EXPERTS_CHUNK if routed and self._library.unpacks else SHORT_CHUNK
        if plan.latent and not plan.state_bytes and self._library.unpacks:
            chunk = max(chunk, min(LATENT_CHUNK, max_context))
        self.prefill_chunk = min(chunk, self._windows.together)
        self._blocks: list[tuple[int, int]] = []  # (address, bytes) of tc_alloc
        self._ctx = self._alloc(self._library.context_bytes)
        wanted = threads or default_threads()
        self.threads: int = start_threads(lambda n: self._lib.tc_open(self._ctx, n), wanted)
        self._threads = f"{self.threads} thread{'s' * (self.threads > 1)}"
        self.device = f"CPU · {self._threads} · {self._library.simd}"
        try:
            progress = progress or (lambda fraction: None)
            self._program = build(plan, weights, max_context, self._library, self._ctx, self._alloc, progress)
            self.weight_bytes = self._program.weight_bytes
            self._fill_context()
        except BaseException:
            self.close()
            raise

    def _alloc(self, nbytes: int) -> int:
        address = self._lib.tc_alloc(max(nbytes, 64))
        if not address:
            raise TinychatError(
                f"not enough memory: {nbytes / 1e9:.1f} GB more are needed; choose a smaller model or context"
            )
        self._blocks.append((address, max(nbytes, 64)))
        return address

    def _array(self, array: np.ndarray) -> int:
        """The address of `array`, which lives as long as the program."""
        self._program.arrays.append(array)
        return array.ctypes.data

    def _fill_context(self) -> None:
        plan, ops = self.plan, self._program.ops
        rows = [-(-plan.rows(cache, self.max_context) // TILE) * TILE for cache in plan.caches]
        self.cache_bytes = sum(n * cache.row_bytes for n, cache in zip(rows, plan.caches))
        slack = 4096  # vectors may be read past the last row
        at = self._alloc(self.cache_bytes + slack)
        self._caches = (library.LayerCache * max(len(plan.caches), 1))()
        attentions = [layer.attention for layer in (*plan.layers, *([plan.mtp.layer] if plan.mtp else []))]
        heads = [a.kv_heads if isinstance(a, GQA | MLA) else 1 for a in attentions]
        for made, cache, n, kept in zip(self._caches, plan.caches, [*heads, 1], rows):
            made.heads, made.rows, made.window = n, kept, cache.window
            made.k_dim, made.v_dim = cache.key_width // made.heads, cache.value_width // made.heads
            made.k, made.v = at, at + kept * cache.key_width * CACHE_VALUE_BYTES
            at += kept * cache.row_bytes
        sizes = [
            (4 * s.rows * s.channels, 4 * s.heads * s.key_dim * _filled(s.value_dim)) if s else (0, 0)
            for s in plan.states
        ]
        self.state_bytes = sum(map(sum, sizes))
        self._states = at = self._alloc(self.state_bytes)
        for made, (tail, state) in zip(self._caches, sizes):
            made.tail, made.state = at, at + tail
            at += tail + state
        widths = list(plan.buffers.values())
        assert next(iter(plan.buffers)) == "x", "the residual stream is the first buffer"
        addresses = [self._alloc(4 * (self.prefill_chunk * w + 64)) for w in widths]
        self._context = c = StepContext.from_address(self._ctx)
        c.n_ops, c.n_step, c.n_whole = len(ops), self._program.steps, self._program.whole
        c.max_context, c.batch, c.vocab = self.max_context, self.prefill_chunk, plan.vocab
        c.layers, c.n_buffers = len(plan.caches), len(widths)
        self._ops = (library.COp * len(ops))(*ops)
        c.ops = ctypes.addressof(self._ops)
        if room := heads_bytes(plan, self.max_context, self.threads) if self._library.unpacks else 0:
            c.expanded, c.expanded_room = self._alloc(room + slack), room // CACHE_VALUE_BYTES
        c.buffers = self._array(np.array(addresses, np.uint64))
        c.widths = self._array(np.array(widths, np.int32))
        c.caches = ctypes.addressof(self._caches)
        if self._lib.tc_prepare(self._ctx):
            raise TinychatError("not enough memory for the working buffers; choose a smaller model or context")

    # ---- running ----

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
        """See Executor.forward. What follows is not run with them."""
        self._check(ids, pos)
        tokens = np.asarray(ids, np.int32)
        out = np.empty((len(tokens) if logits == "all" else 1, self.plan.vocab), np.float32)
        for at in range(0, len(tokens), self.prefill_chunk):
            part = tokens[at : at + self.prefill_chunk]
            mode = 2 if logits == "all" else int(logits == "last" and at + len(part) == len(tokens))
            rows = out[at:] if mode == 2 else out
            self._slide(self._windows.base_for(pos + at, len(part)))
            with _watching(watch, at / len(tokens), len(part) / len(tokens)) as asked:
                where = part.ctypes.data, len(part), pos + at, mode, mtp, rows.ctypes.data
                if self._lib.tc_forward(self._ctx, *where, asked, int(WATCH_S * 1e9)):
                    return None
        return None if logits == "none" else out

    def draft(self, ids: Sequence[int], pos: int) -> int:
        """See Executor.draft."""
        rows = self.forward(ids, pos, "last", mtp=True)
        assert rows is not None
        return int(rows[0].argmax())

    def decode(
        self, token: int, pos: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None = None
    ) -> Iterator[tuple[int, float]]:
        """See Executor.decode."""
        history = list(recent)
        while pos < self.max_context:
            self._step((token,), pos)
            token, logprob = self._sample(0, sampling, history, mask)
            pos += 1
            history.append(token)
            yield token, logprob

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
        """See Executor.verify."""
        assert len(drafts) < LIMITS.verified
        history = list(recent) if drafts else []  # a single step appends nothing, so it copies nothing
        self._step((token, *drafts), pos)
        for i in range(len(drafts) + 1):
            token, logprob = self._sample(i, sampling, history if drafts else recent, mask)
            yield token, logprob
            if i == len(drafts) or token != drafts[i]:
                return
            history.append(token)

    def _step(self, ids: Sequence[int], pos: int) -> None:
        self._check(ids, pos)
        self._slide(self._windows.base_for(pos, len(ids)))
        self._lib.tc_step(self._ctx, (ctypes.c_int32 * len(ids))(*ids), len(ids), pos)

    def reaches(self, pos: int) -> bool:
        """See Executor.reaches."""
        return self._windows.reaches(pos)

    def _slide(self, base: int) -> None:
        """From now on the first row of layers with a window is that of position `base`."""
        if base != self._windows.base:
            self._windows.base = base
            self._lib.tc_slide(self._ctx, base)

    def _sample(self, i: int, sampling: Sampling, recent: Sequence[int], mask: Mask | None) -> tuple[int, float]:
        """(id, log-probability) of what follows token `i` of the step that was run last."""
        if sampling is not self._sampling:
            fields = {name: getattr(sampling, name) for name in SAMPLED}
            self._sampling, self._spec = sampling, SampleSpec(seed=sampling.seed % 2**64, **fields)
        spec, logprob = self._spec, ctypes.c_double()
        bits = mask() if mask else None
        spec.mask = bits.ctypes.data if bits is not None else None
        if sampling.has_penalties:
            p = penalties(sampling, recent)
            spec.n_penalised, spec.penalised = len(p.ids), p.ids.ctypes.data
            spec.divisors, spec.amounts = p.divisors.ctypes.data, p.amounts.ctypes.data
        self._sampled = i
        return self._lib.tc_sample(self._ctx, i, ctypes.byref(spec), ctypes.byref(logprob)), logprob.value

    @property
    def sampling_s(self) -> float:
        """See Executor.sampling_s."""
        return self._context.sampling * 1e-9

    def routes(self) -> np.ndarray | None:
        """See Executor.routes."""
        routes = self._program.routes
        return routes[:, self._sampled].copy() if len(routes) else None

    @property
    def cache_layout(self) -> str:
        """See Executor.cache_layout."""
        return f"cpu f16 tiles of 16, 1{' mtp' * bool(self.plan.mtp)}"

    def read_cache(self, first: int, rows: int) -> bytes:
        """See Executor.read_cache. Rows come in tiles of 16."""
        assert first % 16 == 0 and first + rows <= self.max_context
        data = np.empty(self._lib.tc_cache(self._ctx, None, first, rows, 0), np.uint8)
        self._lib.tc_cache(self._ctx, data.ctypes.data, first, rows, 0)
        return data.tobytes()

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        if first % TILE or not 0 <= first <= first + rows <= self.max_context:
            raise TinychatError(f"a saved cache of {rows} rows from {first} on does not fit the context")
        tiles = -(-rows // TILE) * TILE
        self._slide(self._windows.base_with(first, tiles, self._windows.held(len(data), tiles)))
        self._lib.tc_cache(self._ctx, np.frombuffer(data, np.uint8).ctypes.data, first, rows, 1)

    def read_state(self) -> StateCopy:
        """See Executor.read_state."""
        return memoryview(ctypes.string_at(self._states, self.state_bytes))

    def write_state(self, state: StateCopy) -> None:
        """See Executor.write_state."""
        data = state.tobytes()
        if len(data) != self.state_bytes:
            raise TinychatError(f"a saved state of {len(data):,} bytes is not of this model")
        ctypes.memmove(self._states, data, len(data))

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """See MeasurableExecutor.profile: every second step runs with a clock around each op on each thread."""
        if pos + 2 * steps + 3 > self.max_context:
            raise TinychatError(
                f"{steps} profiled tokens at position {pos} do not fit the context of {self.max_context}"
            )
        ops = self._program.sources
        ticks = np.zeros((steps, self.threads, len(self._ops), 2), np.uint64)
        times, sampling, context = np.zeros((2, steps)), np.zeros(steps), StepContext.from_address(self._ctx)
        stepper = self.decode(token, pos, Sampling(temperature=0.0), [token])
        first, *_ = (_seconds(stepper) for _ in range(3))
        try:
            for i in range(steps):
                for clocked in (0, 1):
                    context.ticks = ticks[i].ctypes.data if clocked else None
                    times[clocked, i] = _seconds(stepper)
                sampling[i] = context.sampling * 1e-9
        finally:
            context.ticks = None
        depth, spent = pos + 3 + steps, ticks * 1e-9
        parts = tuple(
            Part(
                name_of(o),
                index,
                bytes_of(self.plan, o, depth),
                self._tasks(o, depth),
                spent[:, :, k, 0],
                spent[:, :, k, 1],
            )
            for k, (index, o) in enumerate(ops)
        )
        library = CacheUse(
            "compiled C library", int(not self._compiled), int(self._compiled), self._library_s, self._lib._name
        )
        return StepProfile(
            "in the batch",
            parts,
            times[1],
            times[0],
            sampling,
            (Batch("native call", len(ops), times[0]),),
            (first,),
            (library,),
            depth,
            max(default_threads(), self.threads),
            tuple(self.kernels()),
        )

    def _tasks(self, o: Op, depth: int) -> int:
        """Into how many pieces step.c can divide an op of one token: groups of 16 rows; heads and chunks in
        attention."""
        match o:
            case Embed():
                return 1
            case NormAdd() | GateInput():
                return 1
            case LayerInputs():
                return 1 if o.norm.cols % STRETCH else o.table.weight.cols // o.norm.cols
            case Convolve() | Delta():
                return o.heads
            case GatedConvolve():
                return -(-o.weight.rows // TILE)
            case Attention():
                return o.heads * -(-min(depth, o.window or depth) // self._library.chunk)
            case ExpertsUp() | ExpertsDown():
                return sum(-(-w.rows // TILE) * (o.top_k if w.groups > 1 else 1) for w in matrices_of(o))
            case _:
                return sum(-(-w.rows // TILE) * w.groups for w in matrices_of(o))

    def kernels(self) -> list[Kernel]:
        """See MeasurableExecutor.kernels: step.c's function for each kind of op in the plan."""
        text, rest = (compiler.SOURCES / "step.c").read_text(), f"// what it calls is in {compiler.SOURCES}\n"
        functions = {n: "attention" if name == "latent_attention" else name for name, n in self._library.tags.items()}
        counts = Counter((name_of(o), functions[op.tag]) for (_, o), op in zip(self._program.sources, self._ops))
        return [
            Kernel(name, n, self._threads, self._library.simd, function_source(text, function) + rest)
            for (name, function), n in counts.items()
        ]

    def seconds_of(self, groups: Sequence[Sequence[int]], pos: int, steps: int) -> Calls:
        """See MeasurableExecutor.seconds_of."""
        return calls_of(self.profile(0, pos, steps), groups)

    def stand_in(self, drafts: Sequence[int], pos: int) -> None:
        """See MeasurableExecutor.stand_in: no step is enqueued ahead."""

    def read_bandwidth(self) -> float:
        """See MeasurableExecutor.read_bandwidth: of the weights, where they are larger than the caches."""
        size = bandwidth.block_bytes()
        return (
            float(self._lib.tc_bandwidth(self._ctx, self._program.weights_at, size))
            if self.weight_bytes >= size
            else 0.0
        )

    def close(self) -> None:
        """See Executor.close."""
        if self._ctx:
            self._lib.tc_close(self._ctx)
            for address, nbytes in self._blocks:
                self._lib.tc_free(address, nbytes)
            self._ctx, self._blocks = 0, []

    def _check(self, ids: Sequence[int], pos: int) -> None:
        if not self._ctx:
            raise TinychatError("the model is closed")
        if not len(ids) or pos < 0 or pos + len(ids) > self.max_context:
            raise TinychatError(f"{len(ids)} tokens at position {pos} do not fit the context of {self.max_context}")
        if min(ids) < 0 or max(ids) >= self.plan.vocab:
            raise TinychatError(f"token id out of range: the vocabulary has {self.plan.vocab} entries")


@contextmanager
def _watching(watch: Watch | None, done: float, share: float) -> Iterator[ctypes._FuncPointer]:
    """`watch` for step.c, of a call of which `done` is done and a part of `share` runs; raises in the end what it
    raised."""
    raised = list[BaseException]()

    def asked() -> Generator[bool, float]:
        """A generator, which is in its `try` when it is called: a signal that came while C ran raises before the first
        line of what C calls, and C would lose it."""
        stop = False
        while True:
            try:
                part = yield stop
                assert watch
                stop = watch(done + share * part)
            except GeneratorExit:
                return
            except BaseException as e:
                raised.append(e)
                stop = True

    ask = asked()
    next(ask)
    yield library.CWatch(ask.send) if watch else library.CWatch()
    if raised:
        raise raised[0]


def _filled(values: int) -> int:
    """`values` of a head filled up to whole vectors."""
    return -(-values // TILE) * TILE


def _seconds(stepper: Iterator[object]) -> float:
    """Seconds that the next step takes."""
    start = time.perf_counter()
    next(stepper)
    return time.perf_counter() - start
