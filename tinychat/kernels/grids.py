"""The grids of the IQ quant types, as the gguf package has them: an index stands for an entry of several values."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants


def grid(kind: GGMLQuantizationType) -> np.ndarray:
    """float32 (entries, values of an entry)."""
    codec: Any = getattr(quants, kind.name)
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
