"""The named constants of each kernel: a dataclass per .cu file, and the C++ header with its values.

A field `key_dim` is the constant KEY_DIM in the .cu file. A field that is a dataclass itself becomes a struct with
static members (`table.rows` is Table::ROWS), a tuple of them `List<Part0, Part1>`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from functools import cache
from typing import Any, get_args

from tinychat.kernels import blocks
from tinychat.kernels.quant_types import GGMLQuantizationType

SPAN = 128  # values that four lanes of a prompt's product take at a time; rows of halves are padded to it
U64 = int  # a field of this type is u64 in C++: it goes into address computations
LOG2E = math.log2(math.e)
GatingCode = IntEnum("GatingCode", [name.upper() for name in get_args(blocks.Gating)], start=0)  # type: ignore[misc]
ActivationCode = IntEnum("ActivationCode", [name.upper() for name in get_args(blocks.Activation)], start=0)  # type: ignore[misc]


class Norm(IntEnum):
    """Over what the RMSNorm of a query or key goes."""

    NO_NORM = 0
    PER_HEAD = 1
    ALL_HEADS = 2


class Constants:
    """Base of the dataclasses below."""


@dataclass(frozen=True, kw_only=True)
class StepConstants(Constants):
    """Base of those of a decode step's kernels."""

    columns: int  # tokens of the step, each with its own position; 1, or more where drafts are verified


@dataclass(frozen=True)
class Matrix(Constants):
    """Matrices (rows, cols) of one weight: matrix g's row r is row g * stride + start + r of a packed tensor; with a
    `run`, of the one matrix, row r // run * stride + start + r % run (quants.cuh, packed_row)."""

    type: GGMLQuantizationType
    rows: int
    cols: int
    blocks: U64  # of the whole tensor: where its planes begin
    start: U64
    stride: U64
    run: int = 0


NO_MATRIX = Matrix(GGMLQuantizationType.F16, 0, 0, 0, 0, 0)  # where a block has no shared expert


@dataclass(frozen=True)
class ExpertChoice(Constants):
    """How experts are chosen (kernels/ops.py, Route); routing.cuh"""

    experts: int
    chosen: int
    gating: GatingCode
    normalize: bool
    groups: int
    groups_used: int
    scale: float
    logit_scale: float
    min_weight_sum: float = blocks.MIN_WEIGHT_SUM


@dataclass(frozen=True)
class GatedActivation(Constants):
    """What is made of gate and up (kernels/blocks.py, Gated); activation.cuh"""

    function: ActivationCode
    clamp: float = blocks.CLAMP
    slope: float = blocks.CLAMP_SLOPE


@dataclass(frozen=True)
class EmbedConstants(Constants):
    """embed.cu"""

    table: Matrix
    scale: float


@dataclass(frozen=True)
class StoreHiddenConstants(Constants):
    """store_hidden.cu"""

    cols: int
    eps: float


@dataclass(frozen=True)
class JoinConstants(Constants):
    """join.cu"""

    table: Matrix
    scale: float
    eps: float


@dataclass(frozen=True, kw_only=True)
class FollowConstants(StepConstants):
    """follow.cu, next_step.cu"""

    words: int  # of `state`


@dataclass(frozen=True)
class LayerInputsConstants(Constants):
    """layer_inputs.cu"""

    table: Matrix
    scale: float
    eps: float
    width: int


@dataclass(frozen=True)
class GateInputConstants(Constants):
    """gate_input.cu"""

    activation: GatedActivation
    width: int
    pitch: int  # of the inputs of all layers
    start: int  # of the layer's
    unit: bool
    cols: int
    eps: float


