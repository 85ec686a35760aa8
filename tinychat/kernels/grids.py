"""The grids of the IQ quant types, as the gguf package has them: an index stands for an entry of several values."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants


def grid(kind: GGMLQuantizationType) -> np.ndarray:
    """float32 (entries, values of an entry)."""
    codec: Any = getattr(quants, kind.name)
    codec.init_grid()
    return codec.grid[0, 0]
