"""A plan's decode step: which ops share a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from tinychat.kernels import ops
from tinychat.kernels.blocks import (
    GQA,
    KDA,
    MLA,
    DeltaRule,
    Dense,
    Experts,
    Layer,
    LayerEmbedding,
    ShortConvolution,
)
from tinychat.kernels.cuda.builder import RING_DRAFTS, Activations, Builder, Depth, LaunchedOps
from tinychat.kernels.cuda.latent import (
    absorb,
    combine,
    deep_attention,
    latent_linear,
    mla_cluster,
    takes_cluster,
    value_up,
)
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.launches import (
    PAIR_WARPS,
    attended,
    attention,
    choice_buffer,
    embed,
    experts_down,
    experts_up,
    follow,
    gate_input,
    gate_up,
    head,
    join,
    layer_inputs,
    linear,
    linear_add,
    next_step,
    norm_add,
    sample,
    store_hidden,
)
from tinychat.kernels.cuda.recurrent import delta, kda_inputs, short_convolution
from tinychat.kernels.cuda.spread import QUANTISED_ROWS, pair_spread
from tinychat.kernels.ops import Head, Join, LinearAdd, NormAdd, NormLinear, StoreHidden

NEAR = 512  # keys up to which a cluster of blocks per head does latent attention with all that belongs to it
DEEP = 2048  # keys from which on latent attention has DEEP_SPLITS parts, and a kernel more to combine them


def decode(b: Builder, depth: Depth = "middle") -> LaunchedOps:
    """All kernels of a step of the builder's columns: embedding to sampling. Only latent attention differs by
    `depth`."""
    plan, out = b.plan, LaunchedOps()
    out.append((embed(b, plan.embed, b.columns), 0))
    if table := plan.layer_table:
        x = Activations("x", plan.dim)
        project = linear(b, "linear", x, ((table.project, None, "inputs"),))
        out += [(project, 1), (layer_inputs(b, table, b.columns), 2)]
    counts, made = [len(layer_ops) for layer_ops in plan.ops_of_layers], dict[int, LaunchedOps]()
    *first, behind = accumulate(counts, initial=len(plan.first_ops))  # op of each layer
    for i, layer, like, others in b.layers():
        if like == i:
            made[i] = _layer(b, i, layer, counts[i], depth)
        out += [(launch.over(others), first[i] + n) for launch, n in made[like]]
    if isinstance(hidden := plan.ops[behind], StoreHidden):
        out.append((store_hidden(b, hidden, b.columns), behind))
    out.append((head(b, plan.head), len(plan.ops) - 1))
    out += [(launch, len(plan.ops)) for launch in sample(b)]
    return [(each, op) for launch, op in out for each in (*launch.before, launch)]


def draft(b: Builder, depth: Depth) -> LaunchedOps:
    """All kernels of the plan's multi-token prediction for the builder's columns, with the index in Plan.draft_ops of
    the op that each computes. There is a draft behind the last of the step's tokens."""
    joined, _, *layer_ops, last = b.plan.draft_ops
    assert b.plan.mtp and isinstance(joined, Join) and isinstance(last, Head)
    done = 2 + len(layer_ops)
    out: LaunchedOps = [
        (join(b, joined, b.columns), 0),
        (linear(b, "linear", Activations(joined.dst, 2 * b.plan.dim), ((b.plan.mtp.project, None, "x"),)), 1),
    ]
    out += [(launch, 2 + n) for launch, n in _layer(b, len(b.plan.layers), b.plan.mtp.layer, len(layer_ops), depth)]
    b = b.of(1)
    out += [(head(b, last), done), *((launch, done + 1) for launch in sample(b, RING_DRAFTS))]
    return [(each, op) for launch, op in out for each in (*launch.before, launch)]


def cycle(b: Builder, depth: Depth, draft_depth: Depth) -> LaunchedOps:
    """A verify step of two, the draft behind what it chose, and what the next cycle needs to begin."""
    return [*decode(b, depth), (follow(b), 0), *draft(b, draft_depth), (next_step(b), 0)]


