"""Runs a plan on the CPU: weights repacked once at load, then one native call per token (step.c)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from tinychat.errors import TinychatError
from tinychat.kernels.cpu import compiler
from tinychat.kernels.executor import Weights
from tinychat.kernels.ops import (
    Absorb,
    Attention,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GateUp,
    Head,
    LatentStore,
    LinearAdd,
    NormLinear,
    Op,
    Plan,
    Rope,
    RopeStore,
    Route,
    Sampling,
    ValueUp,
    Weight,
)
from tinychat.kernels.profile import (
    Batch,
    CacheUse,
    Kernel,
    Part,
    StepProfile,
    bytes_of,
    function_source,
    matrices_of,
    name_of,
)

BATCH = 256  # tokens of a prompt that run together
CHUNK = 256  # of attention.h: cache rows of one task
_MAX_GROUP = 1024  # of step.c
_MAX_TASKS = 1 << 20  # of pool.h
Q = GGMLQuantizationType
_TYPES = {
    Q.F32,
    Q.F16,
    Q.BF16,
    Q.Q4_0,
    Q.Q4_1,
    Q.Q5_0,
    Q.Q5_1,
    Q.Q8_0,
    Q.Q2_K,
    Q.Q3_K,
    Q.Q4_K,
    Q.Q5_K,
    Q.Q6_K,
    Q.IQ4_NL,
    Q.IQ4_XS,
    Q.MXFP4,
}
(
    _EMBED,
    _LINEAR,
    _ATTENTION,
    _ABSORB,
    _LATENT_ATTENTION,
    _VALUE_UP,
    _GATE_UP,
    _ROUTE,
    _EXPERTS_UP,
    _EXPERTS_DOWN,
    _HEAD,
) = range(11)
_FUNCTIONS = (
    "embed",
    "linear",
    "attention",
    "absorb",
    "attention",
    "value_up",
    "gate_up",
    "route",
    "experts_up",
    "experts_down",
    "head",
)
_GATING = ("softmax", "sigmoid", "softmax_weight", "sqrt_softplus")

_i32, _f32, _ptr = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _Matrix(ctypes.Structure):
    _fields_ = [("type", _i32), ("rows", _i32), ("cols", _i32), ("groups", _i32), ("data", _ptr)]


class _Op(ctypes.Structure):
    _fields_ = [
        *((n, _i32) for n in ("tag", "layer", "matrices", "add", "src")),
        ("dst", _i32 * 3),
        *(
            (n, _i32)
            for n in (
                "heads",
                "kv_heads",
                "key_dim",
                "value_dim",
                "nope",
                "rope_dims",
                "neox",
                "q_norm_len",
                "k_norm_len",
                "top_k",
                "gating",
                "normalize",
                "route_groups",
                "route_groups_used",
            )
        ),
        ("eps", _f32),
        ("norm_eps", _f32),
        ("scale", _f32),
        *((n, _ptr) for n in ("norm", "q_norm", "k_norm", "rope")),
        ("bias", _ptr * 3),
        ("routes", _ptr),
        ("w", _Matrix * 4),
    ]


class _Context(ctypes.Structure):  # the part of step.c's Ctx that is filled from here
    _fields_ = [
        *(
            (n, _i32)
            for n in ("n_ops", "max_context", "batch", "vocab", "layers", "k_width", "v_width", "kv_heads", "n_buffers")
        ),
        *((n, _ptr) for n in ("ops", "buffers", "widths", "k_cache", "v_cache", "ticks")),
        ("sampling", ctypes.c_uint64),
    ]


class _SampleSpec(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_double) for n in ("temperature", "top_p", "min_p", "repeat_penalty")),
        ("seed", ctypes.c_uint64),
        ("top_k", _i32),
        ("n_recent", _i32),
        ("recent", _ptr),
    ]


def load_library(flags: Sequence[str] = ("-march=native",), notice: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The native library, compiled if need be, with its functions declared. Raises TinychatError where it cannot be
    had."""
    lib = compiler.load(flags, notice)
    c_int, size = ctypes.c_int, ctypes.c_size_t
    for name, result, args in (
        ("tc_alloc", _ptr, [size]),
        ("tc_free", None, [_ptr, size]),
        ("tc_simd", ctypes.c_char_p, []),
        ("tc_group_bytes", size, [c_int, c_int]),
        ("tc_sizeof", size, [c_int]),
        ("tc_open", c_int, [_ptr, c_int]),
        ("tc_prepare", c_int, [_ptr]),
        ("tc_close", None, [_ptr]),
        ("tc_pack", None, [_ptr, _ptr, _ptr, c_int, c_int, c_int, c_int, c_int]),
        ("tc_dequantise", None, [_ptr, c_int, c_int, _ptr]),
        ("tc_forward", None, [_ptr, _ptr, c_int, c_int, c_int, _ptr]),
        ("tc_step", c_int, [_ptr, c_int, c_int, _ptr, _ptr]),
        ("tc_sample", c_int, [_ptr, _ptr, c_int, _ptr, _ptr]),
        ("tc_logits", _ptr, [_ptr]),
        ("tc_cache", size, [_ptr, _ptr, c_int, c_int, c_int]),
        ("tc_bandwidth", ctypes.c_double, [_ptr, _ptr, size]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, args
    for what, struct in ((0, _Op), (2, _SampleSpec)):
        assert lib.tc_sizeof(what) == ctypes.sizeof(struct), struct
    return lib


def default_threads(root: Path = Path("/")) -> int:
    """Physical cores this process may use, at most as many as its cgroups' CPU quotas pay for; on Apple silicon the
    performance cores only. `root`: where /proc and /sys are."""
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True)
        return int(done.stdout) if done.returncode == 0 else os.cpu_count() or 1
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return max(1, int(min(len(cores), _cpu_quota(root))))


def _cpu_quota(root: Path) -> float:
    """CPU seconds per second that this process's cgroups allow, of version 1 or 2; infinity without a quota.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), https://docs.kernel.org/scheduler/sched-bwc.html
    """
    least = float("inf")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return least
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # a quota of any group above counts too; the path may be that of the host, of which only the top is seen here
        for folder in (top / group.lstrip("/"), *(top / p for p in Path(group.lstrip("/")).parents)):
            try:
                if controllers:
                    quota = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if float(quota) > 0:
                    least = min(least, float(quota) / float(period))
            except (OSError, ValueError, ZeroDivisionError):  # "max": no quota
                continue
    return least


class CPUExecutor:
    """An Executor (kernels/executor.py) on this machine's CPU.

    Activations are quantised to 16 bits per 32 values, the cache is F16; everything else is float32. `flags` choose the
    instruction set of the compiled code (tests force others); `notice` gets a line before a compilation, `progress` the
    fraction of the weights packed. Raises TinychatError without a compiler or memory.
    """

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
        self.plan, self.max_context = plan, max_context
        self._compiled = False

        def compiling(line: str) -> None:
            self._compiled = True
            if notice:
                notice(line)

        started = time.perf_counter()
        self._lib = load_library(flags, compiling)
        self._library_s = time.perf_counter() - started
        self._blocks: list[tuple[int, int]] = []  # (address, bytes) of tc_alloc
        self._keep: list[Any] = []  # arrays that C points into
        self._ctx = self._alloc(self._lib.tc_sizeof(1))
        self.threads: int = self._lib.tc_open(self._ctx, threads or default_threads())
        self.device = f"CPU · {self.threads} thread{'s' * (self.threads > 1)} · {self._lib.tc_simd().decode()}"
        try:
            self._ops = self._compile(plan, weights, progress or (lambda fraction: None))
            self._fill_context()
        except BaseException:
            self.close()
            raise

    # ---- building ----

    def _alloc(self, nbytes: int) -> int:
        address = self._lib.tc_alloc(max(nbytes, 64))
        if not address:
            raise TinychatError(
                f"not enough memory: {nbytes / 1e9:.1f} GB more are needed; choose a smaller model or context"
            )
        self._blocks.append((address, max(nbytes, 64)))
        return address

    def _array(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        self._keep.append(array)
        return array.ctypes.data

    def _compile(self, plan: Plan, weights: Weights, progress: Callable[[float], None]) -> list[_Op]:
        """The plan as step.c's ops, its weights packed into one block of memory."""
        _check_limits(plan, self.max_context, self.threads)
        vectors, matrices = _collect(plan)
        at, places = 0, {}
        for w in matrices:
            places[w] = at
            at += self._packed_bytes(w)
        self.weight_bytes = at
        arena = self._alloc(at)
        last_use = {w.tensor: w for w in [*vectors, *matrices]}
        seen = dict[Weight, int]()
        for w in vectors:
            raw = weights.raw(w.tensor)[w.start * w.row_bytes :][: w.row_bytes]
            seen[w] = self._array(raw.view(np.float32).copy())
        for w in matrices:
            seen[w] = arena + places[w]
            self._pack(w, weights.raw(w.tensor), seen[w])
            if last_use[w.tensor] is w:
                weights.release(w.tensor)
            progress((seen[w] - arena + self._packed_bytes(w)) / at)
        return self._translate(plan, seen)

    def _stored_type(self, w: Weight) -> Q:
        return Q.F16 if w.transposed else w.type

    def _packed_bytes(self, w: Weight) -> int:
        kind = self._stored_type(w)
        if kind not in _TYPES:
            raise TinychatError(f"tensor {w.tensor}: the CPU kernels know no type {kind.name}")
        if w.cols % GGML_QUANT_SIZES[kind][0]:
            raise TinychatError(f"tensor {w.tensor}: rows of {w.cols} values are no whole blocks of {kind.name}")
        return w.groups * -(-w.rows // 16) * self._lib.tc_group_bytes(kind, w.cols)

    def _pack(self, w: Weight, raw: np.ndarray, to: int) -> None:
        """Repacks `w` from its tensor's bytes to address `to`."""
        if w.transposed:  # K of a legacy attn_kv_b: its rows are our columns
            rows = raw.reshape(-1, w.row_bytes)
            with np.errstate(all="ignore"):  # a damaged file may hold any bits
                parts = [dequantize(rows[g * w.stride + w.start :][: w.cols], w.type).T for g in range(w.groups)]
                half = np.ascontiguousarray(np.stack(parts).astype(np.float16))
            self._lib.tc_pack(self._ctx, to, half.ctypes.data, Q.F16, w.rows, w.cols, w.groups, w.rows)
        else:
            self._lib.tc_pack(
                self._ctx, to, raw.ctypes.data + w.start * w.row_bytes, w.type, w.rows, w.cols, w.groups, w.stride
            )

    def _translate(self, plan: Plan, places: dict[Weight, int]) -> list[_Op]:
        index = {name: i for i, name in enumerate(plan.buffers)}

        def matrix(w: Weight | None) -> _Matrix:
            return _Matrix(self._stored_type(w), w.rows, w.cols, w.groups, places[w]) if w else _Matrix()

        def op(
            tag: int, w: Sequence[Weight | None] = (), *, src: str = "x", dst: Sequence[str] = ("x",), **values: Any
        ) -> _Op:
            made = _Op(tag=tag, matrices=sum(m is not None for m in w), src=index[src])
            made.dst[: len(dst)] = [index[d] for d in dst]
            made.w[: len(w)] = [matrix(m) for m in w]
            for name, value in values.items():
                if isinstance(value, tuple):
                    made.bias[: len(value)] = [places[b] if b else None for b in value]
                else:
                    setattr(made, name, places[value] if isinstance(value, Weight) else value)
            return made

        used = [o.top_k for o in plan.ops if isinstance(o, ExpertsUp)]
        self._routes = np.zeros((len(used), max(used, default=0)), np.int32)
        routes = iter(self._routes)
        tables = dict[Rope, int]()

        def rope(r: Rope) -> dict[str, Any]:
            if r not in tables:
                tables[r] = self._array(r.table(self.max_context))
            return {"rope": tables[r], "rope_dims": r.dims, "neox": int(r.style == "neox")}

        out = list[_Op]()
        before: RopeStore | LatentStore | None = None
        for o in plan.ops:
            match o:
                case Embed(weight):
                    out.append(op(_EMBED, [weight]))
                case NormLinear():
                    out.append(op(_LINEAR, o.weights, src=o.src, dst=o.dst, norm=o.norm, eps=o.eps, bias=o.biases))
                case LinearAdd():
                    out.append(op(_LINEAR, [o.weight], src=o.src, bias=(o.bias,), add=1))
                case RopeStore() | LatentStore():
                    before = o  # runs inside the op that follows it
                case Attention(latent=True):
                    out.append(
                        op(
                            _LATENT_ATTENTION,
                            src=o.src,
                            dst=[o.dst],
                            layer=o.layer,
                            heads=o.heads,
                            kv_heads=1,
                            key_dim=o.key_dim,
                            value_dim=o.value_dim,
                            scale=o.scale,
                        )
                    )
                case Attention():
                    r = before
                    assert isinstance(r, RopeStore)
                    out.append(
                        op(
                            _ATTENTION,
                            src=o.src,
                            dst=[o.dst, r.k, r.v],
                            layer=o.layer,
                            heads=o.heads,
                            kv_heads=o.kv_heads,
                            key_dim=o.key_dim,
                            value_dim=o.value_dim,
                            scale=o.scale,
                            norm_eps=r.eps,
                            q_norm=r.q_norm,
                            k_norm=r.k_norm,
                            q_norm_len=r.q_norm.cols if r.q_norm else 0,
                            k_norm_len=r.k_norm.cols if r.k_norm else 0,
                            **rope(r.rope),
                        )
                    )
                case Absorb():
                    r = before
                    assert isinstance(r, LatentStore)
                    out.append(
                        op(
                            _ABSORB,
                            [o.weight],
                            src=o.src,
                            dst=[o.dst, r.kv],
                            layer=r.layer,
                            heads=o.heads,
                            nope=o.nope,
                            norm=r.norm,
                            norm_eps=r.eps,
                            **rope(r.rope),
                        )
                    )
                case ValueUp():
                    out.append(op(_VALUE_UP, [o.weight], src=o.src, dst=[o.dst]))
                case GateUp():
                    out.append(op(_GATE_UP, [o.gate, o.up], dst=[o.dst], norm=o.norm, eps=o.eps))
                case Route():
                    out.append(
                        op(
                            _ROUTE,
                            [o.router],
                            norm=o.norm,
                            eps=o.eps,
                            bias=(o.router_bias, o.bias),
                            top_k=o.top_k,
                            gating=_GATING.index(o.gating),
                            normalize=int(o.normalize),
                            scale=o.scale,
                            route_groups=o.groups,
                            route_groups_used=o.groups_used,
                        )
                    )
                case ExpertsUp():
                    out.append(
                        op(
                            _EXPERTS_UP,
                            [o.gate, o.up, o.shared_gate, o.shared_up],
                            dst=[o.dst],
                            norm=o.norm,
                            eps=o.eps,
                            top_k=o.top_k,
                            routes=next(routes).ctypes.data,
                        )
                    )
                case ExpertsDown():
                    out.append(op(_EXPERTS_DOWN, [o.down, o.shared_down], src=o.src, top_k=o.top_k))
                case Head():
                    out.append(op(_HEAD, [o.weight], norm=o.norm, eps=o.eps))
        assert index["x"] == 0, "the residual stream is the first buffer"
        return out

    def _fill_context(self) -> None:
        plan, rows = self.plan, -(-self.max_context // 16) * 16
        kv_heads = max((o.kv_heads for o in plan.ops if isinstance(o, Attention)), default=1)
        k_bytes, v_bytes = (plan.layers * width * rows * 2 for width in (plan.k_width, plan.v_width))
        self.cache_bytes = k_bytes + v_bytes
        slack = 4096  # vectors may be read past the last row
        batch = min(BATCH, self.max_context)
        widths = list(plan.buffers.values())
        addresses = [self._alloc(4 * (batch * w + 64)) for w in widths]
        c = _Context.from_address(self._ctx)
        c.n_ops, c.max_context, c.batch, c.vocab, c.layers = (
            len(self._ops),
            self.max_context,
            batch,
            plan.vocab,
            plan.layers,
        )
        c.k_width, c.v_width, c.kv_heads, c.n_buffers = plan.k_width, plan.v_width, kv_heads, len(widths)
        ops = (_Op * len(self._ops))(*self._ops)
        self._keep.append(ops)
        c.ops = ctypes.addressof(ops)
        c.buffers = self._array(np.array(addresses, np.uint64))
        c.widths = self._array(np.array(widths, np.int32))
        c.k_cache, c.v_cache = self._alloc(k_bytes + slack), self._alloc(v_bytes + slack)
        if self._lib.tc_prepare(self._ctx):
            raise TinychatError("not enough memory for the working buffers; choose a smaller model or context")

    # ---- running ----

    def forward(
        self, ids: Sequence[int], pos: int, logits: Literal["none", "last", "all"] = "none"
    ) -> np.ndarray | None:
        """See Executor.forward."""
        tokens = np.asarray(ids, np.int32)
        self._check(tokens, pos)
        out = np.empty((len(tokens) if logits == "all" else 1, self.plan.vocab), np.float32)
        mode = ("none", "last", "all").index(logits)
        self._lib.tc_forward(self._ctx, tokens.ctypes.data, len(tokens), pos, mode, out.ctypes.data)
        return out if mode else None

    def decode(self, token: int, pos: int, sampling: Sampling, recent: Sequence[int]) -> Iterator[tuple[int, float]]:
        """See Executor.decode."""
        self._check(np.array([token]), pos)
        history, logprob = list(recent), ctypes.c_double()
        spec, _ids = _sample_spec(sampling, history)
        while pos < self.max_context:
            if not self._ctx:
                raise TinychatError("the model is closed")
            token = self._lib.tc_step(self._ctx, token, pos, ctypes.addressof(spec), ctypes.addressof(logprob))
            pos += 1
            history.append(token)
            yield token, logprob.value
            if sampling.repeat_penalty != 1.0:
                spec, _ids = _sample_spec(sampling, history)

    @property
    def sampling_s(self) -> float:
        """Seconds that choosing the last id took, out of its step."""
        return _Context.from_address(self._ctx).sampling * 1e-9

    def step_logits(self) -> np.ndarray:
        """See Executor.step_logits."""
        address = self._lib.tc_logits(self._ctx)
        return np.ctypeslib.as_array((ctypes.c_float * self.plan.vocab).from_address(address)).copy()

    def sample(self, logits: np.ndarray, pos: int, sampling: Sampling, recent: Sequence[int] = ()) -> tuple[int, float]:
        """What decode() chooses from `logits` (float32, vocab) behind position `pos`: (id, log-probability)."""
        logits, logprob = np.ascontiguousarray(logits, np.float32), ctypes.c_double()
        spec, _ids = _sample_spec(sampling, recent)
        token = self._lib.tc_sample(
            self._ctx, logits.ctypes.data, pos, ctypes.addressof(spec), ctypes.addressof(logprob)
        )
        return token, logprob.value

    def routes(self) -> np.ndarray | None:
        """See Executor.routes."""
        return self._routes.copy() if len(self._routes) else None

    @property
    def cache_layout(self) -> str:
        """See Executor.cache_layout."""
        return "cpu f16 tiles of 16, 1"

    def read_cache(self, first: int, rows: int) -> bytes:
        """See Executor.read_cache. Rows come in tiles of 16."""
        assert first % 16 == 0 and first + rows <= self.max_context
        data = np.empty(self._lib.tc_cache(self._ctx, None, first, rows, 0), np.uint8)
        self._lib.tc_cache(self._ctx, data.ctypes.data, first, rows, 0)
        return data.tobytes()

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        array = np.frombuffer(data, np.uint8)
        fits = first % 16 == 0 and 0 <= first <= first + rows <= self.max_context
        if not fits or array.size != self._lib.tc_cache(self._ctx, None, first, rows, 1):
            raise TinychatError(f"saved cache of {len(data)} bytes does not fit {rows} rows of this model")
        self._lib.tc_cache(self._ctx, array.ctypes.data, first, rows, 1)

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """Runs `token` at `pos` and greedily what follows: every second step with a clock around each op on each
        thread."""
        if pos + 2 * steps + 3 > self.max_context:
            raise TinychatError(
                f"{steps} profiled tokens at position {pos} do not fit the context of {self.max_context}"
            )
        ops = self._steps()
        ticks = np.zeros((steps, self.threads, len(self._ops), 2), np.uint64)
        times, sampling, context = np.zeros((2, steps)), np.zeros(steps), _Context.from_address(self._ctx)
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
            case Attention():
                return o.heads * -(-depth // CHUNK)
            case ExpertsUp() | ExpertsDown():
                return sum(-(-w.rows // 16) * (o.top_k if w.groups > 1 else 1) for w in matrices_of(o))
            case _:
                return sum(-(-w.rows // 16) * w.groups for w in matrices_of(o))

    def kernels(self) -> list[Kernel]:
        """step.c's function for each kind of op in the plan, and where what it calls is."""
        text = (compiler.SOURCES / "step.c").read_text()
        counts = Counter((name_of(o), _FUNCTIONS[op.tag]) for (_, o), op in zip(self._steps(), self._ops))
        threads, rest = (
            f"{self.threads} thread{'s' * (self.threads > 1)}",
            f"// what it calls is in {compiler.SOURCES}\n",
        )
        return [
            Kernel(name, n, threads, self._lib.tc_simd().decode(), function_source(text, function) + rest)
            for (name, function), n in counts.items()
        ]

    def _steps(self) -> list[tuple[int, Op]]:
        """The plan's ops that are ops of step.c, with their index in the plan."""
        return [(i, o) for i, o in enumerate(self.plan.ops) if not isinstance(o, RopeStore | LatentStore)]

    def close(self) -> None:
        """See Executor.close."""
        if self._ctx:
            self._lib.tc_close(self._ctx)
            for address, nbytes in self._blocks:
                self._lib.tc_free(address, nbytes)
            self._ctx, self._blocks = 0, []

    def _check(self, tokens: np.ndarray, pos: int) -> None:
        if not self._ctx:
            raise TinychatError("the model is closed")
        if not len(tokens) or pos < 0 or pos + len(tokens) > self.max_context:
            raise TinychatError(f"{len(tokens)} tokens at position {pos} do not fit the context of {self.max_context}")
        if tokens.min() < 0 or tokens.max() >= self.plan.vocab:
            raise TinychatError(f"token id out of range: the vocabulary has {self.plan.vocab} entries")


def _check_limits(plan: Plan, max_context: int, threads: int) -> None:
    """Raises TinychatError for what step.c has no room for: the query heads of a kv head on a task's stack, and the
    tasks of a phase in 20 bits (pool.h)."""
    for o in plan.ops:
        if isinstance(o, Attention):
            group, chunks = o.heads // o.kv_heads, -(-max_context // CHUNK)
            if group > _MAX_GROUP:
                raise TinychatError(f"{group} query heads per kv head; the CPU kernels have room for {_MAX_GROUP}")
            if max(o.kv_heads * chunks, 8 * o.heads, 8 * threads) >= _MAX_TASKS:
                raise TinychatError(f"a context of {max_context:,} tokens is too large for the CPU kernels")
        for w in matrices_of(o):
            if w.groups * -(-w.rows // 16) // 16 + 1 >= _MAX_TASKS:
                raise TinychatError(f"tensor {w.tensor}: too many rows for the CPU kernels")


def _collect(plan: Plan) -> tuple[list[Weight], list[Weight]]:
    """The plan's distinct (vectors, matrices), in file order of use."""
    vectors, matrices = dict[Weight, None](), dict[Weight, None]()
    for o in plan.ops:
        inner: list[Weight | None]
        match o:
            case Embed(weight):
                inner, flat = [weight], []
            case NormLinear():
                inner, flat = list(o.weights), [o.norm, *o.biases]
            case RopeStore():
                inner, flat = [], [o.q_norm, o.k_norm]
            case LatentStore():
                inner, flat = [], [o.norm]
            case Absorb() | ValueUp():
                inner, flat = [o.weight], []
            case LinearAdd():
                inner, flat = [o.weight], [o.bias]
            case GateUp():
                inner, flat = [o.gate, o.up], [o.norm]
            case Route():
                inner, flat = [o.router], [o.norm, o.router_bias, o.bias]
            case ExpertsUp():
                inner, flat = [o.gate, o.up, o.shared_gate, o.shared_up], [o.norm]
            case ExpertsDown():
                inner, flat = [o.down, o.shared_down], []
            case Head():
                inner, flat = [o.weight], [o.norm]
            case _:
                inner, flat = [], []
        matrices |= dict.fromkeys(w for w in inner if w)
        vectors |= dict.fromkeys(w for w in flat if w)
    return list(vectors), list(matrices)


def _seconds(stepper: Iterator[object]) -> float:
    """How long the next step takes."""
    start = time.perf_counter()
    next(stepper)
    return time.perf_counter() - start


def _sample_spec(s: Sampling, recent: Sequence[int]) -> tuple[_SampleSpec, np.ndarray]:
    use = s.repeat_penalty != 1.0 and s.repeat_last_n > 0
    ids = np.unique(np.asarray(recent[-s.repeat_last_n :] if use else (), np.int32))
    return _SampleSpec(
        s.temperature, s.top_p, s.min_p, s.repeat_penalty, s.seed % 2**64, s.top_k, len(ids), ids.ctypes.data
    ), ids
