"""Latent attention's own kernels in a decode step, as launches. Behind few keys one kernel does all that belongs to it,
with a cluster of blocks per head (mla_cluster.cu)."""

from __future__ import annotations

from typing import Any

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import MLA, Weight
from tinychat.kernels.cuda.builder import MAX_DYNAMIC, Activations, Builder, LaunchedOps, shared_columns
from tinychat.kernels.cuda.constants import (
    LOG2E,
    NO_MATRIX,
    AbsorbConstants,
    CombineConstants,
    LatentAttentionConstants,
    MLAClusterConstants,
    ValueUpConstants,
)
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.launches import ATTENTION_THREADS, attention, chunk_keys, linear, linear_add, splits
from tinychat.kernels.cuda.quants import FLOATS, QUANTS, packed_bytes
from tinychat.kernels.cuda.spread import QUANTISED_ROWS, spread
from tinychat.kernels.ops import latent_inputs

CLUSTER = 4  # blocks of a head
HEADS_AT_ONCE = 32  # of a block of latent_attention.cu
KEYS_AT_ONCE = 64  # there, twice in shared memory
CLUSTER_THREADS = 512
CLUSTER_KEYS = 2  # keys that a warp takes at a time
CLUSTER_BLOCKS = 132  # at most: all heads at once, a block for each multiprocessor of an H100


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
            if any(first * blocks * size % 16 for size in p.sizes) or first * blocks * p.s2 % 128:
                return False
    return _cluster_shape(b, a, False).shared <= MAX_DYNAMIC


