"""A plan over up to PREFILL tokens at once as kernel launches: matrix products on tensor cores, experts grouped by
their tokens."""

from __future__ import annotations

from tinychat.kernels import ops
from tinychat.kernels.cuda import constants
from tinychat.kernels.cuda.constants import LOG2E, TILE_ROWS, TILE_TOKENS
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.layout import FLOATS
from tinychat.kernels.cuda.step import PREFILL, Builder, attention, choice, embed, store_kv
from tinychat.kernels.ops import Weight


class Prefill:
    """Launches for `tokens` tokens over the buffers of a decode Builder, which grow to that many rows."""

    def __init__(self, builder: Builder, tokens: int = PREFILL) -> None:
        self.b, self.tokens = builder, tokens

    def layers(self) -> list[Launch]:
        """Embedding and all layers: the residual stream of every token, and their cache rows."""
        out: list[Launch] = []
        todo = list(self.b.plan.ops[:-1])
        while todo:
            op = todo.pop(0)
            if isinstance(op, ops.Embed):
                out.append(embed(self.b, op, self.tokens))
            elif isinstance(op, ops.LatentStore):
                absorb, attend = todo.pop(0), todo[0]
                assert isinstance(absorb, ops.Absorb) and isinstance(attend, ops.Attention)
                out += self._absorb(op, absorb, attend.scale * LOG2E)
            elif isinstance(op, ops.RopeStore):
                attend = todo[0]
                assert isinstance(attend, ops.Attention)
                out.append(store_kv(self.b, op, attend.scale * LOG2E, self.tokens))
            elif isinstance(op, ops.Attention):
                out.append(attention(self.b, op, self.tokens))
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
        return [
            self._prepare("x", [op.weight], norm=op.norm, eps=op.eps),
            self._matmul(op.weight, dst, op.weight.rows),
        ]

    # --- pieces

    def _prepare(
        self,
        src: str,
        readers: list[Weight],
        *,
        norm: Weight | None = None,
        eps: float = 0,
        up: str | None = None,
        rows_per_token: int = 1,
        token_stride: int = 0,
        row_stride: int = 0,
    ) -> Launch:
        """Activations for the matrices `readers`: rows of buffer `src` as they are, normed, or silu(src) * up."""
        cols = readers[0].cols
        rows = self.tokens * rows_per_token
        floating = {self.b.matrix(w).type in FLOATS for w in readers}
        shape = constants.Prepare(
            cols,
            normed=norm is not None,
            gated=up is not None,
            quantised=False in floating,
            floating=True in floating,
            rows_per_token=rows_per_token,
            token_stride=token_stride or rows_per_token * cols,
            row_stride=row_stride or cols,
            eps=eps,
        )
        buffers = {
            "xq": self.b.buffer("xq", rows * cols),
            "xs": self.b.buffer("xs", rows * -(-cols // 32) * 8),
            "xh": self.b.buffer("xh", rows * cols * 2 if shape.floating else 16),
            "src": src,
            "state": "state",
            "gain": self.b.data(norm),
            "up": up,
        }
        mode = "silu" if up else "normed" if norm else "plain"
        return kernel(f"prepare_{mode}_{cols}", "prepare.cu", shape, buffers, (rows, 1, 1), "activations")

    def _product(self, w: Weight, dst: str, bias: Weight | None, shape: constants.Matmul) -> Launch:
        half = shape.half
        buffers = {
            "w": self.b.data(w),
            **{name: name for name in ("xq", "xs", "xh", "state")},
            "dst": None if half else dst,
            "dst_half": dst if half else None,
            "bias": self.b.data(bias),
        }
        quant = shape.weight.type.name.lower()
        grid = (-(-w.rows // TILE_ROWS), -(-self.tokens // TILE_TOKENS), w.groups)
        return kernel(f"matmul_{quant}_{w.rows}x{w.cols}", "matmul.cu", shape, buffers, grid, f"matmul {quant}")

    def _matmul(self, w: Weight, dst: str, pitch: int, bias: Weight | None = None, add: bool = False) -> Launch:
        """dst (tokens, pitch) = or += w @ prepared (+ bias)."""
        return self._product(
            w, dst, bias, constants.Matmul(self.b.matrix(w), w.cols, pitch, out_step=0, half=False, add=add)
        )

    # --- ops

    def _NormLinear(self, op: ops.NormLinear) -> list[Launch]:
        src = self.b.act(op.src, self.tokens)
        return [self._prepare(src, list(op.weights), norm=op.norm, eps=op.eps)] + [
            self._matmul(w, self.b.act(d, self.tokens), self.b.plan.buffers[d], bias)
            for w, bias, d in zip(op.weights, op.biases, op.dst)
        ]

    def _absorb(self, store: ops.LatentStore, op: ops.Absorb, scale: float) -> list[Launch]:
        row, head = op.kv_lora + store.rope.dims, op.nope + store.rope.dims
        queries = self.b.buffer("queries", 2 * self.tokens * op.heads * row)
        shape = constants.StoreLatent(
            op.heads,
            op.nope,
            op.kv_lora,
            store.rope.dims,
            neox=store.rope.style == "neox",
            eps=store.eps,
            query_scale=scale,
        )
        buffers = {
            "q": self.b.act(op.src, self.tokens),
            "queries": queries,
            "cache": self.b.cache("k", store.layer),
            "kv": self.b.act(store.kv, self.tokens),
            "kv_gain": self.b.data(store.norm),
            "table": self.b.rope(store.rope),
            "state": "state",
        }
        grid = (-(-op.heads // 8) + 1, self.tokens, 1)
        product = constants.Matmul(
            self.b.matrix(op.weight),
            in_pitch=op.heads * op.weight.cols,
            out_pitch=op.heads * row,
            out_step=row,
            half=True,
            add=False,
            scale=scale,
        )
        return [
            kernel(f"store_latent_{op.heads}", "store_latent.cu", shape, buffers, grid, "rope"),
            self._prepare(op.src, [op.weight], rows_per_token=op.heads, token_stride=op.heads * head, row_stride=head),
            self._product(op.weight, queries, None, product),
        ]

    def _ValueUp(self, op: ops.ValueUp) -> list[Launch]:
        w = op.weight
        shape = constants.Matmul(
            self.b.matrix(w),
            in_pitch=w.groups * w.cols,
            out_pitch=w.groups * w.rows,
            out_step=w.rows,
            half=False,
            add=False,
        )
        return [
            self._prepare(self.b.act(op.src, self.tokens), [w], rows_per_token=w.groups),
            self._product(w, self.b.act(op.dst, self.tokens), None, shape),
        ]

    def _LinearAdd(self, op: ops.LinearAdd) -> list[Launch]:
        src, stride = self.b.act(op.src, self.tokens), self.b.plan.buffers[op.src]
        return [
            self._prepare(src, [op.weight], token_stride=stride),
            self._matmul(op.weight, "x", op.weight.rows, op.bias, add=True),
        ]

    def _gate_up(self, gate: Weight, up: Weight) -> list[Launch]:
        """gate and up of the prepared activations into their own buffers."""
        return [
            self._matmul(w, self.b.buffer(name, 4 * self.tokens * w.rows), w.rows)
            for w, name in ((gate, "gate"), (up, "up"))
        ]

    def _GateUp(self, op: ops.GateUp) -> list[Launch]:
        ff = op.gate.rows
        buffers = {"dst": self.b.act(op.dst, self.tokens), "gate": "gate", "up": "up", "state": "state"}
        shape = constants.Silu(ff, out_pitch=self.b.plan.buffers[op.dst])
        return [
            self._prepare("x", [op.gate, op.up], norm=op.norm, eps=op.eps),
            *self._gate_up(op.gate, op.up),
            kernel(f"silu_{ff}", "silu.cu", shape, buffers, (-(-ff // 256), self.tokens, 1), "activations"),
        ]

    def _experts(self, route: ops.Route, up: ops.ExpertsUp, down: ops.ExpertsDown) -> list[Launch]:
        """Routing, tokens grouped by expert, gate and up and down of each group, the shared expert, all added to x."""
        b, e, ff, dim, top = self.b, route.router.rows, up.gate.rows, down.down.rows, up.top_k
        pairs = self.tokens * top
        tiles = e + pairs // TILE_TOKENS  # at most: every expert's last tile may be short
        gate_up = [w for w in (up.gate, up.up, up.shared_gate, up.shared_up) if w]
        out = [
            self._router(route, pairs),
            kernel(
                f"group_{e}_{top}",
                "group_pairs.cu",
                constants.GroupPairs(e, top),
                {
                    "order": b.buffer("order", 4 * pairs),
                    "tiles": b.buffer("tiles", 4 * (1 + 3 * tiles)),
                    "ids": "expert_ids",
                    "state": "state",
                },
                (1, 1, 1),
                "routing",
            ),
            self._prepare("x", gate_up, norm=up.norm, eps=up.eps),
            self._grouped(up.gate, b.buffer("gate_pairs", 4 * pairs * ff), top, tiles),
            self._grouped(up.up, b.buffer("up_pairs", 4 * pairs * ff), top, tiles),
        ]
        if up.shared_gate and up.shared_up and down.shared_down:
            out += [
                *self._gate_up(up.shared_gate, up.shared_up),
                self._prepare("gate", [down.shared_down], up="up"),
                self._matmul(down.shared_down, "x", dim, add=True),
            ]
        return [
            *out,
            self._prepare("gate_pairs", [down.down], up="up_pairs", rows_per_token=top),
            self._grouped(down.down, b.buffer("down_pairs", 4 * pairs * dim), 1, tiles),
            kernel(
                f"add_experts_{dim}",
                "add_experts.cu",
                constants.AddExperts(dim, top),
                {"x": "x", "y": "down_pairs", "weights": "expert_weights", "state": "state"},
                (-(-dim // 1024), self.tokens, 1),
                "experts",
            ),
        ]

    def _router(self, route: ops.Route, pairs: int) -> Launch:
        experts, cols = route.router.rows, route.router.cols
        tokens = 4 if cols <= 2560 else 2 if cols <= 5120 else 1  # their float32 values fit into 40 KB
        buffers = {
            "ids": self.b.buffer("expert_ids", 4 * pairs),
            "weights": self.b.buffer("expert_weights", 4 * pairs),
            "w": self.b.data(route.router),
            "x": "x",
            "gain": self.b.data(route.norm),
            "selection_bias": self.b.data(route.bias),
            "router_bias": self.b.data(route.router_bias),
            "state": "state",
        }
        shape = constants.Router(self.b.matrix(route.router), choice(route), tokens, route.eps)
        grid = (-(-self.tokens // tokens), 1, 1)
        return kernel(f"router_{experts}x{cols}", "router.cu", shape, buffers, grid, "routing")

    def _grouped(self, w: Weight, dst: str, pairs_per_row: int, tiles: int) -> Launch:
        """dst (pairs, rows) = w[expert of the pair] @ prepared row pair / pairs_per_row."""
        buffers = {
            "w": self.b.data(w),
            **{name: name for name in ("xq", "xs", "xh", "state")},
            "dst": dst,
            "tiles": "tiles",
            "order": "order",
        }
        shape = constants.MatmulExperts(self.b.matrix(w), pairs_per_row)
        quant = shape.weight.type.name.lower()
        grid = (-(-w.rows // TILE_ROWS), tiles, 1)
        return kernel(
            f"experts_{quant}_{w.rows}x{w.cols}", "matmul_experts.cu", shape, buffers, grid, f"matmul {quant}"
        )
