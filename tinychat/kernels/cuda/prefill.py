"""A plan over up to PREFILL tokens at once as kernel launches: matrix products on tensor cores, experts grouped by
their tokens."""

from __future__ import annotations

from tinychat.kernels import ops
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.layout import FLOATS, Placed
from tinychat.kernels.cuda.step import (
    LOG2E,
    PREFILL,
    STATE,
    Arg,
    Builder,
    attention,
    c_float,
    embed,
    launch,
    rope_store,
)
from tinychat.kernels.ops import Weight

TILE_ROWS, TILE_TOKENS = 128, 64  # as in matmul.cu


class Prefill:
    """Launches for `tokens` tokens over the buffers of a decode Builder, which grow to that many rows."""

    def __init__(self, builder: Builder, tokens: int = PREFILL) -> None:
        self.b, self.tokens = builder, tokens
        self.prepared = ""  # which activations the buffers xq, xs, xh hold

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
                out.append(rope_store(self.b, op, attend.scale * LOG2E, self.tokens))
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
            self._prepare("x", self._kinds(op.weight), op.weight.cols, norm=op.norm, eps=op.eps),
            self._matmul(op.weight, dst, op.weight.rows),
        ]

    # --- pieces

    def _kinds(self, *weights: Weight) -> tuple[bool, bool]:
        """(any quantised, any floating-point)"""
        kinds = {self.b.weight(w).tensor.kind in FLOATS for w in weights}
        return False in kinds, True in kinds

    def _prepare(
        self,
        src: str,
        kinds: tuple[bool, bool],
        k: int,
        *,
        norm: Weight | None = None,
        eps: float = 0,
        silu: str = "",
        per: int = 1,
        stride: int = 0,
        step: int = 0,
        factor: int = 1,
    ) -> Launch:
        """Activations for matmuls: `per` rows of k values per token, token's stride and row's step in src; `silu`: the
        buffer of up."""
        rows = self.tokens * per
        args: list[Arg] = [
            ("u32 *", "xq", self.b.buffer("xq", rows * k)),
            ("F2 *", "xs", self.b.buffer("xs", rows * -(-k // 32) * 8)),
            ("u16 *", "xh", self.b.buffer("xh", rows * k * 2 if kinds[1] else 16)),
            ("const float *", "src", src),
            STATE,
        ]
        args += self.b.vector(norm, "gain")
        if silu:
            args.append(("const float *", "src2", silu))
        mode = "SILU" if silu else "NORMED" if norm else "PLAIN"
        body = (
            f"  prepare<{k}, {mode}, {int(kinds[0])}, {int(kinds[1])}, {per}, {stride or per * k}, {step or k}>(xq, xs, xh, src, "
            f"{'src2' if silu else 'nullptr'}, {'gain' if norm else 'nullptr'}, {c_float(eps)}, state);"
        )
        return launch(f"prepare_{mode.lower()}_{k}", "matmul.cu", body, tuple(args), (rows, 1, 1), "activations")

    def _product(
        self,
        p: Placed,
        w: Weight,
        rows: str,
        count: str,
        put: str,
        pitch: int,
        offset: str = "0",
        group: str = "0",
        setup: str = "",
        args: tuple[Arg, ...] = (),
        grid: tuple[int, int] = (1, 1),
        name: str = "matmul",
    ) -> Launch:
        kind = p.tensor.kind.name
        body = (
            f"  const int first = blockIdx.y * {TILE_TOKENS}, g = blockIdx.z;\n{setup}"
            f"  matmul<{kind}, {w.cols}, {w.rows}>(w, {p.tensor.blocks}ull, {p.start} + (u64)({group}) * {p.stride}, xq, xs, xh, {pitch}, {offset}, {rows}, "
            f"{count}, {put});"
        )
        every: tuple[Arg, ...] = (
            ("const u8 *", "w", p.tensor.buffer),
            ("const u32 *", "xq", "xq"),
            ("const F2 *", "xs", "xs"),
            ("const u16 *", "xh", "xh"),
            STATE,
        )
        return launch(
            f"{name}_{kind.lower()}_{w.rows}x{w.cols}",
            "matmul.cu",
            body,
            (*every, *args),
            (-(-w.rows // TILE_ROWS), grid[0], grid[1]),
            f"matmul {kind.lower()}",
        )

    _DENSE = (
        "  if (first >= state[COUNT]) return;\n  grid_wait();\n  const int n = min({tile}, state[COUNT] - first);\n"
    )

    def _dense(self, w: Weight, put: str, args: tuple[Arg, ...], groups: int = 1) -> Launch:
        setup = self._DENSE.replace("{tile}", str(TILE_TOKENS))
        return self._product(
            self.b.weight(w),
            w,
            "Dense{n, first}",
            "n",
            put,
            groups * w.cols,
            f"g * {w.cols}",
            "g",
            setup,
            args,
            (-(-self.tokens // TILE_TOKENS), groups),
        )

    def _matmul(self, w: Weight, dst: str, pitch: int, bias: Weight | None = None, add: bool = False) -> Launch:
        """dst (tokens, pitch) = or += w @ prepared (+ bias)."""
        put = f"{'AddOut' if add else 'Out'}{{dst + (u64)first * {pitch}, {pitch}, {'bias' if bias else 'nullptr'}}}"
        return self._dense(w, put, (("float *", "dst", dst), *self.b.vector(bias, "bias")))

    # --- ops

    def _NormLinear(self, op: ops.NormLinear) -> list[Launch]:
        out = [
            self._prepare(
                self.b.act(op.src, self.tokens), self._kinds(*op.weights), op.weights[0].cols, norm=op.norm, eps=op.eps
            )
        ]
        return out + [
            self._matmul(w, self.b.act(d, self.tokens), self.b.plan.buffers[d], bias)
            for w, bias, d in zip(op.weights, op.biases, op.dst)
        ]

    def _absorb(self, store: ops.LatentStore, op: ops.Absorb, scale: float) -> list[Launch]:
        r, row, head = store.rope, op.kv_lora + store.rope.dims, op.nope + store.rope.dims
        neox = int(r.style == "neox")
        queries = self.b.buffer("queries", 2 * self.tokens * op.heads * row)
        groups = -(-op.heads // 8)
        args: tuple[Arg, ...] = (
            ("const float *", "src", self.b.act(op.src, self.tokens)),
            ("u16 *", "dst", queries),
            ("u16 *", "cache", self.b.cache("k", store.layer)),
            ("const float *", "kv", self.b.act(store.kv, self.tokens)),
            *self.b.vector(store.norm, "kv_gain"),
            ("const F2 *", "table", self.b.rope(r)),
            STATE,
        )
        body = (
            "  __shared__ float red[8];\n  grid_wait();\n  const int t = blockIdx.y, pos = state[POS];\n  if (t >= state[COUNT]) return;\n"
            f"  if (blockIdx.x < {groups}) latent_query<{op.heads}, {op.nope}, {op.kv_lora}, {r.dims}, {neox}>(dst, src, table, {c_float(scale)}, pos, t, blockIdx.x * 8 + threadIdx.x / 32);\n"
            f"  else latent_row<{op.kv_lora}, {r.dims}, {neox}>(cache, kv, kv_gain, {c_float(store.eps)}, table, pos, t, red);"
        )
        put = f"HalfOut{{dst + (u64)first * {op.heads * row} + g * {row}, {op.heads * row}, {c_float(scale)}}}"
        return [
            launch(f"latent_store_{op.heads}", "rope.cu", body, args, (groups + 1, self.tokens, 1), "rope"),
            self._prepare(op.src, self._kinds(op.weight), op.nope, per=op.heads, stride=op.heads * head, step=head),
            self._dense(op.weight, put, (("u16 *", "dst", queries),), op.heads),
        ]

    def _ValueUp(self, op: ops.ValueUp) -> list[Launch]:
        heads, rows = op.weight.groups, op.weight.rows
        put = f"Out{{dst + (u64)first * {heads * rows} + g * {rows}, {heads * rows}, nullptr}}"
        return [
            self._prepare(self.b.act(op.src, self.tokens), self._kinds(op.weight), op.weight.cols, per=heads),
            self._dense(op.weight, put, (("float *", "dst", self.b.act(op.dst, self.tokens)),), heads),
        ]

    def _LinearAdd(self, op: ops.LinearAdd) -> list[Launch]:
        stride = self.b.plan.buffers[op.src]
        return [
            self._prepare(self.b.act(op.src, self.tokens), self._kinds(op.weight), op.weight.cols, stride=stride),
            self._matmul(op.weight, "x", op.weight.rows, op.bias, add=True),
        ]

    def _gate_up(self, gate: Weight, up: Weight) -> list[Launch]:
        """gate and up of the prepared activations into their own buffers."""
        return [
            self._matmul(w, self.b.buffer(name, 4 * self.tokens * w.rows), w.rows)
            for w, name in ((gate, "gate"), (up, "up"))
        ]

    def _GateUp(self, op: ops.GateUp) -> list[Launch]:
        """Leaves silu(gate) * up prepared for the LinearAdd that follows, as op.dst."""
        ff = op.gate.rows
        act = self.b.act(op.dst, self.tokens)
        silu = (
            f"  grid_wait();\n  const u64 i = (u64)blockIdx.x * 256 + threadIdx.x;\n  if (blockIdx.y >= state[COUNT] || i >= {ff}) return;\n"
            f"  const float v = gate[blockIdx.y * {ff}ull + i];\n  dst[blockIdx.y * {self.b.plan.buffers[op.dst]}ull + i] = v / (1.f + __expf(-v)) * up[blockIdx.y * {ff}ull + i];"
        )
        return [
            self._prepare("x", self._kinds(op.gate, op.up), op.gate.cols, norm=op.norm, eps=op.eps),
            *self._gate_up(op.gate, op.up),
            launch(
                f"silu_{ff}",
                "matmul.cu",
                silu,
                (("float *", "dst", act), ("const float *", "gate", "gate"), ("const float *", "up", "up"), STATE),
                (-(-ff // 256), self.tokens, 1),
                "activations",
            ),
        ]

    def _experts(self, route: ops.Route, up: ops.ExpertsUp, down: ops.ExpertsDown) -> list[Launch]:
        """Routing, tokens grouped by expert, gate and up and down of each group, the shared expert, all added to x."""
        b, e, k, ff, dim, top = self.b, route.router.rows, up.gate.cols, up.gate.rows, down.down.rows, up.top_k
        pairs = self.tokens * top
        tiles = e + pairs // TILE_TOKENS
        router = b.weight(route.router)
        for name, size in (
            ("expert_ids", 4 * pairs),
            ("expert_weights", 4 * pairs),
            ("order", 4 * pairs),
            ("tiles", 4 * (1 + 3 * tiles)),
        ):
            b.buffer(name, size)
        per_block = 4 if k <= 2560 else 2 if k <= 5120 else 1
        choose = (
            f"[&](const float *l, int *my_ids, float *my_weights) {{ choose<{e}, {top}, {route.gating.upper()}, {int(route.normalize)}, {route.groups}, {route.groups_used}>"
            f"(l, {'selection' if route.bias else 'nullptr'}, {c_float(route.scale or 1.0)}, my_ids, my_weights); }}"
        )
        body = (
            f"  router<{router.tensor.kind.name}, {k}, {e}, {top}>(ids, weights, w, {router.tensor.blocks}ull, x, gain, {'rb' if route.router_bias else 'nullptr'}, "
            f"{c_float(route.eps)}, state, {choose});"
        )
        args: tuple[Arg, ...] = (
            ("int *", "ids", "expert_ids"),
            ("float *", "weights", "expert_weights"),
            ("const u8 *", "w", router.tensor.buffer),
            ("const float *", "x", "x"),
            *b.vector(route.norm, "gain"),
            *b.vector(route.bias, "selection"),
            *b.vector(route.router_bias, "rb"),
            STATE,
        )
        out = [
            launch(
                f"router_{e}x{k}", "matvec.cu matmul.cu", body, args, (-(-self.tokens // per_block), 1, 1), "routing"
            ),
            launch(
                f"group_{e}_{top}",
                "matmul.cu",
                f"  group_pairs<{e}, {top}>(order, tiles, ids, state);",
                (("int *", "order", "order"), ("int *", "tiles", "tiles"), ("const int *", "ids", "expert_ids"), STATE),
                (1, 1, 1),
                "routing",
            ),
            self._prepare(
                "x",
                self._kinds(*(w for w in (up.gate, up.up, up.shared_gate, up.shared_up) if w)),
                k,
                norm=up.norm,
                eps=up.eps,
            ),
        ]
        if up.shared_gate and up.shared_up and down.shared_down:
            s = down.shared_down
            out += [
                self._grouped(w, b.buffer(f"{name}_pairs", 4 * pairs * ff), top, k, tiles)
                for w, name in ((up.gate, "gate"), (up.up, "up"))
            ]
            out += [
                *self._gate_up(up.shared_gate, up.shared_up),
                self._prepare("gate", self._kinds(s), s.cols, silu="up"),
                self._matmul(s, "x", dim, add=True),
            ]
        else:
            out += [
                self._grouped(w, b.buffer(f"{name}_pairs", 4 * pairs * ff), top, k, tiles)
                for w, name in ((up.gate, "gate"), (up.up, "up"))
            ]
        add = f"  add_experts<{dim}, {top}>(x, y, weights, state);"
        return [
            *out,
            self._prepare("gate_pairs", self._kinds(down.down), ff, silu="up_pairs", per=top),
            self._grouped(down.down, b.buffer("down_pairs", 4 * pairs * dim), 1, ff, tiles),
            launch(
                f"add_experts_{dim}",
                "matmul.cu",
                add,
                (
                    ("float *", "x", "x"),
                    ("const float *", "y", "down_pairs"),
                    ("const float *", "weights", "expert_weights"),
                    STATE,
                ),
                (-(-dim // 1024), self.tokens, 1),
                "experts",
            ),
        ]

    def _grouped(self, w: Weight, dst: str, per: int, k: int, tiles: int) -> Launch:
        """dst (pairs, rows) = w[expert of the pair] @ prepared row pair / per."""
        setup = (
            "  grid_wait();\n  if ((int)blockIdx.y >= tiles[0]) return;\n  const int expert = tiles[1 + 3 * blockIdx.y], n = tiles[3 + 3 * blockIdx.y];\n"
            "  const int *pairs = order + tiles[2 + 3 * blockIdx.y];\n"
        )
        args: tuple[Arg, ...] = (
            ("float *", "dst", dst),
            ("const int *", "tiles", "tiles"),
            ("const int *", "order", "order"),
        )
        return self._product(
            self.b.weight(w),
            w,
            f"Grouped{{n, pairs, {per}}}",
            "n",
            f"PairOut{{dst, pairs, {w.rows}}}",
            k,
            "0",
            "expert",
            setup,
            args,
            (tiles, 1),
            "experts",
        )
