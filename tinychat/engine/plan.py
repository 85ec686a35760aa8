"""The plan of a model: its blocks over the tensors of a GGUF file, every shape checked."""

from __future__ import annotations

import re
from dataclasses import replace

from tinychat.engine.config import ARCHITECTURES, Heads, ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.blocks import (
    GQA,
    KDA,
    MLA,
    Attends,
    Beside,
    DeltaRule,
    Dense,
    Experts,
    Gated,
    Layer,
    LayerEmbedding,
    Rope,
    Router,
    ShortConvolution,
    Weight,
)
from tinychat.kernels.ops import MTP, Embed, Head, LayerTable, Plan
from tinychat.kernels.quant_types import GGML_QUANT_SIZES, GGMLQuantizationType

_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(nextn\..*|attn_rot_embd)")
F32 = GGMLQuantizationType.F32


def build_plan(gguf: GGUF, config: ModelConfig, mtp: bool = False) -> Plan:
    """The plan of `config` over the tensors of `gguf`, with `mtp` also of its block of multi-token prediction, where it
    has one.

    Raises TinychatError for a missing tensor, a wrong shape, or a tensor that this architecture does not use (ignoring
    it would give wrong answers silently).
    """
    t = _Tensors(gguf)
    embed = Embed(t.matrix("token_embd.weight", config.vocab, config.dim), config.embedding_scale)
    layers = tuple(_layer(t, config, i) for i in range(config.layers))
    output = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
    norm = t.vector(f"{config.output_norm}.weight", config.dim)
    head = Head(norm, config.eps, t.matrix(output, config.vocab, config.dim), config.logit_scale, config.softcap)
    table = _layer_table(t, config) if config.layer_embedding else None
    predicts = _mtp(t, config, embed, head) if mtp and has_mtp(gguf, config) else None
    for name in gguf.tensors.keys() - t.used:
        block = re.match(r"blk\.(\d+)\.", name)
        if not _IGNORED.fullmatch(name) and not (block and int(block[1]) >= config.layers):
            raise TinychatError(
                f"tensor {printable(name)} is not part of a {config.architecture} model as tinychat knows it"
            )
    return Plan(embed, layers, head, predicts, table)


def has_mtp(gguf: GGUF, config: ModelConfig) -> bool:
    """Whether a block of multi-token prediction that tinychat knows is in the file."""
    return ARCHITECTURES[config.architecture].mtp and f"blk.{config.layers}.nextn.eh_proj.weight" in gguf.tensors


def _mtp(t: _Tensors, c: ModelConfig, embed: Embed, head: Head) -> MTP:
    """The first of the blocks behind the last layer. llama.cpp, src/models/deepseek2.cpp (graph_mtp): what it has no
    tensors of are the model's own norm, embedding and output."""
    b = f"blk.{c.layers}.nextn."
    own = {n: f"{b}{n}.weight" for n in ("embed_tokens", "shared_head_norm", "shared_head_head")}
    own = {n: name for n, name in own.items() if name in t.gguf.tensors}
    if "embed_tokens" in own:
        embed = replace(embed, weight=t.matrix(own["embed_tokens"], c.vocab, c.dim))
    if "shared_head_norm" in own:
        head = replace(head, norm=t.vector(own["shared_head_norm"], c.dim))
    if "shared_head_head" in own:
        head = replace(head, weight=t.matrix(own["shared_head_head"], c.vocab, c.dim))
    token_norm, hidden_norm = (t.vector(f"{b}{n}.weight", c.dim) for n in ("enorm", "hnorm"))
    project = t.matrix(b + "eh_proj.weight", c.dim, 2 * c.dim)
    return MTP(embed, token_norm, hidden_norm, c.eps, project, _layer(t, c, c.layers), head)


def _layer(t: _Tensors, c: ModelConfig, i: int) -> Layer:
    b, dense = f"blk.{i}.", c.experts is None or i < c.experts.dense_layers
    attention: Attends
    if c.kda and i in c.kda.layers:
        attention = _kda(t, c, b)
    elif c.latent:
        attention = _mla(t, c, i)
    elif c.delta_rule and i in c.delta_rule.layers:
        attention = _delta_rule(t, c, b)
    elif i in c.convolutions:
        attention = _short_convolution(t, c, b)
    else:
        attention = _gqa(t, c, i)
    embedding = _layer_embedding(t, c, b) if c.layer_embedding else None
    return Layer(attention, _dense(t, c, i) if dense else _experts(t, c, i), embedding)


