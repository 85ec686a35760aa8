"""ModelConfig: what a GGUF's metadata says about the model, checked; one table entry per architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from tinychat.engine import file_limits
from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.blocks import Activation, Gating, Rope, Temperature


@dataclass(frozen=True)
class Architecture:
    """What the metadata does not say: the pairing of RoPE, the norms of q and k, how experts are gated and weighted by
    default.

    `scales`: it has the keys of Granite's four scales. `expert_keys`: it has the keys of DeepSeek's experts; `gating`:
    where they do not say it. `ffn_norm`: the tensor that norms the feed-forward's input; "" with no norm in front of
    any block. `post_norms`: a block's result is normed before it is added. `no_rope_every`: one layer in so many has
    no RoPE. `window_every`: one layer in so many has no sliding window, where no key says it; RoPE of the others has
    the base `window_base` (0: the same) and is scaled as `window_scaled` says.
    """

    rope: Literal["norm", "neox"]
    qk_norm: Literal["head", "projection"] | None = None
    qk_norm_optional: bool = False
    normalize_experts: bool = False
    mla: bool = False
    scales: bool = False
    expert_keys: bool = False
    mtp: bool = False  # a block behind the last layer is multi-token prediction, as of DeepSeek-V3
    gating: Gating = "softmax"
    ffn_norm: str = "ffn_norm"
    post_norms: bool = False
    fused_ffn: bool = False  # gate and up are one tensor, ffn_up
    no_rope_every: int = 0
    window_every: int = 0
    window_base: float = 0.0
    window_scaled: bool = False
    activation: Activation = "silu"
    embedding_root: bool = False  # embeddings are multiplied by sqrt(embedding_length)
    window_sizes: bool = False  # it has keys for the heads of layers with a window; V is K where it has no tensor
    value_norm: bool = False
    beside: bool = False  # a dense feed-forward is beside the experts
    layer_embeddings: bool = False  # it has keys for them, and for layers that share a cache
    unscaled: bool = False  # scores are not divided by the square root of the key length
    sinks: bool = False
    kda: bool = False  # layers without kv heads have Kimi Delta Attention, the others no RoPE
    bounded: bool = False  # its decay has a lower bound; the others have RoPE, and a gate per head
    delta_rule: Literal["grouped", "tiled"] | None = None  # most layers have one: how its heads share those of q and k
    gated: bool = False  # attention has a gate, and so has the shared expert
    convolutions: bool = False  # layers without kv heads have a short convolution
    output_norm: str = "output_norm"


_DEEPSEEK = Architecture("norm", mla=True, expert_keys=True, mtp=True)
_QWEN35 = Architecture(
    "neox",
    qk_norm="head",
    normalize_experts=True,
    ffn_norm="post_attention_norm",
    delta_rule="tiled",
    gated=True,
)
_LFM2 = Architecture(
    "neox",
    qk_norm="head",
    expert_keys=True,
    normalize_experts=True,
    window_every=1 << 10,  # no layer is without, where there is a window at all
    convolutions=True,
    output_norm="token_embd_norm",
)

ARCHITECTURES = {
    "llama": Architecture("norm", normalize_experts=True),
    "qwen2": Architecture("neox"),
    "qwen3": Architecture("neox", qk_norm="head"),
    "qwen3moe": Architecture("neox", qk_norm="head", normalize_experts=True),
    "qwen3next": replace(_QWEN35, delta_rule="grouped"),
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "olmoe": Architecture("neox", qk_norm="projection"),
    "olmo2": Architecture("neox", qk_norm="projection", ffn_norm="", post_norms=True, window_every=4),
    "smollm3": Architecture("norm", no_rope_every=4),
    "glm4": Architecture("norm", post_norms=True, fused_ffn=True),
    "glm4moe": Architecture(
        "neox",
        qk_norm="head",
        qk_norm_optional=True,
        expert_keys=True,
        mtp=True,
        gating="sigmoid",
        ffn_norm="post_attention_norm",
    ),
    "deepseek2": _DEEPSEEK,
    "mistral4": _DEEPSEEK,
    "kimi-linear": replace(_DEEPSEEK, mtp=False, normalize_experts=True, kda=True),
    "bailingmoe3": replace(_DEEPSEEK, mtp=False, kda=True, bounded=True),
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "granite": Architecture("norm", normalize_experts=True, scales=True),
    "gpt-oss": Architecture(
        "neox",
        gating="softmax_weight",
        ffn_norm="post_attention_norm",
        window_every=2,
        window_scaled=True,
        activation="clamped",
        sinks=True,
    ),
    "gemma3": Architecture(
        "neox",
        qk_norm="head",
        post_norms=True,
        window_every=6,
        window_base=10000.0,
        activation="gelu",
        embedding_root=True,
    ),
    "gemma4": Architecture(
        "neox",
        qk_norm="head",
        post_norms=True,
        window_every=6,
        window_base=10000.0,
        activation="gelu",
        embedding_root=True,
        window_sizes=True,
        value_norm=True,
        normalize_experts=True,
        beside=True,
        layer_embeddings=True,
        unscaled=True,
    ),
}

# What other architectures need that the plan's grammar does not have.
_MISSING = {
    "pictures (the file is the part of a model that sees)": "clip",
    "several streams that predict each other (AltUp)": "gemma3n",
    "state-space layers": "mamba mamba2 falcon-h1 granitehybrid jamba nemotron_h nemotron_h_moe plamo2",
    "an index that chooses cache rows": "deepseek32 glm-dsa",
    "several residual streams": "deepseek4 glm5-next kimi-k3",
    "soft caps in attention": "gemma2 grok",
    "LayerNorm": "bloom codeshell cohere2 command-r dbrx falcon gpt2 gptneox mpt olmo phi2 stablelm starcoder2",
    "RWKV's time mixing": "rwkv6 rwkv6qwen2 rwkv7 arwkv7",
    "attention in both directions (it embeds text or translates)": "bert jina-bert-v2 modern-bert nomic-bert t5",
}


def unsupported(name: str) -> str:
    """One line: that an architecture is not supported, why, and what to do."""
    missing = next((f", which needs {what}," for what, names in _MISSING.items() if name in names.split()), "")
    return (
        f"architecture '{printable(name)}'{missing} is not supported; tinychat runs {', '.join(ARCHITECTURES)}; "
        "`tinychat --server URL` chats with another engine that runs it"
    )


_GATING: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_weight", 4: "sqrt_softplus"}


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: ranks and per-head sizes. `q_lora` 0 = plain q projection."""

    q_lora: int
    kv_lora: int
    nope: int
    v_dim: int


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: `ff` per expert, `shared_ff` of the shared expert (0 = none), the first `dense_layers` are
    dense."""

    count: int
    used: int
    ff: int
    shared_ff: int
    dense_layers: int
    gating: Gating
    normalize: bool
    scale: float
    groups: int
    groups_used: int


@dataclass(frozen=True)
class DeltaConfig:
    """Sizes of ops.DeltaRule, and the `layers` that have one. `width`: inputs of the short convolution."""

    key_heads: int
    heads: int
    head_dim: int  # of keys and values
    width: int
    grouped: bool
    layers: frozenset[int]


@dataclass(frozen=True)
class KDAConfig:
    """Sizes of blocks.KDA, and the `layers` that have it. With a `lower_bound` of its decay f and g are a matrix each,
    and latent attention has a gate."""

    head_dim: int
    width: int
    layers: frozenset[int]
    lower_bound: float  # 0: none


@dataclass(frozen=True)
class Heads:
    """Sizes of a layer's attention. `key` and `value`: values of a head."""

    kv: int
    key: int
    value: int
    rope: Rope


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of one model. Without `latent`, head_dim is of q and k, v_dim of v. `residual_scale` is of
    what a block adds to the residual stream."""

    architecture: str
    name: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    ff: tuple[int, ...]  # of each layer
    vocab: int
    eps: float
    context: int
    rope: Rope
    window_heads: Heads  # of layers with a sliding window
    window: int  # cache rows that those layers see
    windowed: frozenset[int]
    unrotated: frozenset[int]  # layers without RoPE
    storing: int  # layers with a cache; those behind them read the rows of the last of these of their kind
    layer_embedding: int  # values of a per-layer embedding; 0: there are none
    attention_scale: float
    temperature: Temperature | None
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    qk_norm: Literal["head", "projection"] | None
    sinks: bool
    value_norm: bool
    beside: bool
    softcap: float
    ffn_norm: str
    post_norms: bool
    fused_ffn: bool
    activation: Activation
    gated: bool
    latent: MLAConfig | None
    delta_rule: DeltaConfig | None
    kda: KDAConfig | None
    convolutions: frozenset[int]  # layers with a short convolution instead of attention
    convolution_width: int
    output_norm: str
    experts: MoEConfig | None

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> ModelConfig:
        """Reads and checks the metadata. Raises TinychatError naming the key, what was expected and what was found."""
        kv = _Metadata(gguf.metadata)
        name = kv.text("general.architecture")
        if name not in ARCHITECTURES:
            raise TinychatError(unsupported(name))
        arch = ARCHITECTURES[name]
        kv.prefix = name + "."
        if "token_embd.weight" not in gguf.tensors:
            raise TinychatError("tensor token_embd.weight is missing; the file is incomplete")
        shape = gguf.tensors["token_embd.weight"].shape
        vocab = shape[0]
        if len(shape) != 2 or vocab > file_limits.VOCABULARY.most:
            raise TinychatError(
                f"tensor token_embd.weight: expected shape (vocabulary, embedding_length), at most "
                f"{file_limits.VOCABULARY.most:,} rows ({file_limits.VOCABULARY.why}), found {shape}"
            )
        nextn = kv.integer("nextn_predict_layers", 0, low=0)
        layers = kv.integer("block_count") - nextn
        if layers < 1:
            raise TinychatError(f"{name}.block_count {layers + nextn} leaves no layer beside {nextn} nextn layers")
        dim, heads = kv.integer("embedding_length"), kv.integer("attention.head_count")
        window, windowed = _window(kv, arch, layers)
        kv_heads, window_kv_heads, without = _kv_heads(kv, arch, heads, layers, windowed)
        head_dim = kv.integer("attention.key_length", dim // heads)
        v_dim = kv.integer("attention.value_length", dim // heads)
        for n in (kv_heads, window_kv_heads):
            if heads % n:
                raise TinychatError(f"{name}.attention.head_count {heads} is not a multiple of head_count_kv {n}")
        context = kv.integer("context_length")
        rope_dims = kv.integer("rope.dimension_count", head_dim)
        latent = None
        if arch.mla:
            lite = layers in (26, 27) or (layers == 48 and vocab == 128256)  # llama.cpp: their q_lora_rank is noise
            per_head = kv.integer("attention.key_length_mla", head_dim)
            v_dim = kv.integer("attention.value_length_mla", v_dim)
            latent = MLAConfig(
                0 if lite else kv.integer("attention.q_lora_rank", 0, low=0),
                kv.integer("attention.kv_lora_rank"),
                per_head - rope_dims,
                v_dim,
            )
            head_dim = per_head
            if latent.nope < 1:
                raise TinychatError(
                    f"{name}.attention.key_length_mla {per_head} leaves nothing beside {rope_dims} rotary dims"
                )
        if rope_dims % 2 or rope_dims > head_dim:
            raise TinychatError(f"{name}.rope.dimension_count is {rope_dims}; expected an even number up to {head_dim}")
        base = kv.number("rope.freq_base", 10000.0)
        window_base = kv.number("rope.freq_base_swa", arch.window_base or base)
        rope, attention_scale = _rope(gguf, kv, arch, rope_dims, head_dim, context, base)
        window_dims, window_heads = rope_dims, Heads(kv_heads, head_dim, v_dim, rope)
        if arch.window_sizes:
            window_dims = kv.integer("rope.dimension_count_swa", rope_dims)
            key, value = (kv.integer(f"attention.{n}_length_swa", head_dim) for n in ("key", "value"))
            window_heads = Heads(window_kv_heads, key, value, rope)
        window_rope = Rope(window_dims, arch.rope, tuple(float(f) for f in _turns(window_base, window_dims)))
        if arch.window_scaled:
            window_rope, _ = _rope(gguf, kv, arch, window_dims, head_dim, context, window_base)
        window_heads = replace(window_heads, rope=window_rope)
        embedding_scale = residual_scale = logit_scale = 1.0
        if arch.scales:  # llama.cpp, src/models/granite.cpp: but for logit_scale, 0 or no key scales nothing
            attention_scale = kv.number("attention.scale", 0.0) or attention_scale
            embedding_scale = kv.number("embedding_scale", 0.0) or 1.0
            residual_scale = kv.number("residual_scale", 0.0) or 1.0
            if not (divisor := kv.number("logit_scale")):
                raise kv.bad("logit_scale", "a number over 0", divisor)
            logit_scale = 1 / divisor
            if kv.values.get(kv.prefix + "rope.scaling.finetuned", True) is False:
                raise TinychatError(f"{name}.rope.scaling.finetuned is false: a model without RoPE is not supported")
        if arch.embedding_root:
            embedding_scale = math.sqrt(dim)
        if name == "gemma3" and layers == 62:  # llama.cpp, src/models/gemma3.cpp: the 27B's queries
            attention_scale = 1 / math.sqrt(dim // heads)
        softcap = kv.number("final_logit_softcapping", 0.0) if arch.activation == "gelu" else 0.0
        if arch.unscaled:
            attention_scale = 1.0
        qk_norm = arch.qk_norm
        if arch.qk_norm_optional and "blk.0.attn_q_norm.weight" not in gguf.tensors:
            qk_norm = None
        if arch.delta_rule:
            _check_sections(kv, rope_dims)
        if arch.bounded:
            _check_bounded(kv)
        every, experts = arch.no_rope_every, _experts(kv, arch, layers, vocab)
        return cls(
            architecture=name,
            name=_name(gguf),
            layers=layers,
            dim=dim,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=v_dim,
            ff=kv.integers("feed_forward_length", layers + nextn, 0 if experts and not experts.dense_layers else None),
            vocab=vocab,
            eps=kv.number("attention.layer_norm_rms_epsilon"),
            context=context,
            rope=rope,
            window_heads=window_heads,
            window=window,
            windowed=windowed,
            unrotated=frozenset(
                range(layers) if arch.kda and not arch.bounded else range(every - 1, layers, every) if every else ()
            ),
            storing=_storing(kv, layers, windowed) if arch.layer_embeddings else layers,
            layer_embedding=kv.integer("embedding_length_per_layer_input", 0, low=0) if arch.layer_embeddings else 0,
            attention_scale=attention_scale,
            temperature=_temperature(kv),
            embedding_scale=embedding_scale,
            residual_scale=residual_scale,
            logit_scale=logit_scale,
            qk_norm=qk_norm,
            sinks=arch.sinks,
            value_norm=arch.value_norm,
            beside=arch.beside,
            softcap=softcap,
            ffn_norm=arch.ffn_norm,
            post_norms=arch.post_norms,
            fused_ffn=arch.fused_ffn,
            activation=arch.activation,
            gated=arch.gated,
            latent=latent,
            delta_rule=_delta_rule(kv, arch, layers),
            kda=_kda(kv, arch, without),
            convolutions=without if arch.convolutions else frozenset(),
            convolution_width=kv.integer("shortconv.l_cache", low=2) if arch.convolutions and without else 0,
            output_norm=arch.output_norm,
            experts=experts,
        )


def _name(gguf: GGUF) -> str:
    """What people call the model: the file's word for it, or the file's own name."""
    name = gguf.metadata.get("general.name")
    return printable((name if isinstance(name, str) and name.strip() else gguf.path.stem)[:200], newlines=False)


class _Metadata:
    """Typed, checked access to `<architecture>.<key>`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.prefix = values, ""

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(self.prefix + key, default)
        if not isinstance(value, str):
            raise self.bad(key, "a text", value)
        return value

    def integer(self, key: str, default: int | None = None, low: int = 1) -> int:
        value = self.values.get(self.prefix + key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(value) and (value == value[0]).all():
            value = int(value[0])  # per-layer arrays that do not differ
        limit = file_limits.METADATA.get(key, file_limits.OTHER)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.bad(key, f"a whole number of at least {low}", value)
        if value > limit.most:
            raise self.bad(key, f"at most {limit.most:,} ({limit.why})", value)
        return value

    def integers(self, key: str, count: int, default: int | None = None) -> tuple[int, ...]:
        """Whole numbers from 0 on, one for each of `count` layers; the file may have one for all."""
        value, limit = self.values.get(self.prefix + key), file_limits.METADATA.get(key, file_limits.OTHER)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or len(value) < count:
            return (self.integer(key, default, low=0),) * count
        if wrong := [int(n) for n in value[:count] if not 0 <= n <= limit.most]:
            raise self.bad(key, f"whole numbers up to {limit.most:,} ({limit.why})", wrong[0])
        return tuple(int(n) for n in value[:count])

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(self.prefix + key, default)
        limit = file_limits.METADATA.get(key, file_limits.OTHER)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.bad(key, "a number", value)
        if not limit.least <= value <= limit.most:  # nor is NaN between them
            raise self.bad(key, f"a number from {limit.least:g} to {limit.most:g} ({limit.why})", value)
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(self.prefix + key, False)
        if not isinstance(value, bool | int):
            raise self.bad(key, "true or false", value)
        return bool(value)

    def bad(self, key: str, expected: str, found: Any) -> TinychatError:
        what = "it is missing" if found is None else f"found {printable(repr(found)[:60], newlines=False)}"
        return TinychatError(f"metadata {self.prefix}{key}: expected {expected}, {what}")


def _turns(base: float, dims: int) -> np.ndarray:
    """The angle per position of each pair: float64 (dims / 2,)."""
    return base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def _rope(
    gguf: GGUF, kv: _Metadata, arch: Architecture, dims: int, head_dim: int, context: int, base: float
) -> tuple[Rope, float]:
    """(Rope, attention scale), scaling as llama.cpp nets it out: src/llama-context.cpp (yarn_attn_factor),
    ggml-cpu/ops.cpp (rope_yarn), src/models/deepseek2.cpp (kq_scale)."""
    kind = kv.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise kv.bad("rope.scaling.type", "none, linear or yarn", kind)
    factor = kv.number("rope.scaling.factor", kv.number("rope.scale_linear", 0.0)) or 1.0
    if kind == "none":
        factor = 1.0
    inv = _turns(base, dims)
    if "rope_freqs.weight" in gguf.tensors:
        t = gguf.tensors["rope_freqs.weight"]
        if t.type.name != "F32" or t.shape != (dims // 2,):
            raise TinychatError(f"tensor rope_freqs.weight: expected F32 ({dims // 2},), found {t.type.name} {t.shape}")
        factors = gguf.raw("rope_freqs.weight").view("<f4").astype(np.float64)
        if not ((factors > 1e-6) & (factors < 1e31)).all():  # 1e30: a pair of Gemma 4 that does not turn
            raise TinychatError("tensor rope_freqs.weight: expected factors from 1e-6 to 1e30; the file is damaged")
        inv = inv / factors
    log_factor = math.log(factor) if factor > 1 else 0.0
    log_mul = (
        kv.number("rope.scaling.yarn_log_multiplier", 0.0) * 10.0 if arch.mla else 0.0
    )  # the converter stored 0.1 x
    attn_factor = kv.number("rope.scaling.attn_factor", 1.0)
    magnitude = attn_factor
    if kind == "yarn":
        original = kv.integer("rope.scaling.original_context_length", context)

        def correction(beta: float) -> float:
            return dims * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(base))

        low = max(
            0.0, math.floor(correction(32.0))
        )  # llama.cpp reads yarn_beta_fast and _slow in other architectures only
        high = min(dims - 1.0, math.ceil(correction(1.0)))
        mix = 1 - np.clip((np.arange(dims // 2) - low) / max(0.001, high - low), 0, 1)
        inv = inv * ((1 - mix) / factor + mix)
        if log_mul == 0.0:
            magnitude *= 1 + 0.1 * log_factor
    else:
        inv = inv / factor
    scale = 1 / math.sqrt(head_dim)
    if arch.mla:
        yarnless = 1 + 0.1 * log_factor if kind != "yarn" else 1.0
        scale *= (magnitude * yarnless * (1 + 0.1 * log_mul * log_factor)) ** 2
    return Rope(dims, arch.rope, tuple(float(f) for f in inv), magnitude), scale


def _window(kv: _Metadata, arch: Architecture, layers: int) -> tuple[int, frozenset[int]]:
    """(rows that a layer with a sliding window sees, those layers)."""
    window = kv.integer("attention.sliding_window", 0, low=0) if arch.window_every else 0
    if not window:
        return 0, frozenset()
    key = "attention.sliding_window_pattern"
    pattern = kv.values.get(kv.prefix + key, arch.window_every)
    if isinstance(pattern, np.ndarray) and pattern.dtype.kind in "iub" and len(pattern) == layers:
        return window, frozenset(int(i) for i in np.flatnonzero(pattern))
    if not isinstance(pattern, int) or isinstance(pattern, bool) or pattern < 0:
        raise kv.bad(key, "a whole number, or true or false for every layer", pattern)
    return window, frozenset(i for i in range(layers) if not pattern or i % pattern < pattern - 1)


def _kv_heads(
    kv: _Metadata, arch: Architecture, heads: int, layers: int, windowed: frozenset[int]
) -> tuple[int, int, frozenset[int]]:
    """Of layers without and with a sliding window: one number, or an array where all layers of a kind have the same;
    and the layers that have none, because they have a convolution or a delta rule."""
    key = "attention.head_count_kv"
    values = kv.values.get(kv.prefix + key)
    if arch.convolutions or arch.kda:
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or len(values) < layers:
            raise kv.bad(key, "whole numbers, 0 for a layer without attention", values)
        found = {int(n) for n in values[:layers] if n}
        if len(found) != 1 or min(found) < 0 or max(found) > heads:
            raise kv.bad(key, f"0, or one number up to {heads}", values)
        return max(found), max(found), frozenset(int(i) for i in np.flatnonzero(values[:layers] == 0))
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu" and windowed and len(values) > max(windowed):
        kinds = [{int(n) for i, n in enumerate(values) if (i in windowed) == kind} for kind in (False, True)]
        if all(len(kind) == 1 and min(kind) > 0 for kind in kinds):
            return min(kinds[0]), min(kinds[1]), frozenset()
    n = kv.integer(key, heads)
    return n, n, frozenset()


def _storing(kv: _Metadata, layers: int, windowed: frozenset[int]) -> int:
    key = "attention.shared_kv_layers"
    shared = kv.integer(key, 0, low=0)
    first = layers - shared
    for kind in (windowed, frozenset(range(layers)) - windowed):
        if any(i >= first for i in kind) and not any(i < first for i in kind):
            raise kv.bad(key, "a layer with a cache in front of those that share one, of each kind", shared)
    return first


def _delta_rule(kv: _Metadata, arch: Architecture, layers: int) -> DeltaConfig | None:
    if not arch.delta_rule:
        return None
    key_heads, heads = kv.integer("ssm.group_count"), kv.integer("ssm.time_step_rank")
    head_dim, inner = kv.integer("ssm.state_size"), kv.integer("ssm.inner_size")
    if heads % key_heads:
        raise kv.bad("ssm.time_step_rank", f"a multiple of ssm.group_count {key_heads}", heads)
    if inner != heads * head_dim:
        raise kv.bad("ssm.inner_size", f"ssm.time_step_rank * ssm.state_size, {heads * head_dim}", inner)
    key = "attention.recurrent_layers"
    which = kv.values.get(kv.prefix + key)
    if which is None:
        every = kv.integer("full_attention_interval", 4)
        which = np.arange(1, layers + 1) % every
    if not isinstance(which, np.ndarray) or which.dtype.kind not in "iub" or len(which) < layers:
        raise kv.bad(key, "true or false for every layer", which)
    width = kv.integer("ssm.conv_kernel", low=2)
    found = frozenset(int(i) for i in np.flatnonzero(which[:layers]))
    return DeltaConfig(key_heads, heads, head_dim, width, arch.delta_rule == "grouped", found)


def _kda(kv: _Metadata, arch: Architecture, layers: frozenset[int]) -> KDAConfig | None:
    if not arch.kda:
        return None
    bound = kv.number("kda.gate_lower_bound") if arch.bounded else 0.0
    if arch.bounded and bound >= 0:
        raise kv.bad("kda.gate_lower_bound", "a number under 0", bound)
    return KDAConfig(kv.integer("kda.head_dim"), kv.integer("ssm.conv_kernel", low=2), layers, bound)


def _check_bounded(kv: _Metadata) -> None:
    """What Ling-3's graph (llama.cpp, src/models/bailingmoe3.cpp) has besides, which is not there."""
    if not kv.values.get(kv.prefix + "kda.safe_gate", True):
        raise kv.bad("kda.safe_gate", "true", False)
    for key in ("swiglu_clamp_exp", "rope.dimension_sections"):
        value = kv.values.get(kv.prefix + key, 0)
        if np.any(np.asarray(value)):
            raise kv.bad(key, "no value over 0: that is not supported", value)


def _check_sections(kv: _Metadata, dims: int) -> None:
    """Positions of texts are the same in time, height and width; then pairs that belong to none of them would not
    turn (ggml-cpu/ops.cpp, ggml_mrope_cache_init)."""
    key = "rope.dimension_sections"
    sections = kv.values.get(kv.prefix + key)
    if sections is None:
        return
    if not isinstance(sections, np.ndarray) or sections.dtype.kind not in "iu" or len(sections) < 3:
        raise kv.bad(key, "whole numbers", sections)
    if any(pair // 3 >= int(sections[pair % 3]) for pair in range(dims // 2)):
        raise kv.bad(key, f"sections that take turns over {dims // 2} pairs", sections)


def _temperature(kv: _Metadata) -> Temperature | None:
    scale = kv.number("attention.temperature_scale", 0.0)
    return Temperature(scale, kv.integer("attention.temperature_length")) if scale else None


def _experts(kv: _Metadata, arch: Architecture, layers: int, vocab: int) -> MoEConfig | None:
    count = kv.integer("expert_count", 0, low=0)
    dense = kv.integer("leading_dense_block_count", 0, low=0) if arch.expert_keys else 0
    if not count or dense >= layers:
        return None
    used = kv.integer("expert_used_count")
    if used > count:
        raise kv.bad("expert_used_count", f"at most expert_count {count}", used)
    ff = kv.integer("expert_feed_forward_length", 0, low=0)
    if not ff:
        ff = kv.integer("feed_forward_length") // (used if arch.gated or kv.prefix == "qwen3moe." else 1)
    shared_ff = kv.integer("expert_shared_count", 0, low=0) * ff if arch.expert_keys else 0
    if arch.bounded:
        shared_ff = kv.integer("expert_shared_feed_forward_length", shared_ff, low=0)
    if arch.gated:
        shared_ff = kv.integer("expert_shared_feed_forward_length", kv.integer("feed_forward_length", 0, low=0), low=0)
    gating, function = arch.gating, kv.integer("expert_gating_func", 0, low=0) if arch.expert_keys else 0
    if function not in (0, *_GATING):
        raise kv.bad("expert_gating_func", "1 softmax, 2 sigmoid, 3 softmax after top-k or 4 sqrt-softplus", function)
    if function:
        gating = _GATING[function]
    elif arch.mla and layers in (47, 48) and vocab == 154880:  # files older than the key: llama.cpp's rule
        gating = "sigmoid"
    normalize = arch.normalize_experts or (arch.expert_keys and kv.flag("expert_weights_norm"))
    scale = (kv.number("expert_weights_scale", 0.0) if arch.expert_keys else 0.0) or 1.0
    groups = kv.integer("expert_group_count", 0, low=0) or 1
    groups_used = kv.integer("expert_group_used_count", 0, low=0) or groups
    if groups > 1 and (
        count % groups or groups_used > groups or count // groups < 2 or groups_used * (count // groups) < used
    ):
        raise kv.bad("expert_group_count", f"groups that {count} experts divide into and {used} fit in", groups)
    return MoEConfig(
        count,
        used,
        ff,
        shared_ff,
        dense,
        gating,
        normalize,
        scale,
        groups,
        groups_used,
    )
