"""The grammar of a plan: what one forward step of a model computes, in typed blocks.

A plan is an embedding, layers and a head. A layer has two blocks, attention and feed-forward; what differs between
models is a field of a block. An executor matches the blocks. `Plan.ops` is the same step written as a list of fused
ops, in order of execution: the units that profiles and microbenchmarks measure.

Conventions. T is the number of tokens of a step (1 in decode). x is the residual stream, float32 (T, dim).
RMSNorm(v) = v / sqrt(mean(v^2) + eps) * gain. Weights stay packed as in the file; `Weight` says which rows of which
tensor. kernels/tinygrad/step.py is the specification of every block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tinychat.kernels.sampling import Sampling as Sampling  # for branches that still import it from here

CACHE_VALUE_BYTES = 2  # of one value in the KV cache of the CPU and CUDA executors: F16


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
class Temperature:
    """Queries at position p are multiplied by 1 + scale * log(1 + floor(p / length)) (Mistral's long contexts)."""

    scale: float
    length: int

    def table(self, positions: int) -> np.ndarray:
        """float32 (positions,), computed in float64."""
        return (1 + self.scale * np.log1p(np.arange(positions) // self.length)).astype(np.float32)


# --- blocks


@dataclass(frozen=True)
class Cache:
    """A layer's part of one row of the KV cache, in values. A "kv" row is K and V of all kv heads; a "latent" row is
    MLA's, stored as K, whose first kv_lora values are also V; a "hidden" row is what MTP reads, stored as V."""

    kind: Literal["kv", "latent", "hidden"]
    key_width: int  # 0 for hidden
    value_width: int  # 0 for latent

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row."""
        return (self.key_width + self.value_width) * CACHE_VALUE_BYTES


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
    kv head h * kv_heads // heads. A head's value of `sinks` is one more score, of a row whose value is 0.
    """

    norm: Weight | None
    eps: float
    q: Weight
    k: Weight
    v: Weight
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

    @property
    def cache(self) -> Cache:
        return Cache("kv", self.kv_heads * self.key_dim, self.kv_heads * self.value_dim)


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention, absorbed: x += residual_scale * (output @ heads).

    n = RMSNorm(x); q = q @ n, or q @ RMSNorm(q_a @ n) with gain q_a_norm; per head its first `nope` values are not
    rotated, the last rope.dims are. kv = kv_a @ n; the cache row is RMSNorm(kv[:kv_lora]) * kv_norm ‖ RoPE of the rest.
    Per head: query = (k_b[h] @ q_nope ‖ q_rope) * temperature, o = softmax(query·row * scale)·row[:kv_lora],
    heads[h] = v_b[h] @ o.
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
    Beside."""

    norm: Weight
    eps: float
    router: Router
    weights: Gated  # one group per expert
    shared: Gated | None
    residual_scale: float = 1.0
    beside: Beside | None = None


Attends = GQA | MLA
FeedForward = Dense | Experts


@dataclass(frozen=True)
class Layer:
    """Attention, then feed-forward; None where a layer lacks one (parts of models in microbenchmarks)."""

    attention: Attends | None
    feed_forward: FeedForward | None


# --- ops: the linearisation of the blocks


@dataclass(frozen=True)
class Embed:
    """x = scale * row `token` of `weight` (vocab, dim), dequantised."""

    weight: Weight
    scale: float = 1.0


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
    """GQA: optional RMSNorm of q and k, and of v without a gain (`value_norm`), RoPE of q and k (first rope.dims values
    of each head), then row `pos` of layer's K and V.

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
    value_norm: bool


@dataclass(frozen=True)
class LatentStore:
    """MLA: RoPE of the trailing `rope.dims` of each head of q, in place, and its temperature; row `pos` of the layer's
    latent cache = RMSNorm(kv[:kv_lora]) * norm ‖ RoPE(kv[kv_lora:]). q (T, heads * (nope + rope.dims)), kv (T, kv_lora
    + rope.dims)."""

    layer: int
    rope: Rope
    q: str
    kv: str
    norm: Weight
    eps: float
    heads: int
    nope: int
    kv_lora: int
    temperature: Temperature | None


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
    """Causal softmax(q·K * scale)·V over cache rows 0..pos, or the last `window` of them. q (T, heads, key_dim); dst
    (T, heads, value_dim). `sinks`: see GQA.

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
    window: int = 0
    sinks: Weight | None = None


@dataclass(frozen=True)
class ValueUp:
    """MLA: dst (T, heads, v_dim) = weight[h] (v_dim, kv_lora) @ src[h] (T, heads, kv_lora)."""

    src: str
    weight: Weight
    dst: str


@dataclass(frozen=True)
class LinearAdd:
    """x += scale * (weight @ src (+ bias))."""

    src: str
    weight: Weight
    bias: Weight | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class NormAdd:
    """dst = stream_scale * (dst + scale * RMSNorm(src)); without `add` as if dst were 0."""

    src: str
    norm: Weight
    eps: float
    scale: float = 1.0
    stream_scale: float = 1.0
    dst: str = "x"
    add: bool = True


@dataclass(frozen=True)
class GateUp:
    """dst = f(gate @ n, up @ n), n = RMSNorm(x) or x: the first half of a dense feed-forward layer."""

    norm: Weight | None
    eps: float
    gate: Weight
    up: Weight
    activation: Activation
    dst: str


@dataclass(frozen=True)
class Route:
    """Router. Results: ids int32 and weights float32, (T, top_k), in order of selection."""

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
    logit_scale: float
    expert_scale: Weight | None


@dataclass(frozen=True)
class ExpertsUp:
    """For each chosen expert e: f(gate[e] @ n + bias, up[e] @ n + bias), n = RMSNorm(x), behind one another in dst
    (T, top_k * ff + shared_ff); the shared expert's f, where there is one, comes last."""

    norm: Weight
    eps: float
    gate: Weight
    up: Weight
    gate_bias: Weight | None
    up_bias: Weight | None
    activation: Activation
    shared_gate: Weight | None
    shared_up: Weight | None
    top_k: int
    dst: str


@dataclass(frozen=True)
class ExpertsDown:
    """dst += scale * (sum over the chosen experts of weight * (down[e] @ src part + bias[e]) + shared_down @ shared
    part); without `add` dst is set."""

    src: str
    down: Weight
    bias: Weight | None
    shared_down: Weight | None
    top_k: int
    scale: float = 1.0
    dst: str = "x"
    add: bool = True


@dataclass(frozen=True)
class Head:
    """logits (T, vocab) = l = scale * (weight @ RMSNorm(x)), or with a `softcap` softcap * tanh(l / softcap)."""

    norm: Weight
    eps: float
    weight: Weight
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True)
class MTP:
    """Multi-token prediction: one more layer, which guesses the token behind the next one (DeepSeek-V3, arXiv
    2412.19437, section 2.2).

    With h(p) = RMSNorm(x) at position p, behind the last layer and with the gain of the plan's head, and h(-1) = 0:
    x = project @ (RMSNorm(embedding of the token at p) ‖ RMSNorm(h(p - 1))), then `layer`, which has cache rows of its
    own, then `head`: the largest logit is the draft of the token at p + 1.
    """

    embed: Embed
    token_norm: Weight
    hidden_norm: Weight
    eps: float
    project: Weight  # (dim, 2 * dim)
    layer: Layer
    head: Head


@dataclass(frozen=True)
class StoreHidden:
    """Row `pos` of cache `layer` = RMSNorm(x): h of MTP."""

    layer: int
    norm: Weight
    eps: float


@dataclass(frozen=True)
class Join:
    """dst (T, 2 * dim) = RMSNorm(embed of each token) ‖ RMSNorm(row pos - 1 of cache `layer`), the row in front of the
    first being 0: the input of MTP."""

    layer: int
    embed: Embed
    token_norm: Weight
    hidden_norm: Weight
    eps: float
    dst: str


Op = (
    Embed
    | NormLinear
    | RopeStore
    | LatentStore
    | Absorb
    | Attention
    | ValueUp
    | LinearAdd
    | NormAdd
    | GateUp
    | Route
    | ExpertsUp
    | ExpertsDown
    | StoreHidden
    | Join
    | Head
)


@dataclass(frozen=True)
class Plan:
    """One forward step. Layer i stores its cache rows in cache i; with `mtp`, its layer's cache and that of the hidden
    rows are behind those."""

    embed: Embed
    layers: tuple[Layer, ...]
    head: Head
    mtp: MTP | None = None

    @property
    def dim(self) -> int:
        return self.embed.weight.cols

    @property
    def vocab(self) -> int:
        return self.head.weight.rows

    @cached_property
    def caches(self) -> tuple[Cache, ...]:
        """The cache of every layer, and those of `mtp`; a layer without attention has rows of no values."""
        layers, hidden = self.layers, tuple[Cache, ...]()
        if self.mtp:
            layers, hidden = (*layers, self.mtp.layer), (Cache("hidden", 0, self.dim),)
        return (*(layer.attention.cache if layer.attention else Cache("kv", 0, 0) for layer in layers), *hidden)

    @cached_property
    def ops_of_layers(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each layer, in order of execution."""
        return tuple(tuple(_ops_of_layer(i, layer)) for i, layer in enumerate(self.layers))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops of a step, in order of execution."""
        hidden = [StoreHidden(len(self.layers) + 1, self.head.norm, self.head.eps)] if self.mtp else []
        return (self.embed, *chain.from_iterable(self.ops_of_layers), *hidden, self.head)

    @cached_property
    def draft_ops(self) -> tuple[Op, ...]:
        """All ops of `mtp`, in order of execution."""
        if not (m := self.mtp):
            return ()
        layer = len(self.layers)
        join = Join(layer + 1, m.embed, m.token_norm, m.hidden_norm, m.eps, "joined")
        project = NormLinear("joined", None, m.eps, (m.project,), (None,), ("x",))
        return (join, project, *_ops_of_layer(layer, m.layer), m.head)

    @cached_property
    def buffers(self) -> dict[str, int]:
        """The activation buffers that the ops name: name -> float32 values per token, the largest of all layers."""
        sizes = {"x": self.dim}
        if self.mtp:
            sizes["joined"] = 2 * self.dim
        for layer in (*self.layers, *([self.mtp.layer] if self.mtp else [])):
            for name, size in _buffers_of_layer(layer):
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one cache row over all layers."""
        return sum(cache.row_bytes for cache in self.caches)

    def weight_bytes(self, op: Op) -> int:
        """Packed bytes that one decode step reads of `op`'s weights: all of a matrix, top_k of its experts, one
        embedding row."""
        match op:
            case Embed():
                return op.weight.row_bytes
            case Join():
                return op.embed.weight.row_bytes + op.token_norm.nbytes + op.hidden_norm.nbytes
            case ExpertsUp() | ExpertsDown():
                return sum(w.group_bytes * (op.top_k if w.groups > 1 else 1) for w in weights_of(op))
            case _:
                return sum(w.nbytes for w in dict.fromkeys(weights_of(op)))

    def cache_bytes(self, op: Op, depth: int) -> int:
        """Bytes that `op` reads of a cache of `depth` rows."""
        if not isinstance(op, Attention):
            return 0
        return min(depth, op.window or depth) * self.caches[op.layer].row_bytes

    def bytes_per_token(self, depth: int = 0) -> int:
        """Bytes that must move for one token: the weights it uses and `depth` cache rows."""
        return self._step_weight_bytes + sum(self.cache_bytes(op, depth) for op in self._attentions)

    @cached_property
    def _attentions(self) -> tuple[Attention, ...]:
        return tuple(op for op in self.ops if isinstance(op, Attention))

    @cached_property
    def _step_weight_bytes(self) -> int:
        """Weight bytes of a step; cached, because it is needed after every token."""
        return sum(map(self.weight_bytes, self.ops))

    @property
    def weights(self) -> list[Weight]:
        """Every distinct weight, in order of use."""
        return list(dict.fromkeys(w for op in (*self.ops, *self.draft_ops) for w in weights_of(op)))

    @property
    def matrices(self) -> list[Weight]:
        """Every distinct weight but norm gains and biases, in order of use."""
        return list(dict.fromkeys(w for op in (*self.ops, *self.draft_ops) for w in matrices_of(op)))


def weights_of(part: Op | Layer) -> list[Weight]:
    """Every weight of an op or a layer, in field order."""
    return list(_weights(part))


_VECTORS = {
    "norm",
    "q_norm",
    "k_norm",
    "token_norm",
    "hidden_norm",
    "bias",
    "biases",
    "router_bias",
    "gate_bias",
    "up_bias",
    "sinks",
    "expert_scale",
}


def matrices_of(op: Op) -> list[Weight]:
    """The weights of an op but norm gains, biases and sinks."""
    return [w for f in fields(op) if f.name not in _VECTORS for w in _weights(getattr(op, f.name))]


def _weights(value: Any) -> Iterator[Weight]:
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _weights(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from _weights(getattr(value, f.name))


def _ops_of_layer(i: int, layer: Layer) -> Iterator[Op]:
    match layer.attention:
        case GQA() as a:
            biases = (a.q_bias, a.k_bias, a.v_bias)
            yield NormLinear("x", a.norm, a.eps, (a.q, a.k, a.v), biases, ("q", "k", "v"))
            norms = (a.q_norm, a.k_norm, a.eps)
            yield RopeStore(i, a.rope, "q", "k", "v", *norms, a.heads, a.kv_heads, a.key_dim, a.value_norm)
            yield Attention(
                i, "q", "heads", a.heads, a.kv_heads, a.key_dim, a.value_dim, a.scale, False, a.window, a.sinks
            )
            yield from _added("heads", a.output, a.output_bias, a.post_norm, a.eps, a.residual_scale)
        case MLA() as a:
            if a.q_a:
                yield NormLinear("x", a.norm, a.eps, (a.q_a, a.kv_a), (None, None), ("q_a", "kv"))
                yield NormLinear("q_a", a.q_a_norm, a.eps, (a.q,), (None,), ("q",))
            else:
                yield NormLinear("x", a.norm, a.eps, (a.q, a.kv_a), (None, None), ("q", "kv"))
            yield LatentStore(i, a.rope, "q", "kv", a.kv_norm, a.eps, a.heads, a.nope, a.kv_lora, a.temperature)
            yield Absorb("q", a.k_b, "q_latent", a.heads, a.nope, a.rope.dims, a.kv_lora)
            yield Attention(i, "q_latent", "o_latent", a.heads, 1, a.row, a.kv_lora, a.scale, latent=True)
            yield ValueUp("o_latent", a.v_b, "heads")
            yield LinearAdd("heads", a.output, None, a.residual_scale)
    match layer.feed_forward:
        case Dense(norm, eps, w, scale, post_norm, stream_scale):
            yield GateUp(norm, eps, w.gate, w.up, w.activation, "ffn")
            yield from _added("ffn", w.down, None, post_norm, eps, scale, stream_scale)
        case Experts(norm, eps, r, w, s, scale, beside):
            if beside:
                d = beside.weights
                yield GateUp(beside.norm, eps, d.gate, d.up, d.activation, "ffn")
                yield NormLinear("ffn", None, eps, (d.down,), (None,), ("y",))
                yield NormAdd("y", beside.dense_norm, eps, dst="z", add=False)
            yield Route(
                r.norm or norm,
                eps,
                r.weight,
                r.bias,
                r.selection_bias,
                r.gating,
                r.top_k,
                r.normalize,
                r.scale,
                r.groups,
                r.groups_used,
                r.logit_scale,
                r.expert_scale,
            )
            shared_gate, shared_up, shared_down = (s.gate, s.up, s.down) if s else (None, None, None)
            yield ExpertsUp(
                norm,
                eps,
                w.gate,
                w.up,
                w.gate_bias,
                w.up_bias,
                w.activation,
                shared_gate,
                shared_up,
                r.top_k,
                "ffn",
            )
            dst = "y" if beside else "x"
            yield ExpertsDown("ffn", w.down, w.down_bias, shared_down, r.top_k, scale, dst, add=not beside)
            if beside:
                yield NormAdd("y", beside.experts_norm, eps, dst="z")
                yield NormAdd("z", beside.post_norm, eps, 1.0, beside.stream_scale)


def _added(
    src: str, w: Weight, bias: Weight | None, post_norm: Weight | None, eps: float, scale: float, stream: float = 1.0
) -> Iterator[Op]:
    """x += scale * (w @ src + bias); if there is a post_norm, normed first, and x times `stream` after it."""
    if post_norm is None:
        yield LinearAdd(src, w, bias, scale)
    else:
        yield NormLinear(src, None, eps, (w,), (bias,), ("y",))
        yield NormAdd("y", post_norm, eps, scale, stream)


def _buffers_of_layer(layer: Layer) -> Iterator[tuple[str, int]]:
    match layer.attention:
        case GQA() as a:
            yield "q", a.q.rows
            yield "heads", a.output.cols
            yield from (("k", a.k.rows), ("v", a.v.rows))
            if a.post_norm:
                yield "y", a.output.rows
        case MLA() as a:
            yield "q", a.q.rows
            yield "heads", a.output.cols
            yield from (("kv", a.row), ("q_latent", a.heads * a.row), ("o_latent", a.heads * a.kv_lora))
            if a.q_a:
                yield "q_a", a.q_a.rows
    match layer.feed_forward:
        case Dense(weights=w, post_norm=post_norm):
            yield "ffn", w.ff
            if post_norm:
                yield "y", w.down.rows
        case Experts(router=r, weights=w, shared=s, beside=beside):
            yield "ffn", r.top_k * w.ff + (s.ff if s else 0)
            if beside:
                yield from (("ffn", beside.weights.ff), ("y", w.down.rows), ("z", w.down.rows))
