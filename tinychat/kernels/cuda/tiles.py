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

TILE_THREADS = 256
WARPS = TILE_THREADS // 32
MULTIPROCESSORS = 132  # of an H100
TILES = (2, 1)  # times 16 rows of a warp
STAGES = 3  # of the ring, if they fit
MOST_SHARED = 8  # columns up to which a multiprocessor has two blocks: more need more shared memory for each
UNEVEN = 0.8  # smaller tiles where the fullest block then has at most this share of the rows
Matrices = Sequence[tuple[Weight, Spread]]


@dataclass(frozen=True)
class Tiling:
    """`tile` times 16 rows of a warp; thread blocks of each matrix; bytes of shared memory; blocks of a multiprocessor;
    whether activations come with the weights."""

    tile: int
    blocks: tuple[int, ...]
    shared: int
    resident: int
    stream: bool


def tiling(b: Builder, groups: Sequence[Matrices], *, together: int = 1) -> Tiling:
    """For the groups of matrices of one kernel, over one input; those of a group share their tiles. `together`: rows
    that one block has to make. Raises TinychatError where they do not fit."""
    for resident, stages in ((2, STAGES), (1, STAGES), (1, 2)):
        if resident == 2 and b.columns > MOST_SHARED:
            continue
        shared, found = b.room // resident, []
        for tile in TILES if all(len(group) == 1 for group in groups) else TILES[1:]:
            blocks, rounds = _grid(groups, tile, together, MULTIPROCESSORS * resident)
            for stream in (rounds == 1, rounds > 1):
                if all(_least(b, group, tile, stages, stream) <= shared for group in groups):
                    found.append((rounds * tile, Tiling(tile, blocks, shared, resident, stream)))
                    break
        if found:
            least = min(rows for rows, _ in found)
            return next(t for rows, t in found if least > UNEVEN * rows)
    cols = groups[0][0][0].cols
    raise TinychatError(f"{b.columns} columns of {cols:,} activations are too many for shared memory")


def _classes(t: Spread) -> tuple[int, int]:
    """Partial sums of a row, and groups of warps with rows of their own."""
    classes = t.lanes * t.split
    return classes, WARPS // min(classes, WARPS)


def _grid(groups: Sequence[Matrices], tile: int, together: int, most: int) -> tuple[tuple[int, ...], int]:
    """Blocks of each group, `most` in all, and the most tiles that one computes."""
    rows = [16 * tile * _classes(group[0][1])[1] for group in groups]
    unit = max(1, together // rows[0])  # tiles that belong together
    tiles = [-(-group[0][0].rows // (n * unit)) * unit for group, n in zip(groups, rows)]
    rounds = 1
    while sum(-(-n // rounds) for n in tiles) > most:
        rounds += 1
    blocks, fewer = [-(-n // rounds) for n in tiles], max(1, rounds - 1)
    for i in reversed(range(len(tiles))):  # what is left goes to the last, which then have a tile less
        blocks[i] += min(-(-tiles[i] // fewer) - blocks[i], most - sum(blocks))
    return tuple(blocks), rounds


def _least(b: Builder, group: Matrices, tile: int, stages: int, stream: bool) -> int:
    """Bytes of shared memory with so many stages, as tiles.cuh counts."""
    (first, t), columns = group[0], b.columns
    classes, row_groups = _classes(t)
    blocks = first.cols // 32
    span = classes * min(-(-blocks // classes), max(1, 32 // classes))
    rows, padded = 16 * tile * row_groups, columns if columns < 8 else -(-columns // 8) * 8
    stage = sum(rows * _row_bytes(QUANTS[b.weight(w).tensor.kind], span) for w, _ in group)
    stage += -(-span * columns * 40 // 16) * 16 if stream else 0
    staged = 0 if stream else -(-columns * blocks * 40 // 16) * 16
    sums = 4 * (WARPS // row_groups) * t.split * padded * (len(group) * rows + 4)
    return staged + sums + stages * stage


def _row_bytes(p: Planes, span: int) -> int:
    """Of `span` blocks of a row in shared memory."""
    planes = (*(span * size for size in p.sizes), -(-span // 8) * p.s2)
    return sum(((n + 15) // 16 | 1) * 16 for n in planes if n)
