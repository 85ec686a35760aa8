"""A plan, and the same step as a list of fused ops in order of execution: the units that profiles and microbenchmarks
measure.

A plan is an embedding, layers (kernels/blocks.py, which has the conventions) and a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, cached_property
from itertools import chain
from typing import Any

from tinychat.kernels.blocks import (
    GQA,
    KDA,
    MLA,
    Activation,
    Cache,
    DeltaRule,
    Dense,
    Experts,
    Gating,
    Layer,
    LayerState,
    Rope,
    ShortConvolution,
    Temperature,
    Weight,
)


@dataclass(frozen=True)
class Embed:
    """x = scale * row `token` of `weight` (vocab, dim), dequantised."""

    weight: Weight
    scale: float = 1.0


@dataclass(frozen=True)
class LayerInputs:
    """The per-layer embeddings of each token: dst (T, layers, width) = (RMSNorm(dst) + table.scale * row) / sqrt(2),
    with the gain `norm` per layer, where `row` is the token's row of the table (vocab, layers * width).

    dst is project @ x before, x being the scaled embedding; the factor 1 / sqrt(dim) on it is in `eps`.
    """

    dst: str
    table: Embed
    norm: Weight
    eps: float


@dataclass(frozen=True)
class GateInput:
    """dst (T, width) = f(dst) * values `start`.. of src: what a layer takes of its per-layer embedding."""

    src: str
    dst: str
    start: int
    width: int
    activation: Activation


@dataclass(frozen=True)
class NormLinear:
    """dst[i] = weights[i] @ RMSNorm(src) (+ biases[i]); `norm` None means no norm. All weights share the input. With
    `at`, results begin at value at[i] of the buffer."""

    src: str
    norm: Weight | None
    eps: float
    weights: tuple[Weight, ...]
    biases: tuple[Weight | None, ...]
    dst: tuple[str, ...]
    at: tuple[int, ...] = ()


@dataclass(frozen=True)
class RopeStore:
    """GQA: optional RMSNorm of q and k, and of v without a gain (`value_norm`), RoPE of q and k (first rope.dims values
    of each head), then row `pos` of layer's K and V.

    q (T, heads * head_dim), k and v (T, kv_heads * head_dim) are buffers; q is updated in place. Gains of
    `q_norm`/`k_norm` have head_dim values (per head) or all heads' (over the whole projection, OLMoE). Without kv heads
    nothing is stored.
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
    """Causal softmax(q·K * scale)·V over rows 0..pos of the cache of `layer`, or the last `window` of them.

    q (T, heads, key_dim); dst (T, heads, value_dim), times the sigmoid of the buffer `gate` of the same shape if one is
    named. `sinks`: see GQA.

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
    gate: str = ""


@dataclass(frozen=True)
class Convolve:
    """DeltaRule, KDA: dst (T, channels) = silu of the convolution of dst with weights (channels, width) over time; the
    layer's state takes the last inputs."""

    layer: int
    dst: str
    weights: tuple[Weight, ...]  # of all channels, or of q, k and v
    heads: int  # of q, k and v together


@dataclass(frozen=True)
class GatedConvolve:
    """ShortConvolution: dst (T, dim) out of src (T, 3 * dim), with weight (dim, width); the layer's state takes the
    last inputs."""

    layer: int
    src: str
    dst: str
    weight: Weight


