"""A plan's decode step as kernel launches: which ops share a kernel, and how each is spread over the GPU."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.layout import FLOATS, Layout, Placed, block_size
from tinychat.kernels.ops import Op, Plan, Weight

SPLITS = 32  # parts of the keys in decode attention; latent attention, with one kv head, has twice as many
PREFILL = 512  # tokens of a prefill step, at most
LOG2E = math.log2(math.e)  # attention works in powers of two
RING = 64  # slots of the ring of decoded tokens
STRETCH, SLOTS = 4096, 128  # as in sample.cu
Arg = tuple[str, str, str]  # C type, parameter, buffer
STATE = ("const int *", "state", "state")
WIDE = 512  # threads of the gate-up kernels: 16 warps of 2 rows are one block of 32 activations
MAX_SHARED = 48 << 10  # static shared memory of a block


@dataclass(frozen=True)
class Tile:
    """How a matrix is spread: `lanes` of a warp and `split` warps share a row, a lane has `rows` rows and `depth`
    blocks of each in flight."""

    lanes: int
    split: int
    rows: int
    depth: int

    def per_block(self, warps: int = 8) -> int:
        """Rows of a thread block of `warps` warps."""
        return warps * 32 // (self.split * self.lanes) * self.rows

    def blocks(self, rows: int, warps: int = 8) -> int:
        """Thread blocks for a matrix of `rows` rows."""
        return -(-rows // self.per_block(warps))


def tile(w: Weight, rows: int | None = None, pair: bool = False, quantise: bool = False) -> Tile:
    """The spread for `rows` rows in all (default: the weight's own); `pair`: two such matrices at once, in blocks of 16
    warps; `quantise`: a block makes 32 rows where that is possible."""
    rows, n = rows or w.rows, w.cols // block_size(w.type)
    waste = {lanes: -(-n // lanes) * lanes / n for lanes in (32, 16, 8, 4)}
    lanes = next((k for k, v in waste.items() if v <= 1.15), min(waste, key=lambda k: waste[k]))
    split = 1
    while lanes == 32 and not pair and not quantise and split < 8 and rows * split < 1056 and n >= 64 * split:
        split *= 2
    per_lane = -(-n // (lanes * split))
    warps = rows * lanes / 32
    if pair:
        return Tile(lanes, 1, 2 if lanes == 32 else 1, 1)
    r = 2 if warps >= 65536 else 4 if warps >= 6000 else 2 if warps >= 4096 else 1
    if quantise and lanes >= 8:
        r = lanes // 8
    return Tile(lanes, split, r, max(1, min(per_lane, {1: 8, 2: 2 if warps >= 65536 else 4, 4: 1}[r])))


class Builder:
    """Turns ops into launches. `buffers` collects every buffer a launch names, with its size in bytes."""

    def __init__(self, plan: Plan, layout: Layout, max_context: int) -> None:
        self.plan, self.layout, self.max_context = plan, layout, max_context
        self.buffers: dict[str, int] = {"state": 256, "history": 4 * (max_context + 1), "ring": 8 * RING}
        self.ropes: dict[ops.Rope, str] = {}
        self.attended: ops.Attention | None = None  # whose partial results the next op combines
        self.next: Op | None = None  # the op behind the one that is being built
        self.quantised: set[str] = set()  # activation buffers that their producer left as int8 blocks
        self.route: ops.Route | None = None
        self.computes: list[
            int
        ] = []  # which op of the plan each launch of `decode` computes (of two in one kernel, the second)

    # --- names

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

    def vector(self, w: Weight | None, name: str) -> list[Arg]:
        return [] if w is None else [("const float *", name, self.weight(w).tensor.buffer)]

    def rope(self, rope: ops.Rope) -> str:
        name = self.ropes.setdefault(rope, f"rope:{len(self.ropes)}")
        return self.buffer(name, 4 * self.max_context * rope.dims)

    def cache(self, kind: str, layer: int) -> str:
        cache = self.plan.caches[layer]
        width = cache.key_width if kind == "k" else cache.value_width
        return self.buffer(f"{kind}:{layer}", ops.CACHE_VALUE_BYTES * self.max_context * width)

    # --- the decode step

    def decode(self) -> list[Launch]:
        """All kernels of one token: embedding to sampling."""
        out: list[Launch] = []
        todo = list(self.plan.ops)
        while todo:
            op = todo.pop(0)
            built = len(out)
            if isinstance(op, ops.LatentStore):
                absorb, attend = todo.pop(0), todo[0]
                assert isinstance(absorb, ops.Absorb) and isinstance(attend, ops.Attention)
                out.append(self._absorb(op, absorb, attend.scale * LOG2E))
            elif isinstance(op, ops.RopeStore):
                attend = todo[0]
                assert isinstance(attend, ops.Attention)
                out.append(rope_store(self, op, attend.scale * LOG2E, 1))
            elif isinstance(op, ops.Route):
                up = todo.pop(0)
                assert isinstance(up, ops.ExpertsUp)
                self.next = todo[0]
                out += self._experts_up(op, up)
            else:
                self.next = todo[0] if todo else None
                out.append(getattr(self, "_" + type(op).__name__)(op))
            done = len(self.plan.ops) - len(todo)
            self.computes += [done - i for i in range(len(out) - built, 0, -1)]
        return out + self._sample()

    def _Embed(self, op: ops.Embed) -> Launch:
        return embed(self, op, 1)

    def _shared(self, k: int, quant: bool, flt: bool, direct: bool, extra: int = 0) -> str:
        """Declares the staged activations; `direct`: floats are read where they lie."""
        stage_f = flt and not direct
        size = (k // 32 * 40 if quant else 0) + (4 * k if stage_f else 0) + 4 * extra + 512
        if size > MAX_SHARED:
            raise TinychatError(
                f"the CUDA kernels take rows of up to {MAX_SHARED // 4} floating-point weights, not {k}"
            )
        return (
            f"  __shared__ V4 sq[{k // 16 if quant else 1}]; __shared__ Scale ss[{k // 32 if quant else 1}]; "
            f"__shared__ F4 sf[{k // 4 if stage_f else 1}]; __shared__ float red[96];\n"
            f"  Shared sh = {{sq, ss, {'(float *)src' if direct else '(float *)sf'}, red}};\n"
        )

    def _linear(
        self,
        name: str,
        norm: Weight | None,
        eps: float,
        parts: list[tuple[Weight, int, str]],
        load: str = "Plain{src}",
        prelude: str = "",
        extra_args: tuple[Arg, ...] = (),
        direct: bool = True,
        extra_shared: int = 0,
        tail: str = "",
        tail_blocks: int = 0,
        file: str = "matvec.cu",
        quantise: bool = False,
    ) -> Launch:
        """Matrices over one input. A part is (weight, groups, C expression of its epilogue).

        With groups > 1 a block's group is `g`, for use in `load` and the epilogue.
        """
        k = parts[0][0].cols
        placed = [self.weight(w) for w, _, _ in parts]
        quant, flt = (any((p.tensor.kind in FLOATS) is b for p in placed) for b in (False, True))
        direct = direct and norm is None
        body = f"{prelude}{self._shared(k, quant, flt, direct, extra_shared)}  const int b = blockIdx.x;\n"
        args: list[Arg] = list(extra_args)
        args += self.vector(norm, "gain")
        first, nbytes, seen = 0, 0, dict[str, str]()
        for (w, groups, epilogue), p in zip(parts, placed):
            t = tile(w, sum(x.rows * n for x, n, _ in parts), quantise=quantise)
            if groups > 1 and t.split > 1:
                t = Tile(t.lanes, 1, t.rows, t.depth)
            per = t.blocks(w.rows)
            if p.tensor.buffer not in seen:
                seen[p.tensor.buffer] = f"w{len(seen)}"
                args.append(("const u8 *", seen[p.tensor.buffer], p.tensor.buffer))
            gain = "gain" if norm else "nullptr"
            body += (
                f"  if (b >= {first} && b < {first + per * groups}) {{\n    const int g = (b - {first}) / {per};\n"
                f"    linear<{p.tensor.kind.name}, {k}, {w.rows}, {t.lanes}, {t.split}, {t.rows}, {t.depth}, {int(norm is not None)}, {int(quant)}, "
                f"{int(flt and not direct)}>({seen[p.tensor.buffer]}, {p.tensor.blocks}ull, {p.start} + (u64)g * {p.stride}, (b - {first}) % {per}, {load}, {gain}, "
                f"{c_float(eps)}, sh, {epilogue});\n  }}\n"
            )
            first += per * groups
            nbytes += w.nbytes
        body += tail
        kinds = "_".join(dict.fromkeys(p.tensor.kind.name.lower() for p in placed))
        return Launch(
            f"{name}_{kinds}_{first}x{k}",
            file,
            body,
            tuple(args),
            (first + tail_blocks, 1, 1),
            bytes=nbytes,
            kind=f"mat-vec {kinds}",
        )

    def _NormLinear(self, op: ops.NormLinear) -> Launch:
        args: list[Arg] = [("const float *", "src", self.act(op.src))]
        parts: list[tuple[Weight, int, str]] = []
        for i, (w, bias, dst) in enumerate(zip(op.weights, op.biases, op.dst)):
            args += [("float *", f"d{i}", self.act(dst)), *self.vector(bias, f"bias{i}")]
            parts.append((w, 1, f"Put{{d{i}, {f'bias{i}' if bias else 'nullptr'}}}"))
        return self._linear("norm_linear", op.norm, op.eps, parts, extra_args=(*args, STATE))

    def _absorb(self, store: ops.LatentStore, op: ops.Absorb, scale: float) -> Launch:
        """q_nope through W_k_b, the rotated part of q behind it, and the cache row of this token, in one kernel."""
        r, neox = store.rope, int(store.rope.style == "neox")
        row, head = op.kv_lora + r.dims, op.nope + r.dims
        args = (
            ("const float *", "src", self.act(op.src)),
            ("u16 *", "dst", self.buffer("queries", 2 * op.heads * row)),
            ("u16 *", "cache", self.cache("k", store.layer)),
            ("const float *", "kv", self.act(store.kv)),
            *self.vector(store.norm, "kv_gain"),
            ("const F2 *", "table", self.rope(r)),
            STATE,
        )
        t = tile(op.weight, op.weight.rows * op.heads)
        first = Tile(t.lanes, 1, t.rows, t.depth).blocks(op.weight.rows) * op.heads
        groups = -(-op.heads // 8)
        tail = (
            f"  if (b >= {first}) {{\n    grid_wait();\n    const int pos = state[POS];\n"
            f"    if (b < {first + groups}) latent_query<{op.heads}, {op.nope}, {op.kv_lora}, {r.dims}, {neox}>(dst, src, table, {c_float(scale)}, pos, 0, (b - {first}) * 8 + threadIdx.x / 32);\n"
            f"    else latent_row<{op.kv_lora}, {r.dims}, {neox}>(cache, kv, kv_gain, {c_float(store.eps)}, table, pos, 0, red);\n  }}\n"
        )
        parts = [(op.weight, op.heads, f"PutHalf{{dst + g * {row}, {c_float(scale)}}}")]
        return self._linear(
            "absorb",
            None,
            0,
            parts,
            load=f"Plain{{src + g * {head}}}",
            extra_args=args,
            direct=False,
            tail=tail,
            tail_blocks=groups + 1,
            file="rope.cu matvec.cu",
        )

    def _Attention(self, op: ops.Attention) -> Launch:
        self.attended = op if op.latent else None
        return attention(self, op, 1)

    def _put(
        self,
        dst: str,
        offset: str,
        consumer: tuple[Weight | None, ...],
        per_block: int,
        rows: tuple[int, ...],
        size: int,
    ) -> tuple[str, tuple[Arg, ...]]:
        """(declarations and C expression of the epilogue into `dst` from value `offset` on, its arguments): int8 blocks
        where all that reads them is quantised and a block makes 32 rows of `rows`; `size` is the length of dst."""
        weights = [self.weight(w).tensor.kind for w in consumer if w]
        if weights and not any(k in FLOATS for k in weights) and per_block == 32 and not any(n % 32 for n in rows):
            self.quantised.add(dst)
            q, scales = self.buffer(f"{dst}_q", size), self.buffer(f"{dst}_s", size // 32 * 8)
            return f"PutQuantised{{values, dst_q, dst_s, {size // 32}, ({offset}) / 32}}", (
                ("u32 *", "dst_q", q),
                ("Scale *", "dst_s", scales),
            )
        self.quantised.discard(dst)
        return f"Put{{dst + {offset}, nullptr}}", (("float *", "dst", self.act(dst)),)

    def _source(self, name: str) -> tuple[str, tuple[Arg, ...]]:
        """(C expression of the loader, its arguments) for activations as their producer left them."""
        if name in self.quantised:
            return "Quantised{src_q, src_s}", (
                ("const V4 *", "src_q", f"{name}_q"),
                ("const Scale *", "src_s", f"{name}_s"),
            )
        return "Plain{src}", (("const float *", "src", self.act(name)),)

    def _ValueUp(self, op: ops.ValueUp) -> Launch:
        """Per head: combines attention's splits, then W_v_b."""
        a, then = self.attended, self.next
        assert a is not None and a.dst == op.src and isinstance(then, ops.LinearAdd)
        n = splits(a)
        load = f"Combined<{n}, {a.heads}, {a.value_dim}>{{src, ml, split_weight, state, {chunk(a)}, g, 0}}"
        t = tile(op.weight, op.weight.rows * a.heads, quantise=True)
        put, dst = self._put(
            op.dst, f"g * {op.weight.rows}", (then.weight,), t.per_block(), (op.weight.rows,), a.heads * op.weight.rows
        )
        args = (("const u16 *", "src", "attention_o"), ("const F2 *", "ml", "attention_ml"), STATE, *dst)
        return self._linear(
            "value_up",
            None,
            0,
            [(op.weight, a.heads, put)],
            load=load,
            prelude=f"  __shared__ float split_weight[{n}], values[32];\n",
            direct=False,
            extra_shared=n,
            extra_args=args,
            quantise=True,
        )

    def _LinearAdd(self, op: ops.LinearAdd) -> Launch:
        load, src = self._source(op.src)
        parts = [(op.weight, 1, f"Add{{x, {'bias' if op.bias else 'nullptr'}}}")]
        args = (*src, ("float *", "x", self.act("x")), *self.vector(op.bias, "bias"), STATE)
        return self._linear("linear_add", None, 0, parts, load=load, extra_args=args, direct=load.startswith("Plain"))

    def _gated(
        self,
        gate: Weight,
        up: Weight,
        late: bool,
        quant: bool,
        flt: bool,
        names: tuple[str, str],
        first: str,
        block: str,
        put: str,
        eps: float,
    ) -> str:
        g, u, t = self.weight(gate), self.weight(up), tile(gate, pair=True)
        return (
            f"gated<{g.tensor.kind.name}, {u.tensor.kind.name}, {gate.cols}, {gate.rows}, {t.lanes}, {t.rows}, {t.depth}, {int(late)}, {int(quant)}, {int(flt)}>"
            f"({names[0]}, {g.tensor.blocks}ull, {g.start} + {first} * {g.stride}, {names[1]}, {u.tensor.blocks}ull, {u.start} + {first} * {u.stride}, "
            f"{block}, stage, src, {c_float(eps)}, sh, {put});"
        )

    def _kinds(self, *weights: Weight | None) -> tuple[bool, bool]:
        """(any quantised, any floating-point)"""
        kinds = {self.weight(w).tensor.kind in FLOATS for w in weights if w}
        return False in kinds, True in kinds

    def _GateUp(self, op: ops.GateUp) -> Launch:
        then = self.next
        assert isinstance(then, ops.LinearAdd)
        quant, flt = self._kinds(op.gate, op.up)
        t = tile(op.gate, pair=True)
        put, dst = self._put(op.dst, "0", (then.weight,), t.per_block(WIDE // 32), (op.gate.rows,), op.gate.rows)
        call = self._gated(op.gate, op.up, False, quant, flt, ("wg", "wu"), "0ull", "blockIdx.x", put, op.eps)
        body = (
            f"{self._shared(op.gate.cols, quant, flt, False)}  __shared__ float values[32];\n"
            f"  Stage<{op.gate.cols}, true, {int(quant)}, {int(flt)}> stage;\n  stage.prefetch(gain);\n  {call}"
        )
        args = (
            ("const float *", "src", self.act("x")),
            *dst,
            *self.vector(op.norm, "gain"),
            ("const u8 *", "wg", self.weight(op.gate).tensor.buffer),
            ("const u8 *", "wu", self.weight(op.up).tensor.buffer),
            STATE,
        )
        kind = op.gate.type.name.lower()
        return launch(
            f"gate_up_{kind}_{op.gate.rows}x{op.gate.cols}",
            "matvec.cu",
            body,
            args,
            (t.blocks(op.gate.rows, WIDE // 32), 1, 1),
            f"mat-vec {kind}",
            op.gate.nbytes + op.up.nbytes,
            WIDE,
            2,
        )

    def _choice(self, route: ops.Route) -> tuple[str, tuple[Arg, ...]]:
        """(C statement in which a warp puts the chosen experts into ids and weights, its arguments)."""
        bias = self.vector(route.bias, "selection")
        code = (
            f"choose<{route.router.rows}, {route.top_k}, {route.gating.upper()}, {int(route.normalize)}, {route.groups}, {route.groups_used}>"
            f"(router, {'selection' if bias else 'nullptr'}, {c_float(route.scale or 1.0)}, ids, weights);"
        )
        return code, (("const float *", "router", "router"), *bias)

    def _experts_up(self, route: ops.Route, op: ops.ExpertsUp) -> list[Launch]:
        """Router logits, then: choice of experts (by every block for itself), gate and up of the chosen and the shared.

        The kernel behind may start when this one's blocks have seen the router's logits: it reads them before its
        grid_wait().
        """
        then = self.next
        assert isinstance(then, ops.ExpertsDown)
        self.route = route
        k, ff, top = op.gate.cols, op.gate.rows, op.top_k
        shared_ff = op.shared_gate.rows if op.shared_gate else 0
        bias = self.vector(route.router_bias, "rb")
        router = self._linear(
            "route",
            route.norm,
            route.eps,
            [(route.router, 1, f"Put{{d0, {'rb' if bias else 'nullptr'}}}")],
            extra_args=(
                ("const float *", "src", self.act("x")),
                ("float *", "d0", self.buffer("router", 4 * route.router.rows)),
                *bias,
                STATE,
            ),
        )
        quant, flt = self._kinds(op.gate, op.up, op.shared_gate, op.shared_up)
        t = tile(op.gate, pair=True)
        per = t.blocks(ff, WIDE // 32)
        routed, blocks, nbytes = per * top, per * top, top * (op.gate.group_bytes + op.up.group_bytes)
        rows, shared_t = [ff], t
        if op.shared_gate:
            rows, shared_t = [ff, shared_ff], tile(op.shared_gate, pair=True)
        width = t.per_block(WIDE // 32) if t.per_block() == shared_t.per_block() else 0
        consumers, size = (then.down, then.shared_down), top * ff + shared_ff
        put, dst = self._put(op.dst, f"b / {per} * {ff}", consumers, width, tuple(rows), size)
        choose, choice = self._choice(route)
        body = (
            f"{self._shared(k, quant, flt, False)}  __shared__ int ids[{top}]; __shared__ float weights[{top}], values[32];\n  const int b = blockIdx.x;\n"
            f"  Stage<{k}, true, {int(quant)}, {int(flt)}> stage;\n  stage.prefetch(gain);\n  if (b < {routed}) {{\n    grid_wait();\n  "
            f"    stage.load(Plain{{src}});\n    if (threadIdx.x < 32) {choose}\n    __syncthreads();\n    const int id = ids[b / {per}];\n    "
            f"{self._gated(op.gate, op.up, True, quant, flt, ('wg', 'wu'), '(u64)id', f'b % {per}', put, op.eps)}\n  }}\n"
        )
        args: tuple[Arg, ...] = (
            ("const float *", "src", self.act("x")),
            *dst,
            *choice,
            *self.vector(op.norm, "gain"),
            ("const u8 *", "wg", self.weight(op.gate).tensor.buffer),
            ("const u8 *", "wu", self.weight(op.up).tensor.buffer),
            STATE,
        )
        if op.shared_gate and op.shared_up:
            put, _ = self._put(op.dst, f"{top * ff}", consumers, width, tuple(rows), size)
            body += f"  else {self._gated(op.shared_gate, op.shared_up, False, quant, flt, ('sg', 'su'), '0ull', f'b - {routed}', put, op.eps)}\n"
            args += (
                ("const u8 *", "sg", self.weight(op.shared_gate).tensor.buffer),
                ("const u8 *", "su", self.weight(op.shared_up).tensor.buffer),
            )
            blocks += shared_t.blocks(shared_ff, WIDE // 32)
            nbytes += op.shared_gate.nbytes + op.shared_up.nbytes
        kind = op.gate.type.name.lower()
        return [
            router,
            launch(
                f"experts_up_{kind}_{top}x{ff}x{k}",
                "matvec.cu",
                body,
                args,
                (blocks, 1, 1),
                f"experts {kind}",
                nbytes,
                WIDE,
                2,
            ),
        ]

    def _ExpertsDown(self, op: ops.ExpertsDown) -> Launch:
        """A warp per row. Chooses the experts again, so that their weights are on the way while experts_up still
        runs."""
        assert self.route is not None
        ff, dim, top = op.down.cols, op.down.rows, op.top_k
        shared_ff = op.shared_down.cols if op.shared_down else 0
        k = top * ff + shared_ff
        quant, flt = self._kinds(op.down, op.shared_down)
        p, (load, src), (choose, choice) = self.weight(op.down), self._source(op.src), self._choice(self.route)
        args: tuple[Arg, ...] = (
            *src,
            *choice,
            ("float *", "x", self.act("x")),
            ("const u8 *", "w", p.tensor.buffer),
            STATE,
        )
        body = (
            f"{self._shared(k, quant, flt, load.startswith('Plain'))}  __shared__ int ids[{top}]; __shared__ float weights[{top}];\n"
            f"  const int row = blockIdx.x * 8 + threadIdx.x / 32, r = row < {dim} ? row : {dim - 1};\n"
        )
        after = ""
        nbytes = top * op.down.group_bytes
        if op.shared_down:
            s = self.weight(op.shared_down)
            n = -(-op.shared_down.cols // (32 * block_size(op.shared_down.type)))
            body += (
                f"  Dot<{s.tensor.kind.name}, {shared_ff}, 32, 1, 1, {min(n, 4)}> shared;\n  shared.row[0] = {s.start} + r;\n"
                f"  shared.point(sw, {s.tensor.blocks}ull);\n  shared.prefetch();\n"
            )
            after = f"  shared.run(sh, {k // 32}, {top * ff});\n  if (threadIdx.x % 32 == 0) acc += shared.acc[0];\n"
            args += (("const u8 *", "sw", s.tensor.buffer),)
            nbytes += op.shared_down.nbytes
        body += (
            f"  if (threadIdx.x < 32) {choose}\n  __syncthreads();\n"
            f"  Experts<{p.tensor.kind.name}, {ff}, {dim}, {top}> experts;\n  experts.prefetch(w, {p.tensor.blocks}ull, ids, r);\n  grid_wait();\n"
            f"  Stage<{k}, false, {int(quant)}, false> stage;\n  stage.finish({load}, sh);\n"
            f"  float acc = warp_sum(experts.run(w, {p.tensor.blocks}ull, ids, weights, r, sh, {k // 32}));\n{after}"
            f"  if (threadIdx.x % 32 == 0 && row < {dim}) x[row] += acc;"
        )
        kind = op.down.type.name.lower()
        return launch(
            f"experts_down_{kind}_{top}x{dim}x{ff}",
            "matvec.cu",
            body,
            args,
            (-(-dim // 8), 1, 1),
            f"experts {kind}",
            nbytes,
        )

    def _Head(self, op: ops.Head) -> Launch:
        load = f"Plain{{src + (u64)(state[COUNT] - 1) * {op.weight.cols}}}"  # the last of this step's tokens
        return self._linear(
            "head",
            op.norm,
            op.eps,
            [(op.weight, 1, "Put{d0, nullptr}")],
            load=load,
            extra_args=(
                ("const float *", "src", self.act("x")),
                ("float *", "d0", self.buffer("logits", 4 * self.plan.vocab)),
                STATE,
            ),
        )

    def _sample(self) -> list[Launch]:
        vocab = self.plan.vocab
        n = -(-vocab // STRETCH)
        for name, size in (("candidates", 8 * n * SLOTS), ("counts", 4 * n), ("parts", 8 * n), ("adjusted", 4 * vocab)):
            self.buffer(name, size)
        lists = (
            ("Candidate *", "list", "candidates"),
            ("int *", "counts", "counts"),
            ("F2 *", "parts", "parts"),
            ("float *", "adjusted", "adjusted"),
        )
        logits = ("const float *", "logits", "logits")
        first = Launch(
            f"candidates_{vocab}",
            "sample.cu",
            f"  candidates<{vocab}>(list, counts, parts, adjusted, logits, history, state);",
            (*lists, logits, ("const int *", "history", "history"), STATE),
            (n, 1, 1),
            1024,
            kind="sampling",
        )
        args = (
            ("V2 *", "ring", "ring"),
            ("int *", "history", "history"),
            ("int *", "state", "state"),
            *((f"const {c}", p, b) for c, p, b in lists),
            logits,
        )
        body = f"  choose_token<{vocab}, {RING}>(ring, history, state, list, counts, parts, adjusted, logits);"
        return [first, Launch(f"choose_token_{vocab}", "sample.cu", body, args, (1, 1, 1), 1024, kind="sampling")]


def c_float(value: float) -> str:
    """A float literal of C."""
    return f"{float(value)!r}f"


def launch(
    name: str,
    file: str,
    body: str,
    args: tuple[Arg, ...],
    grid: tuple[int, int, int],
    kind: str,
    nbytes: int = 0,
    threads: int = 256,
    resident: int = 1,
) -> Launch:
    """A launch in which every buffer is bound once: a second name for one becomes a local pointer."""
    bound: dict[str, Arg] = {}
    for c_type, param, buffer in args:
        if buffer in bound:
            body = f"  {c_type}{param} = {bound[buffer][1]};\n{body}"
        else:
            bound[buffer] = (c_type, param, buffer)
    return Launch(name, file, body, tuple(bound.values()), grid, threads, bytes=nbytes, kind=kind, resident=resident)


def embed(b: Builder, op: ops.Embed, tokens: int) -> Launch:
    """x (tokens, dim): rows of the table."""
    p, dim = b.weight(op.weight), op.weight.cols
    args = (
        ("float *", "x", b.act("x", tokens)),
        ("const u8 *", "w", p.tensor.buffer),
        ("const int *", "history", "history"),
        STATE,
    )
    body = f"  embed<{p.tensor.kind.name}, {dim}>(x, w, {p.tensor.blocks}ull, history, state);"
    return launch(
        f"embed_{p.tensor.kind.name.lower()}_{dim}", "rope.cu", body, args, (-(-dim // 256), tokens, 1), "embedding"
    )


def rope_store(b: Builder, op: ops.RopeStore, scale: float, tokens: int) -> Launch:
    """Queries times `scale` and rotated into `queries`; rotated keys, and values, into the cache."""
    norm = 0 if op.q_norm is None else 1 if op.q_norm.cols == op.head_dim else 2
    out = b.buffer("queries", 2 * tokens * op.heads * op.head_dim)
    args = (
        ("u16 *", "out", out),
        ("u16 *", "kc", b.cache("k", op.layer)),
        ("u16 *", "vc", b.cache("v", op.layer)),
        ("const float *", "q", b.act(op.q, tokens)),
        ("const float *", "k", b.act(op.k, tokens)),
        ("const float *", "v", b.act(op.v, tokens)),
        *b.vector(op.q_norm, "q_gain"),
        *b.vector(op.k_norm, "k_gain"),
        ("const F2 *", "table", b.rope(op.rope)),
        STATE,
    )
    shape = f"{op.heads}, {op.kv_heads}, {op.head_dim}, {op.rope.dims}, {int(op.rope.style == 'neox')}, {norm}"
    gain = "q_gain, k_gain" if norm else "nullptr, nullptr"
    body = f"  rope_store<{shape}>(out, kc, vc, q, k, v, {gain}, {c_float(op.eps)}, {c_float(scale)}, table, state);"
    return launch(
        f"rope_store_{op.heads}_{op.kv_heads}_{op.head_dim}",
        "rope.cu",
        body,
        args,
        (-(-(op.heads + 2 * op.kv_heads) // 8), tokens, 1),
        "rope",
    )


def splits(op: ops.Attention) -> int:
    """Parts of the keys in decode."""
    return 2 * SPLITS if op.latent else SPLITS


def chunk(op: ops.Attention) -> int:
    """Keys that attention takes at a time: what fits twice into shared memory."""
    return 32 if op.latent or op.key_dim > 128 else 64


def attention(b: Builder, op: ops.Attention, tokens: int) -> Launch:
    """Decode: SPLITS parts of the keys; prefill: all keys. The results go into op.dst, latent decode's partial ones
    into attention_o."""
    group, ck, decode = op.heads // op.kv_heads, chunk(op), tokens == 1
    mt = 2 if group > 16 or not decode else 1
    kp, vp, rows = op.key_dim + 8, op.value_dim + 8, 16 * mt
    parts = 4 if mt * ck // 8 <= 4 else 2
    shared = 2 * (rows * kp + 2 * ck * kp + (0 if op.latent else 2 * ck * vp) + rows * (ck + 8)) + 4 * max(
        rows * (parts * (ck + 4) + 3), group * SPLITS
    )
    if op.key_dim % 16 or op.value_dim % 8 or shared > 227 << 10:
        raise TinychatError(f"the CUDA attention kernel does not take heads of {op.key_dim} and {op.value_dim} values")
    n = splits(op) if decode else 1
    b.buffer("attention_o", 2 * splits(op) * op.heads * op.value_dim)
    b.buffer("attention_ml", 8 * splits(op) * op.heads)
    b.buffer("tickets", 4 * op.kv_heads)
    args: tuple[Arg, ...] = (
        ("u16 *", "partial", "attention_o"),
        ("F2 *", "ml", "attention_ml"),
        ("int *", "tickets", "tickets"),
        ("const u16 *", "q", "queries"),
        ("const u16 *", "kc", b.cache("k", op.layer)),
        STATE,
    )
    if not op.latent:
        args += (("const u16 *", "vc", b.cache("v", op.layer)),)
    if not (op.latent and decode):
        args += (("float *", "out", b.act(op.dst, tokens)),)
    shape = (
        f"{op.heads}, {op.kv_heads}, {op.key_dim}, {op.value_dim}, {mt}, {ck}, {n}, {int(op.latent)}, {int(not decode)}"
    )
    body = f"  attention<{shape}>({'nullptr' if op.latent and decode else 'out'}, partial, ml, tickets, q, kc, {'kc' if op.latent else 'vc'}, state);"
    return Launch(
        f"attention_{op.heads}_{op.kv_heads}_{op.key_dim}{'' if decode else '_prefill'}",
        "attention.cu",
        body,
        args,
        (n, -(-group * tokens // rows), op.kv_heads),
        512,
        shared=shared,
        kind="attention",
    )


def state_words(s: ops.Sampling, pos: int, count: int, first_known: int) -> list[int]:
    """The int32 words of buffer `state` (quants.cuh): position, tokens of this step, sampling; tokens are known from
    `first_known` on."""
    floats = struct.unpack("<4i", struct.pack("<4f", s.temperature, s.top_p, s.min_p, s.repeat_penalty))
    seed = struct.unpack("<2i", struct.pack("<Q", s.seed % 2**64))
    return [pos, count, s.top_k, *floats, max(0, s.repeat_last_n), *seed, max(0, first_known)]
