"""The decode step in plain tinygrad tensors: the specification of every block of a plan.

Weights stay packed; an op dequantises the rows that it uses inside its own kernels. Each op of `Plan.ops` is realised
separately, so that fusion happens within an op only. TinyJit captures the step, with the position as a bound variable.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.helpers import Context

from tinychat.kernels.blocks import (
    CLAMP,
    CLAMP_SLOPE,
    GQA,
    KDA,
    MIN_WEIGHT_SUM,
    MLA,
    Activation,
    Cache,
    DeltaRule,
    Dense,
    Experts,
    Gated,
    Layer,
    LayerEmbedding,
    Rope,
    Router,
    ShortConvolution,
    Temperature,
    Weight,
)
from tinychat.kernels.executor import Weights
from tinychat.kernels.ops import Embed, Head, LayerTable, Plan, kda_inputs, latent_inputs, projections
from tinychat.kernels.tinygrad.compile_caches import Caches
from tinychat.kernels.tinygrad.dequant import dequantize, to_tensor
from tinychat.kernels.window_rows import WindowRows

Ops = Generator[Tensor, None, Tensor]  # yields the realised result of every op, returns x
DEQUANTISED = 1 << 24  # values of a weight that one matrix product of several tokens dequantises at a time


class Step:
    """A plan's weights, KV cache and captured steps on one tinygrad device.

    Caches are (rows, width) tensors of `cache_type`, by layer: `keys`, and `values` where the rows have some; `windows`
    says which rows layers with a window keep.
    `states`, float32: of each layer with one, the last inputs of its convolution (rows, channels) and the matrices of
    its heads (heads, key_dim, value_dim).
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights,
        max_context: int,
        device: str | None,
        cache_type: Any,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.plan, self.max_context = plan, max_context
        self.device = device or Device.DEFAULT
        self.compile_caches = Caches(self.device)
        self.packed: dict[str, Tensor] = {}
        names = list(dict.fromkeys(w.tensor for w in plan.weights))
        for i, name in enumerate(names):
            self.packed[name] = to_tensor(weights.raw(name), self.device)
            if progress:
                progress((i + 1) / len(names))
        rows = [plan.rows(cache, max_context) for cache in plan.caches]
        self.keys = [self._zeros(n, cache.key_width, cache_type) for n, cache in zip(rows, plan.caches)]
        self.values = [self._zeros(n, cache.value_width, cache_type) for n, cache in zip(rows, plan.caches)]
        self.windows = WindowRows(plan, max_context)
        self.states = {
            i: [self._floats(rows, width) for rows, width in shapes if rows * width]
            for i, s in enumerate(plan.states)
            if s and (shapes := ((s.rows, s.channels), (s.heads, s.key_dim * s.value_dim)))
        }
        self._tables: dict[Rope | Temperature, Tensor] = {}
        self._pos = UOp.variable("pos", 0, max_context - 1)
        self._jits: dict[tuple[int, bool, str], Any] = {}  # TinyJit is a function to mypy

    def _zeros(self, rows: int, width: int, kind: Any) -> Tensor | None:
        if not width:
            return None
        return Tensor.zeros(rows, width, dtype=kind, device=self.device).contiguous().realize()

    def _floats(self, rows: int, width: int) -> Tensor:
        return Tensor.zeros(rows, width, dtype=dtypes.float32, device=self.device).contiguous().realize()

    @property
    def caches(self) -> list[tuple[Tensor, Cache]]:
        """Every cache tensor: K of all layers, then V."""
        return [(t, c) for t, c in zip((*self.keys, *self.values), 2 * self.plan.caches) if t is not None]

    def slide(self, base: int) -> None:
        """From now on the first row of layers with a window is that of position `base`: a constant of what is
        captured."""
        if not (by := base - self.windows.base):
            return
        self.windows.base, rows = base, self.windows.rows
        for t, cache in self.caches:
            if cache.window and 0 < by < rows:
                t[: rows - by].assign(t[by:].contiguous().realize()).realize()
        self._pos = UOp.variable("pos", base, min(base + rows, self.max_context) - 1)
        self._jits.clear()

    @property
    def state_tensors(self) -> list[Tensor]:
        """Every tensor of the states, by layer."""
        return list(chain.from_iterable(self.states.values()))

    def run(self, ids: Sequence[int], pos: int, want_logits: bool) -> np.ndarray | None:
        """Runs `ids` at pos, pos + 1, ...; float32 logits (len(ids), vocab) if wanted."""
        if pos == 0:
            for state in self.state_tensors:
                state.assign(Tensor.zeros_like(state)).realize()
        return self._run("layers", self._logits if want_logits else self._hidden, ids, pos, want_logits)

    def run_mtp(self, ids: Sequence[int], pos: int, want_logits: bool) -> np.ndarray | None:
        """The same with the plan's MTP. At position 0 one token alone, because no hidden row is in front of it."""
        if pos == 0:
            return self._run("first", lambda tokens, at: self._mtp(tokens, at, False, want_logits), ids, 0, want_logits)
        return self._run("mtp", lambda tokens, at: self._mtp(tokens, at, True, want_logits), ids, pos - 1, want_logits)

    def _run(
        self, what: str, step: Callable[[Tensor, UOp], Tensor], ids: Sequence[int], pos: int, want_logits: bool
    ) -> np.ndarray | None:
        key = (len(ids), want_logits, what)
        if key not in self._jits:
            self._jits[key] = TinyJit(step)
            self._jits[key].cnt = 1  # captured by the first call; TinyJit by itself runs that op by op, as slowly
        jit = self._jits[key]
        with contextlib.nullcontext() if jit.captured else self.compile_caches.counted():
            out = jit(*self.inputs(ids, pos))
        return out.numpy() if want_logits else None

    def inputs(self, ids: Sequence[int], pos: int) -> tuple[Tensor, UOp]:
        """What a captured step takes."""
        return Tensor(np.asarray(ids, np.int32), device=self.device).realize(), self._pos.bind(pos)

    @property
    def decode_jit(self) -> Any:
        """The TinyJit of the decode step; None before the first one."""
        return self._jits.get((1, True, "layers"))

    def forget_decode(self) -> None:
        """Discards the captured decode step; the next one is captured again."""
        self._jits.pop((1, True, "layers"), None)

    def close(self) -> None:
        self.packed.clear()
        self._jits.clear()
        self.keys, self.values = [], []
        self.states.clear()

    def _hidden(self, tokens: Tensor, pos: UOp) -> Tensor:
        return deque(self._layers(tokens, pos), 1).pop()

    def _logits(self, tokens: Tensor, pos: UOp) -> Tensor:
        return deque(self.ops(tokens, pos), 1).pop()

    def ops(self, tokens: Tensor, pos: UOp) -> Iterator[Tensor]:
        """Runs the step op by op, as in Plan.ops; yields one realised tensor each. The last is the logits."""
        x = yield from self._layers(tokens, pos)
        yield self._head(x, self.plan.head)

    def _head(self, x: Tensor, head: Head) -> Tensor:
        logits = self._linear(self._norm(x, head.norm, head.eps), head.weight) * head.scale
        return (logits if not head.softcap else head.softcap * (logits / head.softcap).tanh()).realize()

    def _layers(self, tokens: Tensor, pos: UOp) -> Ops:
        """All ops but the head."""
        x = self._embedded(tokens, self.plan.embed).realize()
        yield x
        inputs = None
        if table := self.plan.layer_table:
            inputs = yield from self._layer_inputs(table, tokens, x)
        for i, layer in enumerate(self.plan.layers):
            x = yield from self._layer(i, layer, x, pos)
            if layer.embedding and inputs is not None:
                x = yield from self._layer_embedding(layer.embedding, x, inputs[:, i])
        if (hidden := self.values[-1]) is not None and self.plan.mtp:
            _store(hidden, self._norm(x, self.plan.head.norm, self.plan.head.eps), pos)
            yield x
        return x

    def _layer(self, i: int, layer: Layer, x: Tensor, pos: UOp) -> Ops:
        match layer.attention:
            case GQA() as gqa:
                x = yield from self._gqa(i, gqa, x, pos)
            case MLA() as mla:
                x = yield from self._mla(i, mla, x, pos)
            case DeltaRule() as rule:
                x = yield from self._delta_rule(i, rule, x)
            case KDA() as kda:
                x = yield from self._kda(i, kda, x)
            case ShortConvolution() as convolution:
                x = yield from self._short_convolution(i, convolution, x)
        match layer.feed_forward:
            case Dense() as dense:
                x = yield from self._dense(dense, x)
            case Experts() as experts:
                x = yield from self._experts(experts, x)
        return x

    def _embedded(self, tokens: Tensor, embed: Embed) -> Tensor:
        rows = dequantize(self._rows(embed.weight)[0][tokens].contiguous(), embed.weight.type)
        return (rows * embed.scale).contiguous()

    def _layer_inputs(self, table: LayerTable, tokens: Tensor, x: Tensor) -> Ops:
        """float32 (T, layers, width)."""
        y = self._linear(x, table.project).contiguous().realize()
        yield y
        rows = self._embedded(tokens, table.table).reshape(tokens.shape[0], -1, table.width)
        inputs = (_unit(y.reshape(rows.shape), table.eps) * self._vector(table.norm) + rows) * 0.5**0.5
        inputs = inputs.contiguous().realize()
        yield inputs
        return inputs

    def _layer_embedding(self, e: LayerEmbedding, x: Tensor, of_layer: Tensor) -> Ops:
        gated = self._linear(x, e.gate).contiguous().realize()
        yield gated
        gated = _activated(gated, of_layer, e.activation).contiguous().realize()
        yield gated
        return (yield from self._added(x, self._linear(gated, e.project), e.post_norm, e.eps, 1.0, e.stream_scale))

    def _mtp(self, tokens: Tensor, at: UOp, behind: bool, want_logits: bool) -> Tensor:
        """MTP from position `at` on, or from the one `behind` it; in front of position 0 there is no hidden row."""
        m, hidden = self.plan.mtp, self.values[-1]
        assert m is not None and hidden is not None
        embedded = self._embedded(tokens, m.embed)
        h = hidden[at : at + tokens.shape[0]].cast(dtypes.float32) if behind else embedded * 0
        h = self._norm(h.contiguous(), m.hidden_norm, m.eps)
        joined = self._norm(embedded, m.token_norm, m.eps).cat(h, dim=-1).contiguous().realize()
        x = self._linear(joined, m.project).realize()
        x = deque(self._layer(len(self.plan.layers), m.layer, x, at + 1 if behind else at), 1).pop()
        return self._head(x, m.head) if want_logits else x

    # --- blocks: each runs its ops and returns x with what it adds

    def _gqa(self, i: int, a: GQA, x: Tensor, pos: UOp) -> Ops:
        keys, values = (of[i if a.shared is None else a.shared] for of in (self.keys, self.values))
        assert keys is not None and values is not None
        n = self._norm(x, a.norm, a.eps)
        made = {name: self._biased(self._linear(n, w), bias).contiguous() for w, bias, name in projections(a)}
        Tensor.realize(*made.values())
        q = made["q"]
        yield q
        q = self._rotate(self._head_norm(q, a.q_norm, a), a.rope, pos, 0).contiguous()
        at = pos - self.windows.base if a.window else pos  # the row of position `pos`
        if a.shared is None:
            k, v = self._rotate(self._head_norm(made["k"], a.k_norm, a), a.rope, pos, 0), made["v"]
            _store(keys, k.flatten(1), at)
            _store(values, _unit(v.reshape(v.shape[0], a.kv_heads, -1), a.eps).flatten(1) if a.value_norm else v, at)
        yield q.realize()
        n_rows = at + x.shape[0]
        rows_k = keys[:n_rows].cast(dtypes.float32).reshape(n_rows, a.kv_heads, a.key_dim)
        rows_v = values[:n_rows].cast(dtypes.float32).reshape(n_rows, a.kv_heads, a.value_dim)
        sinks = self._vector(a.sinks) if a.sinks else None
        heads = _attend(q, rows_k, rows_v, a.scale, at, a.window, sinks)
        if a.gate:
            heads = heads * made["gate"].sigmoid()
        yield heads.realize()
        y = self._biased(self._linear(heads, a.output), a.output_bias)
        return (yield from self._added(x, y, a.post_norm, a.eps, a.residual_scale))

    def _mla(self, i: int, a: MLA, x: Tensor, pos: UOp) -> Ops:
        keys = self.keys[i]
        assert keys is not None
        n = self._norm(x, a.norm, a.eps)
        made = {name: self._linear(n, w).contiguous() for name, w in latent_inputs(a).items()}
        q, kv = made["q_a" if a.q_a else "q"], made["kv"]
        Tensor.realize(*made.values())
        yield q
        if a.q_a:
            q = self._linear(self._norm(q, a.q_a_norm, a.eps), a.q).realize()
            yield q
        q = self._rotate(q.reshape(q.shape[0], a.heads, -1), a.rope, pos, a.nope).contiguous()
        if a.temperature:
            factors = self._table(a.temperature)[pos : pos + q.shape[0]]
            q = (q * factors.reshape(-1, 1, 1)).contiguous()
        latent = self._norm(kv[:, : a.kv_lora], a.kv_norm, a.eps)
        rotated = self._rotate(kv[:, a.kv_lora :].unsqueeze(1), a.rope, pos, 0).squeeze(1)
        _store(keys, latent.cat(rotated, dim=-1), pos)
        yield q.realize()
        nope = (q[..., : a.nope].transpose(0, 1) @ self._matrices(a.k_b).transpose(-1, -2)).transpose(0, 1)
        query = nope.contiguous().cat(q[..., a.nope :], dim=-1).realize()
        yield query
        n_rows = pos + x.shape[0]
        rows = keys[:n_rows].cast(dtypes.float32).reshape(n_rows, 1, a.row)
        o = _attend(query, rows, rows[..., : a.kv_lora], a.scale, pos).reshape(-1, a.heads, a.kv_lora)
        if a.gate:
            o = o * made["gate"].sigmoid().unsqueeze(-1)
        o = o.realize()
        yield o
        o = o.reshape(-1, a.heads, a.kv_lora).transpose(0, 1)
        heads = (o @ self._matrices(a.v_b).transpose(-1, -2)).transpose(0, 1).flatten(1).realize()
        yield heads
        x = (x + self._linear(heads, a.output) * a.residual_scale).realize()
        yield x
        return x

    def _delta_rule(self, i: int, a: DeltaRule, x: Tensor) -> Ops:
        """One token a step."""
        tail, state = self.states[i]
        n = self._norm(x, a.norm, a.eps)
        qkv, gate, beta, alpha = (self._linear(n, w).contiguous() for w in (a.qkv, a.gate, a.beta, a.alpha))
        Tensor.realize(qkv, gate, beta, alpha)
        yield qkv
        mixed = _convolved(tail, qkv, self._vector(a.conv).reshape(a.channels, a.width))
        yield mixed
        keys, per = a.key_heads * a.key_dim, a.heads // a.key_heads
        q, k = (mixed[at : at + keys].reshape(a.key_heads, a.key_dim) for at in (0, keys))
        q, k = (t * ((t * t).sum(-1, keepdim=True) + a.eps).rsqrt() for t in (q, k))
        if a.grouped:
            q, k = (t.unsqueeze(1).expand(a.key_heads, per, a.key_dim).reshape(a.heads, -1, 1) for t in (q, k))
        else:
            q, k = (t.unsqueeze(0).expand(per, a.key_heads, a.key_dim).reshape(a.heads, -1, 1) for t in (q, k))
        v = mixed[2 * keys :].reshape(a.heads, 1, a.value_dim)
        decay = (self._vector(a.decay) * _softplus(alpha[0] + self._vector(a.decay_bias))).exp().reshape(-1, 1, 1)
        o = _updated(state, q, k, v, decay, beta)
        o = (_unit(o, a.eps) * self._vector(a.head_norm)).reshape(1, -1) * gate.silu()
        heads = o.contiguous().realize()
        yield heads
        x = (x + self._linear(heads, a.output)).realize()
        yield x
        return x

    def _kda(self, i: int, a: KDA, x: Tensor) -> Ops:
        """One token a step."""
        (tail, state), made = self.states[i], {"x": x}
        for op in kda_inputs(a):
            n = self._norm(made[op.src], op.norm, op.eps)
            parts = [self._linear(n, w).contiguous() for w in op.weights]
            Tensor.realize(*parts)
            made |= {"qkv": parts[0].cat(*parts[1:], dim=-1)} if op.at else dict(zip(op.dst, parts))
            yield parts[0]
        weights = [self._vector(w).reshape(w.rows, w.cols) for w in a.convs]
        mixed = _convolved(tail, made["qkv"], weights[0].cat(*weights[1:]).contiguous())
        yield mixed
        q, k, v = (mixed[at * a.q.rows : (at + 1) * a.q.rows].reshape(a.heads, -1) for at in range(3))
        q, k = ((t * ((t * t).sum(-1, keepdim=True) + a.eps).rsqrt()).unsqueeze(-1) for t in (q, k))
        speed = (made["alpha"][0] + self._vector(a.decay_bias)).reshape(a.heads, -1, 1)
        rates = self._vector(a.decay).reshape(-1, 1, 1)
        decay = ((rates * speed).sigmoid() * a.lower_bound if a.lower_bound else rates * _softplus(speed)).exp()
        o = _updated(state, q, k, v.unsqueeze(1), decay, made["beta"])
        o = (_unit(o, a.eps) * self._vector(a.head_norm)).reshape(1, -1) * made["gate"].sigmoid()
        heads = o.contiguous().realize()
        yield heads
        x = (x + self._linear(heads, a.output)).realize()
        yield x
        return x

    def _short_convolution(self, i: int, a: ShortConvolution, x: Tensor) -> Ops:
        """One token a step."""
        tail = self.states[i][0]
        bcz = self._linear(self._norm(x, a.norm, a.eps), a.in_proj).contiguous().realize()
        yield bcz
        b, c, z = (bcz[:, at : at + a.conv.rows] for at in range(0, 3 * a.conv.rows, a.conv.rows))
        inputs = tail.cat(b * z, dim=0).contiguous().realize()  # (width, channels)
        weights = self._vector(a.conv).reshape(a.conv.rows, a.width)
        heads = (c * (inputs * weights.transpose(0, 1)).sum(0)).contiguous().realize()
        tail.assign(inputs[1:].contiguous()).realize()
        yield heads
        x = (x + self._linear(heads, a.output)).realize()
        yield x
        return x

    def _dense(self, b: Dense, x: Tensor) -> Ops:
        h = self._gated(self._norm(x, b.norm, b.eps), b.weights).realize()
        yield h
        y = self._linear(h, b.weights.down)
        return (yield from self._added(x, y, b.post_norm, b.eps, b.residual_scale, b.stream_scale))

    def _added(
        self, x: Tensor, y: Tensor, post_norm: Weight | None, eps: float, scale: float, stream: float = 1.0
    ) -> Ops:
        """stream * (x + scale * y), y normed first if there is a post_norm."""
        if post_norm:
            y = y.contiguous().realize()
            yield y
            y = self._norm(y, post_norm, eps)
        x = ((x + y * scale) * stream).realize()
        yield x
        return x

    def _experts(self, b: Experts, x: Tensor) -> Ops:
        """One token a step."""
        n, z = self._norm(x, b.norm, b.eps), None
        if d := b.beside:
            h = self._gated(self._norm(x, d.norm, b.eps), d.weights).realize()
            yield h
            y = self._linear(h, d.weights.down).contiguous().realize()
            yield y
            z = self._norm(y, d.dense_norm, b.eps).realize()
            yield z
        ids, weights = self._route(b.router, self._norm(x, b.router.norm, b.eps) if b.router.norm else n)
        Tensor.realize(ids, weights)
        yield ids
        chosen = ids[0]
        w = b.weights
        gate, up = (
            self._chosen_bias((self._chosen(m, chosen) * n).sum(-1), bias, chosen).contiguous()
            for m, bias in ((w.gate, w.gate_bias), (w.up, w.up_bias))
        )
        h = _activated(gate, up, w.activation).contiguous()
        shared = self._gated(n, b.shared) if b.shared else None
        if shared is not None and b.shared_scale:
            shared = shared.contiguous() * (n * self._vector(b.shared_scale)).sum(-1, keepdim=True).sigmoid()
        Tensor.realize(h, *([shared] if shared is not None else []))
        yield h
        y = (self._chosen(w.down, chosen) * h.reshape(b.router.top_k, 1, -1)).sum(-1)
        y = self._chosen_bias(y, w.down_bias, chosen).contiguous()
        added = (y * weights.reshape(-1, 1)).sum(0)
        if b.shared and shared is not None:
            added = added + self._linear(shared, b.shared.down)
        if d and z is not None:
            y = added.reshape(1, -1).contiguous().realize()
            yield y
            z = (z + self._norm(y, d.experts_norm, b.eps)).realize()
            yield z
            return (yield from self._normed_add(x, z, d.post_norm, b.eps, d.stream_scale))
        x = (x + added * b.residual_scale).realize()
        yield x
        return x

    def _normed_add(self, x: Tensor, y: Tensor, norm: Weight, eps: float, stream: float) -> Ops:
        x = ((x + self._norm(y, norm, eps)) * stream).realize()
        yield x
        return x

    def _gated(self, n: Tensor, w: Gated) -> Tensor:
        return _activated(self._linear(n, w.gate).contiguous(), self._linear(n, w.up).contiguous(), w.activation)

    def _route(self, r: Router, n: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, weights) of the chosen experts, (T, top_k) each."""
        scores = (self._biased(self._linear(n, r.weight), r.bias) * r.logit_scale).contiguous()
        p = {
            "softmax": lambda: scores.softmax(-1),
            "sigmoid": scores.sigmoid,
            "softmax_weight": lambda: scores,
            "sqrt_softplus": lambda: _softplus(scores).sqrt(),
        }[r.gating]()
        p = p.contiguous()
        chosen = self._biased(p, r.selection_bias)
        if r.groups > 1:
            grouped = chosen.reshape(-1, r.groups, r.experts // r.groups)
            best_two = grouped.max(-1) + _without_best(grouped).max(-1)
            keep = (_rank(best_two.contiguous()) < r.groups_used).unsqueeze(-1)
            chosen = keep.where(grouped, float("-inf")).reshape(p.shape)
        order = _rank(chosen.contiguous())  # (T, experts)
        picks = (order.unsqueeze(1) == Tensor.arange(r.top_k).reshape(1, -1, 1)).contiguous()
        ids = picks.where(Tensor.arange(r.experts), 0).sum(-1).cast(dtypes.int32)
        weights = picks.where(p.unsqueeze(1), 0).sum(-1)
        if r.gating == "softmax_weight":
            weights = weights.softmax(-1)
        if r.normalize:
            weights = weights / weights.sum(-1, keepdim=True).maximum(MIN_WEIGHT_SUM)
        if r.expert_scale:
            weights = weights * self._vector(r.expert_scale)[ids]
        return ids, (weights * r.scale).contiguous()

    # --- pieces

    def _head_norm(self, x: Tensor, gain: Weight | None, a: GQA) -> Tensor:
        """(T, heads * key_dim) -> (T, heads, key_dim), normed per head or as a whole."""
        heads = (x.shape[0], -1, a.key_dim)
        if a.qk_norm == "head":
            assert gain is not None
            return _unit(x.reshape(heads), a.eps) * self._vector(gain)
        return self._norm(x, gain, a.eps).reshape(heads)

    def _rotate(self, x: Tensor, rope: Rope, pos: UOp, start: int) -> Tensor:
        """RoPE of values start..start+dims of each head of x (T, heads, width)."""
        half = rope.dims // 2
        table = self._table(rope)[pos : pos + x.shape[0]].unsqueeze(1)
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

    def _table(self, kind: Rope | Temperature) -> Tensor:
        """A value, or cos and sin, of every position."""
        if kind not in self._tables:
            with Context(CAPTURING=0):  # once, not in every step
                self._tables[kind] = Tensor(kind.table(self.max_context), device=self.device).realize()
        return self._tables[kind]

    def _norm(self, x: Tensor, gain: Weight | None, eps: float) -> Tensor:
        return x if gain is None else (_unit(x, eps) * self._vector(gain)).contiguous()

    def _biased(self, x: Tensor, bias: Weight | None) -> Tensor:
        return x if bias is None else x + self._vector(bias)

    def _rows(self, w: Weight) -> Tensor:
        """The packed rows of all groups: uint8 (groups, rows, row bytes); for a transposed weight (groups, cols, row
        bytes)."""
        rows = w.cols if w.transposed else w.rows
        stride = w.stride or rows
        if w.run:
            runs = self.packed[w.tensor].reshape(-1, stride, w.row_bytes)[:, w.start : w.start + w.run]
            return runs.reshape(1, rows, w.row_bytes)
        packed = (
            self.packed[w.tensor].reshape(-1, stride, w.row_bytes)
            if w.groups > 1 or w.stride
            else (self.packed[w.tensor].reshape(1, -1, w.row_bytes))
        )
        return packed[:, w.start : w.start + rows]

    def _vector(self, w: Weight) -> Tensor:
        return dequantize(self.packed[w.tensor], w.type)

    def _matrices(self, w: Weight) -> Tensor:
        """float32 (groups, rows, cols), lazily."""
        m = dequantize(self._rows(w), w.type)
        return m.transpose(-1, -2) if w.transposed else m

    def _linear(self, x: Tensor, w: Weight) -> Tensor:
        """(T, cols) @ (rows, cols)^T."""
        packed = self._rows(w)[0]
        if x.shape[0] == 1:  # fused into the reduction
            return x @ dequantize(packed, w.type).T
        step = max(1, DEQUANTISED // w.cols)
        parts = [x @ dequantize(packed[r : r + step], w.type).contiguous().T for r in range(0, w.rows, step)]
        return parts[0] if len(parts) == 1 else Tensor.cat(*[p.contiguous() for p in parts], dim=-1)

    def _chosen(self, w: Weight, chosen: Tensor) -> Tensor:
        """The chosen experts' matrices of one token: float32 (top_k, rows, cols); gathered packed."""
        return dequantize(self._rows(w)[chosen].contiguous(), w.type)

    def _chosen_bias(self, y: Tensor, bias: Weight | None, chosen: Tensor) -> Tensor:
        """y (top_k, rows) and the chosen experts' biases."""
        return y if bias is None else y + self._vector(bias).reshape(bias.groups, bias.cols)[chosen]


