"""Runs a plan with plain tinygrad tensors on any device. It is the specification of every op, and the way out where no
faster executor works.

Weights stay packed; an op dequantises what it uses inside its own kernels. Each op is realised on its own, so what is
fused is visible here; the steps are captured by TinyJit, with the position as a bound variable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.kernels.executor import Weights
from tinychat.kernels.ops import Plan, Sampling, Weight
from tinychat.kernels.profile import Kernel, StepProfile
from tinychat.kernels.sampling import sample
from tinychat.kernels.tinygrad.compile_caches import Caches
from tinychat.kernels.tinygrad.dequant import dequantize, to_tensor

CHUNK = 32  # tokens of a prefill step; what is left over goes one by one
ROWS = 1 << 24  # values of a weight that one matrix product of a prefill step dequantises at a time


class ReferenceExecutor:
    """`Executor` on tinygrad tensors. `cache_dtype` is the KV cache's; F32 for comparisons, F16 to save memory."""

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        max_context: int,
        device: str | None = None,
        cache_f16: bool = False,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.plan, self.max_context = plan, max_context
        self.tiny_device = device or Device.DEFAULT
        self.device = f"{self.tiny_device} · plain tinygrad"
        self.jit_batches = 0
        cache = dtypes.float16 if cache_f16 else dtypes.float32
        self._packed: dict[str, Tensor] = {}
        names = list(dict.fromkeys(w.tensor for op in plan.ops for w in ops.weights_of(op)))
        for i, name in enumerate(names):
            self._packed[name] = to_tensor(weights.raw(name), self.tiny_device)
            weights.release(name)
            if progress:
                progress((i + 1) / len(names))
        self.weight_bytes = sum(t.nbytes() for t in self._packed.values())
        self._k = [self._zeros(max_context, plan.k_width, cache) for _ in range(plan.layers)]
        self._v = [self._zeros(max_context, plan.v_width, cache) for _ in range(plan.layers)] if plan.v_width else []
        self.cache_bytes = sum(t.nbytes() for t in self._k + self._v)
        self._rope: dict[ops.Rope, Tensor] = {}
        self._pos = UOp.variable("pos", 0, max_context - 1)
        self._chunk = 1 if any(isinstance(op, ops.Route) for op in plan.ops) else CHUNK
        self._jits: dict[tuple[int, bool], Any] = {}  # TinyJit is a function to mypy
        self.caches = Caches(self.tiny_device)
        self._logits = np.zeros(plan.vocab, np.float32)

    def _zeros(self, rows: int, width: int, dtype: Any) -> Tensor:
        return Tensor.zeros(rows, width, dtype=dtype, device=self.tiny_device).contiguous().realize()

    @property
    def kernels_per_token(self) -> int:
        """Kernels of the captured decode step (0 before it was captured)."""
        jit = self._jits.get((1, True))
        return len(jit.captured._linear.src) if jit and jit.captured else 0

    @property
    def jit_state(self) -> str:
        """See Executor.jit_state: TinyJit runs the first step as it comes, captures the second and replays it from then
        on."""
        jit = self._jits.get((1, True))
        return ("compiling", "capturing", "replaying")[min(jit.cnt, 2) if jit else 0]

    def forward(
        self, ids: Sequence[int], pos: int, logits: Literal["none", "last", "all"] = "none"
    ) -> np.ndarray | None:
        """See Executor.forward."""
        out, done = [], 0
        while done < len(ids):
            n = self._chunk if len(ids) - done >= self._chunk else 1
            last = done + n == len(ids)
            want = logits == "all" or (logits == "last" and last)
            rows = self._run(ids[done : done + n], pos + done, want)
            if rows is not None:
                out.append(rows if logits == "all" else rows[-1:])
            done += n
        return np.concatenate(out) if out else None

    def decode(self, token: int, pos: int, sampling: Sampling, recent: Sequence[int]) -> Iterator[tuple[int, float]]:
        """See Executor.decode; sampling runs on the host."""
        seen = list(recent)
        while pos < self.max_context:
            rows = self._run([token], pos, True)
            assert rows is not None
            self._logits = rows[0]
            token, logprob = sample(self._logits, sampling, pos, seen)
            seen.append(token)
            yield token, logprob
            pos += 1

    def step_logits(self) -> np.ndarray:
        """See Executor.step_logits."""
        return self._logits

    def routes(self) -> np.ndarray | None:
        """See Executor.routes: None, what a step computes inside stays on the device."""
        return None

    @property
    def cache_layout(self) -> str:
        """See Executor.cache_layout."""
        return f"reference {self._k[0].dtype.name} 1"

    def read_cache(self, first: int, rows: int) -> bytes:
        """See Executor.read_cache: for each layer K's rows, then V's."""
        return b"".join(t[first : first + rows].numpy().tobytes() for t in self._k + self._v)

    def write_cache(self, data: bytes, first: int, rows: int) -> None:
        """See Executor.write_cache."""
        if len(data) != sum(rows * t.nbytes() // self.max_context for t in self._k + self._v):
            raise TinychatError(f"saved cache of {len(data)} bytes does not fit {rows} rows of this model")
        at = 0
        for t in self._k + self._v:
            size = rows * t.nbytes() // self.max_context
            part = np.frombuffer(
                data, np.float16 if t.dtype == dtypes.half else np.float32, size // t.dtype.itemsize, at
            )
            t[first : first + rows].assign(Tensor(part.reshape(rows, -1), device=self.tiny_device)).realize()
            at += size

    def profile(self, token: int, pos: int, steps: int) -> StepProfile:
        """See kernels/profile.py."""
        from tinychat.kernels.tinygrad.profile import profile

        return profile(self, token, pos, steps)

    def kernels(self) -> list[Kernel]:
        """See kernels/profile.py."""
        from tinychat.kernels.tinygrad.profile import kernels

        return kernels(self)

    def close(self) -> None:
        """See Executor.close."""
        self._packed.clear()
        self._jits.clear()
        self._k, self._v = [], []

    def _run(self, ids: Sequence[int], pos: int, want_logits: bool) -> np.ndarray | None:
        key = (len(ids), want_logits)
        if key not in self._jits:
            self._jits[key] = TinyJit(self._step_with_logits if want_logits else self._step)
        jit = self._jits[key]
        tokens = Tensor(np.asarray(ids, np.int32), device=self.tiny_device).realize()
        with contextlib.nullcontext() if jit.captured else self.caches.counted():
            out = jit(tokens, self._pos.bind(pos))
        return out.numpy() if want_logits else None

    def _step(self, tokens: Tensor, pos: UOp) -> Tensor:
        return self._layers(tokens, pos)["x"]

    def _step_with_logits(self, tokens: Tensor, pos: UOp) -> Tensor:
        b, head = self._layers(tokens, pos), self.plan.ops[-1]
        assert isinstance(head, ops.Head)
        return self._linear(self._norm(b["x"], head.norm, head.eps), head.weight).realize()

    def _layers(self, tokens: Tensor, pos: UOp) -> dict[str, Tensor]:
        """The buffers after every op but the head."""
        b: dict[str, Tensor] = {"tokens": tokens}
        for op in self.plan.ops[:-1]:
            getattr(self, "_" + type(op).__name__)(op, b, pos)
            Tensor.realize(*b.values())
        return b

    # --- weights

    def _rows(self, w: Weight) -> Tensor:
        """The packed rows of all groups: uint8 (groups, rows, row bytes); for a transposed weight (groups, cols, row
        bytes)."""
        rows = w.cols if w.transposed else w.rows
        stride = w.stride or rows
        packed = (
            self._packed[w.tensor].reshape(-1, stride, w.row_bytes)
            if w.groups > 1 or w.stride
            else (self._packed[w.tensor].reshape(1, -1, w.row_bytes))
        )
        return packed[:, w.start : w.start + rows]

    def _vector(self, w: Weight) -> Tensor:
        return dequantize(self._packed[w.tensor], w.type)

    def _matrices(self, w: Weight) -> Tensor:
        """float32 (groups, rows, cols), lazily."""
        m = dequantize(self._rows(w), w.type)
        return m.transpose(-1, -2) if w.transposed else m

    def _linear(self, x: Tensor, w: Weight) -> Tensor:
        """(T, cols) @ (rows, cols)^T."""
        packed = self._rows(w)[0]
        if x.shape[0] == 1:  # fused into the reduction
            return x @ dequantize(packed, w.type).T
        step = max(1, ROWS // w.cols)
        parts = [x @ dequantize(packed[r : r + step], w.type).contiguous().T for r in range(0, w.rows, step)]
        return parts[0] if len(parts) == 1 else Tensor.cat(*[p.contiguous() for p in parts], dim=-1)

    def _norm(self, x: Tensor, gain: Weight | None, eps: float) -> Tensor:
        return x if gain is None else (_unit(x, eps) * self._vector(gain)).contiguous()

    # --- ops, named as their classes

    def _Embed(self, op: ops.Embed, b: dict[str, Tensor], pos: UOp) -> None:
        b["x"] = dequantize(self._rows(op.weight)[0][b.pop("tokens")].contiguous(), op.weight.type)

    def _NormLinear(self, op: ops.NormLinear, b: dict[str, Tensor], pos: UOp) -> None:
        n = self._norm(b[op.src], op.norm, op.eps)
        for weight, bias, dst in zip(op.weights, op.biases, op.dst):
            y = self._linear(n, weight)
            b[dst] = y if bias is None else y + self._vector(bias)

    def _RopeStore(self, op: ops.RopeStore, b: dict[str, Tensor], pos: UOp) -> None:
        q, k = (
            self._head_norm(b[src], gain, op.eps, op.head_dim) for src, gain in ((op.q, op.q_norm), (op.k, op.k_norm))
        )
        b[op.q] = self._rotate(q, op.rope, pos, 0).flatten(1)
        _store(self._k[op.layer], self._rotate(k, op.rope, pos, 0).flatten(1), pos)
        _store(self._v[op.layer], b.pop(op.v), pos)
        del b[op.k]

    def _head_norm(self, x: Tensor, gain: Weight | None, eps: float, head_dim: int) -> Tensor:
        """(T, heads * head_dim) -> (T, heads, head_dim), normed per head or as a whole, as the gain's length says."""
        heads = x.reshape(x.shape[0], -1, head_dim)
        if gain is None:
            return heads
        if gain.cols == head_dim:
            return _unit(heads, eps) * self._vector(gain)
        return self._norm(x, gain, eps).reshape(heads.shape)

    def _LatentStore(self, op: ops.LatentStore, b: dict[str, Tensor], pos: UOp) -> None:
        q = b[op.q].reshape(b[op.q].shape[0], op.heads, op.nope + op.rope.dims)
        b[op.q] = self._rotate(q, op.rope, pos, op.nope).flatten(1)
        kv = b.pop(op.kv)
        latent = self._norm(kv[:, : op.kv_lora], op.norm, op.eps)
        rotated = self._rotate(kv[:, op.kv_lora :].unsqueeze(1), op.rope, pos, 0).squeeze(1)
        _store(self._k[op.layer], latent.cat(rotated, dim=-1), pos)

    def _rotate(self, x: Tensor, rope: ops.Rope, pos: UOp, start: int) -> Tensor:
        """RoPE of values start..start+dims of each head of x (T, heads, width)."""
        if rope not in self._rope:
            self._rope[rope] = Tensor(rope.table(self.max_context), device=self.tiny_device).realize()
        half = rope.dims // 2
        table = self._rope[rope][pos : pos + x.shape[0]].unsqueeze(1)
        cos, sin = table[..., 0], table[..., 1]
        part = x[..., start : start + rope.dims]
        if rope.style == "norm":
            pairs = part.reshape(*part.shape[:-1], half, 2)
            a, c = pairs[..., 0], pairs[..., 1]
            turned = Tensor.stack(a * cos - c * sin, a * sin + c * cos, dim=-1).flatten(-2)
        else:
            a, c = part[..., :half], part[..., half:]
            turned = (a * cos - c * sin).cat(a * sin + c * cos, dim=-1)
        parts = (
            [x[..., :start]] * (start > 0)
            + [turned]
            + [x[..., start + rope.dims :]] * (start + rope.dims < x.shape[-1])
        )
        return Tensor.cat(*parts, dim=-1) if len(parts) > 1 else turned

    def _Absorb(self, op: ops.Absorb, b: dict[str, Tensor], pos: UOp) -> None:
        q = b.pop(op.src).reshape(-1, op.heads, op.nope + op.rope_dims)
        nope = (q[..., : op.nope].transpose(0, 1) @ self._matrices(op.weight).transpose(-1, -2)).transpose(0, 1)
        b[op.dst] = nope.contiguous().cat(q[..., op.nope :], dim=-1).flatten(1)

    def _Attention(self, op: ops.Attention, b: dict[str, Tensor], pos: UOp) -> None:
        q = b.pop(op.src).reshape(-1, op.kv_heads, op.heads // op.kv_heads, op.key_dim)
        t = q.shape[0]
        k = self._k[op.layer][: pos + t].float().reshape(pos + t, op.kv_heads, op.key_dim)
        v = (
            k[..., : op.value_dim]
            if op.latent
            else (self._v[op.layer][: pos + t].float().reshape(pos + t, op.kv_heads, op.value_dim))
        )
        scores = q.permute(1, 2, 0, 3) @ k.permute(1, 2, 0).unsqueeze(1) * op.scale  # (kv heads, group, T, rows)
        mask = Tensor.full(
            (t, pos + t), float("-inf"), dtype=dtypes.float32, device=self.tiny_device, buffer=False
        ).triu(pos + 1)
        p = (scores + mask).contiguous().softmax(-1) if t > 1 else scores.contiguous().softmax(-1)
        b[op.dst] = (p @ v.permute(1, 0, 2).unsqueeze(1)).permute(2, 0, 1, 3).reshape(t, op.heads * op.value_dim)

    def _ValueUp(self, op: ops.ValueUp, b: dict[str, Tensor], pos: UOp) -> None:
        w = self._matrices(op.weight)
        o = b.pop(op.src).reshape(-1, op.weight.groups, op.weight.cols).transpose(0, 1)
        b[op.dst] = (o @ w.transpose(-1, -2)).transpose(0, 1).flatten(1)

    def _LinearAdd(self, op: ops.LinearAdd, b: dict[str, Tensor], pos: UOp) -> None:
        y = self._linear(b.pop(op.src), op.weight)
        b["x"] = b["x"] + (y if op.bias is None else y + self._vector(op.bias))

    def _GateUp(self, op: ops.GateUp, b: dict[str, Tensor], pos: UOp) -> None:
        n = self._norm(b["x"], op.norm, op.eps)
        b[op.dst] = self._linear(n, op.gate).contiguous().silu() * self._linear(n, op.up).contiguous()

    def _Route(self, op: ops.Route, b: dict[str, Tensor], pos: UOp) -> None:
        scores = self._linear(self._norm(b["x"], op.norm, op.eps), op.router)
        if op.router_bias is not None:
            scores = scores + self._vector(op.router_bias)
        scores = scores.contiguous()
        p = {
            "softmax": lambda: scores.softmax(-1),
            "sigmoid": scores.sigmoid,
            "softmax_weight": lambda: scores,
            "sqrt_softplus": lambda: _softplus(scores).sqrt(),
        }[op.gating]()
        p = p.contiguous()
        chosen = p if op.bias is None else p + self._vector(op.bias)
        if op.groups > 1:
            grouped = chosen.reshape(-1, op.groups, op.router.rows // op.groups)
            best_two = grouped.max(-1) + _without_best(grouped).max(-1)
            keep = (_rank(best_two.contiguous()) < op.groups_used).unsqueeze(-1)
            chosen = keep.where(grouped, float("-inf")).reshape(p.shape)
        order = _rank(chosen.contiguous())  # (T, experts)
        picks = (order.unsqueeze(1) == Tensor.arange(op.top_k).reshape(1, -1, 1)).contiguous()
        numbers = Tensor.arange(op.router.rows)
        b["experts"] = picks.where(numbers, 0).sum(-1).cast(dtypes.int32)
        weights = picks.where(p.unsqueeze(1), 0).sum(-1)
        if op.gating == "softmax_weight":
            weights = weights.softmax(-1)
        if op.normalize:
            weights = weights / weights.sum(-1, keepdim=True).maximum(6.103515625e-5)
        b["weights"] = weights * op.scale

    def _expert_matrices(self, w: Weight, chosen: Tensor) -> Tensor:
        """The chosen experts' matrices of one token: float32 (top_k, rows, cols); gathered packed."""
        return dequantize(self._rows(w)[chosen].contiguous(), w.type)

    def _ExpertsUp(self, op: ops.ExpertsUp, b: dict[str, Tensor], pos: UOp) -> None:
        n, chosen = self._norm(b["x"], op.norm, op.eps), b["experts"][0]  # one token a step
        gate, up = ((self._expert_matrices(w, chosen) * n).sum(-1).contiguous() for w in (op.gate, op.up))
        parts = [(gate.silu() * up).reshape(1, -1)]
        if op.shared_gate and op.shared_up:
            shared = self._linear(n, op.shared_gate).contiguous().silu() * self._linear(n, op.shared_up).contiguous()
            parts.append(shared)
        b[op.dst] = Tensor.cat(*parts, dim=-1) if len(parts) > 1 else parts[0]

    def _ExpertsDown(self, op: ops.ExpertsDown, b: dict[str, Tensor], pos: UOp) -> None:
        h, chosen, ff = b.pop(op.src), b.pop("experts")[0], op.down.cols
        routed = h[:, : op.top_k * ff].reshape(op.top_k, 1, ff)
        y = (self._expert_matrices(op.down, chosen) * routed).sum(-1).contiguous()  # (top_k, dim)
        x = b["x"] + (y * b.pop("weights").reshape(-1, 1)).sum(0)
        b["x"] = x if op.shared_down is None else x + self._linear(h[:, op.top_k * ff :], op.shared_down)


def _unit(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    return x * ((x * x).mean(-1, keepdim=True) + eps).rsqrt()


def _softplus(x: Tensor) -> Tensor:
    return x.maximum(0) + (1 + (-x.abs()).exp()).log()


def _store(cache: Tensor, rows: Tensor, pos: UOp) -> None:
    """cache[pos : pos + T] = rows, now."""
    cache[pos : pos + rows.shape[0]].assign(rows.cast(cache.dtype).contiguous()).realize()


def _rank(x: Tensor) -> Tensor:
    """Place of each value of the last axis in descending order, ties to the lower index: int32."""
    a, c = x.unsqueeze(-1), x.unsqueeze(-2)  # (..., n, 1) and (..., 1, n)
    n = x.shape[-1]
    earlier = Tensor.arange(n).reshape(1, n) < Tensor.arange(n).reshape(n, 1)
    return ((c > a) | ((c == a) & earlier)).sum(-1).cast(dtypes.int32)


def _without_best(x: Tensor) -> Tensor:
    """x with its first largest value of the last axis at -inf."""
    return (_rank(x) == 0).where(float("-inf"), x)
