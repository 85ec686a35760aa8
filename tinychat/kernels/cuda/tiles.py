"""How the matrices of a verify step are cut into tiles for tensor cores (tiles.cuh): rows of a tile, thread blocks, the
ring in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import Weight
from tinychat.kernels.cuda.builder import Builder
from tinychat.kernels.cuda.constants import Spread
from tinychat.kernels.cuda.quants import QUANTS, Planes

TILE_THREADS, WARPS = 256, 8
MULTIPROCESSORS = 132  # of an H100: a block on each
TILES = (2, 1)  # times 16 rows of a warp
STAGES = 4  # of the ring, if they fit
UNEVEN = 0.8  # smaller tiles where the fullest multiprocessor then has at most this share of the rows


@dataclass(frozen=True)
class Tiling:
    """`tile` times 16 rows of a warp; thread blocks of each matrix; bytes of shared memory; blocks that a
    multiprocessor takes at once, so that those of the next kernel fetch their first weights in time."""

    tile: int
    blocks: tuple[int, ...]
    shared: int
    resident: int


def tiling(
    b: Builder, matrices: Sequence[tuple[Weight, Spread]], *, stream: bool = False, pair: bool = False, together: int = 1
) -> Tiling:
    """For matrices of one kernel, over one input. `stream`: the input comes with the ring; `pair`: two matrices share
    their tiles; `together`: rows that one block has to make. Raises TinychatError where they do not fit."""
    for shared, resident, stages in ((b.room // 2, 2, STAGES), (b.room, 1, STAGES), (b.room, 1, 2)):
        fits = [
            tile
            for tile in (TILES[1:] if pair else TILES)
            if all(_least(b, matrices if pair else [m], tile, stages, stream) <= shared for m in matrices)
        ]
        if fits:
            grids = {tile: _grid(matrices, tile, pair, together) for tile in fits}
            most = {tile: rounds * tile for tile, (_, rounds) in grids.items()}
            tile = next(t for t in fits if min(most.values()) > UNEVEN * most[t] or t == fits[-1])
            return Tiling(tile, grids[tile][0], shared, resident)
    raise TinychatError(f"{b.columns} columns of {matrices[0][0].cols:,} activations are too many for shared memory")


def _classes(t: Spread) -> tuple[int, int]:
    """Partial sums of a row, and groups of warps with rows of their own."""
    classes = t.lanes * t.split
    return classes, WARPS // min(classes, WARPS)


def _grid(
    matrices: Sequence[tuple[Weight, Spread]], tile: int, pair: bool, together: int
) -> tuple[tuple[int, ...], int]:
    """Blocks of each matrix, and the most tiles that one computes."""
    tiles = []
    for w, t in matrices:
        rows = 16 * tile * _classes(t)[1]
        tiles.append(-(-w.rows // max(rows, together)) * max(1, together // rows))
    unit = max(1, together // (16 * tile * _classes(matrices[0][1])[1]))
    rounds = unit
    while sum(-(-n // rounds) for n in (tiles[:1] if pair else tiles)) > MULTIPROCESSORS:
        rounds += unit
    if pair or len(tiles) == 1:
        return tuple(min(-(-n // unit), MULTIPROCESSORS) for n in tiles), rounds
    return tuple(-(-n // rounds) for n in tiles), rounds


def _least(b: Builder, matrices: Sequence[tuple[Weight, Spread]], tile: int, stages: int, stream: bool) -> int:
    """Bytes of shared memory with so many stages, as tiles.cuh counts."""
    (first, t), columns = matrices[0], b.columns
    classes, groups = _classes(t)
    blocks = first.cols // 32
    span = classes * min(-(-blocks // classes), max(1, 32 // classes))
    rows, padded = 16 * tile * groups, columns if columns < 8 else -(-columns // 8) * 8
    stage = sum(rows * _row_bytes(QUANTS[b.weight(w).tensor.kind], span) for w, _ in matrices)
    stage += -(-span * columns * 40 // 16) * 16 if stream else 0
    staged = 0 if stream else -(-columns * blocks * 40 // 16) * 16
    sums = 4 * (WARPS // groups) * t.split * padded * (len(matrices) * rows + 4)
    return staged + sums + stages * stage


def _row_bytes(p: Planes, span: int) -> int:
    """Of `span` blocks of a row in shared memory."""
    planes = (span * p.lo, span * p.hi, span * p.s1, -(-span // 8) * p.s2)
    return sum(((n + 15) // 16 | 1) * 16 for n in planes if n)