def _activated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """See Gated."""
    if activation == "silu":
        return gate.silu() * up
    if activation == "gelu":
        return gate.gelu() * up
    gate = gate.minimum(CLAMP)
    return gate * (gate * CLAMP_SLOPE).sigmoid() * (up.clamp(-CLAMP, CLAMP) + 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, pos: UOp, window: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """Causal softmax(q·k * scale)·v: q (T, heads, d) at pos.., k and v (rows, kv heads, d) -> (T, heads * width of v).

    Head h reads kv head h * kv heads // heads. `window`, `sinks` (heads,): see ops.GQA.
    """
    t, kv_heads, width = q.shape[0], k.shape[1], v.shape[-1]
    q = q.reshape(t, kv_heads, -1, k.shape[-1])
    scores = q.permute(1, 2, 0, 3) @ k.permute(1, 2, 0).unsqueeze(1) * scale  # (kv heads, group, T, rows)
    if t > 1 or window:
        mask = Tensor.full((t, pos + t), float("-inf"), dtype=dtypes.float32, device=q.device, buffer=False)
        scores = scores + (mask.triu(pos + 1) if t > 1 else 0)
        scores = scores + (mask.tril(pos - window) if window else 0)
    if sinks is None:
        p = scores.contiguous().softmax(-1)
    else:
        scores, sink = scores.contiguous(), sinks.reshape(kv_heads, -1, 1, 1)
        high = scores.max(-1, keepdim=True).maximum(sink)
        e = (scores - high).exp()
        p = e / (e.sum(-1, keepdim=True) + (sink - high).exp())
    return (p @ v.permute(1, 0, 2).unsqueeze(1)).permute(2, 0, 1, 3).reshape(t, q.shape[1] * q.shape[2] * width)


def _unit(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    return x * ((x * x).mean(-1, keepdim=True) + eps).rsqrt()


def _convolved(tail: Tensor, x: Tensor, weights: Tensor) -> Tensor:
    """silu of the convolution of one token's channels x (1, channels) behind those of `tail`, which takes them in;
    weights (channels, width)."""
    inputs = tail.cat(x, dim=0).contiguous().realize()  # (width, channels)
    mixed = (inputs * weights.transpose(0, 1)).sum(0).silu().contiguous().realize()
    tail.assign(inputs[1:].contiguous()).realize()
    return mixed


def _updated(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """What heads answer, (heads, value_dim); their `state` takes in this token.

    q and k are (heads, key_dim, 1), v (heads, 1, value_dim), decay (heads, 1 or key_dim, 1), beta (1, heads).
    """
    held = (state.reshape(q.shape[0], q.shape[1], v.shape[2]) * decay).contiguous()
    k = k.contiguous()
    news = (beta[0].sigmoid().reshape(-1, 1, 1) * (v - (held * k).sum(1, keepdim=True))).contiguous()
    held = (held + k * news).contiguous().realize()
    state.assign(held.reshape(state.shape)).realize()
    return (held * q).sum(1) * int(q.shape[1]) ** -0.5


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
