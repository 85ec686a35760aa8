"""Plans to measure a part of a model with: copies of one op or of a file's layers, between a small embedding and head.

The copies have weights of their own, together several times the size of the caches, so that every weight is read from
memory, as in a model.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any, cast

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.cpu.bandwidth import block_bytes
from tinychat.kernels.ops import (
    GQA,
    MLA,
    Dense,
    Embed,
    Experts,
    Gated,
    Head,
    Layer,
    Plan,
    Rope,
    Router,
    Weight,
)
from tinychat.kernels.profile import quant_of, shape_of
from tinychat.kernels.tinygrad.dequant import CODECS

VOCAB = 16  # of the small embedding and head
MOST = 400  # copies
DEPTH = 2048  # cache rows that attention reads
EPS = 1e-6
EXPERTS, USED = 8, 4  # of a layer with experts
# op -> rows × columns where none are given; of attention: heads of K and V × their width
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
    """Weights of a made-up model: bytes of one pool, none of which makes an infinite scale; gains are ones."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.nbytes = 0  # of all that a plan reads
        self.pool = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8) & 0x37

    def weight(self, name: str, kind: Q, rows: int, cols: int, groups: int = 1) -> Weight:
        """A weight under a new name."""
        made = Weight(f"#{name}", kind, rows, cols, groups, stride=rows if groups > 1 else 0)
        self.sizes[made.tensor] = made.nbytes
        return made

    def raw(self, name: str) -> np.ndarray:
        if name.startswith("#gain"):
            return np.ones(self.sizes[name] // 4, np.float32).view(np.uint8)
        return np.resize(self.pool, self.sizes[name])

    def release(self, name: str) -> None:
        pass


def copies(nbytes: int) -> int:
    """How many copies of `nbytes` bytes are together larger than the caches."""
    return max(2, min(MOST, -(-block_bytes() // max(1, nbytes))))


def small_ends(source: RandomWeights, dim: int) -> tuple[Embed, Head]:
    """A small embedding and a small head for layers of width `dim`."""
    gain, matrix = source.weight("gain.x", Q.F32, 1, dim), source.weight("head", Q.F32, VOCAB, dim)
    return Embed(source.weight("embed", Q.F32, VOCAB, dim)), Head(gain, EPS, matrix)


def kernel_plan(source: RandomWeights, op: str, quant: Q, rows: int, cols: int) -> Plan:
    """A plan whose layers contain copies of one op; what else a layer needs is as small as its shapes allow."""
    w = source.weight
    dim = {"linear_add": rows, "experts_down": rows, "attention": 256}.get(op, cols)
    gain, n = w("gain", Q.F32, 1, dim), copies(Weight("", quant, rows, cols).nbytes)
    layers = list[Layer]()
    match op:
        case "head":  # a step has one
            matrix = w("head", quant, rows, cols)
            return Plan(Embed(matrix), (), Head(gain, EPS, matrix))
        case "norm_linear":  # q, k and v of one kv head, together `rows`
            width = next((d for d in (128, 64, 32, 16, 8, 4, 2) if rows % d == 0 and rows // d >= 3), None)
            if width is None:
                raise TinychatError(f"norm_linear with {rows} rows: expected an even number of at least 6")
            heads = rows // width - 2
            for i in range(n):
                layers.append(Layer(_attention(source, f"{i}", gain, quant, heads, 1, width), None))
        case "attention":
            for i in range(copies(4 * DEPTH * rows * cols)):
                layers.append(Layer(_attention(source, f"{i}", gain, Q.F16, 4 * rows, rows, cols), None))
        case "gate_up" | "linear_add":
            ff = rows if op == "gate_up" else cols
            for i in range(n // 2 + 1 if op == "gate_up" else n):
                layers.append(Layer(None, Dense(gain, EPS, _gated(source, f"{i}", quant, dim, ff))))
        case _:
            ff = rows if op == "experts_up" else cols
            for i in range(max(2, n // (3 * EXPERTS))):
                router = Router(w(f"r{i}", Q.F32, EXPERTS, dim), None, None, "softmax", USED, False, 1.0, 1, 1)
                layers.append(
                    Layer(None, Experts(gain, EPS, router, _gated(source, f"{i}", quant, dim, ff, EXPERTS), None))
                )
    embed, head = small_ends(source, dim)
    return Plan(embed, tuple(layers), head)


def _fitting(quant: Q, cols: int) -> Q:
    """`quant` where rows of `cols` values are complete blocks of it, else F16."""
    return quant if cols % GGML_QUANT_SIZES[quant][0] == 0 else Q.F16


def _gated(source: RandomWeights, name: str, quant: Q, dim: int, ff: int, groups: int = 1) -> Gated:
    gate, up = (source.weight(f"{part}{name}", _fitting(quant, dim), ff, dim, groups) for part in ("gate", "up"))
    return Gated(gate, up, source.weight(f"down{name}", _fitting(quant, ff), dim, ff, groups))


def _attention(source: RandomWeights, name: str, gain: Weight, quant: Q, heads: int, kv_heads: int, width: int) -> GQA:
    dim, frequencies = gain.cols, tuple(1e4 ** (-2 * i / width) for i in range(width // 2))
    q, k, v = (
        source.weight(f"{part}{name}", quant, n * width, dim)
        for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    return GQA(
        norm=gain,
        eps=EPS,
        q=q,
        k=k,
        v=v,
        q_bias=None,
        k_bias=None,
        v_bias=None,
        qk_norm=None,
        q_norm=None,
        k_norm=None,
        rope=Rope(width // 2 * 2, "neox", frequencies),
        heads=heads,
        kv_heads=kv_heads,
        key_dim=width,
        value_dim=width,
        scale=width**-0.5,
        output=source.weight(f"o{name}", _fitting(quant, heads * width), dim, heads * width),
        output_bias=None,
    )


def layer_kinds(plan: Plan) -> list[list[int]]:
    """Numbers of the layers with the same ops, shapes and types, together; in order of the first of each kind."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, ops in enumerate(plan.ops_of_layers):
        found.setdefault(tuple((type(o), shape_of(o), quant_of(o)) for o in ops), []).append(i)
    return list(found.values())


class PartOfFile(RandomWeights):
    """Some layers of a file, a layer perhaps several times (as `name#1`, `name#2`), between a small embedding and
    head."""

    def __init__(self, gguf: GGUF) -> None:
        super().__init__()
        self.gguf = gguf

    def raw(self, name: str) -> np.ndarray:
        return super().raw(name) if name.startswith("#") else self.gguf.raw(name.split("#")[0])


def copied(layer: Layer, copy: int) -> Layer:
    """`layer` with its weights under names of their own; copy 0 is `layer` itself."""
    return cast(Layer, _renamed(layer, copy)) if copy else layer


def _renamed(value: Any, copy: int) -> Any:
    if isinstance(value, Weight):
        return replace(value, tensor=f"{value.tensor}#{copy}")
    if isinstance(value, GQA | MLA | Dense | Experts | Router | Gated | Layer):
        return replace(value, **{f.name: _renamed(getattr(value, f.name), copy) for f in fields(value)})
    return value