@dataclass(frozen=True)
class Spread(Constants):
    """How a matrix is spread over warps: `lanes` of a warp and `split` warps share a row, a lane has `rows_per_lane`
    rows and `depth` blocks of each in flight."""

    lanes: int
    split: int
    rows_per_lane: int
    depth: int

    def rows(self, warps: int = 8) -> int:
        """Rows of a thread block of `warps` warps."""
        return warps * 32 // (self.split * self.lanes) * self.rows_per_lane

    def blocks(self, rows: int, warps: int = 8) -> int:
        """Thread blocks for a matrix of `rows` rows."""
        return -(-rows // self.rows(warps))


@dataclass(frozen=True)
class LinearPart(Constants):
    """One matrix of linear.cu and the blocks that compute it."""

    weight: Matrix
    spread: Spread
    grid_first: int
    grid_blocks: int
    pitch: int  # values from one column's results to the next
    start: int  # value of a column's results that the first row is


@dataclass(frozen=True)
class LinearConstants(StepConstants):
    """linear.cu"""

    cols: int
    normed: bool
    eps: float
    early: bool  # the kernel behind may start at once: nothing that it reads in front of its wait is new
    last_token: bool  # the input is that of the last of this step's tokens
    in_quantised: bool  # the input is int8 blocks already
    quantised: bool  # there is a matrix that reads int8 blocks
    floating: bool  # there is a matrix that reads floats
    add: bool  # results are added to dst
    cleared: int  # words of `cleared`
    tile: int  # of several columns: tiles.cuh
    stream: bool
    ring_shared: int
    out_scale: float
    softcap: float  # results are softcap * tanh(result / softcap); 0: as they are
    part: tuple[LinearPart, ...]


@dataclass(frozen=True)
class LatentConstants(Constants):
    """latent.cuh; prompt_latent.cu"""

    heads: int
    nope: int
    kv_lora: int
    rope_dims: int
    neox: bool
    eps: float
    query_scale: float
    growth: float  # of queries: the scale of kernels/blocks.py, Temperature; 0: none
    growth_length: int


@dataclass(frozen=True)
class PromptLatentConstants(LatentConstants):
    """prompt_latent.cu"""

    absorbed: bool  # the queries go through W_k_b, instead of all rows of the cache


@dataclass(frozen=True)
class PromptLatentAttentionConstants(Constants):
    """prompt_latent_attention.cu"""

    heads: int
    key_dim: int
    value_dim: int
    blocks: int  # that run at the same time


@dataclass(frozen=True)
class PromptCombineConstants(Constants):
    """prompt_combine.cu"""

    heads: int
    value_dim: int
    blocks: int  # as in PromptLatentAttentionConstants
    gated: bool
    rest: int  # values of all heads' results, and of a row of them
    pitch: int


@dataclass(frozen=True)
class AbsorbConstants(LatentConstants, StepConstants):
    """absorb.cu"""

    weight: Matrix
    spread: Spread
    head_blocks: int  # thread blocks of one head's matrix
    quantised: bool
    floating: bool


@dataclass(frozen=True)
class MLAClusterConstants(LatentConstants, StepConstants):
    """mla_cluster.cu"""

    cluster: int  # blocks per head
    keys: int  # that a warp takes at a time
    query: Matrix  # 0 columns where q has no low rank
    absorb: Matrix
    value: Matrix
    query_lanes: int  # that share a row
    latent_lanes: int
    value_lanes: int
    gated: bool  # a head's results are multiplied by the sigmoid of its gate
    out_quantised: bool
    shared: int  # bytes of dynamic shared memory


@dataclass(frozen=True)
class LatentAttentionConstants(StepConstants):
    """latent_attention.cu"""

    heads: int
    heads_at_once: int  # of a block
    key_dim: int
    value_dim: int
    keys: int  # that are computed at a time
    chunk_keys: int
    splits: int


@dataclass(frozen=True)
class CombineConstants(StepConstants):
    """combine.cu"""

    heads: int
    kv_lora: int
    splits: int
    chunk_keys: int


@dataclass(frozen=True)
class ValueUpConstants(StepConstants):
    """value_up.cu"""

    heads: int
    kv_lora: int
    splits: int  # as in attention.cu
    chunk_keys: int
    combined: bool  # by combine.cu
    gated: bool  # a head's results are multiplied by the sigmoid of its gate
    weight: Matrix
    spread: Spread
    head_blocks: int  # thread blocks of one head's matrix
    quantised: bool
    floating: bool
    out_quantised: bool


@dataclass(frozen=True)
class QuantiseConstants(StepConstants):
    """quantise.cu"""

    cols: int
    normed: bool
    eps: float


@dataclass(frozen=True)
class GateUpConstants(StepConstants):
    """gate_up.cu; gated.cuh"""

    cols: int
    eps: float
    normed: bool
    activation: GatedActivation
    quantised: bool
    floating: bool
    gate: Matrix
    up: Matrix
    spread: Spread
    out_quantised: bool
    blocks: int  # of rows
    grid: int  # thread blocks
    tile: int  # of several columns: tiles.cuh
    stream: bool
    ring_shared: int


@dataclass(frozen=True)
class ExpertsUpConstants(StepConstants):
    """experts_up.cu; gated.cuh"""

    choice: ExpertChoice
    cols: int
    eps: float
    normed: bool
    activation: GatedActivation
    quantised: bool
    floating: bool
    gate: Matrix
    up: Matrix
    spread: Spread
    expert_blocks: int  # thread blocks of one expert
    shared_gate: Matrix  # 0 rows where there is no shared expert
    shared_up: Matrix
    shared_spread: Spread
    out_quantised: bool
    together: int  # columns of a thread block
    route_slots: int  # tokens whose experts are kept, for the host
    routes: int  # experts of a token, of all layers


@dataclass(frozen=True)
class ExpertsDownConstants(StepConstants):
    """experts_down.cu"""

    choice: ExpertChoice
    weight: Matrix
    shared_down: Matrix  # 0 columns where there is no shared expert
    shared_depth: int  # blocks of its rows in flight
    in_quantised: bool
    quantised: bool
    out_scale: float
    add: bool  # to what is there
    together: int  # columns of a thread block


@dataclass(frozen=True, kw_only=True)
class HeadsConstants(Constants):
    """heads.cuh; store_kv.cu. The defaults: of latent attention, which makes nothing of them."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rope_dims: int = 2
    neox: bool = False  # rotated pairs are (i, i + rope_dims / 2) instead of (2i, 2i + 1)
    norm: Norm = Norm.NO_NORM
    eps: float = 0.0
    query_scale: float = 1.0  # attention's scale times log2(e)
    value_norm: bool = False  # each head of v is divided by its root mean square
    window: int = 0  # rows that a query sees; 0: all


@dataclass(frozen=True, kw_only=True)
class AttentionConstants(HeadsConstants, StepConstants):
    """attention.cu"""

    own: bool  # rows of this step's tokens are not in the cache yet
    row_tiles: int  # of 16 query rows in a block
    chunk_keys: int  # keys that are computed at a time
    stages: int  # chunks in shared memory
    parts: int  # warps that share a tile of scores, each over a part of the key's values
    splits: int  # parts of the cache's rows, one block each
    together: int  # columns of a block, at most
    places: int  # for blocks at once
    latent: bool  # V is the head of K's row
    sinks: bool = False  # a head has one more score, of a row whose value is 0
    gated: bool = False  # results are multiplied by the sigmoid of a gate
    out_quantised: bool = False


@dataclass(frozen=True)
class CarriedConstants(StepConstants):
    """carried.cuh; short_convolution.cu, prompt_short_convolution.cu"""

    taps: int  # inputs of the convolution
    channels: int
    slots: int
    slot_values: int  # of all that a slot holds
    out_quantised: bool


@dataclass(frozen=True)
class DeltaConstants(CarriedConstants):
    """delta.cuh; delta.cu, prompt_convolve.cu, prompt_chunks.cu, prompt_kda.cu, prompt_gated_norm.cu"""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    grouped: bool
    by_channel: bool  # kernels/blocks.py, KDA
    lower_bound: float  # of the logarithm of a decay; 0: none
    eps: float
    query_scale: float


@dataclass(frozen=True)
class PromptDeltaConstants(DeltaConstants):
    """prompt_delta.cu"""

    stages: int  # chunks in shared memory


@dataclass(frozen=True)
class Tile(Constants):
    """What a block of a prompt's product computes: halves.cuh"""

    rows: int  # times 16, per warp
    tokens: int
    split: int  # warps that share rows, each with a part of the columns
    depth: int  # spans of weights on the way
    stages: int  # spans of activations in shared memory
    warpgroups: bool = False  # products by whole warpgroups (wgmma)
    warps: int = 8
    scales: bool = False  # those of the block's rows lie in shared memory
    ring: bool = False  # so do the codes on the way, in as many stages as activations; else in registers

    @property
    def block_rows(self) -> int:
        return self.rows * 16 * (self.warps // self.split)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage_bytes(self) -> int:
        return self.split * self.tokens * SPAN * 2

    @property
    def resident(self) -> int:
        """Blocks that have to fit on a multiprocessor at once."""
        return 2 if self.warpgroups and self.tokens == 64 else 1

    def shared(self, cols: int) -> int:
        """Bytes of dynamic shared memory for rows of `cols` values, but for what weights take."""
        stages = self.stages if self.scales else min(self.stages, -(-cols // (SPAN * self.split)))
        return stages * self.stage_bytes + 1024


@dataclass(frozen=True)
class PromptLinearPart(Constants):
    """One of the weights of prompt_linear.cu: `total` rows of it from its first matrix on, at block `first_tile`."""

    weight: Matrix
    total: int
    pitch: int  # values from one token's results to the next
    start: int  # value of a token's results that the first row is
    first_tile: int
    tiles: int


@dataclass(frozen=True)
class PromptLinearConstants(Constants):
    """prompt_linear.cu"""

    parts: int
    part: tuple[PromptLinearPart, ...]
    tile: Tile
    half: bool  # results are halves
    add: bool  # results are added to what is there
    all_keys: bool  # the tokens are all rows of the cache, not only this step's
    scale: float  # of the results, with their bias
    softcap: float  # as in LinearConstants
    groups: int = 1  # matrices of a weight, each over activations of its own
    group_pitch: int = 0  # values from one matrix's results to the next one's
    placed: bool = False  # halves in the order the next product reads


@dataclass(frozen=True)
class PromptGatedConstants(Constants):
    """prompt_gated.cu"""

    gate: Matrix
    up: Matrix
    activation: GatedActivation
    tile: Tile
    grouped: bool
    pairs_per_row: int  # (token, expert) pairs that share a row of activations


@dataclass(frozen=True)
class PromptExpertsConstants(Constants):
    """prompt_experts.cu"""

    weight: Matrix
    tile: Tile


@dataclass(frozen=True)
class PromptNormConstants(Constants):
    """prompt_norm.cu"""

    cols: int
    eps: float
    normed: bool = True  # False: the values as they are


@dataclass(frozen=True)
class NormAddConstants(Constants):
    """norm_add.cu"""

    cols: int
    eps: float
    scale: float
    stream_scale: float
    add: bool


@dataclass(frozen=True)
class PromptAttentionConstants(Constants):
    """prompt_attention.cu"""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    key_part: int  # values of a key that lie in `keys`; the rest is in `rope`
    rope_pitch: int
    rope_start: int
    window: int = 0  # rows that a query sees; 0: all
    sinks: bool = False  # a head has one more score, of a row whose value is 0
    gate: int = 0  # values of a head's gate, by whose sigmoid results are multiplied: 1 or value_dim; 0: none
    chunk_keys: int = 0  # keys in shared memory at a time, twice
    warpgroups: bool = False  # products by whole warpgroups (wgmma)


@dataclass(frozen=True)
class RouterConstants(Constants):
    """router.cu"""

    weight: Matrix
    choice: ExpertChoice
    tokens: int  # of a cluster of blocks
    cluster: int  # blocks that share the experts
    parts: int  # warps that share some experts, each with a part of the columns
    eps: float
    route_slots: int  # as in experts_down.cu
    routes: int


@dataclass(frozen=True)
class GroupPairsConstants(Constants):
    """group_pairs.cu"""

    experts: int
    chosen: int
    tile_tokens: int


@dataclass(frozen=True)
class AddExpertsConstants(Constants):
    """add_experts.cu"""

    dim: int
    chosen: int
    scale: float
    add: bool  # to what is there


@dataclass(frozen=True)
class RepackConstants(Constants):
    """repack.cu"""

    type: GGMLQuantizationType
    file_bytes: int  # of a block in the file


@dataclass(frozen=True)
class TransposeConstants(Constants):
    """transpose.cu"""

    weight: Matrix
    total: int  # values


@dataclass(frozen=True)
class SampleConstants(StepConstants):
    """candidates.cu, choose_token.cu"""

    vocab: int
    ring: int  # slots of the ring of decoded tokens
    ring_first: int  # that of position 0
    stretch: int  # logits of a block of candidates.cu
    candidates: int  # kept of a stretch, at most
    max_k: int  # largest top_k that the lists serve


def c_float(value: float) -> str:
    """A float literal of C."""
    return f"{float(value)!r}f"


def _constant(name: str, c_type: str, value: Any) -> str:
    if is_dataclass(value):
        return f"struct {name.title().replace('_', '')} {{\n{_members(value, 'static ')}}};\n"
    name = name.upper()
    match value:
        case bool():
            return f"constexpr bool {name} = {str(value).lower()};\n"
        case IntEnum():
            return f"constexpr int {name} = {value.name};\n"
        case int():
            return f"constexpr {'u64' if c_type == 'U64' else 'int'} {name} = {value};\n"
        case float():
            return f"constexpr float {name} = {c_float(value)};\n"
        case tuple():
            kind = name.title().replace("_", "")
            parts = "".join(_constant(f"{kind}{i}", "", v) for i, v in enumerate(value))
            return f"{parts}using {kind}s = List<{', '.join(f'{kind}{i}' for i in range(len(value)))}>;\n"
    raise AssertionError(value)


def _members(c: Any, prefix: str = "") -> str:
    return "".join(
        ("" if is_dataclass(v := getattr(c, f.name)) or isinstance(v, tuple) else prefix)
        + _constant(f.name, str(f.type), v)
        for f in fields(c)
    )


def enums(*kinds: type[IntEnum]) -> str:
    """The C++ definitions of enums."""
    return "".join(f"enum {{ {', '.join(f'{m.name} = {m.value}' for m in kind)} }};\n" for kind in kinds)


@cache
def header(constants: Constants) -> str:
    """C++ definitions of all constants of a kernel."""
    return "template <class...> struct List {};\n" + enums(GatingCode, ActivationCode, Norm) + _members(constants)
