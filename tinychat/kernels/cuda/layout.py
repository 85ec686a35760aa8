"""Where the kernels find each weight: file tensors repacked into planes (quants.cuh), one device buffer per tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels import ops
from tinychat.kernels.blocks import Weight
from tinychat.kernels.cuda.constants import Matrix, RepackConstants, TransposeConstants
from tinychat.kernels.cuda.launch import Launch, kernel
from tinychat.kernels.cuda.quants import QUANTS, packed_bytes
from tinychat.kernels.grids import packed_grid
from tinychat.kernels.ops import Plan
from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

Q = GGMLQuantizationType
GRIDS = (Q.IQ1_S, Q.IQ2_XXS, Q.IQ2_XS, Q.IQ2_S, Q.IQ3_XXS, Q.IQ3_S)  # types whose codes are indices of a grid
REPACK_PARAMS = 24 + 2 * 2048


def block_size(kind: Q) -> int:
    """Weights that a lane reads at once."""
    return QUANTS[kind].block


@dataclass(frozen=True)
class PackedTensor:
    """A repacked tensor: the buffer `w:name` of `values` weights."""

    name: str
    kind: Q
    values: int

    @property
    def buffer(self) -> str:
        return f"w:{self.name}"

    @property
    def file_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.values // block * size

    @property
    def blocks(self) -> int:
        return self.values // block_size(self.kind)

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.kind, self.values)


@dataclass(frozen=True)
class Placed:
    """A plan's weight on the device: matrix g's row r is row g * stride + start + r of `tensor`, but see Weight.run."""

    tensor: PackedTensor
    start: int
    stride: int


def keys_of(absorb: Weight) -> Weight:
    """The weight that makes keys from latent rows: what `absorb` makes of queries, transposed."""
    return replace(absorb, rows=absorb.cols, cols=absorb.rows, transposed=not absorb.transposed)


class Layout:
    """The tensors of a plan. Raises TinychatError for a quant type or a shape that the kernels do not take."""

    def __init__(self, plan: Plan, sizes: dict[str, int]) -> None:
        """`sizes`: packed bytes of every tensor in the file."""
        self.tensors: dict[str, PackedTensor] = {}
        self.transposed: dict[str, tuple[Weight, PackedTensor]] = {}  # buffers made from columns of another tensor
        self._placed: dict[Weight, Placed] = {}
        for op in (*plan.ops, *plan.draft_ops):
            matrices = set(ops.matrices_of(op))
            for w in ops.weights_of(op):
                self._place(w, sizes, w in matrices)
            if isinstance(op, ops.Absorb):
                self._place(keys_of(op.weight), sizes, matrix=True)

    def __getitem__(self, w: Weight) -> Placed:
        return self._placed[w]

    def _place(self, w: Weight, sizes: dict[str, int], matrix: bool) -> None:
        if w.type not in QUANTS:
            raise TinychatError(f"the CUDA kernels do not read {w.type.name} ({w.tensor})")
        if matrix and (w.rows if w.transposed else w.cols) % block_size(w.type):
            raise TinychatError(f"the CUDA kernels need rows of a multiple of {block_size(w.type)} values ({w.tensor})")
        block, size = GGML_QUANT_SIZES[w.type]
        tensor = self.tensors.setdefault(w.tensor, PackedTensor(w.tensor, w.type, sizes[w.tensor] // size * block))
        if w.transposed:
            made = PackedTensor(f"{w.tensor}#T", Q.F16, w.groups * w.rows * w.cols)
            self.transposed[made.buffer] = (w, tensor)
            self._placed[w] = Placed(made, 0, w.rows)
        else:
            self._placed[w] = Placed(tensor, w.start, w.stride or w.rows)

    @property
    def buffers(self) -> list[PackedTensor]:
        """What lies on the device: the file's tensors, and those made of them."""
        return [*self.tensors.values(), *(self[w].tensor for w, _ in self.transposed.values())]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights on the device."""
        return sum(t.nbytes for t in self.buffers)


def repack(tensor: PackedTensor) -> Launch:
    """Repacks as many blocks of 32 weights as it is launched for, which lie in `staging`; repack_params() are in
    `params`."""
    shape = RepackConstants(tensor.kind, GGML_QUANT_SIZES[tensor.kind][1])
    buffers = {"out": tensor.buffer, "in": "staging", "params": "params"}
    name = f"repack_{tensor.kind.name.lower()}"
    return kernel(name, "repack.cu", shape, buffers, lambda count, keys: (-(-count // 256), 1, 1), "load")


def repack_params(tensor: PackedTensor, first: int, count: int) -> np.ndarray:
    """uint64, of at most REPACK_PARAMS bytes: the tensor's blocks (of 32 weights), the first of those to repack, their
    number, and the type's grid."""
    kind = Q.IQ1_S if tensor.kind == Q.IQ1_M else tensor.kind
    grid = packed_grid(kind).view(np.uint64) if kind in GRIDS else ()
    return np.array([tensor.blocks, first, count, *grid], np.uint64)


def transpose(w: Weight, source: PackedTensor, made: PackedTensor) -> Launch:
    """Writes the columns of a legacy kv_b's K part as rows of halves."""
    matrix = Matrix(w.type, w.rows, w.cols, source.blocks, w.start, w.stride)
    shape = TransposeConstants(matrix, made.values)
    buffers = {"dst": made.buffer, "w": source.buffer}
    return kernel("transpose", "transpose.cu", shape, buffers, (-(-made.values // 256), 1, 1), "load")
