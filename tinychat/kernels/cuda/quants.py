"""The quantised types on the device, as the table in quants.cuh has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

Q = GGMLQuantizationType


@dataclass(frozen=True)
class Planes:
    """A row of QUANTS in quants.cuh, where the columns are explained."""

    table: bool  # whether codes are indices of one
    lo: int
    two: int
    one: int
    lo_unit: int
    two_unit: int
    one_unit: int
    s1: int
    s2: int
    offset: int
    min: int
    split: int
    shift: int
    block: int
    codes: int
    bits: int
    scale: int
    minimum: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Bytes of 32 weights in each plane but s2, which has `s2` bytes of 256."""
        return self.lo, self.two, self.one, self.s1


_ROW = re.compile(r"X\((\w+), \d+, ([-\d, ]+), (\w+)\)")
QUANTS = {
    GGMLQuantizationType[name]: Planes(table != "INTEGERS", *map(int, columns.split(", ")))
    for name, columns, table in _ROW.findall((Path(__file__).parent / "quants.cuh").read_text())
}
FLOATS = tuple(kind for kind, planes in QUANTS.items() if planes.block == 8)


@cache
def packed_bytes(kind: Q, values: int) -> int:
    """Size of a repacked tensor of `values` weights; its last plane begins at s2_at (quants.cuh)."""
    if kind in FLOATS:
        return values * GGML_QUANT_SIZES[kind][1]
    p, n = QUANTS[kind], values // 32
    return sum(-(-size // 16) * 16 for size in (*(n * size for size in p.sizes), -(-n // 8) * p.s2))
