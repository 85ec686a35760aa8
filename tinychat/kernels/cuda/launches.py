"""The kernels of a decode step as launches: the constants, buffers and grid of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinychat.errors import TinychatError
from tinychat.kernels import blocks, ops
from tinychat.kernels.blocks import GQA, MLA, Experts, LayerEmbedding, Weight
from tinychat.kernels.cuda.builder import MAX_DYNAMIC, RING, ROUTE_SLOTS, Activations, Builder, shared_columns
from tinychat.kernels.cuda.constants import (
    LOG2E,
    ActivationCode,
    AttentionConstants,
    EmbedConstants,
    ExpertChoice,
    ExpertsDownConstants,
    ExpertsUpConstants,
    FollowConstants,
    GatedActivation,
    GateInputConstants,
    GateUpConstants,
    GatingCode,
    HeadsConstants,
    JoinConstants,
    LayerInputsConstants,
    LinearConstants,
    LinearPart,
    Norm,
    NormAddConstants,
    QuantiseConstants,
    SampleConstants,
    Spread,
    StoreHiddenConstants,
)
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.layout import block_size
from tinychat.kernels.cuda.spread import PAIR_THREADS, QUANTISED_ROWS, light, pair_spread, spread
from tinychat.kernels.cuda.state import STATE_BYTES, WORDS
from tinychat.kernels.cuda.tiles import MULTIPROCESSORS, TILE_THREADS, tiling

SPLITS = 32  # parts of the keys in decode attention; latent attention, with one kv head, has twice as many
DEEP_SPLITS = 132  # a block for each multiprocessor of an H100
STRETCH = 4096  # logits of a block of candidates.cu
MAX_K = 64  # largest top_k that the candidate lists serve
CANDIDATES = 128  # of a stretch: MAX_K and room for equal logits
SAMPLING_THREADS = 1024
ATTENTION_THREADS = 512
LINEAR_THREADS = 256
# Up to FEW_COLUMNS are multiplied outside of tensor cores: int8 blocks (tiled_of in matvec.cuh), and what each block
# stages for so few rows, which is cheaper than a kernel that does, or for so many that STREAMS blocks of each
# multiprocessor take them in turns.
FEW_COLUMNS = 2
STAGED_ROWS = 2048
STREAMED_ROWS, STREAMS = 65536, 3
EXPERTS_COLUMNS, EXPERTS_SHARED = 4, 48 << 10  # a block of the experts' kernels: at most; bytes of their activations
WIDE_THREADS, WIDE_ROWS = 512, 2112  # of linear.cu with a norm: 16 rows a block, at most one for each multiprocessor,
WIDE_MOST, WIDE_DEPTH = 2, 4  # or, of types that spread.light() says, so many times, with so many of each in flight
RESIDENT = 2  # blocks on a multiprocessor of such types, which bounds registers: ptxas takes up to 255 to load ahead
PAIR_WARPS = PAIR_THREADS // 32
PLACES = 264  # for blocks of PAIR_THREADS on an H100 at once


def quantise(b: Builder, x: Activations, norm: Weight | None, eps: float, threads: int) -> tuple[Launch, Activations]:
    """Columns of a verify step as int8 blocks, and those. `threads`: of the kernel of a single step that reads them,
    which share a sum of squares."""
    out = Activations("input", x.size, quantised=True)
    names = b.target(out)
    shape = QuantiseConstants(x.size, norm is not None, eps, columns=b.columns)
    buffers = {"src": b.act(x.name), "gain": b.data(norm), **names, "norms": b.buffer("norms", 4 * b.columns)}
    name = f"quantise_{x.size}"
    grid = (b.columns, -(-x.size // (4 * threads)) + (norm is not None), 1)
    return kernel(name, "quantise.cu", shape, buffers, grid, "norm", threads=threads), out


def gate_up(b: Builder, norm: Weight | None, eps: float, w: blocks.Gated) -> tuple[Launch, Activations]:
    """The first half of a dense feed-forward, and what it leaves."""
    t = pair_spread(w.gate)
    quantised, floating = b.kinds(w.gate, w.up)
    ffn = b.agreed("ffn", w.ff, [w.down], [w.ff], t.rows(PAIR_WARPS) == QUANTISED_ROWS)
    threads, resident, before = PAIR_THREADS, 2 if b.columns < 8 else 1, tuple[Launch, ...]()
    blocks = t.blocks(w.ff, PAIR_WARPS)
    grid = min(blocks, PLACES) if light(w.gate) and light(w.up) else blocks
    tiles, source = None, dict[str, str | None]()
    if b.columns > 1 and not floating:
        together = QUANTISED_ROWS if ffn.quantised else 1
        tiles = tiling(b, [[(w.gate, t), (w.up, t)]], together=together)
        threads, resident, shared, (grid,) = TILE_THREADS, tiles.resident, tiles.shared, tiles.blocks
        blocks = grid
        first, x = quantise(b, Activations("x", w.gate.cols), norm, eps, PAIR_THREADS)
        before, source = (first,), {"x_q": f"{x.name}_q", "x_s": f"{x.name}_s", "norms": "norms"}
    else:
        shared = shared_columns(b, w.gate.cols, quantised, floating)
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
        blocks=blocks,
        grid=grid,
        tile=tiles.tile if tiles else 0,
        stream=bool(tiles and tiles.stream),
        ring_shared=shared if tiles else 0,
        columns=b.columns,
    )
    if tiles and ffn.quantised:
        units = w.ff // QUANTISED_ROWS
        source |= {"halves": b.buffer("halves", 4 * w.ff * b.columns), "tickets": b.buffer("half_tickets", 4 * units)}
    buffers = {
        "x": b.act("x"),
        **source,
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
        (grid, 1, 1),
        f"mat-vec {kind}",
        nbytes=w.gate.nbytes + w.up.nbytes,
        threads=threads,
        shared=shared,
        resident=resident,
        before=before,
    )
    return gate_up, ffn


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
    early: bool = False,
    cleared: tuple[str, int] | None = None,
) -> Launch:
    """Matrices over one input, each (weight, bias, buffer of its results): dst = or += scale * (w @ x + bias). Results
    in one buffer stand beside each other. Before it, what quantises the input of several columns. `early`: see
    LinearConstants. `cleared`: a buffer, of which it makes so many words 0."""
    weights = [w for w, _, _ in outputs]
    cols, quantised, floating = weights[0].cols, *b.kinds(*weights)
    rows = sum(w.rows for w in weights)
    spreads = {w: spread(w, rows) for w in weights}
    streamed = rows >= STREAMED_ROWS and all(_in_turns(w, t) for w, t in spreads.items())
    untiled = b.columns <= FEW_COLUMNS and (x.quantised or rows <= STAGED_ROWS or streamed)
    tiled = quantised and b.columns > 1 and not untiled
    shared = shared_columns(b, cols, quantised and not tiled, floating and norm is not None)
    buffers, before = b.source(x) | {"gain": b.data(norm)}, tuple[Launch, ...]()
    few_registers = all(light(w) for w in weights)
    most = WIDE_MOST * WIDE_ROWS if few_registers else WIDE_ROWS
    wide = norm and rows <= most and all(t.split == 1 for t in spreads.values())
    if wide and rows > WIDE_ROWS:
        spreads = {w: replace(t, rows_per_lane=WIDE_MOST, depth=min(t.depth, WIDE_DEPTH)) for w, t in spreads.items()}
    one = wide or not few_registers  # block a multiprocessor
    threads = WIDE_THREADS if wide else LINEAR_THREADS
    grid, tiles = {w: t.blocks(w.rows, threads // 32) for w, t in spreads.items()}, None
    if streamed and not tiled:  # blocks of one wave, which stage their input once
        grid = {w: min(n, STREAMS * MULTIPROCESSORS) for w, n in grid.items()}
    if tiled:
        many = [(w, t) for w, t in spreads.items() if not b.kinds(w)[1]]
        tiles = tiling(b, [[m] for m in many])
        if not x.quantised:
            first, made = quantise(b, x, norm, eps, threads)
            before, buffers = (first,), buffers | b.source(made) | {"norms": "norms"}
        grid |= {w: n for (w, _), n in zip(many, tiles.blocks)}
        shared = max(shared, tiles.shared)
    parts, blocks = list[LinearPart](), 0
    places = beside_each_other([(dst, w.rows) for w, _, dst in outputs])
    for i, ((w, bias, dst), place) in enumerate(zip(outputs, places)):
        parts.append(LinearPart(b.matrix(w), spreads[w], blocks, grid[w], *place))
        blocks += grid[w]
        dst = b.act(dst) if dst in b.plan.buffers else dst
        buffers |= {f"dst[{i}]": dst, f"bias[{i}]": b.data(bias), f"w[{i}]": b.data(w)}
    buffers |= {"state": "state", "cleared": cleared[0] if cleared else None}
    shape = LinearConstants(
        cols,
        normed=norm is not None,
        eps=eps,
        last_token=last_token,
        early=early,
        in_quantised=x.quantised,
        quantised=quantised,
        floating=floating,
        add=add,
        cleared=cleared[1] if cleared else 0,
        tile=tiles.tile if tiles else 0,
        stream=bool(tiles and tiles.stream),
        ring_shared=tiles.shared if tiles else 0,
        out_scale=scale,
        softcap=softcap,
        part=tuple(parts),
        columns=b.columns,
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
        shared=shared,
        threads=TILE_THREADS if tiles else threads,
        resident=tiles.resident if tiles else STREAMS if streamed else 1 if one else RESIDENT,
        before=before,
    )


def _in_turns(w: Weight, t: Spread) -> bool:
    """Whether a block may have the first weights of other rows on their way while it finishes some (matvec.cuh)."""
    return t.split == 1 and -(-w.cols // block_size(w.type) // t.lanes) % t.depth == 0


def beside_each_other(results: Sequence[tuple[str, int]]) -> list[tuple[int, int]]:
    """(values from one token's results to the next, the first of these) for each (buffer, values)."""
    ends, out = dict[str, int](), []
    for name, values in results:
        out.append((name, ends.get(name, 0)))
        ends[name] = ends.get(name, 0) + values
    return [(ends[name], start) for name, start in out]


def linear_add(b: Builder, x: Activations, w: Weight, bias: Weight | None, scale: float) -> Launch:
    """x += scale * (w @ activations + bias)."""
    return linear(b, "linear_add", x, ((w, bias, "x"),), add=True, scale=scale)


def norm_add(
    b: Builder,
    norm: Weight,
    eps: float,
    scale: float = 1.0,
    stream: float = 1.0,
    tokens: int | None = None,
    *,
    src: str = "y",
    dst: str = "x",
    add: bool = True,
) -> Launch:
    """dst = stream * (dst + scale * RMSNorm(src)), without `add` as if dst were 0."""
    tokens = tokens or b.columns
    buffers = {"x": b.act(dst, tokens), "src": b.act(src, tokens), "gain": b.data(norm), "state": "state"}
    shape = NormAddConstants(norm.cols, eps, scale, stream, add)
    threads = min(-(-norm.cols // 128) * 32, 1024)  # with a vector of four values each, where they suffice
    return kernel(f"norm_add_{norm.cols}", "norm_add.cu", shape, buffers, (tokens, 1, 1), "norm", threads=threads)


def head(b: Builder, op: ops.Head) -> Launch:
    """Logits of this step's last token, of all of them where it verifies."""
    logits = b.buffer("logits", 4 * b.columns * op.weight.rows)
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
        last_token=b.columns == 1,
    )


def experts_together(b: Builder, k: int, quantised: bool, floats: bool) -> tuple[int, int]:
    """The columns that a block of the experts' kernels takes, and the bytes of shared memory for their activations."""
    together = min(b.columns, EXPERTS_COLUMNS)
    while (room := shared_columns(b.of(together), k, quantised, floats)) > EXPERTS_SHARED:
        together //= 2
    return together, room


def experts_up(b: Builder, layer: int, e: Experts, ffn: Activations) -> Launch:
    layers, used = b.routes
    r, w, shared = e.router, e.weights, e.shared
    t = pair_spread(w.gate)
    blocks = t.blocks(w.ff, PAIR_WARPS)
    grid, nbytes = 1 + blocks * r.top_k, r.top_k * (w.gate.group_bytes + w.up.group_bytes)
    if shared:
        grid += pair_spread(shared.gate).blocks(shared.ff, PAIR_WARPS)
        nbytes += shared.gate.nbytes + shared.up.nbytes
    matrices = [w.gate, w.up, *((shared.gate, shared.up) if shared else ())]
    quantised, floating = b.kinds(*matrices)
    together, room = experts_together(b, w.gate.cols, quantised, floating)
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
        together=together,
        route_slots=ROUTE_SLOTS,
        routes=used * layers,
        columns=b.columns,
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
        "expert_scale": b.data(r.expert_scale),
        "choice": choice_buffer(b, r)[0],
        "routes": b.routes_of(layer) if layer < len(b.plan.layers) else None,
    }
    kind = w.gate.type.name.lower()
    return kernel(
        f"experts_up_{kind}_{r.top_k}x{w.ff}x{w.gate.cols}",
        "experts_up.cu",
        shape,
        buffers,
        (grid, b.columns // together, 1),
        f"experts {kind}",
        nbytes=nbytes,
        shared=room,
        threads=PAIR_THREADS,
        resident=2,
    )


def experts_down(b: Builder, e: Experts, ffn: Activations) -> Launch:
    r, w, shared = e.router, e.weights.down, e.shared.down if e.shared else None
    quantised, _ = b.kinds(w, shared)
    together, room = experts_together(b, ffn.size, quantised, False)
    shape = ExpertsDownConstants(
        choice(r),
        b.matrix(w),
        b.matrix(shared),
        shared_depth=min(-(-shared.cols // (32 * block_size(shared.type))), 4) if shared else 1,
        in_quantised=ffn.quantised,
        quantised=quantised,
        out_scale=e.residual_scale,
        add=e.beside is None,
        together=together,
        columns=b.columns,
    )
    buffers = {
        **b.source(ffn),
        "choice": choice_buffer(b, r)[0],
        "router": "router",
        "selection_bias": b.data(r.selection_bias),
        "x": b.act("y" if e.beside else "x"),
        "w": b.data(w),
        "state": "state",
        "expert_scale": b.data(r.expert_scale),
        "shared": b.data(shared),
        "bias": b.data(e.weights.down_bias),
        "shared_scale": "shared_scale" if e.shared_scale else None,
    }
    kind = w.type.name.lower()
    return kernel(
        f"experts_down_{kind}_{r.top_k}x{w.rows}x{w.cols}",
        "experts_down.cu",
        shape,
        buffers,
        (-(-w.rows // 8), b.columns // together, 1),
        f"experts {kind}",
        nbytes=r.top_k * w.group_bytes + (shared.nbytes if shared else 0),
        shared=room,
        resident=RESIDENT if light(w) or b.columns > 1 else 1,
    )


def embed(b: Builder, op: ops.Embed, tokens: int) -> Launch:
    """x (tokens, dim): rows of the table."""
    dim, kind = op.weight.cols, op.weight.type.name.lower()
    buffers = {"x": b.act("x", tokens), "w": b.data(op.weight), "history": "history", "state": "state"}
    grid = (-(-dim // 256), tokens, 1)
    return kernel(
        f"embed_{kind}_{dim}", "embed.cu", EmbedConstants(b.matrix(op.weight), op.scale), buffers, grid, "embedding"
    )


def store_hidden(b: Builder, op: ops.StoreHidden, tokens: int) -> Launch:
    """The hidden row of each token."""
    cols = op.norm.cols
    buffers = {"hidden": b.cache("v", op.layer), "x": b.act("x", tokens), "gain": b.data(op.norm), "state": "state"}
    shape = StoreHiddenConstants(cols, op.eps)
    return kernel(f"store_hidden_{cols}", "store_hidden.cu", shape, buffers, (tokens, 1, 1), "norm", threads=512)


def join(b: Builder, op: ops.Join, tokens: int) -> Launch:
    """joined (tokens, 2 * dim): the input of multi-token prediction."""
    table = op.embed.weight
    buffers = {
        "dst": b.act(op.dst, tokens),
        "w": b.data(table),
        "hidden": b.cache("v", op.layer),
        "token_gain": b.data(op.token_norm),
        "hidden_gain": b.data(op.hidden_norm),
        "history": "history",
        "state": "state",
    }
    shape, name = JoinConstants(b.matrix(table), op.embed.scale, op.eps), f"join_{table.type.name.lower()}_{table.cols}"
    return kernel(name, "join.cu", shape, buffers, (tokens, 2, 1), "embedding", threads=512)


def layer_inputs(b: Builder, table: ops.LayerTable, tokens: int) -> Launch:
    """The per-layer embeddings of all layers, in place of their projection."""
    weight, width = table.table.weight, table.width
    buffers = {
        "x": b.act("inputs", tokens),
        "w": b.data(weight),
        "gain": b.data(table.norm),
        "history": "history",
        "state": "state",
    }
    shape = LayerInputsConstants(b.matrix(weight), table.table.scale, table.eps, width)
    name = f"layer_inputs_{weight.type.name.lower()}_{weight.cols}"
    return kernel(name, "layer_inputs.cu", shape, buffers, (weight.cols // width, tokens, 1), "embedding")


def gate_input(b: Builder, layer: int, e: LayerEmbedding, tokens: int, unit: bool = False) -> Launch:
    """f(gate) times the layer's embedding, in place."""
    width, pitch, cols = e.gate.rows, b.plan.buffers["inputs"], e.gate.cols
    buffers = {"gated": b.act("gated", tokens), "inputs": b.act("inputs", tokens), "state": "state"}
    if unit:
        buffers["x"] = b.act("x", tokens)
    shape = GateInputConstants(activation(e), width, pitch, layer * width, unit, cols, e.eps)
    return kernel(f"gate_input_{layer}_{width}", "gate_input.cu", shape, buffers, (tokens, 1, 1), "embedding")


def _heads(a: GQA) -> dict[str, Any]:
    """The fields of HeadsConstants for attention."""
    norm = {None: Norm.NO_NORM, "head": Norm.PER_HEAD, "projection": Norm.ALL_HEADS}
    return {
        "heads": a.heads,
        "kv_heads": a.kv_heads,
        "key_dim": a.key_dim,
        "value_dim": a.value_dim,
        "rope_dims": a.rope.dims,
        "neox": a.rope.style == "neox",
        "norm": norm[a.qk_norm],
        "eps": a.eps,
        "query_scale": a.scale * LOG2E,
        "value_norm": a.value_norm,
        "window": a.window,
    }


def _head_buffers(b: Builder, a: GQA, tokens: int) -> dict[str, str | None]:
    """What q, k and v are made of; k and v where the layer does not share a cache."""
    own = {"k": b.act("k", tokens), "v": b.act("v", tokens), "k_gain": b.data(a.k_norm)} if a.shared is None else {}
    return {"q": b.act("q", tokens), "q_gain": b.data(a.q_norm), "table": b.rope(a.rope), "state": "state", **own}


def store_kv(b: Builder, layer: int, a: GQA, tokens: int) -> Launch:
    """Of a prompt: queries, scaled for attention and rotated, into `queries`; rotated keys, and values, into the cache.
    Queries alone where the layer shares a cache."""
    own = a.shared is None
    shape = HeadsConstants(**_heads(a) | ({} if own else {"kv_heads": 0, "window": 0}))
    buffers = {"queries": b.buffer("queries", 2 * tokens * a.heads * a.key_dim), **_head_buffers(b, a, tokens)}
    if own:
        buffers |= {"k_cache": b.cache("k", layer), "v_cache": b.cache("v", layer)}
    grid = (-(-(a.heads + 2 * shape.kv_heads) // 8), tokens, 1)
    return kernel(f"store_kv_{a.heads}_{shape.kv_heads}_{a.key_dim}", "store_kv.cu", shape, buffers, grid, "rope")


def activation(w: blocks.Gated | LayerEmbedding) -> GatedActivation:
    """What a kernel makes of gate and up."""
    return GatedActivation(ActivationCode[w.activation.upper()])


def choice(r: blocks.Router) -> ExpertChoice:
    """How a kernel chooses experts."""
    gating = GatingCode[r.gating.upper()]
    return ExpertChoice(r.experts, r.top_k, gating, r.normalize, r.groups, r.groups_used, r.scale, r.logit_scale)


def choice_buffer(b: Builder, r: blocks.Router) -> tuple[str, int]:
    """Where experts_up leaves the chosen experts for experts_down, and its words, which the router's kernel clears."""
    words = b.columns * r.top_k
    return b.buffer("choice", 8 * words), words


def splits(a: GQA | MLA, deep: bool = False) -> int:
    """Parts of the keys in decode."""
    return SPLITS if isinstance(a, GQA) else DEEP_SPLITS if deep else 2 * SPLITS


def chunk_keys(a: GQA | MLA) -> int:
    """Keys that attention takes at a time: what fits twice into shared memory."""
    return 32 if isinstance(a, MLA) or a.key_dim > 128 else 64


def attended(b: Builder, a: GQA) -> Activations:
    """What attention leaves for the output matrix: int8 blocks where a thread block has a whole group of heads, and
    whole warps quantise them."""
    group = a.heads // a.kv_heads
    fits = group <= 16 * _row_tiles(group) and group * a.value_dim % 128 == 0 and a.value_dim % 32 == 0
    return b.agreed("heads", a.output.cols, [a.output], [], fits)


def _row_tiles(group: int) -> int:
    """Tiles of 16 heads of a kv head that a block of attention has."""
    return 2 if group > 16 else 1


def attention(b: Builder, layer: int, a: GQA | MLA, deep: bool = False) -> Launch:
    """With what store_kv does for a prompt (GQA). Results go into `heads` (GQA), partial ones into `attention_o`."""
    stored, heads, buffers = layer, None, dict[str, str | None]()
    own: dict[str, Any] = {"heads": a.heads}
    if isinstance(a, MLA):
        own |= {"kv_heads": 1, "key_dim": a.row, "value_dim": a.kv_lora}
        buffers |= {"queries": "queries", "state": "state"}
    else:
        stored, heads = layer if a.shared is None else a.shared, attended(b, a)
        own |= _heads(a) | {"sinks": a.sinks is not None, "gated": a.gate is not None, "out_quantised": heads.quantised}
        buffers |= _head_buffers(b, a, b.columns) | (b.target(heads) if heads.quantised else {"out": b.act("heads")})
        buffers |= {"sinks": b.data(a.sinks), "gate": b.act("gate") if a.gate else None}
    latent, kv_heads, key_dim, value_dim = heads is None, own["kv_heads"], own["key_dim"], own["value_dim"]
    group, keys = a.heads // kv_heads, chunk_keys(a)
    row_tiles = _row_tiles(group)
    rows, steps, score_tiles = 16 * row_tiles, key_dim // 16, row_tiles * keys // 16
    warps = ATTENTION_THREADS // 32 * (2 if deep else 1)  # at depth a warp takes two tiles
    parts = next((n for n in (4, 2) if score_tiles * n <= warps and steps % n == 0), 1)
    k_pitch, v_pitch = key_dim + 8, value_dim + 8
    stages = 2
    together = 1 if latent or own["window"] else min(b.columns, max(1, rows // group))  # a window differs by column
    halves = rows * k_pitch + stages * keys * (k_pitch + (0 if latent else v_pitch)) + rows * (keys + 8)
    scores = max(rows * parts * (keys + 4), 0 if latent else ATTENTION_THREADS // 32 * key_dim)
    shared = 2 * halves + 4 * max(scores + 3 * rows, together * group * SPLITS)
    if key_dim % 16 or value_dim % 8 or shared > MAX_DYNAMIC:
        raise TinychatError(f"the CUDA attention kernel does not take heads of {key_dim} and {value_dim} values")
    resident = 2 if 2 * shared <= MAX_DYNAMIC else 1
    shape = AttentionConstants(
        **own,
        own=stored == layer,
        row_tiles=row_tiles,
        chunk_keys=keys,
        stages=stages,
        parts=parts,
        splits=splits(a, deep),
        together=together,
        places=MULTIPROCESSORS * resident,
        latent=latent,
        columns=b.columns,
    )
    buffers |= {
        "partial": b.buffer("attention_o", 2 * b.columns * splits(a, deep) * a.heads * value_dim),
        "ml": b.buffer("attention_ml", 8 * b.columns * splits(a, deep) * a.heads),
        "tickets": b.buffer("tickets", 4 * b.columns * kv_heads),
        "k_cache": b.cache("k", stored),
        "v_cache": b.cache("k" if latent else "v", stored),
    }
    window = f"_{shape.window}" if shape.window else ""
    name = f"attention_{a.heads}_{kv_heads}_{key_dim}{window}{'_deep' if deep else ''}"
    grid = (splits(a, deep), -(-group // rows), b.columns * kv_heads)
    if b.columns > 1:  # a part of the keys behind the other, so that those which have keys begin at once
        grid = grid[::-1]
    return kernel(
        name,
        "attention.cu",
        shape,
        buffers,
        grid,
        "attention",
        threads=ATTENTION_THREADS,
        shared=shared,
        resident=resident,
    )


def follow(b: Builder) -> Launch:
    """What stands between a verify step of two and the draft behind it."""
    return _from_step_to_step(b, "follow", {"greedy": b.buffer("greedy", STATE_BYTES)})


def next_step(b: Builder) -> Launch:
    """What stands between that draft and the next verify step."""
    return _from_step_to_step(b, "next_step", {"stand_ins": b.buffer("stand_ins", 4 * (b.max_context + 1))})


def _from_step_to_step(b: Builder, name: str, own: dict[str, str]) -> Launch:
    assert b.columns == 2
    buffers = {
        "history": "history",
        "state": "state",
        "kept": b.buffer("kept", STATE_BYTES),
        "chosen": b.buffer("chosen", 4 * b.columns),
        **own,
    }
    shape = FollowConstants(words=len(WORDS), columns=b.columns)
    return kernel(name, f"{name}.cu", shape, buffers, (1, 1, 1), "sampling", threads=32)


def sample(b: Builder, ring_first: int = 0) -> list[Launch]:
    """The next token, from the logits."""
    vocab = b.plan.vocab
    n = b.columns
    shape = SampleConstants(vocab, RING, ring_first, STRETCH, CANDIDATES, MAX_K, columns=n)
    stretches = -(-vocab // STRETCH)
    lists = {
        "list": b.buffer("candidates", 8 * n * stretches * CANDIDATES),
        "counts": b.buffer("counts", 4 * n * stretches),
        "parts": b.buffer("parts", 8 * n * stretches),
        "adjusted": b.buffer("adjusted", 4 * n * vocab),
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
            "bias": b.buffer("bias", 4 * vocab),
            "allowed": b.buffer("allowed", 4 * -(-vocab // 32)),
        },
        (stretches, n, 1),
        "sampling",
        threads=SAMPLING_THREADS,
    )
    last = kernel(
        f"choose_token_{vocab}",
        "choose_token.cu",
        shape,
        {
            "ring": "ring",
            "history": "history",
            "state": "state",
            "chosen": b.buffer("chosen", 4 * n),
            **lists,
            "logits": "logits",
        },
        (n, 1, 1),
        "sampling",
        threads=SAMPLING_THREADS,
    )
    return [first, last]