def _layer(b: Builder, i: int, layer: Layer, count: int, depth: Depth) -> LaunchedOps:
    """The launches of layer `i`, with the index among its `count` ops of the op that each computes."""
    out = LaunchedOps()
    embedding = enumerated(_layer_embedding(b, i, layer.embedding), count) if layer.embedding else []
    match layer.attention:
        case GQA() as a:
            out += _gqa(b, i, a)
        case MLA() as m:
            out += _mla(b, i, m, depth)
        case DeltaRule() as r:
            out += [(launch, n) for n, launch in zip((0, 2, 3), _delta_rule(b, i, r))]
        case KDA() as k:
            out += _kda(b, i, k)
        case ShortConvolution() as c:
            out += [(launch, n) for n, launch in enumerate(_short_convolution(b, i, c))]
    match layer.feed_forward:
        case Dense() as d:
            out += enumerated(_dense(b, d), count - len(embedding))
        case Experts() as e:
            out += enumerated(_experts(b, i, e), count - len(embedding))
    return [*out, *embedding]


def depths(b: Builder, clusters: bool, layers: Sequence[Layer]) -> dict[int, Depth]:
    """The kinds of decode steps of `layers`, whatever their number of tokens, by the position from which on each is
    taken. `clusters`: the GPU has them."""
    latent = [layer.attention for layer in layers if isinstance(layer.attention, MLA)]
    near = clusters and latent and all(takes_cluster(b.of(1), a) for a in latent)
    kinds: dict[int, Depth] = {0: "near" if near else "middle"}
    if near and b.max_context > NEAR:
        kinds[NEAR] = "middle"
    if latent and b.max_context > DEEP:
        kinds[DEEP] = "deep"
    return kinds


def enumerated(launches: list[Launch], done: int) -> LaunchedOps:
    """The launches of a layer's last ops, of which `done` is the number behind the last."""
    return [(launch, done - len(launches) + n) for n, launch in enumerate(launches)]


def _layer_embedding(b: Builder, layer: int, e: LayerEmbedding) -> list[Launch]:
    return [
        linear(b, "linear", Activations("x", e.gate.cols), ((e.gate, None, "gated"),)),
        gate_input(b, layer, e, b.columns),
        *_added(
            b,
            Activations("gated", e.gate.rows),
            ops.added("gated", e.project, None, e.post_norm, e.eps, 1.0, e.stream_scale),
        ),
    ]


def _gqa(b: Builder, layer: int, a: GQA) -> LaunchedOps:
    """Attention does what the op before it does, too."""
    heads = attended(b, a)
    added = _added(b, heads, ops.added("heads", a.output, a.output_bias, a.post_norm, a.eps, a.residual_scale))
    return [
        (linear(b, "norm_linear", Activations("x", a.q.cols), ops.projections(a), norm=a.norm, eps=a.eps), 0),
        (attention(b, layer, a), 2),
        *((launch, n) for n, launch in enumerate(added, 3)),
    ]


def _added(b: Builder, x: Activations, steps: Iterator[ops.Op]) -> list[Launch]:
    """The launches of `ops.added`, whose input is `x`."""
    out = []
    for op in steps:
        match op:
            case LinearAdd():
                out.append(linear_add(b, x, op.weight, op.bias, op.scale))
            case NormLinear(weights=(w,), biases=(bias,), dst=(dst,)):
                out.append(linear(b, "linear", x, ((w, bias, dst),)))
            case NormAdd():
                out.append(norm_add(b, op.norm, op.eps, op.scale, op.stream_scale))
    return out


def _mla(b: Builder, layer: int, a: MLA, depth: Depth) -> LaunchedOps:
    if depth == "near":
        return mla_cluster(b, layer, a)
    deep = depth == "deep"
    out = [latent_linear(b, a)]
    if a.q_a:
        q_a = Activations("q_a", a.q_a.rows)
        out.append(linear(b, "norm_linear", q_a, ((a.q, None, "q"),), norm=a.q_a_norm, eps=a.eps))
    value, heads = value_up(b, a, deep)
    n = len(out) + 1  # op absorb; its kernel writes the cache row, too, which is the op before
    attend = [deep_attention(b, layer, a), combine(b, a)] if deep else [attention(b, layer, a)]
    return [
        *((launch, i) for i, launch in enumerate(out)),
        (absorb(b, layer, a), n),
        *((launch, n + 1) for launch in attend),
        (value, n + 2),
        (linear_add(b, heads, a.output, None, a.residual_scale), n + 3),
    ]