@dataclass(frozen=True)
class Delta:
    """DeltaRule, or KDA where the decay is `by_channel`: dst (T, heads * value_dim) out of q, k, v in src (T, channels)
    and of the layer's state, which takes them in; `gate`, `beta` and `alpha` are buffers."""

    layer: int
    src: str
    gate: str
    beta: str
    alpha: str
    dst: str
    decay: Weight
    decay_bias: Weight
    head_norm: Weight
    eps: float
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    grouped: bool
    by_channel: bool = False
    lower_bound: float = 0.0


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
    (T, top_k * ff + shared_ff); the shared expert's f, where there is one, comes last, times sigmoid(shared_scale @
    n)."""

    norm: Weight
    eps: float
    gate: Weight
    up: Weight
    gate_bias: Weight | None
    up_bias: Weight | None
    activation: Activation
    shared_gate: Weight | None
    shared_up: Weight | None
    shared_scale: Weight | None
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
class LayerTable:
    """Where per-layer embeddings come from: see LayerInputs."""

    table: Embed
    project: Weight  # (layers * width, dim)
    norm: Weight  # (1, width)
    eps: float

    @property
    def width(self) -> int:
        return self.norm.cols


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
    | LayerInputs
    | GateInput
    | NormLinear
    | RopeStore
    | LatentStore
    | Absorb
    | Attention
    | Convolve
    | GatedConvolve
    | Delta
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


WINDOW_ROWS = 16384  # cache rows that a layer with a sliding window keeps, or four windows where that is more


@dataclass(frozen=True)
class Plan:
    """One forward step. Layer i stores its cache rows in cache i; with `mtp`, its layer's cache and that of the hidden
    rows are behind those."""

    embed: Embed
    layers: tuple[Layer, ...]
    head: Head
    mtp: MTP | None = None
    layer_table: LayerTable | None = None
    window_rows: int = WINDOW_ROWS

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
    def states(self) -> tuple[LayerState | None, ...]:
        """What every layer carries from token to token; None for a layer with cache rows."""
        return tuple(layer.attention.state if layer.attention else None for layer in self.layers)

    @cached_property
    def latent(self) -> tuple[MLA, ...]:
        """The attention of the layers that keep latent rows."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, MLA))

    @cached_property
    def storing(self) -> int:
        """Layers up to the last that stores cache rows or a state. Of a prompt's tokens only the last matters in those
        behind it."""
        kept = [i for i, state in enumerate(self.states) if state or self.caches[i].row_bytes]
        return len(self.layers) if self.mtp or not kept else kept[-1] + 1

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of all layers; 0: all that a token needs of those before it are their cache rows."""
        return sum(state.nbytes for state in self.states if state)

    @cached_property
    def ops_of_layers(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each layer, in order of execution."""
        return tuple(tuple(_ops_of_layer(i, layer)) for i, layer in enumerate(self.layers))

    @cached_property
    def first_ops(self) -> tuple[Op, ...]:
        """Those in front of the layers."""
        if not (t := self.layer_table):
            return (self.embed,)
        project = NormLinear("x", None, t.eps, (t.project,), (None,), ("inputs",))
        return (self.embed, project, LayerInputs("inputs", t.table, t.norm, t.eps))

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All ops of a step, in order of execution."""
        hidden = [StoreHidden(len(self.layers) + 1, self.head.norm, self.head.eps)] if self.mtp else []
        return (*self.first_ops, *chain.from_iterable(self.ops_of_layers), *hidden, self.head)

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
        if self.layer_table:
            sizes["inputs"] = self.layer_table.project.rows
        for layer in (*self.layers, *([self.mtp.layer] if self.mtp else [])):
            for name, size in _buffers_of_layer(layer):
                sizes[name] = max(size, sizes.get(name, 0))
        return sizes

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one cache row over all layers."""
        return sum(cache.row_bytes for cache in self.caches)

    @cached_property
    def window(self) -> int:
        """Rows that a token sees in a layer with a sliding window, at most; 0 without such layers."""
        return max((cache.window for cache in self.caches), default=0)

    @property
    def kept(self) -> int:
        """Rows that layers with a sliding window keep of a longer context: window_rows.py."""
        return max(self.window_rows, 4 * self.window)

    def rows(self, cache: Cache, context: int) -> int:
        """Rows of a layer's cache for a context of so many tokens."""
        return min(context, self.kept) if cache.window else context

    def kv_bytes(self, context: int) -> int:
        """Bytes of the KV cache of a context of so many tokens."""
        return sum(self.rows(cache, context) * cache.row_bytes for cache in self.caches)

    def weight_bytes(self, op: Op) -> int:
        """Packed bytes that one decode step reads of `op`'s weights: all of a matrix, top_k of its experts, one
        embedding row."""
        match op:
            case Embed():
                return op.weight.row_bytes
            case LayerInputs():
                return op.table.weight.row_bytes + op.norm.nbytes
            case Join():
                return op.embed.weight.row_bytes + op.token_norm.nbytes + op.hidden_norm.nbytes
            case ExpertsUp() | ExpertsDown():
                return sum(w.group_bytes * (op.top_k if w.groups > 1 else 1) for w in weights_of(op))
            case _:
                return sum(w.nbytes for w in dict.fromkeys(weights_of(op)))

    def cache_bytes(self, op: Op, depth: int) -> int:
        """Bytes that `op` reads of a cache of `depth` rows, or reads and writes of its layer's state."""
        match op:
            case Attention():
                return min(depth, op.window or depth) * self.caches[op.layer].row_bytes
            case Delta() | GatedConvolve():
                state = self.states[op.layer]
                return 2 * state.nbytes if state else 0
            case _:
                return 0

    def bytes_per_token(self, depth: int = 0) -> int:
        """Bytes that must move for one token: the weights it uses, `depth` cache rows and the states."""
        rows = sum(min(depth, window or depth) * width for window, width in self._widths.items())
        return self._fixed_bytes + rows

    # Cached, because they are needed after every token.

    @cached_property
    def _widths(self) -> dict[int, int]:
        """Bytes of a cache row over the layers of each window (0: those that see all rows)."""
        widths: dict[int, int] = {}
        for op in self.ops:
            if isinstance(op, Attention):
                widths[op.window] = widths.get(op.window, 0) + self.caches[op.layer].row_bytes
        return widths

    @cached_property
    def _fixed_bytes(self) -> int:
        """Bytes of a step's weights and states."""
        return sum(self.weight_bytes(op) + self.cache_bytes(op, 0) for op in self.ops)

    @property
    def weights(self) -> list[Weight]:
        """Every distinct weight, in order of use."""
        return list(dict.fromkeys(w for op in (*self.ops, *self.draft_ops) for w in weights_of(op)))

    @cached_property
    def nbytes(self) -> int:
        """Packed bytes of all weights, those of multi-token prediction included where the plan has it."""
        return sum(w.nbytes for w in self.weights)

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
    "table",
    "bias",
    "biases",
    "router_bias",
    "gate_bias",
    "up_bias",
    "sinks",
    "expert_scale",
    "shared_scale",
    "decay",
    "decay_bias",
    "head_norm",
}


