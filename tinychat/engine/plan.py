"""A forward step, written once: the list of fused ops for a ModelConfig, with every tensor found and its shape
checked."""

from __future__ import annotations

import re

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError, printable
from tinychat.kernels.ops import (
    Absorb,
    Attention,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GateUp,
    Head,
    LatentStore,
    LinearAdd,
    NormLinear,
    Op,
    Plan,
    RopeStore,
    Route,
    ValueUp,
    Weight,
)

_IGNORED = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(nextn\..*|attn_rot_embd)")
F32 = GGMLQuantizationType.F32


def build_plan(gguf: GGUF, config: ModelConfig) -> Plan:
    """The plan of `config` over the tensors of `gguf`.

    Raises TinychatError for a missing tensor, a wrong shape, or a tensor that this architecture does not use (ignoring
    it would give wrong answers silently).
    """
    t = _Tensors(gguf)
    ops: list[Op] = [Embed(t.matrix("token_embd.weight", config.vocab, config.dim))]
    for layer in range(config.layers):
        ops += _latent_attention(t, config, layer) if config.latent else _attention(t, config, layer)
        dense = config.experts is None or layer < config.experts.dense_layers
        ops += _dense_ffn(t, config, layer) if dense else _experts_ffn(t, config, layer)
    output = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
    ops.append(Head(t.vector("output_norm.weight", config.dim), config.eps, t.matrix(output, config.vocab, config.dim)))
    for name in gguf.tensors.keys() - t.used:
        block = re.match(r"blk\.(\d+)\.", name)
        if not _IGNORED.fullmatch(name) and not (block and int(block[1]) >= config.layers):
            raise TinychatError(
                f"tensor {printable(name)} is not part of a {config.architecture} model as tinychat knows it"
            )
    latent = config.latent
    return Plan(
        tuple(ops),
        _buffers(config),
        config.layers,
        latent.kv_lora + config.rope.dims if latent else config.kv_heads * config.head_dim,
        0 if latent else config.kv_heads * config.v_dim,
        config.dim,
        config.vocab,
    )


def _buffers(c: ModelConfig) -> dict[str, int]:
    ff = c.ff
    if e := c.experts:
        ff = max(e.used * e.ff + e.shared_ff, c.ff if e.dense_layers else 0)
    buffers = {"x": c.dim, "q": c.heads * c.head_dim, "heads": c.heads * c.v_dim, "ffn": ff}
    if c.latent:
        row = c.latent.kv_lora + c.rope.dims
        buffers |= {"kv": row, "q_latent": c.heads * row, "o_latent": c.heads * c.latent.kv_lora}
        if c.latent.q_lora:
            buffers["q_a"] = c.latent.q_lora
    else:
        buffers |= {"k": c.kv_heads * c.head_dim, "v": c.kv_heads * c.v_dim}
    return buffers


def _attention(t: _Tensors, c: ModelConfig, layer: int) -> list[Op]:
    b = f"blk.{layer}."
    nq, nk, nv = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.v_dim
    if b + "attn_qkv.weight" in t.gguf.tensors:
        q, k, v = t.slices(b + "attn_qkv.weight", (nq, nk, nv), c.dim)
    else:
        q, k, v = (t.matrix(f"{b}attn_{n}.weight", rows, c.dim) for n, rows in (("q", nq), ("k", nk), ("v", nv)))
    biases = tuple(t.optional(f"{b}attn_{n}.bias", rows) for n, rows in (("q", nq), ("k", nk), ("v", nv)))
    q_norm = k_norm = None
    if c.qk_norm:
        per_head = c.qk_norm == "head"
        q_norm = t.vector(b + "attn_q_norm.weight", c.head_dim if per_head else nq)
        k_norm = t.vector(b + "attn_k_norm.weight", c.head_dim if per_head else nk)
    return [
        NormLinear("x", t.vector(b + "attn_norm.weight", c.dim), c.eps, (q, k, v), biases, ("q", "k", "v")),
        RopeStore(layer, c.rope, "q", "k", "v", q_norm, k_norm, c.eps, c.heads, c.kv_heads, c.head_dim),
        Attention(layer, "q", "heads", c.heads, c.kv_heads, c.head_dim, c.v_dim, c.attention_scale, latent=False),
        LinearAdd(
            "heads",
            t.matrix(b + "attn_output.weight", c.dim, c.heads * c.v_dim),
            t.optional(b + "attn_output.bias", c.dim),
        ),
    ]


