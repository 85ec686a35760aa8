"""A plan's decode step as kernel launches: which ops share a kernel, and how each is spread over the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinychat.errors import TinychatError
from tinychat.kernels import blocks, ops
from tinychat.kernels.blocks import GQA, MLA, Dense, Experts, Weight
from tinychat.kernels.cuda.constants import (
    LOG2E,
    NO_MATRIX,
    AbsorbConstants,
    ActivationCode,
    AttentionConstants,
    CombineConstants,
    EmbedConstants,
    ExpertChoice,
    ExpertsDownConstants,
    ExpertsUpConstants,
    GatedActivation,
    GateUpConstants,
    GatingCode,
    LinearConstants,
    LinearPart,
    Matrix,
    MLAClusterConstants,
    Norm,
    NormAddConstants,
    SampleConstants,
    StoreKVConstants,
    ValueUpConstants,
)
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.layout import Layout, Placed, block_size
from tinychat.kernels.cuda.quants import FLOATS, QUANTS, packed_bytes
from tinychat.kernels.cuda.spread import PAIR_THREADS, QUANTISED_ROWS, pair_spread, spread
from tinychat.kernels.cuda.state import STATE_BYTES
from tinychat.kernels.ops import Plan

SPLITS = 32  # parts of the keys in decode attention; latent attention, with one kv head, has twice as many
NEAR = 512  # keys up to which a cluster of blocks per head does latent attention with all that belongs to it
CLUSTER = 4  # blocks of a head
CLUSTER_THREADS = 512
CLUSTER_KEYS = 2  # keys that a warp takes at a time
CLUSTER_BLOCKS = 132  # at most: all heads at once, a block for each multiprocessor of an H100
DEEP = 2048  # keys from which on latent attention has DEEP_SPLITS parts, and a kernel more to combine them
DEEP_SPLITS = 132  # a block for each multiprocessor of an H100
RING = 64  # slots of the ring of decoded tokens
STRETCH = 4096  # logits of a block of candidates.cu
MAX_K = 64  # largest top_k that the candidate lists serve
CANDIDATES = 128  # of a stretch: MAX_K and room for equal logits
SAMPLING_THREADS = 1024
ATTENTION_THREADS = 512
MAX_SHARED = 48 << 10  # bytes of static shared memory of a block
MAX_DYNAMIC = 227 << 10  # bytes of shared memory of a block, and of a multiprocessor
PAIR_WARPS = PAIR_THREADS // 32
Depth = Literal["near", "middle", "deep"]  # how many keys a step is made for: up to NEAR, to DEEP, more
LaunchedOps = list[tuple[Launch, int]]  # launches, and the index in Plan.ops of the op that each computes


@dataclass(frozen=True)
class Activations:
    """What one kernel leaves for the next: `size` floats in buffer `name`, or int8 blocks in `name`_q and `name`_s."""

    name: str
    size: int
    quantised: bool = False


class Builder:
    """Names the buffers of a plan's launches. `buffers`: every buffer that a launch names, with its size in bytes."""

    def __init__(self, plan: Plan, layout: Layout, max_context: int) -> None:
        self.plan, self.layout, self.max_context = plan, layout, max_context
        self.buffers: dict[str, int] = {"state": STATE_BYTES, "history": 4 * (max_context + 1), "ring": 8 * RING}
        self.ropes: dict[blocks.Rope, str] = {}

    def buffer(self, name: str, nbytes: int) -> str:
        """Asks for a buffer of at least `nbytes`."""
        self.buffers[name] = max(self.buffers.get(name, 0), nbytes)
        return name

    def act(self, name: str, tokens: int = 1) -> str:
        """A float32 activation buffer of the plan."""
        return self.buffer(name, 4 * self.plan.buffers[name] * tokens)

    def weight(self, w: Weight) -> Placed:
        placed = self.layout[w]
        self.buffer(placed.tensor.buffer, placed.tensor.nbytes)
        return placed

    def matrix(self, w: Weight | None) -> Matrix:
        """Where a kernel finds the weight, as named constants."""
        if w is None:
            return NO_MATRIX
        p = self.weight(w)
        return Matrix(p.tensor.kind, w.rows, w.cols, p.tensor.blocks, p.start, p.stride)

    def data(self, w: Weight | None) -> str | None:
        """The buffer that holds the weight."""
        return None if w is None else self.weight(w).tensor.buffer

    def kinds(self, *weights: Weight | None) -> tuple[bool, bool]:
        """(any is quantised, any is floating-point)."""
        floating = {self.weight(w).tensor.kind in FLOATS for w in weights if w}
        return False in floating, True in floating

    def rope(self, rope: blocks.Rope) -> str:
        """The buffer with cos and sin of every position."""
        name = self.ropes.setdefault(rope, f"rope:{len(self.ropes)}")
        return self.buffer(name, 4 * self.max_context * rope.dims)

    def cache(self, kind: str, layer: int) -> str:
        """A layer's cache: "k" or "v"."""
        cache = self.plan.caches[layer]
        width = cache.key_width if kind == "k" else cache.value_width
        return self.buffer(f"{kind}:{layer}", blocks.CACHE_VALUE_BYTES * self.max_context * width)

    def source(self, x: Activations) -> dict[str, str | None]:
        """Activations as a kernel's input."""
        if x.quantised:
            return {"src_q": f"{x.name}_q", "src_s": f"{x.name}_s"}
        return {"src": self.act(x.name)}

    def target(self, x: Activations) -> dict[str, str | None]:
        """Activations as a kernel's result."""
        if x.quantised:
            q, scales = self.buffer(f"{x.name}_q", x.size), self.buffer(f"{x.name}_s", x.size // 32 * 8)
            return {"dst_q": q, "dst_s": scales}
        return {"dst": self.act(x.name)}

    def agreed(
        self, name: str, size: int, readers: Sequence[Weight | None], rows: Sequence[int], fits: bool
    ) -> Activations:
        """Activations as int8 blocks where all that reads them is quantised, and their producer's blocks make 32 rows
        (`fits`) of matrices of `rows` rows."""
        quantised, floating = self.kinds(*readers)
        whole = not any(n % QUANTISED_ROWS for n in rows)
        return Activations(name, size, quantised and not floating and fits and whole)


def decode(b: Builder, depth: Depth = "middle") -> LaunchedOps:
    """All kernels of one token: embedding to sampling. Only latent attention differs by `depth`."""
    plan, out = b.plan, LaunchedOps()
    out.append((embed(b, plan.embed, 1), 0))
    first = 1  # op of the layer
    for i, (layer, layer_ops) in enumerate(zip(plan.layers, plan.ops_of_layers)):
        done = first + len(layer_ops)
        match layer.attention:
            case GQA() as a:
                out += [(launch, first + n) for n, launch in enumerate(_gqa(b, i, a))]
            case MLA() as m:
                out += [(launch, first + n) for launch, n in _mla(b, i, m, depth)]
        match layer.feed_forward:
            case Dense() as d:
                out += enumerated(_dense(b, d), done)
            case Experts() as e:
                out += enumerated(_experts(b, e), done)
        first = done
    out.append((head(b, plan.head), first))
    return out + [(launch, len(plan.ops)) for launch in sample(b)]


def decode_steps(b: Builder, clusters: bool) -> dict[int, LaunchedOps]:
    """The decode steps for all depths, by the position from which on each is taken. `clusters`: the GPU has them."""
    latent = [layer.attention for layer in b.plan.layers if isinstance(layer.attention, MLA)]
    near = clusters and latent and all(takes_cluster(b, a) for a in latent)
    steps = {0: decode(b, "near" if near else "middle")}
    if near and b.max_context > NEAR:
        steps[NEAR] = decode(b, "middle")
    if latent and b.max_context > DEEP:
        steps[DEEP] = decode(b, "deep")
    return steps


def enumerated(launches: list[Launch], done: int) -> LaunchedOps:
    """The launches of a layer's last ops, of which `done` is the number behind the last."""
    return [(launch, done - len(launches) + n) for n, launch in enumerate(launches)]


# --- blocks


def _gqa(b: Builder, layer: int, a: GQA) -> list[Launch]:
    heads = Activations("heads", a.output.cols)
    qkv = ((a.q, a.q_bias, "q"), (a.k, a.k_bias, "k"), (a.v, a.v_bias, "v"))
    return [
        linear(b, "norm_linear", Activations("x", a.q.cols), qkv, norm=a.norm, eps=a.eps),
        store_kv(b, layer, a, 1),
        attention(b, layer, a),
        *_added(b, heads, a.output, a.output_bias, a.post_norm, a.eps, a.residual_scale),
    ]


def _added(
    b: Builder,
    x: Activations,
    w: Weight,
    bias: Weight | None,
    post_norm: Weight | None,
    eps: float,
    scale: float,
    stream: float = 1.0,
) -> list[Launch]:
    """x += scale * (w @ activations + bias); if there is a post_norm, normed first, and x times `stream` after it."""
    if post_norm is None:
        return [linear_add(b, x, w, bias, scale)]
    return [linear(b, "linear", x, ((w, bias, "y"),)), norm_add(b, post_norm, eps, scale, stream)]


def _mla(b: Builder, layer: int, a: MLA, depth: Depth) -> LaunchedOps:
    if depth == "near":
        return _mla_cluster(b, layer, a)
    deep = depth == "deep"
    x, kv = Activations("x", a.kv_a.cols), (a.kv_a, None, "kv")
    if a.q_a:
        q_a = Activations("q_a", a.q_a.rows)
        out = [
            linear(b, "norm_linear", x, ((a.q_a, None, "q_a"), kv), norm=a.norm, eps=a.eps),
            linear(b, "norm_linear", q_a, ((a.q, None, "q"),), norm=a.q_a_norm, eps=a.eps),
        ]
    else:
        out = [linear(b, "norm_linear", x, ((a.q, None, "q"), kv), norm=a.norm, eps=a.eps)]
    value, heads = _value_up(b, a, deep)
    n = len(out) + 1  # op absorb; its kernel writes the cache row, too, which is the op before
    attend = [attention(b, layer, a, deep), *([_combine(b, a)] if deep else [])]
    return [
        *((launch, i) for i, launch in enumerate(out)),
        (_absorb(b, layer, a), n),
        *((launch, n + 1) for launch in attend),
        (value, n + 2),
        (linear_add(b, heads, a.output, None, a.residual_scale), n + 3),
    ]


def takes_cluster(b: Builder, a: MLA) -> bool:
    """Whether mla_cluster.cu takes it: a head's matrices, quantised, in CLUSTER parts that begin at 16 bytes in each
    plane, and all heads at once."""
    rows = a.nope + a.rope.dims, a.kv_lora, a.v_b.rows
    matrices = [(a.q, rows[0])] if a.q_a else []
    matrices += [(a.k_b, rows[1]), (a.v_b, rows[2])]
    if any(n % CLUSTER for n in rows) or a.heads * CLUSTER > CLUSTER_BLOCKS or a.row % 2:
        return False
    for w, n in matrices:
        placed = b.weight(w)
        p, blocks = QUANTS[placed.tensor.kind], w.cols // 32
        if placed.tensor.kind in FLOATS:
            return False
        for first in (placed.start, placed.stride, n // CLUSTER):
            if first * blocks * p.hi % 16 or first * blocks * p.s1 % 16 or first * blocks * p.s2 % 128:
                return False
    return _cluster_shape(b, a, False).shared <= MAX_DYNAMIC


def _cluster_shape(b: Builder, a: MLA, out_quantised: bool) -> MLAClusterConstants:
    head, absorbed, values = (n // CLUSTER for n in (a.nope + a.rope.dims, a.kv_lora, a.v_b.rows))
    query = b.matrix(a.q) if a.q_a else NO_MATRIX
    lanes = {w: _row_lanes(w.cols // 32, n) for w, n in ((a.q, head), (a.k_b, absorbed), (a.v_b, values))}

    def planes(w: Weight, rows: int) -> int:
        return packed_bytes(b.weight(w).tensor.kind, rows * w.cols)

    longest, warps = max(query.cols, a.kv_lora, a.nope), CLUSTER_THREADS // 32
    shared = longest + longest // 4 + 4 * (head * CLUSTER + a.row + a.kv_lora + 2 + 4 * warps + values) + 2 * a.row
    rows = (planes(a.q, head) if a.q_a else 16) + planes(a.k_b, absorbed)
    shared += planes(a.v_b, values) + max(rows, 4 * warps * a.kv_lora) + 256  # for what alignment takes
    return MLAClusterConstants(
        **latent_fields(a),
        cluster=CLUSTER,
        keys=CLUSTER_KEYS,
        query=query,
        absorb=b.matrix(a.k_b),
        value=b.matrix(a.v_b),
        query_lanes=lanes[a.q],
        latent_lanes=lanes[a.k_b],
        value_lanes=lanes[a.v_b],
        out_quantised=out_quantised,
        shared=shared,
    )


def _row_lanes(blocks: int, rows: int) -> int:
    """Lanes that share one of a thread block's `rows` rows of `blocks` blocks: as many as divide the blocks."""
    return next(n for n in (16, 8, 4, 2, 1) if rows * n <= CLUSTER_THREADS and (blocks % n == 0 or n == 1))


def _mla_cluster(b: Builder, layer: int, a: MLA) -> LaunchedOps:
    x, kv = Activations("x", a.kv_a.cols), (a.kv_a, None, "kv")
    first = a.q_a or a.q
    out = [(linear(b, "norm_linear", x, ((first, None, "q_a" if a.q_a else "q"), kv), norm=a.norm, eps=a.eps), 0)]
    fits = a.v_b.rows // CLUSTER % QUANTISED_ROWS == 0
    heads = b.agreed("heads", a.heads * a.v_b.rows, [a.output], [a.v_b.rows], fits)
    shape = _cluster_shape(b, a, heads.quantised)
    buffers = {
        "x": b.act("q_a") if a.q_a else None,
        "x_gain": b.data(a.q_a_norm),
        "q": None if a.q_a else b.act("q"),
        "kv": b.act("kv"),
        "kv_gain": b.data(a.kv_norm),
        "cache": b.cache("k", layer),
        "table": b.rope(a.rope),
        "state": "state",
        "w_query": b.data(a.q) if a.q_a else None,
        "w_absorb": b.data(a.k_b),
        "w_value": b.data(a.v_b),
        **b.target(heads),
    }
    kind = shape.absorb.type.name.lower()
    attend = kernel(
        f"mla_cluster_{kind}_{a.heads}x{CLUSTER}",
        "mla_cluster.cu",
        shape,
        buffers,
        (a.heads * CLUSTER, 1, 1),
        "attention",
        nbytes=(a.q.nbytes if a.q_a else 0) + a.k_b.nbytes + a.v_b.nbytes,
        threads=CLUSTER_THREADS,
        shared=shape.shared,
        cluster=CLUSTER,
    )
    done = 4 if a.q_a else 3  # op of the attention
    return [*out, (attend, done), (linear_add(b, heads, a.output, None, a.residual_scale), done + 2)]


def _dense(b: Builder, d: Dense) -> list[Launch]:
    gate_up, ffn = _gate_up(b, d.norm, d.eps, d.weights)
    down = d.weights.down
    return [gate_up, *_added(b, ffn, down, None, d.post_norm, d.eps, d.residual_scale, d.stream_scale)]


def _gate_up(b: Builder, norm: Weight | None, eps: float, w: blocks.Gated) -> tuple[Launch, Activations]:
    """The first half of a dense feed-forward, and what it leaves."""
    t = pair_spread(w.gate)
    quantised, floating = b.kinds(w.gate, w.up)
    check_shared(w.gate.cols, quantised, floating)
    ffn = b.agreed("ffn", w.ff, [w.down], [w.ff], t.rows(PAIR_WARPS) == QUANTISED_ROWS)
    shape = GateUpConstants(
        w.gate.cols,
        eps,
        norm is not None,
        activation(w),
        quantised,
        floating,
        b.matrix(w.gate),
        b.matrix(w.up),
        t,
        out_quantised=ffn.quantised,
    )
    buffers = {
        "x": b.act("x"),
        **b.target(ffn),
        "gain": b.data(norm),
        "gate": b.data(w.gate),
        "up": b.data(w.up),
        "state": "state",
    }
    kind = w.gate.type.name.lower()
    gate_up = kernel(
        f"gate_up_{kind}_{w.ff}x{w.gate.cols}",
        "gate_up.cu",
        shape,
        buffers,
        (t.blocks(w.ff, PAIR_WARPS), 1, 1),
        f"mat-vec {kind}",
        nbytes=w.gate.nbytes + w.up.nbytes,
        threads=PAIR_THREADS,
        resident=2,
    )
    return gate_up, ffn


def _experts(b: Builder, e: Experts) -> list[Launch]:
    """Router logits; gate and up of the chosen and the shared; their down."""
    r, w, shared = e.router, e.weights, e.shared
    logits = b.buffer("router", 4 * r.experts)
    route = ((r.weight, r.bias, logits),)
    router = linear(b, "route", Activations("x", r.weight.cols), route, norm=r.norm or e.norm, eps=e.eps)
    t, shared_t = pair_spread(w.gate), pair_spread(shared.gate) if shared else None
    rows, size = [w.ff], r.top_k * w.ff
    if shared:
        rows, size = [w.ff, shared.ff], size + shared.ff
    fits = t.rows(PAIR_WARPS) == QUANTISED_ROWS and (shared_t is None or shared_t.rows() == t.rows())
    ffn = b.agreed("ffn", size, [w.down, shared.down if shared else None], rows, fits)
    chosen = [router, _experts_up(b, e, ffn), _experts_down(b, e, ffn)]
    if (d := e.beside) is None:
        return chosen
    gate_up, down = _gate_up(b, d.norm, e.eps, d.weights)
    return [
        gate_up,
        linear(b, "linear", down, ((d.weights.down, None, "y"),)),
        norm_add(b, d.dense_norm, e.eps, dst="z", add=False),
        *chosen,
        norm_add(b, d.experts_norm, e.eps, dst="z"),
        norm_add(b, d.post_norm, e.eps, stream=d.stream_scale, src="z"),
    ]


# --- kernels


def check_shared(k: int, quantised: bool, floats: bool) -> None:
    """Raises TinychatError where staged activations of `k` values do not fit."""
    size = (k // 32 * 40 if quantised else 0) + (4 * k if floats else 0) + 1024
    if size > MAX_SHARED:
        longest = (MAX_SHARED - 1024) // 4
        raise TinychatError(f"the CUDA kernels take rows of up to {longest:,} floating-point weights, not {k:,}")


def linear(
    b: Builder,
    name: str,
    x: Activations,
    outputs: Sequence[tuple[Weight, Weight | None, str]],
    *,
    norm: Weight | None = None,
    eps: float = 0.0,
    add: bool = False,
    scale: float = 1.0,
    softcap: float = 0.0,
    last_token: bool = False,
) -> Launch:
    """Matrices over one input, each (weight, bias, buffer of its results): dst = or += scale * (w @ x + bias)."""
    weights = [w for w, _, _ in outputs]
    cols, quantised, floating = weights[0].cols, *b.kinds(*weights)
    check_shared(cols, quantised, floating and norm is not None)
    buffers = b.source(x) | {"gain": b.data(norm)}
    parts, blocks = list[LinearPart](), 0
    for i, (w, bias, dst) in enumerate(outputs):
        t = spread(w, sum(x.rows for x in weights))
        parts.append(LinearPart(b.matrix(w), t, blocks, t.blocks(w.rows)))
        blocks += t.blocks(w.rows)
        dst = b.act(dst) if dst in b.plan.buffers else dst
        buffers |= {f"dst[{i}]": dst, f"bias[{i}]": b.data(bias), f"w[{i}]": b.data(w)}
    buffers["state"] = "state"
    shape = LinearConstants(
        cols,
        normed=norm is not None,
        eps=eps,
        last_token=last_token,
        in_quantised=x.quantised,
        quantised=quantised,
        floating=floating,
        add=add,
        out_scale=scale,
        softcap=softcap,
        part=tuple(parts),
    )
    kinds = "_".join(dict.fromkeys(p.weight.type.name.lower() for p in parts))
    return kernel(
        f"{name}_{kinds}_{blocks}x{cols}",
        "linear.cu",
        shape,
        buffers,
        (blocks, 1, 1),
        f"mat-vec {kinds}",
        nbytes=sum(w.nbytes for w in weights),
    )


def linear_add(b: Builder, x: Activations, w: Weight, bias: Weight | None, scale: float) -> Launch:
    """x += scale * (w @ activations + bias)."""
    return linear(b, "linear_add", x, ((w, bias, "x"),), add=True, scale=scale)


def norm_add(
    b: Builder,
    norm: Weight,
    eps: float,
    scale: float = 1.0,
    stream: float = 1.0,
    tokens: int = 1,
    *,
    src: str = "y",
    dst: str = "x",
    add: bool = True,
) -> Launch:
    """dst = stream * (dst + scale * RMSNorm(src)), without `add` as if dst were 0."""
    buffers = {"x": b.act(dst, tokens), "src": b.act(src, tokens), "gain": b.data(norm), "state": "state"}
    shape = NormAddConstants(norm.cols, eps, scale, stream, add)
    return kernel(f"norm_add_{norm.cols}", "norm_add.cu", shape, buffers, (tokens, 1, 1), "norm")


def head(b: Builder, op: ops.Head) -> Launch:
    """Logits of this step's last token."""
    logits = b.buffer("logits", 4 * op.weight.rows)
    x = Activations("x", op.weight.cols)
    return linear(
        b,
        "head",
        x,
        ((op.weight, None, logits),),
        norm=op.norm,
        eps=op.eps,
        scale=op.scale,
        softcap=op.softcap,
        last_token=True,
    )


def _absorb(b: Builder, layer: int, a: MLA) -> Launch:
    w, kinds = a.k_b, b.kinds(a.k_b)
    check_shared(w.cols, *kinds)
    t = spread(w, w.rows * a.heads, whole=True)
    shape = AbsorbConstants(
        **latent_fields(a),
        weight=b.matrix(w),
        spread=t,
        head_blocks=t.blocks(w.rows),
        quantised=kinds[0],
        floating=kinds[1],
    )
    buffers = {
        "q": b.act("q"),
        "queries": b.buffer("queries", 2 * a.heads * a.row),
        "cache": b.cache("k", layer),
        "kv": b.act("kv"),
        "kv_gain": b.data(a.kv_norm),
        "table": b.rope(a.rope),
        "state": "state",
        "w": b.data(w),
    }
    kind, products = shape.weight.type.name.lower(), t.blocks(w.rows) * a.heads
    rotations = -(-a.heads // 8)  # a warp per head; one more block for the cache row
    return kernel(
        f"absorb_{kind}_{products}x{w.cols}",
        "absorb.cu",
        shape,
        buffers,
        (products + rotations + 1, 1, 1),
        f"mat-vec {kind}",
        nbytes=w.nbytes,
    )


def _combine(b: Builder, a: MLA) -> Launch:
    shape = CombineConstants(a.heads, a.kv_lora, splits(a, deep=True), chunk_keys(a, deep=True))
    dst = b.act("o_latent")
    buffers = {"partial": "attention_o", "ml": "attention_ml", "dst": dst, "state": "state"}
    return kernel(f"combine_{a.heads}", "combine.cu", shape, buffers, (-(-a.kv_lora // 128), a.heads, 1), "attention")


def _value_up(b: Builder, a: MLA, deep: bool) -> tuple[Launch, Activations]:
    """Per head: combines attention's splits where no kernel did (not `deep`), then W_v_b."""
    w, kinds = a.v_b, b.kinds(a.v_b)
    check_shared(w.cols, *kinds)
    t = spread(w, w.rows * a.heads, quantise=True)
    heads = b.agreed("heads", a.heads * w.rows, [a.output], [w.rows], t.rows() == QUANTISED_ROWS)
    blocks = t.blocks(w.rows)
    shape = ValueUpConstants(
        a.heads,
        a.kv_lora,
        splits=splits(a),
        chunk_keys=chunk_keys(a, deep),
        combined=deep,
        weight=b.matrix(w),
        spread=t,
        head_blocks=blocks,
        quantised=kinds[0],
        floating=kinds[1],
        out_quantised=heads.quantised,
    )
    source: dict[str, str | None] = {"src": "attention_o", "ml": "attention_ml"}
    if deep:
        source = {"whole": b.act("o_latent")}
    buffers = {**source, "state": "state", **b.target(heads), "w": b.data(w)}
    kind = shape.weight.type.name.lower()
    launch = kernel(
        f"value_up_{kind}_{blocks * a.heads}x{w.cols}{'_deep' if deep else ''}",
        "value_up.cu",
        shape,
        buffers,
        (blocks * a.heads, 1, 1),
        f"mat-vec {kind}",
        nbytes=w.nbytes,
    )
    return launch, heads


def _experts_up(b: Builder, e: Experts, ffn: Activations) -> Launch:
    r, w, shared = e.router, e.weights, e.shared
    t = pair_spread(w.gate)
    blocks = t.blocks(w.ff, PAIR_WARPS)
    grid, nbytes = blocks * r.top_k, r.top_k * (w.gate.group_bytes + w.up.group_bytes)
    if shared:
        grid += pair_spread(shared.gate).blocks(shared.ff, PAIR_WARPS)
        nbytes += shared.gate.nbytes + shared.up.nbytes
    matrices = [w.gate, w.up, *((shared.gate, shared.up) if shared else ())]
    quantised, floating = b.kinds(*matrices)
    check_shared(w.gate.cols, quantised, floating)
    shape = ExpertsUpConstants(
        choice(r),
        w.gate.cols,
        e.eps,
        True,
        activation(w),
        quantised,
        floating,
        b.matrix(w.gate),
        b.matrix(w.up),
        t,
        expert_blocks=blocks,
        shared_gate=b.matrix(shared.gate if shared else None),
        shared_up=b.matrix(shared.up if shared else None),
        shared_spread=pair_spread(shared.gate) if shared else t,
        out_quantised=ffn.quantised,
    )
    buffers = {
        "x": b.act("x"),
        **b.target(ffn),
        "router": "router",
        "selection_bias": b.data(r.selection_bias),
        "gain": b.data(e.norm),
        "gate": b.data(w.gate),
        "up": b.data(w.up),
        "state": "state",
        "shared_gate": b.data(shared.gate if shared else None),
        "shared_up": b.data(shared.up if shared else None),
        "gate_bias": b.data(w.gate_bias),
        "up_bias": b.data(w.up_bias),
    }
    kind = w.gate.type.name.lower()
    return kernel(
        f"experts_up_{kind}_{r.top_k}x{w.ff}x{w.gate.cols}",
        "experts_up.cu",
        shape,
        buffers,
        (grid, 1, 1),
        f"experts {kind}",
        nbytes=nbytes,
        threads=PAIR_THREADS,
        resident=2,
    )


def _experts_down(b: Builder, e: Experts, ffn: Activations) -> Launch:
    r, w, shared = e.router, e.weights.down, e.shared.down if e.shared else None
    quantised, _ = b.kinds(w, shared)
    check_shared(ffn.size, quantised, False)
    shape = ExpertsDownConstants(
        choice(r),
        b.matrix(w),
        b.matrix(shared),
        shared_depth=min(-(-shared.cols // (32 * block_size(shared.type))), 4) if shared else 1,
        in_quantised=ffn.quantised,
        quantised=quantised,
        out_scale=e.residual_scale,
        add=e.beside is None,
    )
    buffers = {
        **b.source(ffn),
        "router": "router",
        "selection_bias": b.data(r.selection_bias),
        "x": b.act("y" if e.beside else "x"),
        "w": b.data(w),
        "state": "state",
        "expert_scale": b.data(r.expert_scale),
        "shared": b.data(shared),
        "bias": b.data(e.weights.down_bias),
    }
    kind = w.type.name.lower()
    return kernel(
        f"experts_down_{kind}_{r.top_k}x{w.rows}x{w.cols}",
        "experts_down.cu",
        shape,
        buffers,
        (-(-w.rows // 8), 1, 1),
        f"experts {kind}",
        nbytes=r.top_k * w.group_bytes + (shared.nbytes if shared else 0),
    )


def embed(b: Builder, op: ops.Embed, tokens: int) -> Launch:
    """x (tokens, dim): rows of the table."""
    dim, kind = op.weight.cols, op.weight.type.name.lower()
    buffers = {"x": b.act("x", tokens), "w": b.data(op.weight), "history": "history", "state": "state"}
    grid = (-(-dim // 256), tokens, 1)
    return kernel(
        f"embed_{kind}_{dim}", "embed.cu", EmbedConstants(b.matrix(op.weight), op.scale), buffers, grid, "embedding"
    )


def store_kv(b: Builder, layer: int, a: GQA, tokens: int) -> Launch:
    """Queries, scaled for attention and rotated, into `queries`; rotated keys, and values, into the cache."""
    norm = {None: Norm.NO_NORM, "head": Norm.PER_HEAD, "projection": Norm.ALL_HEADS}
    shape = StoreKVConstants(
        a.heads,
        a.kv_heads,
        a.key_dim,
        a.value_dim,
        rope_dims=a.rope.dims,
        neox=a.rope.style == "neox",
        norm=norm[a.qk_norm],
        eps=a.eps,
        query_scale=a.scale * LOG2E,
        value_norm=a.value_norm,
    )
    buffers = {
        "queries": b.buffer("queries", 2 * tokens * a.heads * a.key_dim),
        "k_cache": b.cache("k", layer),
        "v_cache": b.cache("v", layer),
        "q": b.act("q", tokens),
        "k": b.act("k", tokens),
        "v": b.act("v", tokens),
        "q_gain": b.data(a.q_norm),
        "k_gain": b.data(a.k_norm),
        "table": b.rope(a.rope),
        "state": "state",
    }
    grid = (-(-(a.heads + 2 * a.kv_heads) // 8), tokens, 1)
    return kernel(f"store_kv_{a.heads}_{a.kv_heads}_{a.key_dim}", "store_kv.cu", shape, buffers, grid, "rope")


def activation(w: blocks.Gated) -> GatedActivation:
    """What a kernel makes of gate and up."""
    return GatedActivation(ActivationCode[w.activation.upper()])


def latent_fields(a: MLA) -> dict[str, Any]:
    """The fields of Latent."""
    t = a.temperature
    return {
        "heads": a.heads,
        "nope": a.nope,
        "kv_lora": a.kv_lora,
        "rope_dims": a.rope.dims,
        "neox": a.rope.style == "neox",
        "eps": a.eps,
        "query_scale": a.scale * LOG2E,
        "growth": t.scale if t else 0.0,
        "growth_length": t.length if t else 1,
    }


def choice(r: blocks.Router) -> ExpertChoice:
    """How a kernel chooses experts."""
    gating = GatingCode[r.gating.upper()]
    return ExpertChoice(r.experts, r.top_k, gating, r.normalize, r.groups, r.groups_used, r.scale, r.logit_scale)


def splits(a: GQA | MLA, deep: bool = False) -> int:
    """Parts of the keys in decode."""
    return SPLITS if isinstance(a, GQA) else DEEP_SPLITS if deep else 2 * SPLITS


def chunk_keys(a: GQA | MLA, deep: bool = False) -> int:
    """Keys that attention takes at a time: what fits twice into shared memory."""
    return 64 if deep else 32 if isinstance(a, MLA) or a.key_dim > 128 else 64


def attention(b: Builder, layer: int, a: GQA | MLA, deep: bool = False) -> Launch:
    """Results go into `heads` (GQA), partial ones of each split into `attention_o`."""
    latent = isinstance(a, MLA)
    kv_heads, key_dim, value_dim = (1, a.row, a.kv_lora) if isinstance(a, MLA) else (a.kv_heads, a.key_dim, a.value_dim)
    group, keys = a.heads // kv_heads, chunk_keys(a, deep)
    row_tiles = 2 if group > 16 else 1
    rows, steps, score_tiles = 16 * row_tiles, key_dim // 16, row_tiles * keys // 16
    warps = ATTENTION_THREADS // 32 * (2 if deep else 1)  # at depth a warp takes two tiles
    parts = next((n for n in (4, 2) if score_tiles * n <= warps and steps % n == 0), 1)
    k_pitch, v_pitch = key_dim + 8, value_dim + 8
    stages = 2
    halves = rows * k_pitch + stages * keys * (k_pitch + (0 if latent else v_pitch)) + rows * (keys + 8)
    shared = 2 * halves + 4 * max(rows * (parts * (keys + 4) + 3), group * SPLITS)
    if key_dim % 16 or value_dim % 8 or shared > MAX_DYNAMIC:
        raise TinychatError(f"the CUDA attention kernel does not take heads of {key_dim} and {value_dim} values")
    shape = AttentionConstants(
        a.heads,
        kv_heads,
        key_dim,
        value_dim,
        row_tiles=row_tiles,
        chunk_keys=keys,
        stages=stages,
        parts=parts,
        splits=splits(a, deep),
        latent=latent,
        window=0 if isinstance(a, MLA) else a.window,
        sinks=not isinstance(a, MLA) and a.sinks is not None,
    )
    buffers = {
        "partial": b.buffer("attention_o", 2 * splits(a, deep) * a.heads * value_dim),
        "ml": b.buffer("attention_ml", 8 * splits(a, deep) * a.heads),
        "tickets": b.buffer("tickets", 4 * kv_heads),
        "q": "queries",
        "k_cache": b.cache("k", layer),
        "state": "state",
        "v_cache": b.cache("k" if latent else "v", layer),
        "out": None if latent else b.act("heads"),
        "sinks": None if isinstance(a, MLA) else b.data(a.sinks),
    }
    window = f"_{shape.window}" if shape.window else ""
    name = f"attention_{a.heads}_{kv_heads}_{key_dim}{window}{'_deep' if deep else ''}"
    grid = (splits(a, deep), -(-group // rows), kv_heads)
    return kernel(
        name,
        "attention.cu",
        shape,
        buffers,
        grid,
        "attention",
        threads=ATTENTION_THREADS,
        shared=shared,
        resident=2 if 2 * shared <= MAX_DYNAMIC else 1,
    )


def sample(b: Builder) -> list[Launch]:
    """The next token, from the logits."""
    vocab = b.plan.vocab
    shape = SampleConstants(vocab, RING, STRETCH, CANDIDATES, MAX_K)
    stretches = -(-vocab // STRETCH)
    lists = {
        "list": b.buffer("candidates", 8 * stretches * CANDIDATES),
        "counts": b.buffer("counts", 4 * stretches),
        "parts": b.buffer("parts", 8 * stretches),
        "adjusted": b.buffer("adjusted", 4 * vocab),
    }
    first = kernel(
        f"candidates_{vocab}",
        "candidates.cu",
        shape,
        {
            **lists,
            "logits": "logits",
            "history": "history",
            "state": "state",
            "breakers": b.buffer("breakers", 4 * -(-vocab // 32)),
        },
        (stretches, 1, 1),
        "sampling",
        threads=SAMPLING_THREADS,
    )
    last = kernel(
        f"choose_token_{vocab}",
        "choose_token.cu",
        shape,
        {"ring": "ring", "history": "history", "state": "state", **lists, "logits": "logits"},
        (1, 1, 1),
        "sampling",
        threads=SAMPLING_THREADS,
    )
    return [first, last]
