"""The named constants of each kernel: a dataclass per .cu file, and the C++ header with its values.

A field `key_dim` is the constant KEY_DIM in the .cu file. A field that is a dataclass itself becomes a struct with
static members (`table.rows` is Table::ROWS), a tuple of them `List<Part0, Part1>`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from typing import Any, get_args

from gguf import GGMLQuantizationType

from tinychat.kernels import ops

TILE_ROWS, TILE_TOKENS = 128, 64  # of a block of a prefill product
U64 = int  # a field of this type is u64 in C++: it goes into address computations
LOG2E = math.log2(math.e)
Gating = IntEnum("Gating", [name.upper() for name in get_args(ops.Gating)], start=0)  # type: ignore[misc]


class Norm(IntEnum):
    """Over what the RMSNorm of a query or key goes."""

    NO_NORM = 0
    PER_HEAD = 1
    ALL_HEADS = 2


class Constants:
    """Base of the dataclasses below."""


@dataclass(frozen=True)
class Matrix(Constants):
    """Matrices (rows, cols) of one weight: matrix g's row r is row g * stride + start + r of a packed tensor."""

    type: GGMLQuantizationType
    rows: int
    cols: int
    blocks: U64  # of the whole tensor: where its planes begin
    start: U64
    stride: U64


@dataclass(frozen=True)
class Embed(Constants):
    """embed.cu"""

    table: Matrix


@dataclass(frozen=True)
class StoreKV(Constants):
    """store_kv.cu"""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope_dims: int
    neox: bool  # rotated pairs are (i, i + rope_dims / 2) instead of (2i, 2i + 1)
    norm: Norm
    eps: float
    query_scale: float  # attention's scale times log2(e)


@dataclass(frozen=True)
class StoreLatent(Constants):
    """store_latent.cu; latent.cuh"""

    heads: int
    nope: int
    kv_lora: int
    rope_dims: int
    neox: bool
    eps: float
    query_scale: float


@dataclass(frozen=True)
class Attention(Constants):
    """attention.cu"""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    row_tiles: int  # of 16 query rows in a block
    chunk_keys: int  # keys in shared memory at a time, twice
    parts: int  # warps that share a tile of scores, each over a part of the key's values
    splits: int  # parts of the cache's rows, one block each
    latent: bool  # V is the head of K's row
    prefill: bool  # many tokens, one split, finished results


@dataclass(frozen=True)
class Prepare(Constants):
    """prepare.cu"""

    cols: int
    normed: bool  # RMSNorm
    gated: bool  # silu(src) * up
    quantised: bool  # int8 blocks, for quantised weights
    floating: bool  # halves, for floating-point weights
    rows_per_token: int
    token_stride: int  # values in src from one token to the next
    row_stride: int  # and from one of its rows to the next
    eps: float


@dataclass(frozen=True)
class Matmul(Constants):
    """matmul.cu"""

    weight: Matrix
    in_pitch: int  # values from one token's activations to the next
    out_pitch: int  # and results
    out_step: int  # values from one matrix's results to the next
    half: bool  # results are halves, times `scale`
    add: bool  # results are added to what is there
    scale: float = 1.0
    tile_rows: int = TILE_ROWS
    tile_tokens: int = TILE_TOKENS


@dataclass(frozen=True)
class MatmulExperts(Constants):
    """matmul_experts.cu"""

    weight: Matrix
    pairs_per_row: int  # (token, expert) pairs that share a row of activations
    tile_rows: int = TILE_ROWS
    tile_tokens: int = TILE_TOKENS


@dataclass(frozen=True)
class Silu(Constants):
    """silu.cu"""

    cols: int
    out_pitch: int


@dataclass(frozen=True)
class Choice(Constants):
    """How experts are chosen (kernels/ops.py, Route); routing.cuh"""

    experts: int
    chosen: int
    gating: Gating
    normalize: bool
    groups: int
    groups_used: int
    scale: float


@dataclass(frozen=True)
class Router(Constants):
    """router.cu"""

    weight: Matrix
    choice: Choice
    tokens: int  # of a block
    eps: float


@dataclass(frozen=True)
class GroupPairs(Constants):
    """group_pairs.cu"""

    experts: int
    chosen: int
    tile_tokens: int = TILE_TOKENS


@dataclass(frozen=True)
class AddExperts(Constants):
    """add_experts.cu"""

    dim: int
    chosen: int


def c_float(value: float) -> str:
    """A float literal of C."""
    return f"{float(value)!r}f"


def _constant(name: str, c_type: str, value: Any) -> str:
    if is_dataclass(value):
        return f"struct {name.title().replace('_', '')} {{\n{_members(value, 'static ')}}};\n"
    name = name.upper()
    match value:
        case bool():
            return f"constexpr bool {name} = {str(value).lower()};\n"
        case IntEnum():
            return f"constexpr int {name} = {value.name};\n"
        case int():
            return f"constexpr {'u64' if c_type == 'U64' else 'int'} {name} = {value};\n"
        case float():
            return f"constexpr float {name} = {c_float(value)};\n"
        case tuple():
            kind = name.title().replace("_", "")
            parts = "".join(_constant(f"{kind}{i}", "", v) for i, v in enumerate(value))
            return f"{parts}using {kind}s = List<{', '.join(f'{kind}{i}' for i in range(len(value)))}>;\n"
    raise AssertionError(value)


def _members(c: Any, prefix: str = "") -> str:
    return "".join(
        ("" if is_dataclass(v := getattr(c, f.name)) or isinstance(v, tuple) else prefix)
        + _constant(f.name, str(f.type), v)
        for f in fields(c)
    )


def enums(*kinds: type[IntEnum]) -> str:
    """The C++ definitions of enums."""
    return "".join(f"enum {{ {', '.join(f'{m.name} = {m.value}' for m in kind)} }};\n" for kind in kinds)


def header(constants: Constants) -> str:
    """C++ definitions of all constants of a kernel."""
    return enums(Gating, Norm) + _members(constants)
