"""Quantised types on the device: one table. A new type is a row here, its codes in repack.cu, and in quants.cuh what
its weights mean where that is new.

A tensor lies in planes (quants.cuh), one after the other, each padded to 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Q = GGMLQuantizationType


@dataclass(frozen=True)
class Planes:
    """Bytes of each plane, and what a stored code means: scale * (code - offset), or scale * code + minimum."""

    lo: int  # per block
    hi: int = 0  # per block: the bits above the fourth
    s1: int = 0  # per block: scale, minimum
    s2: int = 0  # per 8 blocks: scale of the scales
    offset: int = 0
    minimum: bool = False
    block: int = 32  # weights that a lane reads at once
    halves: tuple[int, ...] = ()  # where a block of the file has its F16 scales
    exponents: tuple[int, ...] = ()  # where it has scales that are powers of two
    table: bool = False  # a code is an index of a table of signed bytes (quants.cuh)


QUANTS = {
    Q.F32: Planes(32, block=8),
    Q.F16: Planes(16, block=8),
    Q.BF16: Planes(16, block=8),
    Q.Q4_0: Planes(16, s1=2, offset=8, halves=(0,)),
    Q.Q4_1: Planes(16, s1=4, minimum=True, halves=(0, 2)),
    Q.Q5_0: Planes(16, hi=4, s1=2, offset=16, halves=(0,)),
    Q.Q5_1: Planes(16, hi=4, s1=4, minimum=True, halves=(0, 2)),
    Q.Q8_0: Planes(32, s1=2, halves=(0,)),
    Q.Q4_K: Planes(16, s1=2, s2=4, minimum=True, halves=(0, 2)),
    Q.Q5_K: Planes(16, hi=4, s1=2, s2=4, minimum=True, halves=(0, 2)),
    Q.Q6_K: Planes(16, hi=8, s1=2, s2=2, offset=32, halves=(208,)),
    Q.MXFP4: Planes(16, s1=1, exponents=(0,), table=True),
}
FLOATS = tuple(kind for kind, planes in QUANTS.items() if planes.block == 8)


def packed_bytes(kind: Q, values: int) -> int:
    """Size of a repacked tensor of `values` weights; its last plane begins at s2_at (quants.cuh)."""
    if kind in FLOATS:
        return values * GGML_QUANT_SIZES[kind][1]
    p, n = QUANTS[kind], values // 32
    return sum(-(-size // 16) * 16 for size in (n * p.lo, n * p.hi, n * p.s1, -(-n // 8) * p.s2))


def header() -> str:
    """C++: the types with ggml's ids, and the table as functions of a type (lo_bytes, block_of, ...)."""
    names = {"lo": "lo_bytes", "hi": "hi_bytes", "s1": "s1_bytes", "s2": "s2_bytes"}
    names |= {"offset": "offset_of", "minimum": "has_min", "block": "block_of", "table": "has_table"}
    out = f"enum {{ {', '.join(f'{kind.name} = {int(kind)}' for kind in QUANTS)} }};\n"
    for f in fields(Planes):
        if f.name in names:
            cases = " ".join(f"case {kind.name}: return {int(getattr(p, f.name))};" for kind, p in QUANTS.items())
            out += f"DEVICE constexpr int {names[f.name]}(int t) {{\n  switch (t) {{ {cases} }}\n  return 0;\n}}\n"
    return out
