"""Weights from a file into memory, as step.c multiplies with them (load.h)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import Weight
from tinychat.kernels.cpu.library import CSource, Library
from tinychat.kernels.executor import Weights
from tinychat.kernels.grids import dequantize
from tinychat.kernels.quant_types import GGMLQuantizationType as Q

BATCH = 256 << 20  # bytes, at least


def stored_type(w: Weight) -> Q:
    """The type that `w` has in memory."""
    return Q.F16 if w.transposed else w.type


def batches(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """`weights` in pieces of BATCH bytes, between which a load can be reported and stopped."""
    batch = list[Weight]()
    for w in weights:
        batch.append(w)
        if sum(b.nbytes for b in batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def load(lib: Library, context: int, weights: Weights, places: Mapping[Weight, int]) -> None:
    """Reads each weight and packs it to its address, on the threads of `context`. Raises TinychatError."""
    sources, arrays = list[CSource](), dict[object, np.ndarray]()  # arrays: what is not read from a file
    for w, to in places.items():
        fd, start = (not w.transposed and weights.place(w.tensor)) or (-1, 0)
        stride, start = w.stride, start + w.start * w.row_bytes
        if w.transposed:
            arrays[w] = _transposed(w, weights.raw(w.tensor))
            stride, start = w.rows, arrays[w].ctypes.data
        elif fd < 0:
            if w.tensor not in arrays:
                arrays[w.tensor] = weights.raw(w.tensor)
            start += arrays[w.tensor].ctypes.data
        sources.append(CSource(fd, stored_type(w), w.rows, w.cols, w.groups, stride, w.run, start, to))
    done = lib.lib.tc_load(context, (CSource * len(sources))(*sources), len(sources))
    if done < 0:
        raise TinychatError("not enough memory to read the weights; choose a smaller model or context")
    if done < len(sources):
        name = [*places][done].tensor
        weights.raw(name)  # says what is wrong
        raise TinychatError(f"{name} could not be read")


def _transposed(w: Weight, raw: np.ndarray) -> np.ndarray:
    """K of a legacy attn_kv_b, whose rows are our columns: float16 (groups, rows, cols)."""
    rows = raw.reshape(-1, w.row_bytes)
    with np.errstate(all="ignore"):  # a damaged file may hold any bits
        parts = [dequantize(rows[g * w.stride + w.start :][: w.cols], w.type).T for g in range(w.groups)]
        return np.ascontiguousarray(np.stack(parts).astype(np.float16))
