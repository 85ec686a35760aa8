"""Plans to measure a part of a model with: copies of one op, or layers of a file, between a small embedding and head.

The copies have weights of their own, together several times the caches, so that every weight comes from memory as in a
model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q

from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.cpu.bandwidth import block_bytes
from tinychat.kernels.ops import (
    Attention,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GateUp,
    Head,
    LatentStore,
    LinearAdd,
    NormLinear,
    Op,
    Plan,
    Rope,
    RopeStore,
    Route,
    Weight,
    weights_of,
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
            f"rows of {cols} values are no whole blocks of {kind.name}, which hold {GGML_QUANT_SIZES[kind][0]}"
        )
    return op, kind, rows, cols


class RandomWeights:
    """Weights that do not exist: bytes from one pool, none of which makes an infinite scale; `#one` is ones."""

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
    return max(2, min(MOST, -(-block_bytes() // max(1, nbytes))))


def around(source: RandomWeights, dim: int, middle: Iterable[Op]) -> tuple[Op, ...]:
    """A small embedding before `middle` and a small head behind."""
    gain = source.weight("gain.x", Q.F32, 1, dim)
    return (
        Embed(source.weight("embed", Q.F32, VOCAB, dim)),
        *middle,
        Head(gain, EPS, source.weight("head", Q.F32, VOCAB, dim)),
    )


def kernel_plan(source: RandomWeights, op: str, quant: Q, rows: int, cols: int) -> Plan:
    """Copies of one op, each with what has to run before it; the buffer z feeds what is not fed by x."""
    w, narrow = source.weight, 32
    dim = {"linear_add": rows, "experts_down": rows, "attention": 256}.get(op, cols)
    gain, buffers, made = w("gain", Q.F32, 1, dim), {"x": dim, "z": narrow}, list[Op]()
    n, layers, width = copies(Weight("", quant, rows, cols).nbytes), 1, 0
    match op:
        case "head":  # a step has one
            matrix = w("head", quant, rows, cols)
            return Plan((Embed(matrix), Head(gain, EPS, matrix)), buffers, 1, 0, 0, dim, rows)
        case "norm_linear":
            buffers["y"] = rows
            made = [NormLinear("x", gain, EPS, (w(f"w{i}", quant, rows, cols),), (None,), ("y",)) for i in range(n)]
        case "gate_up":
            buffers["y"] = rows
            down = w("down", quant if rows % GGML_QUANT_SIZES[quant][0] == 0 else Q.F16, dim, rows)  # decides y's form
            for i in range(n // 2 + 1):
                gate, up = (w(f"{name}{i}", quant, rows, cols) for name in "gu")
                made += [GateUp(gain, EPS, gate, up, "y"), LinearAdd("y", down)]
        case "linear_add":
            buffers["y"] = cols
            made = [NormLinear("x", gain, EPS, (w("z", Q.F32, narrow, dim),), (None,), ("z",))]
            before = NormLinear("z", None, EPS, (w("y", Q.F32, cols, narrow),), (None,), ("y",))
            for i in range(n):
                made += [before, LinearAdd("y", w(f"w{i}", quant, rows, cols))]
        case "attention":
            width, heads, layers = rows * cols, 4 * rows, copies(4 * DEPTH * rows * cols)
            buffers |= {"q": heads * cols, "k": width, "v": width, "y": heads * cols}
            weights = tuple(w(f"w{b}", Q.F16, buffers[b], dim) for b in "qkv")
            project = NormLinear("x", gain, EPS, weights, (None,) * 3, ("q", "k", "v"))
            rope = Rope(cols // 2 * 2, "neox", tuple(1e4 ** (-2 * i / cols) for i in range(cols // 2)))
            for i in range(layers):
                made += [
                    project,
                    RopeStore(i, rope, "q", "k", "v", None, None, EPS, heads, rows, cols),
                    Attention(i, "q", "y", heads, rows, cols, cols, cols**-0.5, False),
                ]
        case _:
            ff = rows if op == "experts_up" else cols
            buffers["y"] = USED * ff
            for i in range(max(2, n // (3 * EXPERTS))):
                router = w(f"r{i}", Q.F32, EXPERTS, dim)
                gate, up = (w(f"{name}{i}", quant, ff, dim, EXPERTS) for name in "gu")
                made += [
                    Route(gain, EPS, router, None, None, "softmax", USED, False, 1.0, 1, 1),
                    ExpertsUp(gain, EPS, gate, up, None, None, USED, "y"),
                    ExpertsDown("y", w(f"d{i}", quant, dim, ff, EXPERTS), None, USED),
                ]
    return Plan(around(source, dim, made), buffers, layers, width, width, dim, VOCAB)


def layer_of(op: Op) -> int:
    """The layer an op is of; -1 for the embedding and the head."""
    if isinstance(op, RopeStore | LatentStore | Attention):
        return op.layer
    names = (re.match(r"blk\.(\d+)\.", w.tensor) for w in weights_of(op))
    return next((int(m[1]) for m in names if m), -1)


def layer_kinds(plan: Plan) -> list[list[list[Op]]]:
    """Layers with the same ops, shapes and types, together; in order of the first of each kind."""
    found: dict[tuple[object, ...], list[list[Op]]] = {}
    for layer, ops in groupby(plan.ops, layer_of):
        if layer >= 0:
            same = list(ops)
            found.setdefault(tuple((type(o), shape_of(o), quant_of(o)) for o in same), []).append(same)
    return list(found.values())


class PartOfFile(RandomWeights):
    """Some layers of a file, a layer perhaps several times (as `name#1`, `name#2`), between a small embedding and
    head."""

    def __init__(self, gguf: GGUF) -> None:
        super().__init__()
        self.gguf = gguf

    def raw(self, name: str) -> np.ndarray:
        return super().raw(name) if name.startswith("#") else self.gguf.raw(name.split("#")[0])


def moved(op: Op, layer: int, copy: int) -> Op:
    """`op` as part of layer `layer`, its weights under names of this copy."""
    changes: dict[str, Any] = {"layer": layer} if hasattr(op, "layer") else {}

    def renamed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(renamed, value))
        return replace(value, tensor=f"{value.tensor}#{copy}") if isinstance(value, Weight) and copy else value

    return replace(op, **{f.name: renamed(getattr(op, f.name)) for f in fields(op)} | changes)