def _cluster_shape(b: Builder, a: MLA, out_quantised: bool) -> MLAClusterConstants:
    head, absorbed, values = (n // CLUSTER for n in (a.nope + a.rope.dims, a.kv_lora, a.v_b.rows))
    query = b.matrix(a.q) if a.q_a else NO_MATRIX
    lanes = {w: _row_lanes(w.cols // 32, n) for w, n in ((a.q, head), (a.k_b, absorbed), (a.v_b, values))}

    def planes(w: Weight, rows: int) -> int:
        return packed_bytes(b.weight(w).tensor.kind, rows * w.cols)

    longest, warps = max(query.cols, a.kv_lora, a.nope), CLUSTER_THREADS // 32
    new = -(-b.columns // CLUSTER)  # cache rows of the step that a block makes
    n = _cluster_columns(b)
    codes = longest + longest // 4 + a.nope + a.nope // 4
    shared = n * (codes + 4 * (head * CLUSTER + 2 * CLUSTER + 32 + 3 * warps + values)) + 4 * a.row
    shared += 4 * CLUSTER * a.kv_lora * (n if n < CLUSTER else 1)  # parts, or what they are together
    shared += 4 * new * warps + 2 * b.columns * a.row
    first, sums = planes(a.q, head) if a.q_a else 16, 4 * warps * n * a.kv_lora
    rows = (max(first, sums) if n == 1 else first) + planes(a.k_b, absorbed)
    shared += planes(a.v_b, values) + max(rows, sums) + 320  # for what alignment takes
    return MLAClusterConstants(
        **latent_fields(a),
        columns=b.columns,
        cluster=CLUSTER,
        keys=CLUSTER_KEYS,
        query=query,
        absorb=b.matrix(a.k_b),
        value=b.matrix(a.v_b),
        query_lanes=lanes[a.q],
        latent_lanes=lanes[a.k_b],
        value_lanes=lanes[a.v_b],
        gated=a.gate is not None,
        out_quantised=out_quantised,
        shared=shared,
    )


def _cluster_columns(b: Builder) -> int:
    """Columns that share a cluster."""
    return min(b.columns, CLUSTER)


def _row_lanes(blocks: int, rows: int) -> int:
    """Lanes that share one of a thread block's `rows` rows of `blocks` blocks: as many as divide the blocks."""
    return next(n for n in (16, 8, 4, 2, 1) if rows * n <= CLUSTER_THREADS and (blocks % n == 0 or n == 1))


def latent_linear(b: Builder, a: MLA, early: bool = False) -> Launch:
    """The matrices over its input. `early`: see LinearConstants."""
    outputs = [(w, None, name) for name, w in latent_inputs(a).items()]
    return linear(b, "norm_linear", Activations("x", a.kv_a.cols), outputs, norm=a.norm, eps=a.eps, early=early)


def mla_cluster(b: Builder, layer: int, a: MLA) -> LaunchedOps:
    fits = a.v_b.rows // CLUSTER % QUANTISED_ROWS == 0
    heads = b.agreed("heads", a.heads * a.v_b.rows, [a.output], [a.v_b.rows], fits)
    shape = _cluster_shape(b, a, heads.quantised)
    if shape.shared > MAX_DYNAMIC:
        raise TinychatError(f"{b.columns} columns of latent attention are too many for shared memory")
    buffers = {
        "x": b.act("q_a") if a.q_a else None,
        "x_gain": b.data(a.q_a_norm),
        "q": None if a.q_a else b.act("q"),
        "kv": b.act("kv"),
        "kv_gain": b.data(a.kv_norm),
        "gate": b.act("gate") if a.gate else None,
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
        (b.columns // _cluster_columns(b) * a.heads * CLUSTER, 1, 1),
        "attention",
        nbytes=(a.q.nbytes if a.q_a else 0) + a.k_b.nbytes + a.v_b.nbytes,
        threads=CLUSTER_THREADS,
        shared=shape.shared,
        cluster=CLUSTER,
    )
    done = 4 if a.q_a else 3  # op of the attention
    return [
        (latent_linear(b, a, early=True), 0),
        (attend, done),
        (linear_add(b, heads, a.output, None, a.residual_scale), done + 2),
    ]


def absorb(b: Builder, layer: int, a: MLA) -> Launch:
    w, kinds = a.k_b, b.kinds(a.k_b)
    shared = shared_columns(b, w.cols, *kinds)
    t = spread(w, w.rows * a.heads, whole=True)
    shape = AbsorbConstants(
        **latent_fields(a),
        columns=b.columns,
        weight=b.matrix(w),
        spread=t,
        head_blocks=t.blocks(w.rows),
        quantised=kinds[0],
        floating=kinds[1],
    )
    buffers = {
        "q": b.act("q"),
        "queries": b.buffer("queries", 2 * b.columns * a.heads * a.row),
        "cache": b.cache("k", layer),
        "kv": b.act("kv"),
        "kv_gain": b.data(a.kv_norm),
        "table": b.rope(a.rope),
        "state": "state",
        "w": b.data(w),
    }
    kind, products = shape.weight.type.name.lower(), t.blocks(w.rows) * a.heads
    rotations = -(-b.columns * a.heads // 8)  # a warp per head; one more block for each cache row
    return kernel(
        f"absorb_{kind}_{products}x{w.cols}",
        "absorb.cu",
        shape,
        buffers,
        (products + rotations + b.columns, 1, 1),
        f"mat-vec {kind}",
        nbytes=w.nbytes,
        shared=shared,
    )


def deep_attention(b: Builder, layer: int, a: MLA) -> Launch:
    """Attention's parts behind many keys: by warpgroups where the GPU has them and whole tiles suffice."""
    groups = ATTENTION_THREADS // 128
    shared = 2 * (2 * KEYS_AT_ONCE + HEADS_AT_ONCE) * a.row + 2 * HEADS_AT_ONCE * KEYS_AT_ONCE
    shared += 4 * HEADS_AT_ONCE * (groups * (KEYS_AT_ONCE + 4) + 3) + 1024
    if not b.warpgroups or a.row % 64 or a.kv_lora % (64 * groups) or shared > MAX_DYNAMIC:
        return attention(b, layer, a, deep=True)
    shape = LatentAttentionConstants(
        a.heads,
        HEADS_AT_ONCE,
        a.row,
        a.kv_lora,
        KEYS_AT_ONCE,
        chunk_keys(a),
        splits(a, deep=True),
        columns=b.columns,
    )
    buffers = {
        "partial": b.buffer("attention_o", 2 * b.columns * shape.splits * a.heads * a.kv_lora),
        "ml": b.buffer("attention_ml", 8 * b.columns * shape.splits * a.heads),
        "q": "queries",
        "cache": b.cache("k", layer),
        "state": "state",
    }
    grid = (shape.splits, -(-a.heads // HEADS_AT_ONCE), b.columns)
    name = f"latent_attention_{a.heads}_{a.row}"
    return kernel(
        name, "latent_attention.cu", shape, buffers, grid, "attention", threads=ATTENTION_THREADS, shared=shared
    )


def combine(b: Builder, a: MLA) -> Launch:
    shape = CombineConstants(a.heads, a.kv_lora, splits(a, deep=True), chunk_keys(a), columns=b.columns)
    dst = b.act("o_latent")
    buffers = {"partial": "attention_o", "ml": "attention_ml", "dst": dst, "state": "state"}
    grid = (-(-a.kv_lora // 128), a.heads, b.columns)
    return kernel(f"combine_{a.heads}", "combine.cu", shape, buffers, grid, "attention")


def value_up(b: Builder, a: MLA, deep: bool) -> tuple[Launch, Activations]:
    """Per head: combines attention's splits where no kernel did (not `deep`), then W_v_b."""
    w, kinds = a.v_b, b.kinds(a.v_b)
    shared = shared_columns(b, w.cols, *kinds)
    t = spread(w, w.rows * a.heads, quantise=True)
    heads = b.agreed("heads", a.heads * w.rows, [a.output], [w.rows], t.rows() == QUANTISED_ROWS)
    blocks = t.blocks(w.rows)
    shape = ValueUpConstants(
        a.heads,
        a.kv_lora,
        columns=b.columns,
        splits=splits(a),
        chunk_keys=chunk_keys(a),
        combined=deep,
        gated=a.gate is not None,
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
    gate = b.act("gate") if a.gate else None
    buffers = {**source, "state": "state", **b.target(heads), "gate": gate, "w": b.data(w)}
    kind = shape.weight.type.name.lower()
    launch = kernel(
        f"value_up_{kind}_{blocks * a.heads}x{w.cols}{'_deep' if deep else ''}",
        "value_up.cu",
        shape,
        buffers,
        (blocks * a.heads, 1, 1),
        f"mat-vec {kind}",
        nbytes=w.nbytes,
        shared=shared,
    )
    return launch, heads


def latent_fields(a: MLA) -> dict[str, Any]:
    """The fields of LatentConstants."""
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
