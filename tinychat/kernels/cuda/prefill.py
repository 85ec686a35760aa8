"""A plan over many tokens at once as kernel launches: products of halves on tensor cores, experts grouped by their
tokens, keys and values of latent attention made once per cache row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.kernels.blocks import (
    GQA,
    KDA,
    MLA,
    DeltaRule,
    Dense,
    Experts,
    Gated,
    Layer,
    LayerEmbedding,
    ShortConvolution,
    Weight,
)
from tinychat.kernels.cuda.builder import ROUTE_SLOTS, Builder
from tinychat.kernels.cuda.constants import (
    SPAN,
    AddExpertsConstants,
    GroupPairsConstants,
    PromptAttentionConstants,
    PromptCombineConstants,
    PromptExpertsConstants,
    PromptGatedConstants,
    PromptLatentAttentionConstants,
    PromptLatentConstants,
    PromptLinearConstants,
    PromptLinearPart,
    PromptNormConstants,
    RouterConstants,
    Tile,
)
from tinychat.kernels.cuda.latent import latent_fields
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.launches import (
    activation,
    beside_each_other,
    choice,
    embed,
    gate_input,
    join,
    layer_inputs,
    norm_add,
    store_hidden,
    store_kv,
)
from tinychat.kernels.cuda.layout import keys_of
from tinychat.kernels.cuda.quants import FLOATS, QUANTS
from tinychat.kernels.cuda.recurrent import kda_inputs, prompt_delta, prompt_short_convolution
from tinychat.kernels.ops import LinearAdd, NormAdd, NormLinear

SIZES = (16, 64, 1024)  # tokens up to which the kernels are of one kind each; beyond, there is one kind more
ABSORBED = SIZES[1]  # tokens up to which queries of latent attention are absorbed
LATENT_BLOCKS = 1056  # of prompt_latent.cu, at most
ROUTER_BLOCKS = 4  # that share the experts of as many tokens
ROUTER_WARPS, ROUTER_EXPERTS = 16, 4  # of a block; those of a warp at a time (router.cu)
PARTS = 132  # blocks that share the cache rows in absorbed attention: one for each multiprocessor of an H100
KEY_TILES = 16  # blocks that share the cache rows in a graph, whose grids do not know how many there are


@dataclass(frozen=True)
class Chip:
    """What of the GPU decides how its kernels are cut."""

    warpgroups: bool  # it has wgmma
    max_shared: int  # bytes of shared memory that a block may have

    def fitting(self, tile: Tile) -> Tile:
        """The tile with as many stages as fit."""
        most = (self.max_shared - 4096) // tile.stage_bytes  # less what the kernels declare themselves
        return replace(tile, stages=max(2, min(tile.stages, most)))


def padded(values: int) -> int:
    """The length of a row of halves: halves.cuh."""
    return -(-values // SPAN) * SPAN


def _absorbed_shared(a: MLA) -> int:
    """Bytes of shared memory of prompt_latent_attention.cu: 64 queries, and 64 keys twice."""
    return 2 * 3 * 64 * a.row + 1024


class Prefill:
    """Launches for up to `tokens` tokens over the buffers of a decode Builder, which grow to that many rows. `fresh`:
    with few cache rows in front of them."""

    def __init__(self, builder: Builder, tokens: int, chip: Chip, *, fresh: bool = False) -> None:
        self.b, self.tokens, self.chip, self.fresh = builder, tokens, chip, fresh

    def one_of_each(self) -> Prefill:
        """As Builder.one_of_each."""
        return Prefill(self.b.one_of_each(), self.tokens, self.chip, fresh=self.fresh)

    @property
    def in_graph(self) -> bool:
        """Whether these launches are so short that they go into graphs, whose grids are for more than the tokens."""
        return self.tokens <= SIZES[-1]

    @property
    def absorbs(self) -> bool:
        """Whether there is latent attention with absorbed queries."""
        return any(isinstance(a := layer.attention, MLA) and self._absorbs(a) for layer in self.b.plan.layers)

    def layers(self) -> list[Launch]:
        """Embedding and all layers: the residual stream of every token, and their cache rows."""
        out = [self._embed()]
        if table := self.b.plan.layer_table:
            out += [*self._projections("x", None, table.eps, [(table.project, None, "inputs")]), self._inputs(table)]
        made = dict[int, list[Launch]]()
        for i, layer, like, others in self.b.layers():
            if like == i:
                made[i] = self._layer(i, layer)
            out += [launch.over(others) for launch in made[like]]
        hidden = [op for op in self.b.plan.ops if isinstance(op, ops.StoreHidden)]
        return [*out, *(self._each_token(store_hidden(self.b, op, self.tokens)) for op in hidden)]

    def mtp(self) -> list[Launch]:
        """The plan's multi-token prediction: its residual stream of every token, and their cache rows."""
        b, mtp = self.b, self.b.plan.mtp
        joined = b.plan.draft_ops[0]
        assert mtp and isinstance(joined, ops.Join)
        return [
            self._each_token(join(b, joined, self.tokens)),
            *self._projections(joined.dst, None, mtp.eps, [(mtp.project, None, "x")]),
            *self._layer(len(b.plan.layers), mtp.layer),
        ]

    def _layer(self, i: int, layer: Layer) -> list[Launch]:
        out = list[Launch]()
        match layer.attention:
            case GQA() as a:
                out += self._gqa(i, a)
            case MLA() as m:
                out += self._mla(i, m)
            case DeltaRule() as r:
                out += self._delta_rule(i, r)
            case KDA() as k:
                out += self._kda(i, k)
            case ShortConvolution() as c:
                out += self._short_convolution(i, c)
        match layer.feed_forward:
            case Dense() as d:
                down = ops.added("ffn", d.weights.down, None, d.post_norm, d.eps, d.residual_scale, d.stream_scale)
                out += [self._norm("x", d.norm, d.eps), self._gated(d.weights, "inner"), *self._added("inner", down)]
            case Experts() as e:
                out += self._experts(i, e)
        if layer.embedding:
            out += self._layer_embedding(i, layer.embedding)
        return out

    def head(self, op: ops.Head) -> list[Launch]:
        """Logits of every token into logits_all (tokens, vocab)."""
        dst = self.b.buffer("logits_all", 4 * self.tokens * op.weight.rows)
        return [
            self._norm("x", op.norm, op.eps),
            self._linear("head", [op.weight], "normed", [dst], scale=op.scale, softcap=op.softcap),
        ]

    # --- pieces

    @staticmethod
    def _each_token(launch: Launch) -> Launch:
        """A launch with as many blocks in the first dimension as there are tokens."""
        return replace(launch, sized=lambda count, keys: (count, *launch.grid[1:]))

    def _embed(self) -> Launch:
        launch = embed(self.b, self.b.plan.embed, self.tokens)
        return replace(launch, sized=lambda count, keys: (launch.grid[0], count, 1))

    def _inputs(self, table: ops.LayerTable) -> Launch:
        launch = layer_inputs(self.b, table, self.tokens)
        return replace(launch, sized=lambda count, keys: (launch.grid[0], count, 1))

    def _layer_embedding(self, layer: int, e: LayerEmbedding) -> list[Launch]:
        gated = gate_input(self.b, layer, e, self.tokens, unit=True)
        return [
            self._norm("x", None, e.eps, unit=True),
            self._linear("linear", [e.gate], "normed", [self.b.act("gated", self.tokens)]),
            self._each_token(gated),
            self._norm("gated", None, e.eps),
            *self._added("normed", ops.added("gated", e.project, None, e.post_norm, e.eps, 1.0, e.stream_scale)),
        ]

    def _halves(self, name: str, rows: int, values: int) -> str:
        """A buffer of rows of halves."""
        return self.b.buffer(name, 2 * rows * padded(values))

    def _tile(self, weights: Sequence[Weight], count: int) -> Tile:
        """For products with `count` tokens."""
        floating = any(w.transposed or w.type in FLOATS for w in weights)  # whose registers hold four times as much
        depth = 1 if floating else 2
        small, short, medium = SIZES
        if count <= short:
            tile = self._split_tile(-(-weights[0].cols // SPAN), count <= small)
        elif self.chip.warpgroups:
            large = count > medium
            rows, tokens = 2 if large and not floating else 1, 128 if large else 64
            return Tile(rows, tokens, split=1, depth=depth, stages=4, warpgroups=True)
        elif count <= medium:
            tile = Tile(1, 64, split=2, depth=depth, stages=3)
        else:
            tile = Tile(1 if floating else 2, 64, split=1, depth=depth, stages=3)
        return self.chip.fitting(tile)

    def _split_tile(self, spans: int, small: bool) -> Tile:
        """For products with a few tokens: warps share rows of so many spans, as many as there is work for."""
        split = (16 if spans > 8 else 8) if small else (8 if spans > 4 else 4)
        steps = -(-spans // split)
        stages, warps = max(2, min(steps + 1, 4)), 8 if split == 8 and small else 16
        return self.chip.fitting(Tile(1, 16 if small else 32, split, depth=1, stages=stages, warps=warps))

    def _grouped_tile(self, rows: int) -> Tile:
        """For products with each expert's tokens."""
        small, short, medium = SIZES
        if self.tokens <= short:
            return self.chip.fitting(Tile(1, 8 if self.tokens <= small else 16, split=2, depth=2, stages=3))
        rows = 1 if self.tokens <= medium else rows
        if self.chip.warpgroups:
            return Tile(rows, 64, split=1, depth=2, stages=4, warpgroups=True)
        return self.chip.fitting(Tile(rows, 64, split=1, depth=2, stages=3))

    def _sharing(self, tile: Tile, *weights: Weight) -> tuple[Tile, int]:
        """A tile of experts, and its bytes of shared memory: of a few tokens and of very many the weights' scales lie
        there, of a few their codes on the way too, where two blocks fit a multiprocessor and whole copies suffice."""
        cols, few, sizes = weights[0].cols, self.tokens <= SIZES[1], 0
        sharing = replace(tile, scales=True, ring=few, depth=1 if few else tile.depth)
        for w in weights:
            placed, p = self.b.weight(w), QUANTS[self.b.weight(w).tensor.kind]
            s1, s2 = cols // 32 * p.s1, cols // 256 * p.s2
            unaligned = cols % 256 or s1 % 16 or placed.start * s2 % 16 or placed.stride * s2 % 16
            if not p.s1 or w.run or unaligned or SIZES[1] < self.tokens <= SIZES[2]:
                return tile, tile.shared(cols)
            sizes += tile.block_rows * ((s1 | 16) + s2)
            sizes += few * tile.stages * tile.rows * 2 * tile.threads * (p.lo + p.two + p.one)
        sizes += sharing.shared(cols)
        return (sharing, sizes) if sizes <= self.chip.max_shared // 2 - 2048 else (tile, tile.shared(cols))

    def _norm(self, src: str, norm: Weight | None, eps: float, *, unit: bool = False) -> Launch:
        """Activations as halves in the buffer `normed`, normed where there is a gain, or with the gain 1 (`unit`)."""
        cols = norm.cols if norm else self.b.plan.buffers[src]
        buffers = {
            "dst": self._halves("normed", self.tokens, cols),
            "src": self.b.act(src, self.tokens),
            "gain": self.b.data(norm),
            "state": "state",
        }
        shape = PromptNormConstants(cols, eps, norm is not None or unit)
        return kernel(
            f"prompt_norm_{cols}", "prompt_norm.cu", shape, buffers, lambda count, keys: (count, 1, 1), "norm"
        )

    def _linear(
        self,
        name: str,
        weights: list[Weight],
        x: str,
        dst: list[str],
        biases: tuple[Weight | None, ...] = (),
        *,
        half: bool = False,
        add: bool = False,
        all_keys: bool = False,
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> Launch:
        """dst[i] = or += scale * (weights[i] @ x (+ biases[i])), rows of all of a weight's matrices; results in one
        buffer stand beside each other."""
        # as many cache rows as a longer prompt has tokens
        tile = self._tile(weights, max(self.tokens, SIZES[1] + 1) if all_keys else self.tokens)
        parts, first = list[PromptLinearPart](), 0
        buffers: dict[str, str | None] = {"x": x, "state": "state"}
        places = beside_each_other([(name, w.rows * w.groups) for name, w in zip(dst, weights)])
        for i, (w, place) in enumerate(zip(weights, places)):
            tiles = -(-w.rows * w.groups // tile.block_rows)
            parts.append(PromptLinearPart(self.b.matrix(w), w.rows * w.groups, *place, first, tiles))
            buffers |= {f"dst[{i}]": dst[i], f"w[{i}]": self.b.data(w)}
            buffers[f"bias[{i}]"] = self.b.data(biases[i]) if biases else None
            first += tiles
        shape = PromptLinearConstants(len(parts), tuple(parts), tile, half, add, all_keys, scale, softcap)

        def grid(count: int, keys: int) -> tuple[int, int, int]:
            tiles = -(-(keys if all_keys else count) // tile.tokens)
            return first, min(tiles, KEY_TILES) if all_keys and self.in_graph else tiles, 1

        quant = "_".join(dict.fromkeys(p.weight.type.name.lower() for p in parts))
        return kernel(
            f"prompt_{name}_{quant}_{first * tile.block_rows}x{weights[0].cols}",
            "prompt_linear.cu",
            shape,
            buffers,
            grid,
            f"prompt {quant}",
            threads=tile.threads,
            shared=tile.shared(weights[0].cols),
            resident=tile.resident,
        )

    # --- ops

    def _projections(
        self, src: str, norm: Weight | None, eps: float, outputs: Sequence[tuple[Weight, Weight | None, str]]
    ) -> list[Launch]:
        """Each (weight, bias, buffer of its results) over RMSNorm(src)."""
        weights, biases, names = zip(*outputs)
        dst = [self.b.act(d, self.tokens) for d in names]
        return [
            self._norm(src, norm, eps),
            self._linear("linear", list(weights), "normed", dst, biases),
        ]

    def _mla(self, layer: int, a: MLA) -> list[Launch]:
        inputs = [(w, None, name) for name, w in ops.latent_inputs(a).items()]
        projections = self._projections("x", a.norm, a.eps, inputs)
        if a.q_a:
            projections += self._projections("q_a", a.q_a_norm, a.eps, [(a.q, None, "q")])
        attend = self._attend_absorbed if self._absorbs(a) else self._attend_materialised
        return [*projections, *attend(layer, a), self._linear_add("attended", a.output, None, a.residual_scale)]

    def _absorbs(self, a: MLA) -> bool:
        """Whether queries go through W_k_b, instead of all rows of the cache: fewer products where tokens are few, and
        two kernels more."""
        few = not self.fresh and self.tokens <= ABSORBED and self.tokens * a.heads <= 2 * PARTS * 64
        whole = a.row % 64 == 0 and a.kv_lora % 128 == 0 and _absorbed_shared(a) <= self.chip.max_shared
        return self.chip.warpgroups and few and whole

    def _latent_rows(self, layer: int, a: MLA, absorbed: bool) -> Launch:
        """The cache rows, the queries, and what the products of either form read."""
        b, heads = self.b, a.heads
        per_head = a.row if absorbed else a.nope + a.rope.dims
        buffers = {
            "cache": b.cache("k", layer),
            "latents": None if absorbed else self._halves("latents", b.max_context, a.kv_lora),
            "queries": b.buffer("queries", 2 * self.tokens * heads * per_head),
            "nope": self._halves("nope", self.tokens * heads, a.nope) if absorbed else None,
            "q": b.act("q", self.tokens),
            "kv": b.act("kv", self.tokens),
            "kv_gain": b.data(a.kv_norm),
            "table": b.rope(a.rope),
            "state": "state",
        }

        def grid(count: int, keys: int) -> tuple[int, int, int]:
            rows = count if absorbed else keys
            return min(rows + -(-count * heads // 8), LATENT_BLOCKS), 1, 1

        shape = PromptLatentConstants(**latent_fields(a), absorbed=absorbed)
        return kernel(f"prompt_latent_{heads}", "prompt_latent.cu", shape, buffers, grid, "rope")

    def _attend_materialised(self, layer: int, a: MLA) -> list[Launch]:
        """Keys and values of all cache rows, then attention over them."""
        b, context, heads = self.b, self.b.max_context, a.heads
        dims, key_dim, v_dim = a.rope.dims, a.nope + a.rope.dims, a.v_b.rows
        keys, values = b.buffer("keys", 2 * context * heads * a.nope), b.buffer("values", 2 * context * heads * v_dim)
        return [
            self._latent_rows(layer, a, False),
            self._linear(
                "keys_values",
                [keys_of(a.k_b), a.v_b],
                "latents",
                [keys, values],
                half=True,
                all_keys=True,
            ),
            self._attend(
                PromptAttentionConstants(
                    heads, heads, key_dim, v_dim, a.nope, a.kv_lora + dims, a.kv_lora, gate=1 if a.gate else 0
                ),
                keys,
                values,
                b.cache("k", layer),
            ),
        ]

    def _attend_absorbed(self, layer: int, a: MLA) -> list[Launch]:
        """Queries through W_k_b, attention over the cache rows in parts of them, what it leaves through W_v_b."""
        b, heads, pairs, out = self.b, a.heads, self.tokens * a.heads, a.heads * a.v_b.rows
        rows = 2 * PARTS * 64  # of the parts' results, at most
        shared = {"partial": b.buffer("attention_o", 2 * rows * a.kv_lora), "ml": b.buffer("attention_ml", 8 * rows)}
        attended = self._halves("attended", self.tokens, out)
        shape = PromptCombineConstants(heads, a.kv_lora, PARTS, a.gate is not None, out, padded(out))
        combined = {
            "out": self._halves("combined", pairs, a.kv_lora),
            "rest": attended,
            **shared,
            "gate": b.act("gate", self.tokens) if a.gate else None,
            "state": "state",
        }
        return [
            self._latent_rows(layer, a, True),
            self._heads("absorb", a.k_b, "nope", "queries", a.row),
            kernel(
                f"prompt_latent_attention_{heads}_{a.row}",
                "prompt_latent_attention.cu",
                PromptLatentAttentionConstants(heads, a.row, a.kv_lora, PARTS),
                {**shared, "q": "queries", "cache": b.cache("k", layer), "state": "state"},
                (2 * PARTS, 1, 1),
                "attention",
                shared=_absorbed_shared(a),
            ),
            kernel(
                f"prompt_combine_{heads}",
                "prompt_combine.cu",
                shape,
                combined,
                lambda count, keys: (count * heads, 1, 1),
                "attention",
            ),
            self._heads("value_up", a.v_b, "combined", attended, a.v_b.rows, padded(out)),
        ]

    def _heads(self, name: str, w: Weight, x: str, dst: str, pitch: int, token_pitch: int = 0) -> Launch:
        """A head's matrix over its own activations; results as halves, a head's `pitch` values behind the one's before,
        with a `token_pitch` in the order the next product reads."""
        small, spans = self.tokens <= SIZES[0], -(-w.cols // SPAN)
        split = min(4, 1 << (spans - 1).bit_length())
        tile = Tile(1, 16 if small else 32, split, depth=1, stages=2)
        tiles = -(-w.rows // tile.block_rows)
        part = PromptLinearPart(self.b.matrix(w), w.rows, token_pitch or pitch * w.groups, 0, 0, tiles)
        shape = PromptLinearConstants(
            1, (part,), tile, True, False, False, 1.0, 0.0, w.groups, pitch, placed=token_pitch > 0
        )
        quant = part.weight.type.name.lower()
        return kernel(
            f"prompt_{name}_{quant}_{w.rows}x{w.cols}",
            "prompt_linear.cu",
            shape,
            {"x": x, "state": "state", "dst[0]": dst, "w[0]": self.b.data(w)},
            lambda count, keys: (tiles, -(-count // tile.tokens), w.groups),
            f"prompt {quant}",
            threads=tile.threads,
            shared=tile.shared(w.cols),
        )

    def _gqa(self, layer: int, a: GQA) -> list[Launch]:
        stored = store_kv(self.b, layer, a, self.tokens)
        return [
            *self._projections("x", a.norm, a.eps, ops.projections(a)),
            replace(stored, sized=lambda count, keys: (stored.grid[0], count, 1)),
            self._attend(
                PromptAttentionConstants(
                    a.heads,
                    a.kv_heads,
                    a.key_dim,
                    a.value_dim,
                    a.key_dim,
                    0,
                    0,
                    a.window,
                    sinks=a.sinks is not None,
                    gate=a.value_dim if a.gate else 0,
                ),
                self.b.cache("k", layer if a.shared is None else a.shared),
                self.b.cache("v", layer if a.shared is None else a.shared),
                None,
                a.sinks,
            ),
            *self._added("attended", ops.added("heads", a.output, a.output_bias, a.post_norm, a.eps, a.residual_scale)),
        ]

    def _delta_rule(self, layer: int, a: DeltaRule) -> list[Launch]:
        attended = self._halves("attended", self.tokens, a.output.cols)
        outputs = [(a.qkv, None, "qkv"), (a.gate, None, "gate"), (a.beta, None, "beta"), (a.alpha, None, "alpha")]
        return [
            *self._projections("x", a.norm, a.eps, outputs),
            *prompt_delta(self.b, layer, a, self.tokens, attended, self.chip.max_shared),
            self._linear_add("attended", a.output, None, 1.0),
        ]

    def _kda(self, layer: int, a: KDA) -> list[Launch]:
        attended = self._halves("attended", self.tokens, a.output.cols)
        inputs, later = kda_inputs(a)
        return [
            *self._projections("x", a.norm, a.eps, inputs),
            *chain.from_iterable(self._projections(src, None, a.eps, [output]) for src, output in later.items()),
            *prompt_delta(self.b, layer, a, self.tokens, attended, self.chip.max_shared),
            self._linear_add("attended", a.output, None, 1.0),
        ]

    def _short_convolution(self, layer: int, a: ShortConvolution) -> list[Launch]:
        mixed = self._halves("attended", self.tokens, a.output.cols)
        return [
            *self._projections("x", a.norm, a.eps, [(a.in_proj, None, "bcz")]),
            prompt_short_convolution(self.b, layer, a, self.tokens, mixed),
            self._linear_add("attended", a.output, None, 1.0),
        ]

    def _attend(
        self, shape: PromptAttentionConstants, keys: str, values: str, rope: str | None, sinks: Weight | None = None
    ) -> Launch:
        """Attention's results as halves in buffer `attended`."""
        k_size, v_size = -(-shape.key_dim // 64) * 128, -(-shape.value_dim // 64) * 128  # bytes of a row
        threads = 256 if self.tokens > SIZES[-1] else 128  # a warp takes 16 queries
        queries = threads // 2
        sizes = {n: queries * k_size + 2 * n * (k_size + v_size) + 1024 for n in (64, 32, 16)}
        chunk = next((n for n, size in sizes.items() if size <= self.chip.max_shared), 0)
        warpgroups = self.chip.warpgroups and chunk == 64 and shape.key_dim % 64 == 0 and shape.value_dim % 64 == 0
        if not chunk or shape.key_dim % 8 or shape.value_dim % 8 or shape.key_part % 8 or shape.rope_pitch % 8:
            raise TinychatError(
                f"the CUDA attention kernel does not take heads of {shape.key_dim} and {shape.value_dim} values"
            )
        buffers = {
            "out": self._halves("attended", self.tokens, shape.heads * shape.value_dim),
            "q": "queries",
            "keys": keys,
            "values": values,
            "rope": rope,
            "state": "state",
            "sinks": self.b.data(sinks),
            "gate": self.b.act("gate", self.tokens) if shape.gate else None,
        }
        return kernel(
            f"prompt_attention_{shape.heads}_{shape.kv_heads}_{shape.key_dim}",
            "prompt_attention.cu",
            replace(shape, chunk_keys=chunk, warpgroups=warpgroups),
            buffers,
            lambda count, keys: (-(-count // queries), shape.heads, 1),
            "attention",
            threads=threads,
            shared=sizes[chunk],
        )

    def _linear_add(self, src: str, w: Weight, bias: Weight | None, scale: float) -> Launch:
        """x += scale * (w @ src (+ bias))."""
        return self._linear("linear_add", [w], src, ["x"], (bias,), add=True, scale=scale)

    def _added(self, src: str, steps: Iterator[ops.Op]) -> list[Launch]:
        """The launches of `ops.added`, whose input is `src`."""
        out = []
        for op in steps:
            match op:
                case LinearAdd():
                    out.append(self._linear_add(src, op.weight, op.bias, op.scale))
                case NormLinear(weights=(w,), biases=biases, dst=(dst,)):
                    out.append(self._linear("linear", [w], src, [self.b.act(dst, self.tokens)], biases))
                case NormAdd():
                    out.append(self._norm_add(op.norm, op.eps, scale=op.scale, stream=op.stream_scale))
        return out

    def _gated(self, w: Gated, name: str, counts: str | None = None) -> Launch:
        """f(gate, up) of all tokens, from the halves `normed`; times what `counts` has of each."""
        gate, up = w.gate, w.up
        tile = self._tile([gate, up], self.tokens)
        tile = replace(tile, rows=1)
        buffers = {
            "dst": self._halves(name, self.tokens, gate.rows),
            "gate": self.b.data(gate),
            "up": self.b.data(up),
            "x": "normed",
            "state": "state",
            "counts": counts,
        }
        shape = PromptGatedConstants(
            self.b.matrix(gate), self.b.matrix(up), activation(w), tile, grouped=False, pairs_per_row=1
        )
        tiles, quant = -(-padded(gate.rows) // tile.block_rows), gate.type.name.lower()
        return kernel(
            f"prompt_gated_{quant}_{gate.rows}x{gate.cols}",
            "prompt_gated.cu",
            shape,
            buffers,
            lambda count, keys: (tiles, -(-count // tile.tokens), 1),
            f"prompt {quant}",
            threads=tile.threads,
            shared=tile.shared(gate.cols),
        )

    def _experts(self, layer: int, block: Experts) -> list[Launch]:
        """Routing, tokens grouped by expert, gate and up and down of each group, the shared expert, all added to x."""
        beside = block.beside
        b, e, top, w, shared = self.b, block.router.experts, block.router.top_k, block.weights, block.shared
        ff, dim, scale = w.ff, w.down.rows, block.residual_scale
        pairs = self.tokens * top
        tile, down_tile = self._grouped_tile(1), self._grouped_tile(2)
        tile, shared_up = self._sharing(tile, w.gate, w.up)
        down_tile, shared_down = self._sharing(down_tile, w.down)
        assert tile.tokens == down_tile.tokens

        def tiles(count: int) -> int:  # at most: every expert's last tile may be short
            return min(e, count * top) + count * top // tile.tokens

        groups = {
            "tiles": b.buffer("tiles", 4 * (1 + 3 * (e + tiles(self.tokens)))),
            "order": b.buffer("order", 4 * pairs),
        }
        gate_buffers = {
            "dst": self._halves("pairs", pairs, ff),
            "gate": b.data(w.gate),
            "up": b.data(w.up),
            "x": "normed",
            "state": "state",
            "gate_bias": b.data(w.gate_bias),
            "up_bias": b.data(w.up_bias),
            **groups,
        }
        gated = PromptGatedConstants(
            b.matrix(w.gate), b.matrix(w.up), activation(w), tile, grouped=True, pairs_per_row=top
        )
        rows, quant = -(-padded(ff) // tile.block_rows), w.gate.type.name.lower()
        out: list[Launch] = []
        if beside:
            out = [
                self._norm("x", beside.norm, block.eps),
                self._gated(beside.weights, "inner"),
                self._linear("linear", [beside.weights.down], "inner", [b.act("y", self.tokens)]),
                self._norm_add(beside.dense_norm, block.eps, dst="z", add=False),
            ]
        out += [
            self._router(layer, block, pairs),
            *([self._norm("x", block.norm, block.eps)] if block.router.norm else []),
        ]
        if shared:
            counts = "shared_counts" if block.shared_scale else None
            alone = [self._gated(shared, "inner", counts), self._linear_add("inner", shared.down, None, scale)]
            out += [replace(launch, aside=True) for launch in alone]
        down_quant = w.down.type.name.lower()
        out += [
            kernel(
                f"group_{e}_{top}",
                "group_pairs.cu",
                GroupPairsConstants(e, top, tile.tokens),
                {**groups, "ids": "expert_ids", "state": "state"},
                (1, 1, 1),
                "routing",
                threads=1024,
            ),
            kernel(
                f"prompt_experts_up_{quant}_{ff}x{w.gate.cols}",
                "prompt_gated.cu",
                gated,
                gate_buffers,
                lambda count, keys: (rows, tiles(count), 1),
                f"prompt experts {quant}",
                shared=shared_up,
                resident=tile.resident,
            ),
            kernel(
                f"prompt_experts_down_{down_quant}_{dim}x{ff}",
                "prompt_experts.cu",
                PromptExpertsConstants(b.matrix(w.down), down_tile),
                {"dst": b.buffer("down_pairs", 4 * pairs * dim), "w": b.data(w.down), "x": "pairs", **groups},
                lambda count, keys: (-(-dim // down_tile.block_rows), tiles(count), 1),
                f"prompt experts {down_quant}",
                shared=shared_down,
            ),
            replace(
                kernel(
                    f"add_experts_{dim}",
                    "add_experts.cu",
                    AddExpertsConstants(dim, top, scale, beside is None),
                    {
                        "x": "y" if beside else "x",
                        "y": "down_pairs",
                        "weights": "expert_weights",
                        "state": "state",
                        "ids": "expert_ids",
                        "bias": b.data(w.down_bias),
                    },
                    lambda count, keys: (-(-dim // 1024), count, 1),
                    "experts",
                ),
                joins=True,
            ),
        ]
        if beside:
            out += [
                self._norm_add(beside.experts_norm, block.eps, dst="z"),
                self._norm_add(beside.post_norm, block.eps, stream=beside.stream_scale, src="z"),
            ]
        return out

    def _norm_add(self, norm: Weight, eps: float, **options: Any) -> Launch:
        return self._each_token(norm_add(self.b, norm, eps, tokens=self.tokens, **options))

    def _router(self, layer: int, block: Experts, pairs: int) -> Launch:
        r, (layers, used) = block.router, self.b.routes
        experts, cols = r.experts, r.weight.cols
        cluster = ROUTER_BLOCKS if self.chip.warpgroups and self.tokens <= SIZES[1] else 1
        tokens = 4 if cluster > 1 or SIZES[1] < self.tokens <= SIZES[2] else 2 if self.tokens <= SIZES[1] else 8
        tokens = max(1, min(tokens, (160 << 10) // (4 * cols)))  # their float32 values lie in shared memory
        if tokens < cluster:
            cluster = 1
        buffers = {
            "ids": self.b.buffer("expert_ids", 4 * pairs),
            "weights": self.b.buffer("expert_weights", 4 * pairs),
            "normed": self._halves("normed", self.tokens, cols),
            "w": self.b.data(r.weight),
            "x": "x",
            "gain": self.b.data(r.norm or block.norm),
            "expert_scale": self.b.data(r.expert_scale),
            "selection_bias": self.b.data(r.selection_bias),
            "router_bias": self.b.data(r.bias),
            "state": "state",
            "counts": self.b.buffer("shared_counts", 4 * self.tokens) if block.shared_scale else None,
            "shared_scale": self.b.data(block.shared_scale),
            "routes": self.b.routes_of(layer) if layer < len(self.b.plan.layers) else None,
        }
        parts = max(1, ROUTER_WARPS // -(-experts // cluster // ROUTER_EXPERTS))
        shape = RouterConstants(
            self.b.matrix(r.weight), choice(r), tokens, cluster, parts, block.eps, ROUTE_SLOTS, layers * used
        )
        return kernel(
            f"router_{experts}x{cols}",
            "router.cu",
            shape,
            buffers,
            lambda count, keys: (-(-count // tokens) * cluster, 1, 1),
            "routing",
            threads=32 * ROUTER_WARPS,
            shared=4 * tokens * (ROUTER_WARPS // tokens + cols + parts * experts + 2 * r.top_k),
            cluster=cluster,
        )