def matrices_of(op: Op) -> list[Weight]:
    """The weights of an op that are multiplied with vectors, and those of the token embedding: not norm gains, biases,
    sinks, the table of per-layer embeddings and the like."""
    if isinstance(op, Convolve | GatedConvolve):
        return []
    return [w for f in fields(op) if f.name not in _VECTORS for w in _weights(getattr(op, f.name))]


def _weights(value: Any) -> Iterator[Weight]:
    if isinstance(value, Weight):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _weights(item)
    else:
        for name in _fields_of(type(value)):  # type: ignore[arg-type]  # mypy: of any metaclass
            yield from _weights(getattr(value, name))


@cache
def _fields_of(kind: type) -> tuple[str, ...]:
    """The names of a dataclass's fields; none of another type."""
    return tuple(f.name for f in fields(kind)) if is_dataclass(kind) else ()


def _ops_of_layer(i: int, layer: Layer) -> Iterator[Op]:
    match layer.attention:
        case GQA() as a:
            yield NormLinear("x", a.norm, a.eps, *zip(*projections(a)))
            stored = 0 if a.shared is not None else a.kv_heads
            norms = (a.q_norm, a.k_norm, a.eps)
            yield RopeStore(i, a.rope, "q", "k", "v", *norms, a.heads, stored, a.key_dim, a.value_norm)
            sizes = (a.heads, a.kv_heads, a.key_dim, a.value_dim)
            rows, gate = i if a.shared is None else a.shared, "gate" if a.gate else ""
            yield Attention(rows, "q", "heads", *sizes, a.scale, False, a.window, a.sinks, gate=gate)
            yield from added("heads", a.output, a.output_bias, a.post_norm, a.eps, a.residual_scale)
        case MLA() as a:
            outputs = latent_inputs(a)
            yield NormLinear("x", a.norm, a.eps, tuple(outputs.values()), (None,) * len(outputs), tuple(outputs))
            if a.q_a:
                yield NormLinear("q_a", a.q_a_norm, a.eps, (a.q,), (None,), ("q",))
            yield LatentStore(i, a.rope, "q", "kv", a.kv_norm, a.eps, a.heads, a.nope, a.kv_lora, a.temperature)
            yield Absorb("q", a.k_b, "q_latent", a.heads, a.nope, a.rope.dims, a.kv_lora)
            sizes, gate = (a.heads, 1, a.row, a.kv_lora), "gate" if a.gate else ""
            yield Attention(i, "q_latent", "o_latent", *sizes, a.scale, latent=True, gate=gate)
            yield ValueUp("o_latent", a.v_b, "heads")
            yield LinearAdd("heads", a.output, None, a.residual_scale)
        case DeltaRule() as a:
            names = ("qkv", "gate", "beta", "alpha")
            yield NormLinear("x", a.norm, a.eps, (a.qkv, a.gate, a.beta, a.alpha), (None,) * 4, names)
            yield Convolve(i, "qkv", (a.conv,), 2 * a.key_heads + a.heads)
            vectors = (a.decay, a.decay_bias, a.head_norm, a.eps)
            yield Delta(i, *names, "heads", *vectors, a.key_heads, a.heads, a.key_dim, a.value_dim, a.grouped)
            yield LinearAdd("heads", a.output, None)
        case KDA() as a:
            yield from kda_inputs(a)
            yield Convolve(i, "qkv", a.convs, 3 * a.heads)
            vectors, sizes = (a.decay, a.decay_bias, a.head_norm, a.eps), (a.heads, a.heads, a.dim, a.dim)
            names, kind = ("qkv", "gate", "beta", "alpha"), (False, True, a.lower_bound)
            yield Delta(i, *names, "heads", *vectors, *sizes, *kind)
            yield LinearAdd("heads", a.output, None)
        case ShortConvolution() as a:
            yield NormLinear("x", a.norm, a.eps, (a.in_proj,), (None,), ("bcz",))
            yield GatedConvolve(i, "bcz", "heads", a.conv)
            yield LinearAdd("heads", a.output, None)
    match layer.feed_forward:
        case Dense(norm, eps, w, scale, post_norm, stream_scale):
            yield GateUp(norm, eps, w.gate, w.up, w.activation, "ffn")
            yield from added("ffn", w.down, None, post_norm, eps, scale, stream_scale)
        case Experts(norm, eps, r, w, s, scale, beside, shared_scale):
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
                shared_scale,
                r.top_k,
                "ffn",
            )
            dst = "y" if beside else "x"
            yield ExpertsDown("ffn", w.down, w.down_bias, shared_down, r.top_k, scale, dst, add=not beside)
            if beside:
                yield NormAdd("y", beside.experts_norm, eps, dst="z")
                yield NormAdd("z", beside.post_norm, eps, 1.0, beside.stream_scale)
    if e := layer.embedding:
        yield NormLinear("x", None, e.eps, (e.gate,), (None,), ("gated",))
        yield GateInput("inputs", "gated", i * e.gate.rows, e.gate.rows, e.activation)
        yield from added("gated", e.project, None, e.post_norm, e.eps, 1.0, e.stream_scale)


