"""The grammar of a plan: typed blocks.

A layer has two blocks, attention and feed-forward; what differs between models is a field of a block. An executor
matches the blocks; kernels/ops.py writes them as a list of fused ops.

Conventions. T is the number of tokens of a step (1 in decode). x is the residual stream, float32 (T, dim).
RMSNorm(v) = v / sqrt(mean(v^2) + eps) * gain. Weights stay packed as in the file; `Weight` says which rows of which
tensor. kernels/tinygrad/step.py is the specification of every block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

CACHE_VALUE_BYTES = 2  # of one value in the KV cache of the CPU and CUDA executors: F16


@dataclass(frozen=True)
class Weight:
    """`groups` matrices of (rows, cols) inside one file tensor: matrix g, row r is packed row `g * stride + start + r`.

    A plain matrix has groups 1; experts and per-head matrices have one group each; a fused tensor (qkv, gate_up, kv_b)
    gives slices by `start` and `stride`. With a `run`, the rows of one matrix lie in runs of that length: row r is
    packed row `r // run * stride + start + r % run` (what a tensor has per head). With `transposed` the file holds
    (cols, rows) per group instead: group g's packed row `g * stride + start + c` is column c (only the K part of a
    legacy attn_kv_b). Vectors (norm gains, biases, the selection bias) have rows 1 and type F32.
    """

    tensor: str
    type: GGMLQuantizationType
    rows: int
    cols: int
    groups: int = 1
    start: int = 0
    stride: int = 0  # packed rows from one group, or run, to the next
    run: int = 0  # 0: rows of a group lie behind one another; else there is one group
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
class Temperature:
    """Queries at position p are multiplied by 1 + scale * log(1 + floor(p / length)) (Mistral's long contexts)."""

    scale: float
    length: int

    def table(self, positions: int) -> np.ndarray:
        """float32 (positions,), computed in float64."""
        return (1 + self.scale * np.log1p(np.arange(positions) // self.length)).astype(np.float32)


@dataclass(frozen=True)
class Cache:
    """A layer's part of one row of the KV cache, in values. A "kv" row is K and V of all kv heads; a "latent" row is
    MLA's, stored as K, whose first kv_lora values are also V; a "hidden" row is what MTP reads, stored as V."""

    kind: Literal["kv", "latent", "hidden"]
    key_width: int  # 0 for hidden
    value_width: int  # 0 for latent
    window: int = 0  # rows that a token sees; 0: all

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return (self.key_width + self.value_width) * CACHE_VALUE_BYTES


@dataclass(frozen=True)
class LayerState:
    """What a layer carries from token to token instead of cache rows, float32: the last `rows` inputs of a short
    convolution over `channels`, and a matrix (key_dim, value_dim) per head. Zeros in front of the first token."""

    rows: int
    channels: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def nbytes(self) -> int:
        return 4 * (self.rows * self.channels + self.heads * self.key_dim * self.value_dim)


Activation = Literal["silu", "gelu", "clamped"]
CLAMP, CLAMP_SLOPE = 7.0, 1.702  # of "clamped", as gpt-oss is trained


@dataclass(frozen=True)
class Gated:
    """gate and up (ff, dim), down (dim, ff): down @ (f(gate @ n + gate_bias, up @ n + up_bias)) + down_bias. Experts
    have one group each, of biases too.

    f(g, u) = silu(g) * u, gelu(g) * u (the tanh form), or "clamped": a * sigmoid(CLAMP_SLOPE * a) * (b + 1) with
    a = min(g, CLAMP), b = u clamped to -CLAMP..CLAMP.
    """

    gate: Weight
    up: Weight
    down: Weight
    activation: Activation = "silu"
    gate_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None

    @property
    def ff(self) -> int:
        """Values between up and down."""
        return self.up.rows


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention: x += residual_scale * (output @ heads + output_bias). With `post_norm` the sum in
    parentheses is normed (RMSNorm) first, with that gain.

    q, k, v = weights @ RMSNorm(x) + biases (of x itself without `norm`); q and k are normed as `qk_norm` says (each
    head with a gain of key_dim values, or the whole projection with a gain of all its values), then the first rope.dims
    values of each head are rotated; k and v are stored as row `pos` of the layer's cache.
    heads = softmax(q·K * scale)·V over rows 0..pos, with a `window` over the last `window` of them, where head h reads
    kv head h * kv_heads // heads. A head's value of `sinks` is one more score, of a row whose value is 0. With a
    `gate` the heads are multiplied by sigmoid(gate @ RMSNorm(x)).

    A `shared` layer has no k and v and stores nothing: it reads the cache rows of the earlier layer of that number.
    """

    norm: Weight | None
    eps: float
    q: Weight
    k: Weight | None
    v: Weight | None
    q_bias: Weight | None
    k_bias: Weight | None
    v_bias: Weight | None
    qk_norm: Literal["head", "projection"] | None
    q_norm: Weight | None
    k_norm: Weight | None
    rope: Rope
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    output: Weight
    output_bias: Weight | None
    residual_scale: float = 1.0
    post_norm: Weight | None = None
    window: int = 0  # 0: none
    sinks: Weight | None = None  # (1, heads)
    value_norm: bool = False  # each head of v is divided by its root mean square
    gate: Weight | None = None  # (heads * value_dim, dim)
    shared: int | None = None

    @property
    def cache(self) -> Cache:
        stored = self.kv_heads if self.shared is None else 0
        return Cache("kv", stored * self.key_dim, stored * self.value_dim, self.window if stored else 0)

    @property
    def state(self) -> None:
        return None


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention, absorbed: x += residual_scale * (output @ heads).

    n = RMSNorm(x); q = q @ n, or q @ RMSNorm(q_a @ n) with gain q_a_norm; per head its first `nope` values are not
    rotated, the last rope.dims are. kv = kv_a @ n; the cache row is RMSNorm(kv[:kv_lora]) * kv_norm ‖ RoPE of the rest.
    Per head: query = (k_b[h] @ q_nope ‖ q_rope) * temperature, o = softmax(query·row * scale)·row[:kv_lora],
    heads[h] = v_b[h] @ o, with a `gate` (heads, dim) times sigmoid(gate @ n)[h].
    """

    norm: Weight
    eps: float
    q_a: Weight | None
    q_a_norm: Weight | None
    q: Weight
    kv_a: Weight
    kv_norm: Weight
    k_b: Weight  # one group per head: (kv_lora, nope)
    v_b: Weight  # one group per head: (value_dim, kv_lora)
    rope: Rope
    heads: int
    nope: int
    kv_lora: int
    scale: float
    output: Weight
    residual_scale: float = 1.0
    temperature: Temperature | None = None
    gate: Weight | None = None

    @property
    def kv_heads(self) -> int:
        """All heads read one latent row."""
        return 1

    @property
    def row(self) -> int:
        """Values of a cache row, and of a query."""
        return self.kv_lora + self.rope.dims

    @property
    def cache(self) -> Cache:
        return Cache("latent", self.row, 0)

    @property
    def state(self) -> None:
        return None


@dataclass(frozen=True)
class DeltaRule:
    """Gated delta rule behind a short convolution (gated DeltaNet, arXiv 2412.06464): x += output @ heads.

    With n = RMSNorm(x), channel i of token t is c[t, i] = silu(sum over j of conv[i, j] * (qkv @ n)[t - width + 1 + j,
    i]), where inputs in front of the first token are 0. c is q and k (key_heads heads of key_dim values each) and v
    (heads of value_dim values). Each head of q and of k is divided by sqrt(its sum of squares + eps), q also by
    sqrt(key_dim). Head h reads key head h // (heads / key_heads) if `grouped`, else h % key_heads.

    A head's state S (key_dim, value_dim) decays by g = exp(decay * softplus(alpha @ n + decay_bias)), and takes in what
    it does not yet answer, at the rate b = sigmoid(beta @ n): S = g S, then S += k ⊗ b (v - k·S); o = q·S.
    heads = RMSNorm(o) with gain head_norm, per head, * silu(gate @ n).
    """

    norm: Weight
    eps: float
    qkv: Weight  # (channels, dim)
    gate: Weight  # (heads * value_dim, dim)
    beta: Weight  # (heads, dim)
    alpha: Weight  # (heads, dim)
    conv: Weight  # (channels, width), F32
    decay: Weight  # (1, heads), negative
    decay_bias: Weight  # (1, heads)
    head_norm: Weight  # (1, value_dim)
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    grouped: bool
    output: Weight

    @property
    def channels(self) -> int:
        return self.qkv.rows

    @property
    def width(self) -> int:
        """Inputs of the convolution."""
        return self.conv.cols

    @property
    def cache(self) -> Cache:
        return Cache("kv", 0, 0)

    @property
    def state(self) -> LayerState:
        return LayerState(self.width - 1, self.channels, self.heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class KDA:
    """Kimi Delta Attention (arXiv 2510.26692): a delta rule with a decay per key channel; x += output @ heads.

    As DeltaRule, but: q, k and v have a matrix and a convolution each, and as many heads; channel i of a head's state
    decays by g[i] = exp(decay * softplus(f_b @ f_a @ n + decay_bias)[i]), S = diag(g) S; and heads = RMSNorm(o) with
    gain head_norm, per head, * sigmoid(g_b @ g_a @ n). Without f_b and g_b, f_a and g_a have the rows of all channels.
    With a `lower_bound`, g[i] = exp(lower_bound * sigmoid(decay * (f + decay_bias)[i])), f of the same matrices.
    """

    norm: Weight
    eps: float
    q: Weight  # (heads * dim, dim of x), and so k and v
    k: Weight
    v: Weight
    convs: tuple[Weight, Weight, Weight]  # of q, k and v: (heads * dim, width), F32
    f_a: Weight
    f_b: Weight | None  # (heads * dim, rows of f_a)
    g_a: Weight
    g_b: Weight | None
    beta: Weight  # (heads, dim of x)
    decay: Weight  # (1, heads), negative; positive with a lower bound
    decay_bias: Weight  # (1, heads * dim)
    head_norm: Weight  # (1, dim)
    heads: int
    output: Weight
    lower_bound: float = 0.0  # of the logarithm of a decay, negative; 0: none

    @property
    def dim(self) -> int:
        """Keys, and values, of a head."""
        return self.head_norm.cols

    @property
    def width(self) -> int:
        """Inputs of the convolutions."""
        return self.convs[0].cols

    @property
    def cache(self) -> Cache:
        return Cache("kv", 0, 0)

    @property
    def state(self) -> LayerState:
        return LayerState(self.width - 1, 3 * self.q.rows, self.heads, self.dim, self.dim)


@dataclass(frozen=True)
class ShortConvolution:
    """Gated short convolution (LFM2): x += output @ (c * y). b, c and z are the thirds of in_proj @ RMSNorm(x); channel
    i of y at token t is the sum over j of conv[i, j] * (b * z)[t - width + 1 + j, i], where inputs in front of the
    first token are 0."""

    norm: Weight
    eps: float
    in_proj: Weight  # (3 * dim, dim)
    conv: Weight  # (dim, width), F32
    output: Weight

    @property
    def width(self) -> int:
        """Inputs of the convolution."""
        return self.conv.cols

    @property
    def cache(self) -> Cache:
        return Cache("kv", 0, 0)

    @property
    def state(self) -> LayerState:
        return LayerState(self.width - 1, self.conv.rows, 0, 0, 0)


@dataclass(frozen=True)
class Dense:
    """x += residual_scale * gated(RMSNorm(x)); without `norm`, of x itself. RMSNorm of gated with gain `post_norm` if
    there is one, and then x is multiplied by `stream_scale`."""

    norm: Weight | None
    eps: float
    weights: Gated
    residual_scale: float = 1.0
    post_norm: Weight | None = None
    stream_scale: float = 1.0


Gating = Literal["softmax", "sigmoid", "softmax_weight", "sqrt_softplus"]


@dataclass(frozen=True)
class Router:
    """Chooses `top_k` of the experts per token from l = logit_scale * (weight @ RMSNorm(x) + bias), in float32; the
    gain is `norm`, or the block's.

    p = softmax(l), sigmoid(l), sqrt(softplus(l)), or l itself ("softmax_weight"). Selection: largest
    p + selection_bias, ties to the lower index; with groups > 1 a group scores the sum of its two largest
    p + selection_bias and only the best `groups_used` groups stay. Weights: p of the chosen without the bias
    ("softmax_weight": softmax over the chosen l); with `normalize` divided by max(their sum, MIN_WEIGHT_SUM); times
    `scale`, and each times its expert's `expert_scale`.
    """

    weight: Weight  # (experts, dim)
    bias: Weight | None
    selection_bias: Weight | None
    gating: Gating
    top_k: int
    normalize: bool
    scale: float
    groups: int
    groups_used: int
    norm: Weight | None = None
    logit_scale: float = 1.0
    expert_scale: Weight | None = None  # (1, experts)

    @property
    def experts(self) -> int:
        return self.weight.rows


MIN_WEIGHT_SUM = 6.103515625e-5  # 2^-14, the smallest normal F16, as in llama.cpp


@dataclass(frozen=True)
class Beside:
    """A dense feed-forward beside the experts (Gemma 4): x = stream_scale * (x + RMSNorm(d + e)) with gain `post_norm`,
    where d is RMSNorm(weights(RMSNorm(x))) with gains `norm` and `dense_norm`, and e the experts' sum, normed with
    gain `experts_norm`."""

    norm: Weight
    weights: Gated
    dense_norm: Weight
    experts_norm: Weight
    post_norm: Weight
    stream_scale: float


@dataclass(frozen=True)
class Experts:
    """x += residual_scale * (sum over the chosen experts of weight * gated(n) + shared(n)), n = RMSNorm(x); or see
    Beside. With a `shared_scale` s (1, dim) the shared expert counts sigmoid(s @ n) times."""

    norm: Weight
    eps: float
    router: Router
    weights: Gated  # one group per expert
    shared: Gated | None
    residual_scale: float = 1.0
    beside: Beside | None = None
    shared_scale: Weight | None = None


@dataclass(frozen=True)
class LayerEmbedding:
    """What a layer does with its per-layer embedding e (ops.LayerInputs), behind the feed-forward (Gemma 4):
    x = stream_scale * (x + RMSNorm(project @ (f(gate @ x) * e))) with gain `post_norm`, f as of Gated."""

    gate: Weight  # (width, dim)
    project: Weight  # (dim, width)
    post_norm: Weight
    eps: float
    activation: Activation
    stream_scale: float


Attends = GQA | MLA | DeltaRule | KDA | ShortConvolution
FeedForward = Dense | Experts


@dataclass(frozen=True)
class Layer:
    """Attention, then feed-forward, then the layer's embedding; None where a layer lacks one (attention and
    feed-forward: in parts of models in microbenchmarks)."""

    attention: Attends | None
    feed_forward: FeedForward | None
    embedding: LayerEmbedding | None = None