def _layer_table(t: _Tensors, c: ModelConfig) -> LayerTable:
    """llama.cpp, src/models/gemma4.cpp (project_per_layer_inputs)."""
    n = c.layers * c.layer_embedding
    return LayerTable(
        Embed(t.matrix("per_layer_token_embd.weight", c.vocab, n), c.layer_embedding**0.5),
        t.matrix("per_layer_model_proj.weight", n, c.dim),
        t.vector("per_layer_proj_norm.weight", c.layer_embedding),
        c.eps * c.dim,  # a norm of y / sqrt(dim) with eps is one of y with eps * dim
    )


def _layer_embedding(t: _Tensors, c: ModelConfig, b: str) -> LayerEmbedding:
    return LayerEmbedding(
        t.matrix(b + "inp_gate.weight", c.layer_embedding, c.dim),
        t.matrix(b + "proj.weight", c.dim, c.layer_embedding),
        t.vector(b + "post_norm.weight", c.dim),
        c.eps,
        c.activation,
        _stream_scale(t, c, b),
    )


def _stream_scale(t: _Tensors, c: ModelConfig, b: str) -> float:
    """What the residual stream is multiplied by behind a layer."""
    return t.scalar(b + "layer_output_scale.weight") if c.value_norm else 1.0


def _delta_rule(t: _Tensors, c: ModelConfig, b: str) -> DeltaRule:
    d = c.delta_rule
    assert d is not None
    keys, values = d.key_heads * d.head_dim, d.heads * d.head_dim
    if b + "ssm_in.weight" in t.gguf.tensors:
        raise TinychatError(f"tensor {b}ssm_in.weight is of the first files of {c.architecture}; take a later file")
    if b + "ssm_ba.weight" in t.gguf.tensors:  # of each key head: beta of its heads, then alpha
        beta, alpha = t.runs(b + "ssm_ba.weight", d.key_heads, (d.heads // d.key_heads,) * 2, c.dim)
    else:
        beta, alpha = (t.matrix(f"{b}ssm_{n}.weight", d.heads, c.dim) for n in ("beta", "alpha"))
    return DeltaRule(
        norm=t.vector(b + "attn_norm.weight", c.dim),
        eps=c.eps,
        qkv=t.matrix(b + "attn_qkv.weight", 2 * keys + values, c.dim),
        gate=t.matrix(b + "attn_gate.weight", values, c.dim),
        beta=beta,
        alpha=alpha,
        conv=t.floats(b + "ssm_conv1d.weight", 2 * keys + values, d.width),
        decay=t.vector(b + "ssm_a", d.heads),
        decay_bias=t.vector(b + "ssm_dt.bias", d.heads),
        head_norm=t.vector(b + "ssm_norm.weight", d.head_dim),
        key_heads=d.key_heads,
        heads=d.heads,
        key_dim=d.head_dim,
        value_dim=d.head_dim,
        grouped=d.grouped,
        output=t.matrix(b + "ssm_out.weight", c.dim, values),
    )


def _kda(t: _Tensors, c: ModelConfig, b: str) -> KDA:
    d = c.kda
    assert d is not None
    rows = c.heads * d.head_dim
    q, k, v = (t.matrix(f"{b}attn_{n}.weight", rows, c.dim) for n in "qkv")
    conv_q, conv_k, conv_v = (t.floats(f"{b}ssm_conv1d_{n}.weight", rows, d.width) for n in "qkv")
    low = not d.lower_bound
    f_a, g_a = (t.matrix(f"{b}ssm_{n}_a.weight", d.head_dim if low else rows, c.dim) for n in "fg")
    f_b, g_b = (t.matrix(f"{b}ssm_{n}_b.weight", rows, d.head_dim) if low else None for n in "fg")
    return KDA(
        norm=t.vector(b + "attn_norm.weight", c.dim),
        eps=c.eps,
        q=q,
        k=k,
        v=v,
        convs=(conv_q, conv_k, conv_v),
        f_a=f_a,
        f_b=f_b,
        g_a=g_a,
        g_b=g_b,
        beta=t.matrix(b + "ssm_beta.weight", c.heads, c.dim),
        decay=t.vector(b + "ssm_a", c.heads),
        decay_bias=t.vector(b + "ssm_dt.bias", rows),
        head_norm=t.vector(b + "ssm_norm.weight", d.head_dim),
        heads=c.heads,
        output=t.matrix(b + "attn_output.weight", c.dim, rows),
        lower_bound=d.lower_bound,
    )


def _short_convolution(t: _Tensors, c: ModelConfig, b: str) -> ShortConvolution:
    return ShortConvolution(
        norm=t.vector(b + "attn_norm.weight", c.dim),
        eps=c.eps,
        in_proj=t.matrix(b + "shortconv.in_proj.weight", 3 * c.dim, c.dim),
        conv=t.floats(b + "shortconv.conv.weight", c.dim, c.convolution_width),
        output=t.matrix(b + "shortconv.out_proj.weight", c.dim, c.dim),
    )


def _rope(c: ModelConfig, i: int, rope: Rope) -> Rope:
    """The layer's RoPE, which turns nothing in some."""
    return replace(rope, inv_freq=(0.0,) * len(rope.inv_freq), magnitude=1.0) if i in c.unrotated else rope


def _gqa(t: _Tensors, c: ModelConfig, i: int) -> GQA:
    b, windowed, shared = f"blk.{i}.", i in c.windowed, None
    h = c.window_heads if windowed else Heads(c.kv_heads, c.head_dim, c.v_dim, c.rope)
    nq, nk, nv = c.heads * h.key, h.kv * h.key, h.kv * h.value
    gate: Weight | None = None
    k: Weight | None
    v: Weight | None
    if i in range(c.storing, c.layers):  # a file may have its k and v nevertheless
        shared = max(n for n in range(c.storing) if (n in c.windowed) == windowed)
        q, k, v = t.matrix(b + "attn_q.weight", nq, c.dim), None, None
        t.used.update(f"{b}attn_{n}.weight" for n in ("k", "v", "k_norm"))
    elif c.gated:  # of each head: the query, then the gate
        q, gate = t.runs(b + "attn_q.weight", c.heads, (h.key, h.value), c.dim)
        k, v = (t.matrix(f"{b}attn_{n}.weight", rows, c.dim) for n, rows in (("k", nk), ("v", nv)))
    elif b + "attn_qkv.weight" in t.gguf.tensors:
        q, k, v = t.slices(b + "attn_qkv.weight", (nq, nk, nv), c.dim)
    else:
        q, k = (t.matrix(f"{b}attn_{n}.weight", rows, c.dim) for n, rows in (("q", nq), ("k", nk)))
        v = (
            k
            if c.value_norm and b + "attn_v.weight" not in t.gguf.tensors
            else t.matrix(b + "attn_v.weight", nv, c.dim)
        )
    q_norm = k_norm = None
    if c.qk_norm:
        per_head = c.qk_norm == "head"
        q_norm = t.vector(b + "attn_q_norm.weight", h.key if per_head else nq)
        k_norm = t.vector(b + "attn_k_norm.weight", h.key if per_head else nk) if k else None
    return GQA(
        norm=t.vector(b + "attn_norm.weight", c.dim) if c.ffn_norm else None,
        eps=c.eps,
        q=q,
        k=k,
        v=v,
        q_bias=t.optional(b + "attn_q.bias", nq),
        k_bias=t.optional(b + "attn_k.bias", nk),
        v_bias=t.optional(b + "attn_v.bias", nv),
        qk_norm=c.qk_norm,
        q_norm=q_norm,
        k_norm=k_norm,
        rope=_rope(c, i, h.rope),
        heads=c.heads,
        kv_heads=h.kv,
        key_dim=h.key,
        value_dim=h.value,
        scale=c.attention_scale,
        output=t.matrix(b + "attn_output.weight", c.dim, c.heads * h.value),
        output_bias=t.optional(b + "attn_output.bias", c.dim),
        residual_scale=c.residual_scale,
        post_norm=t.vector(b + "post_attention_norm.weight", c.dim) if c.post_norms else None,
        window=c.window if windowed else 0,
        sinks=t.vector(b + "attn_sinks.weight", c.heads) if c.sinks else None,
        value_norm=c.value_norm and v is not None,
        gate=gate,
        shared=shared,
    )


def _mla(t: _Tensors, c: ModelConfig, i: int) -> MLA:
    m, nq, b = c.latent, c.heads * c.head_dim, f"blk.{i}."
    assert m is not None
    q_a = t.matrix(b + "attn_q_a.weight", m.q_lora, c.dim) if m.q_lora else None
    if b + "attn_kv_b.weight" in t.gguf.tensors:  # files of 2024: per head `nope` rows of K, then v_dim rows of V
        k_b, v_b = t.split_kv_b(b + "attn_kv_b.weight", c.heads, m.nope, m.v_dim, m.kv_lora)
    else:
        k_b = t.groups(b + "attn_k_b.weight", c.heads, m.kv_lora, m.nope)
        v_b = t.groups(b + "attn_v_b.weight", c.heads, m.v_dim, m.kv_lora)
    return MLA(
        norm=t.vector(b + "attn_norm.weight", c.dim),
        eps=c.eps,
        q_a=q_a,
        q_a_norm=t.vector(b + "attn_q_a_norm.weight", m.q_lora) if q_a else None,
        q=t.matrix(b + "attn_q_b.weight", nq, m.q_lora) if q_a else t.matrix(b + "attn_q.weight", nq, c.dim),
        kv_a=t.matrix(b + "attn_kv_a_mqa.weight", m.kv_lora + c.rope.dims, c.dim),
        kv_norm=t.vector(b + "attn_kv_a_norm.weight", m.kv_lora),
        k_b=k_b,
        v_b=v_b,
        rope=_rope(c, i, c.rope),
        heads=c.heads,
        nope=m.nope,
        kv_lora=m.kv_lora,
        scale=c.attention_scale,
        output=t.matrix(b + "attn_output.weight", c.dim, c.heads * m.v_dim),
        residual_scale=c.residual_scale,
        temperature=c.temperature,
        gate=t.matrix(b + "attn_gate.weight", c.heads, c.dim) if c.kda and c.kda.lower_bound else None,
    )


def _dense(t: _Tensors, c: ModelConfig, i: int) -> Dense:
    b, ff = f"blk.{i}.", c.ff[i]
    if c.fused_ffn:
        gate, up = t.slices(b + "ffn_up.weight", (ff, ff), c.dim)
    else:
        gate, up = (t.matrix(f"{b}ffn_{n}.weight", ff, c.dim) for n in ("gate", "up"))
    return Dense(
        norm=t.vector(f"{b}{c.ffn_norm}.weight", c.dim) if c.ffn_norm else None,
        eps=c.eps,
        weights=Gated(gate, up, t.matrix(b + "ffn_down.weight", c.dim, ff), c.activation),
        residual_scale=c.residual_scale,
        post_norm=t.vector(b + "post_ffw_norm.weight", c.dim) if c.post_norms else None,
        stream_scale=1.0 if c.layer_embedding else _stream_scale(t, c, b),
    )


def _experts(t: _Tensors, c: ModelConfig, i: int) -> Experts:
    e, block = c.experts, f"blk.{i}."
    b = block + "ffn_"
    assert e is not None
    if b + "gate_up_exps.weight" in t.gguf.tensors:
        gate, up = t.grouped_slices(b + "gate_up_exps.weight", e.count, (e.ff, e.ff), c.dim)
    else:
        gate, up = (t.groups(f"{b}{n}_exps.weight", e.count, e.ff, c.dim) for n in ("gate", "up"))
    shared = None
    if e.shared_ff:
        shared_gate, shared_up = (t.matrix(f"{b}{n}_shexp.weight", e.shared_ff, c.dim) for n in ("gate", "up"))
        shared = Gated(shared_gate, shared_up, t.matrix(b + "down_shexp.weight", c.dim, e.shared_ff), c.activation)
    router = Router(
        weight=t.matrix(b + "gate_inp.weight", e.count, c.dim),
        bias=t.optional(b + "gate_inp.bias", e.count),
        selection_bias=t.optional(block + "exp_probs_b.bias", e.count),
        gating=e.gating,
        top_k=e.used,
        normalize=e.normalize,
        scale=e.scale,
        groups=e.groups,
        groups_used=e.groups_used,
        norm=t.vector(b + "gate_inp.scale", c.dim) if c.beside else None,
        logit_scale=c.dim**-0.5 if c.beside else 1.0,
        expert_scale=t.optional(b + "down_exps.scale", e.count) if c.beside else None,
    )
    weights = Gated(
        gate,
        up,
        t.groups(b + "down_exps.weight", e.count, c.dim, e.ff),
        c.activation,
        *(t.biases(f"{b}{n}_exps.bias", e.count, rows) for n, rows in (("gate", e.ff), ("up", e.ff), ("down", c.dim))),
    )
    norm = t.vector(f"{block}{'pre_ffw_norm_2' if c.beside else c.ffn_norm}.weight", c.dim)
    beside = _beside(t, c, i) if c.beside else None
    shared_scale = t.vector(b + "gate_inp_shexp.weight", c.dim) if c.gated and shared else None
    return Experts(norm, c.eps, router, weights, shared, c.residual_scale, beside, shared_scale)


def _beside(t: _Tensors, c: ModelConfig, i: int) -> Beside:
    dense, b = _dense(t, c, i), f"blk.{i}."
    dense_norm, experts_norm = (t.vector(f"{b}post_ffw_norm_{n}.weight", c.dim) for n in (1, 2))
    assert dense.norm and dense.post_norm
    return Beside(dense.norm, dense.weights, dense_norm, experts_norm, dense.post_norm, dense.stream_scale)


class _Tensors:
    """Finds tensors, checks their shapes and records which ones were used."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf, self.used = gguf, set[str]()

    def _type(self, name: str, *shapes: tuple[int, ...]) -> GGMLQuantizationType:
        if name not in self.gguf.tensors:
            raise TinychatError(f"tensor {name} is missing; the file is incomplete or of another architecture")
        t = self.gguf.tensors[name]
        if t.shape not in shapes:
            raise TinychatError(f"tensor {name}: expected shape {shapes[0]}, found {t.shape}")
        self.used.add(name)
        return t.type

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        return Weight(name, self._type(name, (rows, cols)), rows, cols)

    def vector(self, name: str, n: int) -> Weight:
        kind = self._type(name, (n,), (1, n), (n, 1), (1, 1, n, 1))
        if kind != F32:
            raise TinychatError(f"tensor {name}: expected type F32, found {kind.name}")
        return Weight(name, kind, 1, n)

    def floats(self, name: str, rows: int, cols: int) -> Weight:
        kind = self._type(name, (rows, cols), (rows, 1, cols), (1, rows, 1, cols))
        if kind != F32:
            raise TinychatError(f"tensor {name}: expected type F32, found {kind.name}")
        return Weight(name, kind, rows, cols)

    def optional(self, name: str, n: int) -> Weight | None:
        return self.vector(name, n) if name in self.gguf.tensors else None

    def scalar(self, name: str) -> float:
        """A tensor of one value; 1 where there is none."""
        if self.optional(name, 1) is None:
            return 1.0
        value = float(self.gguf.raw(name).view("<f4")[0])
        if not abs(value) < 1e6:
            raise TinychatError(f"tensor {name}: expected a number up to 1e6, found {value}")
        return value

    def biases(self, name: str, groups: int, n: int) -> Weight | None:
        """A vector of each group."""
        if name not in self.gguf.tensors:
            return None
        kind = self._type(name, (groups, n))
        if kind != F32:
            raise TinychatError(f"tensor {name}: expected type F32, found {kind.name}")
        return Weight(name, kind, 1, n, groups, stride=1)

    def groups(self, name: str, groups: int, rows: int, cols: int) -> Weight:
        return Weight(name, self._type(name, (groups, rows, cols)), rows, cols, groups, stride=rows)

    def slices(self, name: str, parts: tuple[int, ...], cols: int) -> list[Weight]:
        return self._cut(name, self._type(name, (sum(parts), cols)), 1, parts, cols)

    def grouped_slices(self, name: str, groups: int, parts: tuple[int, ...], cols: int) -> list[Weight]:
        return self._cut(name, self._type(name, (groups, sum(parts), cols)), groups, parts, cols)

    def runs(self, name: str, heads: int, parts: tuple[int, ...], cols: int) -> list[Weight]:
        """Matrices whose rows take turns in the tensor: of every head, parts[0] rows of the first, and so on."""
        stride = sum(parts)
        kind = self._type(name, (heads * stride, cols))
        starts = [sum(parts[:i]) for i in range(len(parts))]
        return [Weight(name, kind, heads * n, cols, 1, start, stride, run=n) for start, n in zip(starts, parts)]

    def _cut(
        self, name: str, kind: GGMLQuantizationType, groups: int, parts: tuple[int, ...], cols: int
    ) -> list[Weight]:
        starts = [sum(parts[:i]) for i in range(len(parts))]
        return [Weight(name, kind, rows, cols, groups, start, sum(parts)) for start, rows in zip(starts, parts)]

    def split_kv_b(self, name: str, heads: int, nope: int, v_dim: int, kv_lora: int) -> tuple[Weight, Weight]:
        kind, stride = self._type(name, (heads * (nope + v_dim), kv_lora)), nope + v_dim
        block = GGML_QUANT_SIZES[kind][0]
        if kv_lora % block:
            raise TinychatError(
                f"tensor {name}: rows of {kind.name} hold a multiple of {block}, kv_lora_rank is {kv_lora}"
            )
        return (
            Weight(name, kind, kv_lora, nope, heads, 0, stride, transposed=True),
            Weight(name, kind, v_dim, kv_lora, heads, nope, stride),
        )
