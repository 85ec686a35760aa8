"""The vocabulary of a plan: the fused ops of one forward step, with their shapes. Every executor implements exactly
these.

Conventions. T is the number of tokens of a step (1 in decode). An activation buffer `b` is float32 (T,
plan.buffers[b]). "x" is the residual stream (T, dim). Weights stay packed as in the file; `Weight` says which rows of
which tensor. RMSNorm(v) = v / sqrt(mean(v^2) + eps) * gain. Meanings are fixed by engine/reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType


@dataclass(frozen=True)
class Weight:
    """`groups` matrices of (rows, cols) inside one file tensor: matrix g, row r is packed row `g * stride + start + r`.

    A plain matrix has groups 1; experts and per-head matrices have one group each; a fused tensor (qkv, gate_up, kv_b)
    gives slices by `start` and `stride`. With `transposed` the file holds (cols, rows) per group instead: group g's
    packed row `g * stride + start + c` is column c (only the K part of a legacy attn_kv_b). Vectors (norm gains,
    biases, the selection bias) have rows 1 and type F32.
    """

    tensor: str
    type: GGMLQuantizationType
    rows: int
    cols: int
    groups: int = 1
    start: int = 0
    stride: int = 0  # packed rows from one group to the next
    transposed: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of one packed row."""
        block, size = GGML_QUANT_SIZES[self.type]
        return (self.rows if self.transposed else self.cols) // block * size

    @property
    def group_bytes(self) -> int:
        """Packed bytes of one group's matrix."""
        return self.row_bytes * (self.cols if self.transposed else self.rows)

    @property
    def nbytes(self) -> int:
        return self.group_bytes * self.groups


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of `dims` values. Pair i is (2i, 2i+1) for style "norm", (i, i + dims/2) for "neox".

    At position p it turns by the angle p * inv_freq[i] and scales by `magnitude`; YaRN, linear scaling and rope_freqs
    are already inside `inv_freq` (float64, dims/2).
    """

    dims: int
    style: Literal["norm", "neox"]
    inv_freq: tuple[float, ...]
    magnitude: float = 1.0

    def table(self, positions: int) -> np.ndarray:
        """cos and sin of every angle: float32 (positions, dims/2, 2), computed in float64."""
        angle = np.arange(positions, dtype=np.float64)[:, None] * np.asarray(self.inv_freq)[None, :]
        return (np.stack([np.cos(angle), np.sin(angle)], axis=-1) * self.magnitude).astype(np.float32)


@dataclass(frozen=True)
class Embed:
    """x = row `token` of `weight` (vocab, dim), dequantised."""

    weight: Weight


@dataclass(frozen=True)
class NormLinear:
    """dst[i] = weights[i] @ RMSNorm(src) (+ biases[i]); `norm` None means no norm. All weights share the input."""

    src: str
    norm: Weight | None
    eps: float
    weights: tuple[Weight, ...]
    biases: tuple[Weight | None, ...]
    dst: tuple[str, ...]


@dataclass(frozen=True)
class RopeStore:
    """GQA: optional RMSNorm of q and k, RoPE of both (first rope.dims values of each head), then row `pos` of layer's K
    and V.

    q (T, heads * head_dim), k and v (T, kv_heads * head_dim) are buffers; q is updated in place. Gains of
    `q_norm`/`k_norm` have head_dim values (per head) or all heads' (over the whole projection, OLMoE).
    """

    layer: int
    rope: Rope
    q: str
    k: str
    v: str
    q_norm: Weight | None
    k_norm: Weight | None
    eps: float
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentStore:
    """MLA: RoPE of the trailing `rope.dims` of each head of q, in place; row `pos` of the layer's latent cache =
    RMSNorm(kv[:kv_lora]) * norm ‖ RoPE(kv[kv_lora:]). q (T, heads * (nope + rope.dims)), kv (T, kv_lora +
    rope.dims)."""

    layer: int
    rope: Rope
    q: str
    kv: str
    norm: Weight
    eps: float
    heads: int
    nope: int
    kv_lora: int


@dataclass(frozen=True)
class Absorb:
    """MLA: dst (T, heads, kv_lora + rope_dims): weight[h] (kv_lora, nope) @ q_nope[h], then q_rope[h] copied behind
    it."""

    src: str
    weight: Weight
    dst: str
    heads: int
    nope: int
    rope_dims: int
    kv_lora: int


@dataclass(frozen=True)
class Attention:
    """Causal softmax(q·K * scale)·V over cache rows 0..pos. q (T, heads, key_dim); dst (T, heads, value_dim).

    Head h reads kv head h * kv_heads // heads. `latent`: one kv head, no V cache, V = the first value_dim values of K's
    row.
    """

    layer: int
    src: str
    dst: str
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    latent: bool


@dataclass(frozen=True)
class ValueUp:
    """MLA: dst (T, heads, v_dim) = weight[h] (v_dim, kv_lora) @ src[h] (T, heads, kv_lora)."""

    src: str
    weight: Weight
    dst: str


@dataclass(frozen=True)
class LinearAdd:
    """x += weight @ src (+ bias)."""

    src: str
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True)
class GateUp:
    """dst = silu(gate @ n) * (up @ n), n = RMSNorm(x): the first half of a dense feed-forward layer."""

    norm: Weight
    eps: float
    gate: Weight
    up: Weight
    dst: str


Gating = Literal["softmax", "sigmoid", "softmax_weight", "sqrt_softplus"]


@dataclass(frozen=True)
class Route:
    """Chooses `top_k` of `router.rows` experts per token from l = router @ RMSNorm(x), in float32.

    p = softmax(l), sigmoid(l), sqrt(softplus(l)), or l itself ("softmax_weight"). Selection: largest p + bias, ties to
    the lower index; with groups > 1 a group scores the sum of its two largest p + bias and only the best `groups_used`
    groups stay. Weights: unbiased p of the chosen ("softmax_weight": softmax over the chosen l); with `normalize`
    divided by max(their sum, 6.103515625e-5); times `scale`. Results: ids int32 and weights float32, (T, top_k), in
    order of selection.
    """

    norm: Weight
    eps: float
    router: Weight
    router_bias: Weight | None
    bias: Weight | None
    gating: Gating
    top_k: int
    normalize: bool
    scale: float
    groups: int
    groups_used: int


@dataclass(frozen=True)
class ExpertsUp:
    """For each chosen expert e: silu(gate[e] @ n) * (up[e] @ n), n = RMSNorm(x), behind one another in dst
    (T, top_k * ff + shared_ff); the shared expert's silu(gate)·up, where there is one, comes last."""

    norm: Weight
    eps: float
    gate: Weight
    up: Weight
    shared_gate: Weight | None
    shared_up: Weight | None
    top_k: int
    dst: str


