"""How a decode step's matrices are spread over warps: a table, and the measurement behind each row.

Measurements: one H200 (132 multiprocessors), docs/journal.md, "CUDA executor". `first` is the version that this table
came with (434 tok/s for GLM-4.7-Flash Q4_0); what was tried after it names its row there. Where a figure has no
measurement of its own, the row says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinychat.kernels.blocks import Weight
from tinychat.kernels.cuda.constants import Spread
from tinychat.kernels.cuda.layout import block_size
from tinychat.kernels.cuda.quants import QUANTS

PAIR_THREADS = 512  # of the gate-up kernels: 16 warps of 2 rows are one block of 32 activations
QUANTISED_ROWS = 32  # of a thread block that leaves its results as int8 blocks


@dataclass(frozen=True)
class RowSpread:
    """Rows per lane and blocks in flight for matrices of at least `warps` warps of rows."""

    warps: int
    rows_per_lane: int
    depth: int


ROWS = (
    # "2 rows per warp, depth 2 for the head (was 4 rows, depth 1)": GLM's head 65 -> 62 µs, Llama's 148 -> 120
    RowSpread(65536, rows_per_lane=2, depth=2),
    # first; not measured alone. Llama's qkv and gate-up sized matrices
    RowSpread(6000, rows_per_lane=4, depth=1),
    # first; not measured alone. GLM's q_b (5120 rows), 2.28 µs in the table of docs/cuda.md
    RowSpread(4096, rows_per_lane=2, depth=4),
    # first; "Splitting output 2048x5120 over 2, 4, 8 warps per row" was slower than one row a warp at depth 8
    RowSpread(0, rows_per_lane=1, depth=8),
)
# Lanes of a row: the most that leave at most this share idle. First; not measured alone.
LANES, MOST_IDLE = (32, 16, 8, 4), 0.15
# Several warps share a row of a matrix with fewer rows than this: 8 warps on each of 132 multiprocessors. The journal's
# row "Splitting output 2048x5120 ..." (4.8, 7.2, 11.2 µs for 2, 4, 8 warps) is why larger ones are not split.
FEW_ROWS, MOST_SPLIT, BLOCKS_PER_SPLIT = 1056, 8, 64
# gate and up at once: two rows in flight are enough. "experts_up" 7.9 µs, docs/cuda.md.
PAIR_ROWS, PAIR_DEPTH = 2, 1
LIGHT_DEPTH = 2  # of four rows a lane


def light(w: Weight) -> bool:
    """Whether a lane reads 32 weights at once, 16 bytes and scales: then more of them have room in registers."""
    p = QUANTS[w.type]
    return p.block == 32 and p.lo == 16 and not p.two and not p.one


def lanes_of(w: Weight) -> int:
    """Lanes that share a row."""
    blocks = w.cols // block_size(w.type)
    work = {lanes: -(-blocks // lanes) * lanes / blocks for lanes in LANES}
    return next((n for n, v in work.items() if v <= 1 + MOST_IDLE), min(work, key=lambda n: work[n]))


def spread(w: Weight, rows: int | None = None, *, quantise: bool = False, whole: bool = False) -> Spread:
    """For a matrix of a kernel with `rows` rows in all (default: the weight's own). `quantise`: a block makes
    QUANTISED_ROWS rows where that is possible; `whole`: no two warps share a row."""
    rows, lanes, blocks = rows or w.rows, lanes_of(w), w.cols // block_size(w.type)
    split = 1
    if lanes == 32 and not quantise:
        while split < MOST_SPLIT and rows * split < FEW_ROWS and blocks >= BLOCKS_PER_SPLIT * split:
            split *= 2
    warps = rows * lanes / 32
    fit = next(r for r in ROWS if warps >= r.warps)
    rows_per_lane = lanes // 8 if quantise and lanes >= 8 else fit.rows_per_lane
    if fit.rows_per_lane != rows_per_lane:
        fit = next(r for r in reversed(ROWS) if r.rows_per_lane == rows_per_lane)
    # "q‖k‖v of Llama, two blocks in flight": 394.2 -> 389.7 µs for 6 layers of Q4_0
    depth = LIGHT_DEPTH if rows_per_lane == 4 and light(w) else fit.depth
    return Spread(lanes, 1 if whole else split, rows_per_lane, max(1, min(-(-blocks // (lanes * split)), depth)))


def pair_spread(w: Weight) -> Spread:
    """For gate and up at once, in blocks of PAIR_THREADS."""
    lanes = lanes_of(w)
    return Spread(lanes, 1, PAIR_ROWS if lanes == 32 else 1, PAIR_DEPTH)