def _latent_attention(t: _Tensors, c: ModelConfig, layer: int) -> list[Op]:
    m, b = c.latent, f"blk.{layer}."
    assert m is not None
    row, nq = m.kv_lora + c.rope.dims, c.heads * c.head_dim
    kv_norm = t.vector(b + "attn_kv_a_norm.weight", m.kv_lora)
    norm = t.vector(b + "attn_norm.weight", c.dim)
    kv_a = t.matrix(b + "attn_kv_a_mqa.weight", row, c.dim)
    if m.q_lora:
        q_norm = t.vector(b + "attn_q_a_norm.weight", m.q_lora)
        q_a = t.matrix(b + "attn_q_a.weight", m.q_lora, c.dim)
        q_b = t.matrix(b + "attn_q_b.weight", nq, m.q_lora)
        ops: list[Op] = [
            NormLinear("x", norm, c.eps, (q_a, kv_a), (None, None), ("q_a", "kv")),
            NormLinear("q_a", q_norm, c.eps, (q_b,), (None,), ("q",)),
        ]
    else:
        q = t.matrix(b + "attn_q.weight", nq, c.dim)
        ops = [NormLinear("x", norm, c.eps, (q, kv_a), (None, None), ("q", "kv"))]
    if b + "attn_kv_b.weight" in t.gguf.tensors:  # files of 2024: per head `nope` rows of K, then v_dim rows of V
        k_b, v_b = t.split_kv_b(b + "attn_kv_b.weight", c.heads, m.nope, m.v_dim, m.kv_lora)
    else:
        k_b = t.groups(b + "attn_k_b.weight", c.heads, m.kv_lora, m.nope)
        v_b = t.groups(b + "attn_v_b.weight", c.heads, m.v_dim, m.kv_lora)
    return [
        *ops,
        LatentStore(layer, c.rope, "q", "kv", kv_norm, c.eps, c.heads, m.nope, m.kv_lora),
        Absorb("q", k_b, "q_latent", c.heads, m.nope, c.rope.dims, m.kv_lora),
        Attention(layer, "q_latent", "o_latent", c.heads, 1, row, m.kv_lora, c.attention_scale, latent=True),
        ValueUp("o_latent", v_b, "heads"),
        LinearAdd("heads", t.matrix(b + "attn_output.weight", c.dim, c.heads * m.v_dim)),
    ]


def _dense_ffn(t: _Tensors, c: ModelConfig, layer: int) -> list[Op]:
    b = f"blk.{layer}.ffn_"
    gate, up = (t.matrix(f"{b}{n}.weight", c.ff, c.dim) for n in ("gate", "up"))
    return [
        GateUp(t.vector(b + "norm.weight", c.dim), c.eps, gate, up, "ffn"),
        LinearAdd("ffn", t.matrix(b + "down.weight", c.dim, c.ff)),
    ]


def _experts_ffn(t: _Tensors, c: ModelConfig, layer: int) -> list[Op]:
    e, b = c.experts, f"blk.{layer}.ffn_"
    assert e is not None
    norm = t.vector(b + "norm.weight", c.dim)
    if b + "gate_up_exps.weight" in t.gguf.tensors:
        gate, up = t.grouped_slices(b + "gate_up_exps.weight", e.count, (e.ff, e.ff), c.dim)
    else:
        gate, up = (t.groups(f"{b}{n}_exps.weight", e.count, e.ff, c.dim) for n in ("gate", "up"))
    shared_gate = shared_up = shared_down = None
    if e.shared_ff:
        shared_gate, shared_up = (t.matrix(f"{b}{n}_shexp.weight", e.shared_ff, c.dim) for n in ("gate", "up"))
        shared_down = t.matrix(b + "down_shexp.weight", c.dim, e.shared_ff)
    bias = t.optional(f"blk.{layer}.exp_probs_b.bias", e.count)
    router, router_bias = t.matrix(b + "gate_inp.weight", e.count, c.dim), t.optional(b + "gate_inp.bias", e.count)
    down = t.groups(b + "down_exps.weight", e.count, c.dim, e.ff)
    return [
        Route(norm, c.eps, router, router_bias, bias, e.gating, e.used, e.normalize, e.scale, e.groups, e.groups_used),
        ExpertsUp(norm, c.eps, gate, up, shared_gate, shared_up, e.used, "ffn"),
        ExpertsDown("ffn", down, shared_down, e.used),
    ]


class _Tensors:
    """Finds tensors, checks their shapes, remembers which were used."""

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
        kind = self._type(name, (n,))
        if kind != F32:
            raise TinychatError(f"tensor {name}: expected type F32, found {kind.name}")
        return Weight(name, kind, 1, n)

    def optional(self, name: str, n: int) -> Weight | None:
        return self.vector(name, n) if name in self.gguf.tensors else None

    def groups(self, name: str, groups: int, rows: int, cols: int) -> Weight:
        return Weight(name, self._type(name, (groups, rows, cols)), rows, cols, groups, stride=rows)

    def slices(self, name: str, parts: tuple[int, ...], cols: int) -> list[Weight]:
        return self._cut(name, self._type(name, (sum(parts), cols)), 1, parts, cols)

    def grouped_slices(self, name: str, groups: int, parts: tuple[int, ...], cols: int) -> list[Weight]:
        return self._cut(name, self._type(name, (groups, sum(parts), cols)), groups, parts, cols)

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
