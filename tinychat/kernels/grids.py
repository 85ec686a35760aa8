"""What only the gguf package has, imported when it is needed: the values of packed weights; and the grids of the IQ
quant types, in which an index stands for an entry of several values."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tinychat.kernels.quant_types import GGMLQuantizationType


def dequantize(packed: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """float32 values of packed rows."""
    import gguf

    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType(kind))


def grid(kind: GGMLQuantizationType) -> np.ndarray:
    """float32 (entries, values of an entry)."""
    import gguf

    codec: Any = getattr(gguf.quants, kind.name)
    codec.init_grid()
    return codec.grid[0, 0]


@cache
def packed_grid(kind: GGMLQuantizationType) -> np.ndarray:
    """uint16 (entries,): 8 codes of 2 bits or 4 of 4 bits, the numbers of an entry's values in ascending order; those
    of even values in the low byte, of odd ones in the high byte."""
    values = grid(kind)
    codes = np.searchsorted(np.unique(values), values).astype(np.uint16)  # (entries, 8 or 4)
    bits = 16 // codes.shape[1]
    shifts = [i // 2 * bits + i % 2 * 8 for i in range(codes.shape[1])]
    return (codes << np.array(shifts, np.uint16)).sum(1, dtype=np.uint16)