@dataclass(frozen=True)
class ExpertsDown:
    """x += sum over the chosen experts of weight * (down[e] @ src part) + shared_down @ shared part."""

    src: str
    down: Weight
    shared_down: Weight | None
    top_k: int


@dataclass(frozen=True)
class Head:
    """logits (T, vocab) = weight @ RMSNorm(x)."""

    norm: Weight
    eps: float
    weight: Weight


Op = (
    Embed
    | NormLinear
    | RopeStore
    | LatentStore
    | Absorb
    | Attention
    | ValueUp
    | LinearAdd
    | GateUp
    | Route
    | ExpertsUp
    | ExpertsDown
    | Head
)


@dataclass(frozen=True)
class Plan:
    """One forward step. `buffers`: name -> values per token. `cache`: values per row of each layer's K and V (V 0 for
    MLA)."""

    ops: tuple[Op, ...]
    buffers: dict[str, int]
    layers: int
    k_width: int
    v_width: int
    dim: int
    vocab: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one cache row over all layers, F16."""
        return self.layers * (self.k_width + self.v_width) * 2

    def weight_bytes(self, op: Op) -> int:
        """Packed bytes that one decode step reads of `op`'s weights: all of a matrix, top_k of its experts, one
        embedding row."""
        if isinstance(op, Embed):
            return op.weight.row_bytes
        total = 0
        for w in weights_of(op):
            routed = isinstance(op, ExpertsUp | ExpertsDown) and w.groups > 1
            total += w.group_bytes * op.top_k if routed else w.nbytes  # type: ignore[union-attr]
        return total

    def bytes_per_token(self, depth: int = 0) -> int:
        """Bytes that must move for one token: the weights it uses and `depth` cache rows."""
        return self._step_weight_bytes + depth * self.kv_bytes_per_token

    @cached_property
    def _step_weight_bytes(self) -> int:
        """Asked for after every token, so walked through the ops once."""
        return sum(map(self.weight_bytes, self.ops))


def weights_of(op: Op) -> list[Weight]:
    """Every weight an op reads, in field order."""
    found: list[Weight] = []
    for f in fields(op):
        value = getattr(op, f.name)
        found += [w for w in (value if isinstance(value, tuple) else (value,)) if isinstance(w, Weight)]
    return found


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits l (float32, vocab); order and meaning as llama.cpp's default chain.

    repeat_penalty: l[i] of each distinct token of the last `repeat_last_n` is divided by it (l > 0) or multiplied (l <=
    0). Then only tokens survive that are among the top_k largest (0 = all), in the smallest set of largest-first mass
    >= top_p, and with probability >= min_p * the largest. Then temperature: 0 takes the largest (lowest id on ties);
    otherwise the survivor with the largest l / temperature + gumbel(seed, position, id) wins, which draws from the
    softmax (engine/sampling.py has the hash). No state but the position, so a rolled-back position draws the same
    again.
    """

    temperature: float = 0.7
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int = 0