def _delta_rule(b: Builder, layer: int, a: DeltaRule) -> list[Launch]:
    """The third of its four ops does what the second does, too."""
    x, outputs = Activations("x", a.qkv.cols), ((a.qkv, "qkv"), (a.gate, "gate"), (a.beta, "beta"), (a.alpha, "alpha"))
    rule, heads = delta(b, layer, a)
    return [
        linear(b, "norm_linear", x, [(w, None, name) for w, name in outputs], norm=a.norm, eps=a.eps),
        rule,
        linear_add(b, heads, a.output, None, 1.0),
    ]


def _kda(b: Builder, layer: int, a: KDA) -> LaunchedOps:
    """The first does what its first two ops do, the last but one what the last but one and the one before do."""
    inputs, later = kda_inputs(a)
    rule, heads = delta(b, layer, a)
    out = [(linear(b, "norm_linear", Activations("x", a.q.cols), inputs, norm=a.norm, eps=a.eps), 1)]
    for n, (src, output) in enumerate(later.items(), 2):
        out.append((linear(b, "linear", Activations(src, output[0].cols), [output]), n))
    n = len(later) + 3
    return [*out, (rule, n), (linear_add(b, heads, a.output, None, 1.0), n + 1)]


def _short_convolution(b: Builder, layer: int, a: ShortConvolution) -> list[Launch]:
    x = Activations("x", a.in_proj.cols)
    convolution, heads = short_convolution(b, layer, a)
    return [
        linear(b, "norm_linear", x, ((a.in_proj, None, "bcz"),), norm=a.norm, eps=a.eps),
        convolution,
        linear_add(b, heads, a.output, None, 1.0),
    ]


def _dense(b: Builder, d: Dense) -> list[Launch]:
    first, ffn = gate_up(b, d.norm, d.eps, d.weights)
    down = ops.added("ffn", d.weights.down, None, d.post_norm, d.eps, d.residual_scale, d.stream_scale)
    return [first, *_added(b, ffn, down)]


def _experts(b: Builder, layer: int, e: Experts) -> list[Launch]:
    """Router logits; gate and up of the chosen and the shared; their down."""
    r, w, shared = e.router, e.weights, e.shared
    logits = b.buffer("router", 4 * b.columns * r.experts)
    route = [(r.weight, r.bias, logits)]
    if e.shared_scale:
        assert r.norm is None
        route.append((e.shared_scale, None, b.buffer("shared_scale", 4 * b.columns)))
    x = Activations("x", r.weight.cols)
    router = linear(b, "route", x, route, norm=r.norm or e.norm, eps=e.eps, cleared=choice_buffer(b, r))
    t, shared_t = pair_spread(w.gate), pair_spread(shared.gate) if shared else None
    rows, size = [w.ff], r.top_k * w.ff
    if shared:
        rows, size = [w.ff, shared.ff], size + shared.ff
    fits = t.rows(PAIR_WARPS) == QUANTISED_ROWS and (shared_t is None or shared_t.rows() == t.rows())
    ffn = b.agreed("ffn", size, [w.down, shared.down if shared else None], rows, fits)
    chosen = [router, experts_up(b, layer, e, ffn), experts_down(b, e, ffn)]
    if (d := e.beside) is None:
        return chosen
    first, down = gate_up(b, d.norm, e.eps, d.weights)
    return [
        first,
        linear(b, "linear", down, ((d.weights.down, None, "y"),)),
        norm_add(b, d.dense_norm, e.eps, dst="z", add=False),
        *chosen,
        norm_add(b, d.experts_norm, e.eps, dst="z"),
        norm_add(b, d.post_norm, e.eps, stream=d.stream_scale, src="z"),
    ]
