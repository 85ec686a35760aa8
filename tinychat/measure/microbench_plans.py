"""Plans that measure a part of a model: layers around one op, or layers of a file, between a small embedding and head.

Each layer has its own copy of the measured weights. Together the copies are several times larger than the caches, so
that every weight is read from memory, as in a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np

from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.blocks import GQA, MLA, Dense, Experts, Gated, Layer, Rope, Router, Weight
from tinychat.kernels.cpu.bandwidth import block_bytes
from tinychat.kernels.ops import Embed, Head, Plan, weights_of
from tinychat.kernels.profile import name_of, quant_of, shape_of
from tinychat.kernels.quant_types import GGML_QUANT_SIZES
from tinychat.kernels.quant_types import GGMLQuantizationType as Q
from tinychat.kernels.tinygrad.dequant import CODECS

VOCAB = 16  # of the small embedding and head
MOST = 400  # layers
MEASURED = "#measured"  # begins the names of the weights of the op that a microbenchmark measures
DEPTH = 2048  # cache rows that attention reads
EPS = 1e-6
EXPERTS, USED = 8, 4  # experts of a layer, and those that a token uses
# op -> default rows × columns; for attention: kv heads × their width
SHAPES = {
    "norm_linear": (3072, 2048),
    "linear_add": (2048, 6144),
    "gate_up": (6144, 2048),
    "head": (128256, 2048),
    "attention": (8, 128),
    "experts_up": (1536, 2048),
    "experts_down": (2048, 1536),
}


def parse(spec: str) -> tuple[str, Q, int, int]:
    """(op, quant, rows, cols) of OP[:QUANT[:ROWSxK]]; Q4_0 and a usual shape where they are left out."""
    op, _, rest = spec.partition(":")
    quant, _, shape = rest.partition(":")
    if op not in SHAPES:
        raise TinychatError(f"no kernel {printable(op)!r} to measure alone; there are {', '.join(SHAPES)}")
    if (quant or "Q4_0").upper() not in (known := [q.name for q in CODECS]):
        raise TinychatError(f"{printable(quant)!r} is no quant type of the engine; there are {', '.join(known)}")
    kind, (rows, cols) = Q[(quant or "Q4_0").upper()], SHAPES[op]
    if shape:
        if not (found := re.fullmatch(r"(\d{1,7})[x×](\d{1,6})", shape)) or not int(found[1]) or not int(found[2]):
            raise TinychatError(f"{printable(shape)!r} is no shape; write it as ROWSxCOLUMNS (6144x2048)")
        rows, cols = int(found[1]), int(found[2])
    if op != "attention" and cols % GGML_QUANT_SIZES[kind][0]:
        raise TinychatError(
            f"rows of {cols} values are no complete blocks of {kind.name}, which hold {GGML_QUANT_SIZES[kind][0]}"
        )
    return op, kind, rows, cols


class RandomWeights:
    """Random weights of a made-up model, read from one pool of bytes that contains no infinite scale; `#gain...` is all
    ones."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.pool = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8) & 0x37

    def weight(self, name: str, kind: Q, rows: int, cols: int, groups: int = 1) -> Weight:
        """A weight under a new name."""
        made = Weight(f"#{name}", kind, rows, cols, groups, stride=rows if groups > 1 else 0)
        self.sizes[made.tensor] = made.nbytes
        return made

    def size(self, name: str) -> int:
        return self.sizes[name]

    def raw(self, name: str) -> np.ndarray:
        if name.startswith("#gain"):
            return np.ones(self.sizes[name] // 4, np.float32).view(np.uint8)
        return np.resize(self.pool, self.sizes[name])

    def read(self, name: str, at: int, out: np.ndarray) -> None:
        if name.startswith("#gain"):
            out[:] = self.raw(name)[at : at + len(out)]
        else:
            first = at % len(self.pool)
            out[:] = np.resize(self.pool, first + len(out))[first:]

    def place(self, name: str) -> tuple[int, int] | None:
        return None


def copies(nbytes: int) -> int:
    """The number of copies of `nbytes` bytes that together are larger than the caches."""
    return max(2, min(MOST, -(-block_bytes() // max(1, nbytes))))


def around(source: RandomWeights, dim: int, layers: Iterable[Layer]) -> Plan:
    """A plan of a small embedding, `layers` and a small head."""
    gain = source.weight("gain.x", Q.F32, 1, dim)
    embed = Embed(source.weight("embed", Q.F32, VOCAB, dim))
    return Plan(embed, tuple(layers), Head(gain, EPS, source.weight("head", Q.F32, VOCAB, dim)))


def kernel_plan(source: RandomWeights, op: str, quant: Q, rows: int, cols: int) -> Plan:
    """A plan whose layers each have their own weights of op kind `op`, (rows, cols); they share all other weights."""
    match op:
        case "head":  # a step has one
            matrix = source.weight(MEASURED[1:], quant, rows, cols)
            return Plan(Embed(matrix), (), Head(source.weight("gain.x", Q.F32, 1, cols), EPS, matrix))
        case "norm_linear":
            return _projections(source, quant, rows, cols)
        case "attention":
            return _attentions(source, rows, cols)
        case "gate_up" | "linear_add":
            return _dense(source, op, quant, rows, cols)
        case _:
            return _experts(source, op, quant, rows, cols)


def measured_ops(plan: Plan, op: str) -> list[int]:
    """The indices in Plan.ops of the ops that a microbenchmark of `op` measures."""
    about = [(i, o) for i, o in enumerate(plan.ops) if name_of(o) == op]
    return [i for i, o in about if op == "attention" or any(w.tensor.startswith(MEASURED) for w in weights_of(o))]


def _projections(source: RandomWeights, quant: Q, rows: int, cols: int) -> Plan:
    """MLA whose second projection of q, behind a norm, is measured: heads * (nope + rope) = rows."""
    w, dim, rank, value = source.weight, 32, 32, 8
    head = next((n for n in (64, 32, 16) if rows % n == 0), rows)
    if head < 4:
        raise TinychatError(f"norm_linear is measured with at least 4 rows, not {rows}")
    heads, turned = rows // head, 8 if head >= 16 else 2
    rope = Rope(turned, "neox", (1.0,) * (turned // 2))
    nope = head - turned

    def layer(i: int) -> Layer:
        return Layer(
            MLA(
                norm=w("gain.x", Q.F32, 1, dim),
                eps=EPS,
                q_a=w("q_a", Q.F32, cols, dim),
                q_a_norm=w("gain.q_a", Q.F32, 1, cols),
                q=w(f"measured{i}", quant, rows, cols),
                kv_a=w("kv_a", Q.F32, rank + turned, dim),
                kv_norm=w("gain.kv", Q.F32, 1, rank),
                k_b=w("k_b", Q.F32, rank, nope, heads),
                v_b=w("v_b", Q.F32, value, rank, heads),
                rope=rope,
                heads=heads,
                nope=nope,
                kv_lora=rank,
                scale=head**-0.5,
                output=w("output", Q.F32, dim, heads * value),
            ),
            None,
        )

    return around(source, dim, map(layer, range(copies(Weight("", quant, rows, cols).nbytes))))


def _attentions(source: RandomWeights, kv_heads: int, width: int) -> Plan:
    """Layers of GQA with four query heads per kv head, each with its own cache."""
    w, dim, heads = source.weight, 256, 4 * kv_heads
    q, k, v = (w(name, Q.F16, n * width, dim) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads)))
    rope = Rope(width // 2 * 2, "neox", tuple(1e4 ** (-2 * i / width) for i in range(width // 2)))
    output = w("output", Q.F16, dim, heads * width)
    norm, nothing = w("gain.x", Q.F32, 1, dim), (None,) * 3
    attention = GQA(
        norm, EPS, q, k, v, *nothing, None, None, None, rope, heads, kv_heads, width, width, width**-0.5, output, None
    )
    layers = copies(DEPTH * attention.cache.row_bytes)
    return around(source, dim, [Layer(attention, None)] * layers)


def _dense(source: RandomWeights, op: str, quant: Q, rows: int, cols: int) -> Plan:
    """gate_up: gate and up (rows, cols) are measured; linear_add: down (rows, cols) is."""
    dim, ff = (cols, rows) if op == "gate_up" else (rows, cols)

    def layer(i: int) -> Layer:
        return Layer(None, Dense(norm, EPS, _gated(source, i, quant, dim, ff, 1, op == "gate_up")))

    norm = source.weight("gain.x", Q.F32, 1, dim)
    matrices = 2 if op == "gate_up" else 1
    n = copies(matrices * Weight("", quant, rows, cols).nbytes)
    return around(source, dim, map(layer, range(n)))


def _experts(source: RandomWeights, op: str, quant: Q, rows: int, cols: int) -> Plan:
    """experts_up: gate and up (rows, cols) of every expert are measured; experts_down: down (rows, cols) is."""
    dim, ff = (cols, rows) if op == "experts_up" else (rows, cols)
    norm, w = source.weight("gain.x", Q.F32, 1, dim), source.weight("router", Q.F32, EXPERTS, dim)
    router = Router(w, None, None, "softmax", USED, False, 1.0, 1, 1)

    def layer(i: int) -> Layer:
        weights = _gated(source, i, quant, dim, ff, EXPERTS, op == "experts_up")
        return Layer(None, Experts(norm, EPS, router, weights, None))

    matrices = EXPERTS * (2 if op == "experts_up" else 1)
    return around(source, dim, map(layer, range(copies(matrices * Weight("", quant, rows, cols).nbytes))))


def _gated(source: RandomWeights, i: int, quant: Q, dim: int, ff: int, groups: int, up_measured: bool) -> Gated:
    """The matrices of layer i: gate and up, or down, under names of its own."""

    def matrix(name: str, rows: int, cols: int, measured: bool) -> Weight:
        kind = quant if cols % GGML_QUANT_SIZES[quant][0] == 0 else Q.F16
        return source.weight(f"{MEASURED[1:]}.{name}{i}" if measured else name, kind, rows, cols, groups)

    gate, up = (matrix(name, ff, dim, up_measured) for name in ("gate", "up"))
    return Gated(gate, up, matrix("down", dim, ff, not up_measured))


def layer_kinds(plan: Plan) -> list[list[int]]:
    """Numbers of the layers with the same ops, shapes and types, together; in order of the first of each kind."""
    found: dict[tuple[object, ...], list[int]] = {}
    for number, ops in enumerate(plan.ops_of_layers):
        found.setdefault(tuple((type(o), shape_of(o), quant_of(o)) for o in ops), []).append(number)
    return list(found.values())


class PartOfFile(RandomWeights):
    """Some layers of a file between a small embedding and head; a layer may occur several times (`name#1`,
    `name#2`)."""

    def __init__(self, gguf: GGUF) -> None:
        super().__init__()
        self.gguf = gguf

    def size(self, name: str) -> int:
        return super().size(name) if name.startswith("#") else self.gguf.size(name.split("#")[0])

    def raw(self, name: str) -> np.ndarray:
        return super().raw(name) if name.startswith("#") else self.gguf.raw(name.split("#")[0])

    def read(self, name: str, at: int, out: np.ndarray) -> None:
        if name.startswith("#"):
            super().read(name, at, out)
        else:
            self.gguf.read(name.split("#")[0], at, out)

    def place(self, name: str) -> tuple[int, int] | None:
        return None if name.startswith("#") else self.gguf.place(name.split("#")[0])


def renamed(part: Any, copy: int) -> Any:
    """A layer (or a part of one) with its weights under names of this copy; copy 0 keeps them."""
    if isinstance(part, Weight):
        return replace(part, tensor=f"{part.tensor}#{copy}") if copy else part
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: renamed(getattr(part, f.name), copy) for f in fields(part)})
    return part
