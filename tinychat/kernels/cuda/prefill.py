"""A plan over many tokens at once as kernel launches: products of halves on tensor cores, experts grouped by their
tokens, keys and values of latent attention made once per cache row."""

from __future__ import annotations

from dataclasses import replace

from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.kernels.cuda import constants
from tinychat.kernels.cuda.constants import LOG2E, SPAN, Tile
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.layout import FLOATS, keys_of
from tinychat.kernels.cuda.step import Builder, choice, embed, store_kv
from tinychat.kernels.ops import Weight

SIZES = (16, 64, 1024)  # tokens up to which the kernels are of one kind each; beyond, there is one kind more
LATENT_BLOCKS = 1056  # of prompt_latent.cu, at most
FEW_TILES = 4  # blocks that share the cache rows in a graph, whose grids do not know how many there are
QUERIES = 128  # rows of a block of prompt_attention.cu
MAX_SHARED = 227 << 10  # bytes of shared memory of a block


def padded(values: int) -> int:
    """The length of a row of halves: halves.cuh."""
    return -(-values // SPAN) * SPAN


class Prefill:
    """Launches for up to `tokens` tokens over the buffers of a decode Builder, which grow to that many rows."""

    def __init__(self, builder: Builder, tokens: int, warpgroups: bool) -> None:
        self.b, self.tokens = builder, tokens
        self.warpgroups = warpgroups  # the GPU has wgmma

    @property
    def in_graph(self) -> bool:
        """Whether these launches are few tokens' and so short that launching them one by one takes longer."""
        return self.tokens <= SIZES[1]

    def layers(self) -> list[Launch]:
        """Embedding and all layers: the residual stream of every token, and their cache rows."""
        out: list[Launch] = []
        todo = list(self.b.plan.ops[:-1])
        while todo:
            op = todo.pop(0)
            if isinstance(op, ops.Embed):
                out.append(self._embed(op))
            elif isinstance(op, ops.LatentStore):
                absorb, attend, value = todo.pop(0), todo.pop(0), todo.pop(0)
                assert isinstance(absorb, ops.Absorb) and isinstance(attend, ops.Attention)
                assert isinstance(value, ops.ValueUp)
                out += self._latent_attention(op, absorb, attend, value)
            elif isinstance(op, ops.RopeStore):
                attend = todo.pop(0)
                assert isinstance(attend, ops.Attention)
                out += self._attention(op, attend)
            elif isinstance(op, ops.Route):
                up, down = todo.pop(0), todo.pop(0)
                assert isinstance(up, ops.ExpertsUp) and isinstance(down, ops.ExpertsDown)
                out += self._experts(op, up, down)
            else:
                out += getattr(self, "_" + type(op).__name__)(op)
        return out

    def head(self) -> list[Launch]:
        """Logits of every token into logits_all (tokens, vocab)."""
        op = self.b.plan.ops[-1]
        assert isinstance(op, ops.Head)
        dst = self.b.buffer("logits_all", 4 * self.tokens * op.weight.rows)
        return [self._norm("x", op.norm, op.eps), self._linear("head", [op.weight], "normed", [dst], [op.weight.rows])]

    # --- pieces

    def _embed(self, op: ops.Embed) -> Launch:
        launch = embed(self.b, op, self.tokens)
        return replace(launch, sized=lambda count, keys: (launch.grid[0], count, 1))

    def _halves(self, name: str, rows: int, values: int) -> str:
        """A buffer of rows of halves."""
        return self.b.buffer(name, 2 * rows * padded(values))

    def _tile(self, *weights: Weight) -> Tile:
        """For products with all tokens."""
        floating = any(w.transposed or w.type in FLOATS for w in weights)  # whose registers hold four times as much
        depth = 1 if floating else 2
        small, short, medium = SIZES
        if self.tokens <= small:
            return Tile(1, 16, split=8, depth=2 * depth, stages=3)
        if self.tokens <= short:
            return Tile(1, 32, split=4, depth=2 * depth, stages=2)
        if self.tokens <= medium:
            if self.warpgroups:
                return Tile(1, 64, split=1, depth=depth, stages=4, warpgroups=True)
            return Tile(1, 64, split=2, depth=depth, stages=3)
        if self.warpgroups:
            return Tile(1 if floating else 2, 128, split=1, depth=depth, stages=4, warpgroups=True)
        return Tile(1 if floating else 2, 64, split=1, depth=depth, stages=3)

    def _grouped_tile(self, rows: int) -> Tile:
        """For products with each expert's tokens."""
        small, short, _ = SIZES
        if self.tokens <= short:
            return Tile(1, 8 if self.tokens <= small else 16, split=2, depth=2, stages=3)
        return Tile(rows, 64, split=1, depth=2, stages=4 if self.warpgroups else 3, warpgroups=self.warpgroups)

    def _norm(self, src: str, norm: Weight | None, eps: float) -> Launch:
        assert norm is not None
        buffers = {
            "dst": self._halves("normed", self.tokens, norm.cols),
            "src": self.b.act(src, self.tokens),
            "gain": self.b.data(norm),
            "state": "state",
        }
        shape = constants.PromptNorm(norm.cols, eps)
        return kernel(
            f"prompt_norm_{norm.cols}", "prompt_norm.cu", shape, buffers, lambda count, keys: (count, 1, 1), "norm"
        )

    def _linear(
        self,
        name: str,
        weights: list[Weight],
        x: str,
        dst: list[str],
        pitches: list[int],
        biases: tuple[Weight | None, ...] = (),
        *,
        half: bool = False,
        add: bool = False,
        all_keys: bool = False,
    ) -> Launch:
        """dst[i] (tokens, pitches[i]) = or += weights[i] @ x (+ biases[i]), rows of all of a weight's matrices."""
        tile, parts, first = self._tile(*weights), list[constants.Part](), 0
        if all_keys:
            tile = Prefill(self.b, max(self.tokens, SIZES[1] + 1), self.warpgroups)._tile(*weights)
        buffers: dict[str, str | None] = {"x": x, "state": "state"}
        for i, w in enumerate(weights):
            tiles = -(-w.rows * w.groups // tile.block_rows)
            parts.append(constants.Part(self.b.matrix(w), w.rows * w.groups, pitches[i], first, tiles))
            buffers |= {f"dst[{i}]": dst[i], f"w[{i}]": self.b.data(w)}
            buffers[f"bias[{i}]"] = self.b.data(biases[i]) if biases else None
            first += tiles
        shape = constants.PromptLinear(len(parts), tuple(parts), tile, half, add, all_keys)

        def grid(count: int, keys: int) -> tuple[int, int, int]:
            tiles = -(-(keys if all_keys else count) // tile.tokens)
            return first, min(tiles, FEW_TILES) if all_keys and self.in_graph else tiles, 1

        quant = "_".join(dict.fromkeys(p.weight.type.name.lower() for p in parts))
        return kernel(
            f"prompt_{name}_{quant}_{first * tile.block_rows}x{weights[0].cols}",
            "prompt_linear.cu",
            shape,
            buffers,
            grid,
            f"prompt {quant}",
            shared=tile.shared,
        )

    # --- ops

    def _NormLinear(self, op: ops.NormLinear) -> list[Launch]:
        dst = [self.b.act(d, self.tokens) for d in op.dst]
        pitches = [self.b.plan.buffers[d] for d in op.dst]
        return [
            self._norm(op.src, op.norm, op.eps),
            self._linear("linear", list(op.weights), "normed", dst, pitches, op.biases),
        ]

    def _latent_attention(
        self, store: ops.LatentStore, absorb: ops.Absorb, attend: ops.Attention, value: ops.ValueUp
    ) -> list[Launch]:
        """Keys and values of all cache rows from their latent parts, then attention over them."""
        b, context, heads = self.b, self.b.max_context, store.heads
        dims, key_dim, v_dim = store.rope.dims, store.nope + store.rope.dims, value.weight.rows
        shape = constants.StoreLatent(
            heads,
            store.nope,
            store.kv_lora,
            dims,
            neox=store.rope.style == "neox",
            eps=store.eps,
            query_scale=attend.scale * LOG2E,
        )
        buffers = {
            "cache": b.cache("k", store.layer),
            "latents": self._halves("latents", context, store.kv_lora),
            "queries": b.buffer("queries", 2 * self.tokens * heads * key_dim),
            "q": b.act(store.q, self.tokens),
            "kv": b.act(store.kv, self.tokens),
            "kv_gain": b.data(store.norm),
            "table": b.rope(store.rope),
            "state": "state",
        }
        keys, values = b.buffer("keys", 2 * context * heads * store.nope), b.buffer("values", 2 * context * heads * v_dim)
        return [
            kernel(
                f"prompt_latent_{heads}",
                "prompt_latent.cu",
                shape,
                buffers,
                lambda count, keys: (min(keys + -(-count * heads // 8), LATENT_BLOCKS), 1, 1),
                "rope",
            ),
            self._linear(
                "keys_values",
                [keys_of(absorb.weight), value.weight],
                "latents",
                [keys, values],
                [heads * store.nope, heads * v_dim],
                half=True,
                all_keys=True,
            ),
            self._attend(
                attend,
                constants.PromptAttention(
                    heads, heads, key_dim, v_dim, store.nope, store.kv_lora + dims, store.kv_lora
                ),
                keys,
                values,
                b.cache("k", store.layer),
            ),
        ]

    def _attention(self, store: ops.RopeStore, attend: ops.Attention) -> list[Launch]:
        stored = store_kv(self.b, store, attend.scale * LOG2E, self.tokens)
        k, v = attend.key_dim, attend.value_dim
        return [
            replace(stored, sized=lambda count, keys: (stored.grid[0], count, 1)),
            self._attend(
                attend,
                constants.PromptAttention(attend.heads, attend.kv_heads, k, v, k, 0, 0),
                self.b.cache("k", attend.layer),
                self.b.cache("v", attend.layer),
                None,
            ),
        ]

    def _attend(
        self, op: ops.Attention, shape: constants.PromptAttention, keys: str, values: str, rope: str | None
    ) -> Launch:
        """Attention's results as halves, for the LinearAdd that follows."""
        k_size, v_size = -(-shape.key_dim // 64) * 128, -(-shape.value_dim // 64) * 128  # bytes of a row
        sizes = {n: QUERIES * k_size + 2 * n * (k_size + v_size) + 1024 for n in (64, 32, 16)}
        chunk = next((n for n, size in sizes.items() if size <= MAX_SHARED), 0)
        warpgroups = self.warpgroups and chunk == 64 and shape.key_dim % 64 == 0 and shape.value_dim % 64 == 0
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
        }
        return kernel(
            f"prompt_attention_{shape.heads}_{shape.kv_heads}_{shape.key_dim}",
            "prompt_attention.cu",
            replace(shape, chunk_keys=chunk, warpgroups=warpgroups),
            buffers,
            lambda count, keys: (-(-count // QUERIES), op.heads, 1),
            "attention",
            shared=sizes[chunk],
        )

    def _LinearAdd(self, op: ops.LinearAdd) -> list[Launch]:
        x = "attended" if op.src == "heads" else "inner"
        return [self._linear("linear_add", [op.weight], x, ["x"], [op.weight.rows], (op.bias,), add=True)]

    def _gated(self, gate: Weight, up: Weight, name: str) -> Launch:
        """silu(gate) * up of all tokens, from the halves `normed`."""
        tile = self._tile(gate, up)
        tile = replace(tile, rows=1)
        buffers = {
            "dst": self._halves(name, self.tokens, gate.rows),
            "gate": self.b.data(gate),
            "up": self.b.data(up),
            "x": "normed",
            "state": "state",
        }
        shape = constants.PromptGated(self.b.matrix(gate), self.b.matrix(up), tile, grouped=False, pairs_per_row=1)
        tiles, quant = -(-padded(gate.rows) // tile.block_rows), gate.type.name.lower()
        return kernel(
            f"prompt_gated_{quant}_{gate.rows}x{gate.cols}",
            "prompt_gated.cu",
            shape,
            buffers,
            lambda count, keys: (tiles, -(-count // tile.tokens), 1),
            f"prompt {quant}",
            shared=tile.shared,
        )

    def _GateUp(self, op: ops.GateUp) -> list[Launch]:
        return [self._norm("x", op.norm, op.eps), self._gated(op.gate, op.up, "inner")]

    def _experts(self, route: ops.Route, up: ops.ExpertsUp, down: ops.ExpertsDown) -> list[Launch]:
        """Routing, tokens grouped by expert, gate and up and down of each group, the shared expert, all added to x."""
        b, e, ff, dim, top = self.b, route.router.rows, up.gate.rows, down.down.rows, up.top_k
        pairs = self.tokens * top
        tile, down_tile = self._grouped_tile(1), self._grouped_tile(2)
        assert tile.tokens == down_tile.tokens

        def tiles(count: int) -> int:  # at most: every expert's last tile may be short
            return min(e, count * top) + count * top // tile.tokens

        groups = {"tiles": b.buffer("tiles", 4 * (1 + 3 * (e + tiles(self.tokens)))), "order": b.buffer("order", 4 * pairs)}
        gate_buffers = {
            "dst": self._halves("pairs", pairs, ff),
            "gate": b.data(up.gate),
            "up": b.data(up.up),
            "x": "normed",
            "state": "state",
            **groups,
        }
        gated = constants.PromptGated(b.matrix(up.gate), b.matrix(up.up), tile, grouped=True, pairs_per_row=top)
        rows, quant = -(-padded(ff) // tile.block_rows), up.gate.type.name.lower()
        out = [
            self._router(route, pairs),
            kernel(
                f"group_{e}_{top}",
                "group_pairs.cu",
                constants.GroupPairs(e, top, tile.tokens),
                {**groups, "ids": "expert_ids", "state": "state"},
                (1, 1, 1),
                "routing",
                threads=1024,
            ),
            kernel(
                f"prompt_experts_up_{quant}_{ff}x{up.gate.cols}",
                "prompt_gated.cu",
                gated,
                gate_buffers,
                lambda count, keys: (rows, tiles(count), 1),
                f"prompt experts {quant}",
                shared=tile.shared,
            ),
        ]
        if up.shared_gate and up.shared_up and down.shared_down:
            s = down.shared_down
            out += [
                self._gated(up.shared_gate, up.shared_up, "inner"),
                self._linear("linear_add", [s], "inner", ["x"], [dim], add=True),
            ]
        quant = down.down.type.name.lower()
        return [
            *out,
            kernel(
                f"prompt_experts_down_{quant}_{dim}x{ff}",
                "prompt_experts.cu",
                constants.PromptExperts(b.matrix(down.down), down_tile),
                {"dst": b.buffer("down_pairs", 4 * pairs * dim), "w": b.data(down.down), "x": "pairs", **groups},
                lambda count, keys: (-(-dim // down_tile.block_rows), tiles(count), 1),
                f"prompt experts {quant}",
                shared=down_tile.shared,
            ),
            kernel(
                f"add_experts_{dim}",
                "add_experts.cu",
                constants.AddExperts(dim, top),
                {"x": "x", "y": "down_pairs", "weights": "expert_weights", "state": "state"},
                lambda count, keys: (-(-dim // 1024), count, 1),
                "experts",
            ),
        ]

    def _router(self, route: ops.Route, pairs: int) -> Launch:
        experts, cols = route.router.rows, route.router.cols
        tokens = min(2 if self.in_graph else 8, (160 << 10) // (4 * cols))
        buffers = {
            "ids": self.b.buffer("expert_ids", 4 * pairs),
            "weights": self.b.buffer("expert_weights", 4 * pairs),
            "normed": self._halves("normed", self.tokens, cols),
            "w": self.b.data(route.router),
            "x": "x",
            "gain": self.b.data(route.norm),
            "selection_bias": self.b.data(route.bias),
            "router_bias": self.b.data(route.router_bias),
            "state": "state",
        }
        shape = constants.Router(self.b.matrix(route.router), choice(route), tokens, route.eps)
        return kernel(
            f"router_{experts}x{cols}",
            "router.cu",
            shape,
            buffers,
            lambda count, keys: (-(-count // tokens), 1, 1),
            "routing",
            shared=4 * tokens * cols,
        )
