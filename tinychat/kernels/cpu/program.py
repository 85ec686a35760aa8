"""A plan as step.c's list of ops, with its weights repacked into one block of memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tinychat.kernels.blocks import (
    GQA,
    KDA,
    MLA,
    DeltaRule,
    Dense,
    Experts,
    Layer,
    LayerEmbedding,
    Rope,
    ShortConvolution,
    Weight,
)
from tinychat.kernels.cpu import library
from tinychat.kernels.cpu.library import STEP, TILE, CMatrix, Library
from tinychat.kernels.cpu.load import batches, load, stored_type
from tinychat.kernels.executor import Weights
from tinychat.kernels.ops import (
    Head,
    LatentStore,
    LayerTable,
    LinearAdd,
    NormAdd,
    NormLinear,
    Op,
    Plan,
    RopeStore,
    added,
    kda_inputs,
    latent_inputs,
    projections,
)


@dataclass
class Program:
    """What step.c runs: the ops of a step, `steps` in number, and behind them those of MTP. All but the last of a
    prompt's tokens need the first `whole` ops alone. `sources`: (index in Plan.ops, op) of each op of a step; a store
    of keys and values is no op there, but a part of the op behind it. `routes`: int32 (layers with experts, STEP,
    top_k), where a decode step leaves the experts that its tokens chose."""

    ops: list[library.COp]
    steps: int
    whole: int
    sources: list[tuple[int, Op]]
    routes: np.ndarray
    weights_at: int  # address of the packed weights
    weight_bytes: int
    arrays: list[np.ndarray] = field(default_factory=list)  # what C points into


def build(
    plan: Plan,
    weights: Weights,
    max_context: int,
    lib: Library,
    context: int,
    alloc: Callable[[int], int],
    progress: Callable[[float], None],
) -> Program:
    """Packs the weights (on the threads of `context`) and translates the blocks."""
    lib.prepare({w.type for w in plan.weights})
    packed = plan.matrices
    sizes = {w: w.groups * -(-w.rows // TILE) * lib.lib.tc_group_bytes(stored_type(w), w.cols) for w in packed}
    table = plan.layer_table.table.weight if plan.layer_table else None
    if table:  # its rows stay as they are in the file, from which nothing is read once the model is loaded
        sizes[table] = table.nbytes
    total = sum(sizes.values())
    arena, places, arrays = alloc(total), dict[Weight, int](), list[np.ndarray]()
    for w in set(plan.weights) - {
        *packed,
        table,
    }:  # norm gains and biases; weights of a convolution, to be read by channels
        raw = weights.raw(w.tensor)[w.start * w.row_bytes :][: w.nbytes].view(np.float32)
        arrays.append(raw.reshape(w.groups, w.rows, w.cols).transpose(0, 2, 1).copy())
        places[w] = arrays[-1].ctypes.data
    at, done = arena, 0
    for w in packed:
        places[w] = at
        at += sizes[w]
    for batch in batches(packed):
        load(lib, context, weights, {w: places[w] for w in batch})
        done += sum(sizes[w] for w in batch)
        progress(done / total)
    if table:
        places[table] = at
        weights.read(table.tensor, 0, np.ctypeslib.as_array((ctypes.c_ubyte * table.nbytes).from_address(at)))
        progress(1.0)
    translator = _Translator(plan, places, max_context, lib, arrays)
    steps, drafts = list(translator.ops()), list(translator.draft_ops())
    whole = translator.whole or len(steps)
    return Program(steps + drafts, len(steps), whole, sources(plan), translator.routes, arena, total, arrays)


def sources(plan: Plan) -> list[tuple[int, Op]]:
    """The plan's ops that are ops of step.c, with their index in the plan."""
    return [(i, o) for i, o in enumerate(plan.ops) if not isinstance(o, RopeStore | LatentStore)]