def projections(a: GQA) -> list[tuple[Weight, Weight | None, str]]:
    """Each matrix over attention's input, with its bias and the buffer of its results."""
    parts = ((a.q, a.q_bias, "q"), (a.k, a.k_bias, "k"), (a.v, a.v_bias, "v"), (a.gate, None, "gate"))
    return [(w, bias, name) for w, bias, name in parts if w]


def latent_inputs(a: MLA) -> dict[str, Weight]:
    """The buffer of its results for each matrix over latent attention's input."""
    inputs = {"q_a": a.q_a} if a.q_a else {"q": a.q}
    return inputs | {"kv": a.kv_a} | ({"gate": a.gate} if a.gate else {})


def kda_inputs(a: KDA) -> Iterator[NormLinear]:
    """q ‖ k ‖ v in buffer `qkv`, and the decay, the gate and the rate of each token."""
    n, none = a.q.rows, (None,) * 3
    yield NormLinear("x", a.norm, a.eps, (a.q, a.k, a.v), none, ("qkv",) * 3, (0, n, 2 * n))
    f, g = ("f" if a.f_b else "alpha"), ("g" if a.g_b else "gate")
    yield NormLinear("x", a.norm, a.eps, (a.f_a, a.g_a, a.beta), none, (f, g, "beta"))
    if a.f_b:
        yield NormLinear("f", None, a.eps, (a.f_b,), (None,), ("alpha",))
    if a.g_b:
        yield NormLinear("g", None, a.eps, (a.g_b,), (None,), ("gate",))


def added(
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
            yield "heads", a.output.cols
            yield from ((name, w.rows) for w, _, name in projections(a))
            if a.post_norm:
                yield "y", a.output.rows
        case MLA() as a:
            yield "q", a.q.rows
            yield "heads", a.output.cols
            yield from (("kv", a.row), ("q_latent", a.heads * a.row), ("o_latent", a.heads * a.kv_lora))
            if a.q_a:
                yield "q_a", a.q_a.rows
            if a.gate:
                yield "gate", a.gate.rows
        case DeltaRule() as a:
            yield from (("qkv", a.channels), ("gate", a.gate.rows), ("heads", a.output.cols))
            yield from (("beta", a.heads), ("alpha", a.heads))
        case KDA() as a:
            yield from (("qkv", 3 * a.q.rows), ("f", a.f_a.rows), ("g", a.g_a.rows), ("beta", a.heads))
            yield from (("alpha", a.q.rows), ("gate", a.q.rows), ("heads", a.output.cols))
        case ShortConvolution() as a:
            yield from (("bcz", a.in_proj.rows), ("heads", a.output.cols))
    match layer.feed_forward:
        case Dense(weights=w, post_norm=post_norm):
            yield "ffn", w.ff
            if post_norm:
                yield "y", w.down.rows
        case Experts(router=r, weights=w, shared=s, beside=beside):
            yield "ffn", r.top_k * w.ff + (s.ff if s else 0)
            if beside:
                yield from (("ffn", beside.weights.ff), ("y", w.down.rows), ("z", w.down.rows))
    if e := layer.embedding:
        yield from (("gated", e.gate.rows), ("y", e.project.rows))