class _Translator:
    """Blocks to ops of step.c."""

    def __init__(
        self, plan: Plan, places: dict[Weight, int], max_context: int, lib: Library, arrays: list[np.ndarray]
    ) -> None:
        self.plan, self.places, self.max_context, self.lib, self.arrays = plan, places, max_context, lib, arrays
        self.buffers = {name: i for i, name in enumerate(plan.buffers)}
        self.tables = dict[Rope, int]()
        used = [b.router.top_k for layer in plan.layers if isinstance(b := layer.feed_forward, Experts)]
        self.routes = np.zeros((len(used), STEP, max(used, default=0)), np.int32)
        self.made = 0  # ops so far
        self.whole = 0  # ops of the layers that store something, and those in front of them

    def ops(self) -> Iterator[library.COp]:
        """All ops of a step."""
        p, routes = self.plan, iter(self.routes)
        yield self._op("embed", [p.embed.weight], scale=p.embed.scale)
        if p.layer_table:
            yield from self._layer_inputs(p.layer_table)
        for i, layer in enumerate(p.layers):
            if i == p.storing:
                self.whole = self.made
            yield from self._layer(i, layer, routes)
            if layer.embedding:
                yield from self._layer_embedding(i, layer.embedding)
        if p.mtp:
            yield self._op("store_hidden", layer=len(p.layers) + 1, norm=p.head.norm, eps=p.head.eps)
        yield self._head(p.head)

    def draft_ops(self) -> Iterator[library.COp]:
        """All ops of the plan's MTP; what its router chooses is not looked at."""
        if not (m := self.plan.mtp):
            return
        layer = len(self.plan.layers)
        yield self._op(
            "join",
            [m.embed.weight],
            dst=("joined",),
            layer=layer + 1,
            norm=m.token_norm,
            q_norm=m.hidden_norm,
            eps=m.eps,
            scale=m.embed.scale,
        )
        yield self._op("linear", [m.project], src="joined")
        unseen = np.zeros((STEP, b.router.top_k if isinstance(b := m.layer.feed_forward, Experts) else 0), np.int32)
        self.arrays.append(unseen)
        yield from self._layer(layer, m.layer, iter([unseen]))
        yield self._head(m.head)

    def _layer(self, i: int, layer: Layer, routes: Iterator[np.ndarray]) -> Iterator[library.COp]:
        match layer.attention:
            case GQA() as gqa:
                yield from self._gqa(i, gqa)
            case MLA() as mla:
                yield from self._mla(i, mla)
            case DeltaRule() as rule:
                yield from self._delta_rule(i, rule)
            case KDA() as kda:
                yield from self._kda(i, kda)
            case ShortConvolution() as convolution:
                yield from self._short_convolution(i, convolution)
        match layer.feed_forward:
            case Dense() as dense:
                yield from self._dense(dense)
            case Experts() as experts:
                yield from self._experts(experts, next(routes))

    def _layer_inputs(self, t: LayerTable) -> Iterator[library.COp]:
        yield self._op("linear", [t.project], dst=("inputs",))
        table = [t.table.weight]
        yield self._op(
            "layer_inputs", table, dst=("inputs",), norm=t.norm, eps=t.eps, scale=t.table.scale, key_dim=t.width
        )

    def _layer_embedding(self, i: int, e: LayerEmbedding) -> Iterator[library.COp]:
        yield self._op("linear", [e.gate], dst=("gated",))
        width, activation = e.gate.rows, self.lib.activations[e.activation]
        yield self._op("gate_input", src="inputs", dst=("gated",), key_dim=width, layer=i, activation=activation)
        yield from self._added(added("gated", e.project, None, e.post_norm, e.eps, 1.0, e.stream_scale))

    def _head(self, h: Head) -> library.COp:
        return self._op("head", [h.weight], norm=h.norm, eps=h.eps, scale=h.scale, softcap=h.softcap)

    def _gqa(self, i: int, a: GQA) -> Iterator[library.COp]:
        weights, biases, to = zip(*projections(a))
        yield self._op("linear", weights, dst=to, norm=a.norm, eps=a.eps, bias=biases)
        yield self._op(
            "attention",
            src="q",
            dst=("heads", *to[1:]),
            gated=a.value_dim if a.gate else 0,
            layer=i if a.shared is None else a.shared,
            stores=int(a.shared is None),
            heads=a.heads,
            kv_heads=a.kv_heads,
            key_dim=a.key_dim,
            value_dim=a.value_dim,
            scale=a.scale,
            window=a.window,
            sinks=a.sinks,
            value_norm=int(a.value_norm),
            norm_eps=a.eps,
            q_norm=a.q_norm,
            k_norm=a.k_norm,
            q_norm_len=a.q_norm.cols if a.q_norm else 0,
            k_norm_len=a.k_norm.cols if a.k_norm else 0,
            **self._rope(a.rope),
        )
        yield from self._added(added("heads", a.output, a.output_bias, a.post_norm, a.eps, a.residual_scale))

    def _delta_rule(self, i: int, a: DeltaRule) -> Iterator[library.COp]:
        to = ("qkv", "gate", "beta", "alpha")
        yield self._op("linear", [a.qkv, a.gate, a.beta, a.alpha], dst=to, norm=a.norm, eps=a.eps)
        keys: dict[str, Any] = {"kv_heads": a.key_heads, "key_dim": a.key_dim}
        sizes = keys | {"heads": a.heads, "value_dim": a.value_dim}
        yield self._op("convolve", dst=("qkv",), layer=i, bias=(a.conv,), taps=a.width, eps=a.eps, **sizes)
        yield self._op(
            "delta",
            src="qkv",
            dst=("heads", *to[1:]),
            layer=i,
            bias=(a.decay, a.decay_bias),
            norm=a.head_norm,
            eps=a.eps,
            grouped=int(a.grouped),
            **sizes,
        )
        yield self._op("linear", [a.output], src="heads", add=1)

    def _kda(self, i: int, a: KDA) -> Iterator[library.COp]:
        for op in kda_inputs(a):
            yield self._op("linear", op.weights, src=op.src, dst=op.dst, at=op.at, norm=op.norm, eps=op.eps)
        sizes: dict[str, Any] = {"kv_heads": a.heads, "heads": a.heads, "key_dim": a.dim, "value_dim": a.dim}
        yield self._op("convolve", dst=("qkv",), layer=i, bias=a.convs, taps=a.width, eps=a.eps, **sizes)
        yield self._op(
            "delta",
            src="qkv",
            dst=("heads", "gate", "beta", "alpha"),
            layer=i,
            bias=(a.decay, a.decay_bias),
            norm=a.head_norm,
            eps=a.eps,
            by_channel=1,
            lower_bound=a.lower_bound,
            **sizes,
        )
        yield self._op("linear", [a.output], src="heads", add=1)

    def _short_convolution(self, i: int, a: ShortConvolution) -> Iterator[library.COp]:
        yield self._op("linear", [a.in_proj], dst=("bcz",), norm=a.norm, eps=a.eps)
        yield self._op(
            "gated_convolve", src="bcz", dst=("heads",), layer=i, bias=(a.conv,), taps=a.width, key_dim=a.conv.rows
        )
        yield self._op("linear", [a.output], src="heads", add=1)

    def _mla(self, i: int, a: MLA) -> Iterator[library.COp]:
        inputs = latent_inputs(a)
        yield self._op("linear", list(inputs.values()), dst=tuple(inputs), norm=a.norm, eps=a.eps)
        if a.q_a:
            yield self._op("linear", [a.q], src="q_a", dst=("q",), norm=a.q_a_norm, eps=a.eps)
        yield self._op(
            "absorb",
            [a.k_b],
            src="q",
            dst=("q_latent", "kv"),
            layer=i,
            heads=a.heads,
            nope=a.nope,
            norm=a.kv_norm,
            norm_eps=a.eps,
            **self._rope(a.rope),
        )
        yield self._op(
            "latent_attention",
            src="q_latent",
            dst=(*("o_latent",) * 3, "gate") if a.gate else ("o_latent",),
            gated=1 if a.gate else 0,
            layer=i,
            heads=a.heads,
            kv_heads=1,
            key_dim=a.row,
            value_dim=a.kv_lora,
            scale=a.scale,
            temperature=a.temperature.scale if a.temperature else 0.0,
            temperature_length=a.temperature.length if a.temperature else 0,
        )
        yield self._op("value_up", [a.v_b], src="o_latent", dst=("heads",))
        yield self._op("linear", [a.output], src="heads", scale=a.residual_scale, add=1)

    def _dense(self, b: Dense) -> Iterator[library.COp]:
        w = b.weights
        activation = self.lib.activations[w.activation]
        yield self._op("gate_up", [w.gate, w.up], dst=("ffn",), norm=b.norm, eps=b.eps, activation=activation)
        yield from self._added(added("ffn", w.down, None, b.post_norm, b.eps, b.residual_scale, b.stream_scale))

    def _added(self, steps: Iterator[Op]) -> Iterator[library.COp]:
        """The ops of `ops.added`."""
        for op in steps:
            match op:
                case LinearAdd():
                    yield self._op("linear", [op.weight], src=op.src, bias=(op.bias,), scale=op.scale, add=1)
                case NormLinear():
                    yield self._op("linear", list(op.weights), src=op.src, dst=op.dst, bias=op.biases)
                case NormAdd():
                    yield self._norm_add(op.src, op.norm, op.eps, op.scale, op.stream_scale)

    def _experts(self, b: Experts, routes: np.ndarray) -> Iterator[library.COp]:
        r, w, s = b.router, b.weights, b.shared
        beside, dst = b.beside, "y" if b.beside else "x"
        if beside:
            d = beside.weights
            activation = self.lib.activations[d.activation]
            yield self._op("gate_up", [d.gate, d.up], dst=("ffn",), norm=beside.norm, eps=b.eps, activation=activation)
            yield self._op("linear", [d.down], src="ffn", dst=("y",))
            yield self._norm_add("y", beside.dense_norm, b.eps, dst="z", add=0)
        router = self.made
        yield self._op(
            "route",
            [r.weight],
            norm=r.norm or b.norm,
            eps=b.eps,
            bias=(r.bias, r.selection_bias, r.expert_scale),
            logit_scale=r.logit_scale,
            top_k=r.top_k,
            gating=self.lib.gatings[r.gating],
            normalize=int(r.normalize),
            scale=r.scale,
            route_groups=r.groups,
            route_groups_used=r.groups_used,
        )
        yield self._op(
            "experts_up",
            [w.gate, w.up, s.gate if s else None, s.up if s else None],
            dst=("ffn",),
            norm=b.norm,
            eps=b.eps,
            bias=(w.gate_bias, w.up_bias),
            activation=self.lib.activations[w.activation],
            shared_scale=b.shared_scale,
            top_k=r.top_k,
            router=router,
            routes=routes.ctypes.data,
        )
        down = [w.down, s.down if s else None]
        bias = (w.down_bias,)
        yield self._op(
            "experts_down",
            down,
            src="ffn",
            dst=(dst,),
            bias=bias,
            top_k=r.top_k,
            scale=b.residual_scale,
            add=int(not beside),
        )
        if beside:
            yield self._norm_add("y", beside.experts_norm, b.eps, dst="z")
            yield self._norm_add("z", beside.post_norm, b.eps, stream=beside.stream_scale)

    def _norm_add(
        self, src: str, norm: Weight, eps: float, scale: float = 1.0, stream: float = 1.0, dst: str = "x", add: int = 1
    ) -> library.COp:
        """dst = stream * (dst + scale * RMSNorm(src))."""
        return self._op("norm_add", src=src, dst=(dst,), norm=norm, eps=eps, scale=scale, stream_scale=stream, add=add)

    def _rope(self, rope: Rope) -> dict[str, Any]:
        if rope not in self.tables:
            self.arrays.append(rope.table(self.max_context))
            self.tables[rope] = self.arrays[-1].ctypes.data
        return {"rope": self.tables[rope], "rope_dims": rope.dims, "neox": int(rope.style == "neox")}

    def _matrix(self, w: Weight | None) -> CMatrix:
        return CMatrix(stored_type(w), w.rows, w.cols, w.groups, self.places[w]) if w else CMatrix()

    def _op(
        self,
        tag: str,
        w: Sequence[Weight | None] = (),
        *,
        src: str = "x",
        dst: Sequence[str] = ("x",),
        bias: Sequence[Weight | None] = (),
        at: Sequence[int] = (),
        scale: float = 1.0,
        **values: Any,
    ) -> library.COp:
        """An op of step.c; `values` are its fields, a Weight stands for its address."""
        made = library.COp(tag=self.lib.tags[tag], matrices=sum(m is not None for m in w), src=self.buffers[src])
        made.scale = scale
        made.dst[: len(dst)] = [self.buffers[d] for d in dst]
        made.at[: len(at)] = at
        made.w[: len(w)] = [self._matrix(m) for m in w]
        made.bias[: len(bias)] = [self.places[b] if b else None for b in bias]
        for name, value in values.items():
            setattr(made, name, self.places[value] if isinstance(value, Weight) else value)
        self.made += 1
        return made
