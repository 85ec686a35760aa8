"""GGUF files with the exact shapes of real models and random weights, for kernels, benchmarks and memory tests.

    python -m tests.support.shapes glm-4.7-flash --quant Q4_0 --layers 4 -o out.gguf

The tensor types are those `llama-quantize` gives (its default choice for Q4_K_M, its fallback for rows that are no
multiple of 256). Values are random blocks tiled from a small pool, so that 18 GB are written at the speed of the disk;
activations and logits stay O(1). The tokenizer is a stand-in of the right size: byte tokens, dummy words, the model's
special tokens.

Rows of the output matrix repeat in such a file, so its greedy tokens are ties. With `--follow 3` no row repeats and
every token has a likely successor: greedy decoding can be compared between executors.
"""

import argparse
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as Q
from gguf.quants import dequantize

from tests.support.blocks import MIXED, QUANTS, random_blocks

Tensor = tuple[
    str, tuple[int, ...], float
]  # name, numpy shape (row length last), standard deviation; 0 = a norm around 1
FALLBACK = {Q.Q4_K: Q.Q5_0, Q.Q5_K: Q.Q5_1, Q.Q6_K: Q.Q8_0, Q.Q2_K: Q.Q4_0, Q.Q3_K: Q.Q4_0, Q.IQ4_XS: Q.IQ4_NL}
FALLBACK |= dict.fromkeys(MIXED, Q.IQ4_NL)


@dataclass(frozen=True)
class MLA:
    q_lora: int  # 0: one plain attn_q
    kv_lora: int
    nope: int
    rope: int
    v: int
    legacy: bool = False  # one attn_kv_b and no `_mla` keys, as files before April 2025


@dataclass(frozen=True)
class MoE:
    experts: int
    used: int
    ffn: int
    shared: int = 0
    dense: int = 0  # leading dense blocks
    gating: int | None = 1  # 1 softmax, 2 sigmoid, 3 softmax after top-k, 4 sqrt-softplus; None: no key
    scale: float | None = None
    norm: bool | None = None
    bias: bool = False  # exp_probs_b
    groups: int = 0
    groups_used: int = 0
    fused: bool = False  # one ffn_gate_up_exps


@dataclass(frozen=True)
class DeltaRule:
    key_heads: int
    heads: int
    head_dim: int
    width: int = 4  # of the convolution
    every: int = 4  # one layer in so many has attention


@dataclass(frozen=True)
class Shape:
    arch: str
    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    theta: float
    eps: float
    context: int
    pre: str
    specials: dict[int, str]
    bos: int
    eos: int
    mla: MLA | None = None
    moe: MoE | None = None
    qkv_bias: bool = False
    fused_qkv: bool = False
    qk_norm: int = 0  # length of attn_q_norm: head_dim, or heads * head_dim (olmoe)
    rope_freqs: float = 0  # Llama 3.x: the factor of the slow dimensions
    nextn: int = 0  # multi-token-prediction layers behind the last one
    nextn_own: bool = False  # they have an embedding and an output of their own, and no norm
    scaling: dict[str, str | int | float] = field(default_factory=dict)  # `rope.scaling.*`
    scales: tuple[float, float, float, float] | None = None  # granite: embedding, residual, attention, logit
    value_dim: int = 0  # of a GQA head; 0: head_dim
    rope_dims: int = 0  # rotated values of a GQA head; 0: all
    window: int = 0  # rows that layers with a sliding window see
    window_pattern: int | tuple[bool, ...] = ()  # (): no key
    window_theta: float = 0  # RoPE base of those layers; 0: no key
    temperature: tuple[float, int] | None = None  # of attention: scale, length
    window_heads: tuple[int, int] = (0, 0)  # kv heads and values of a head in layers with a window; 0: as the others
    softcap: float = 0  # of the logits
    delta: DeltaRule | None = None
    layer_embedding: int = 0  # values of a per-layer embedding
    shared: int = 0  # last layers that share the caches of earlier ones, with a feed-forward twice as wide
    kda: tuple[int, int, int] | None = (
        None  # values of a head, inputs of the convolutions, one layer in so many has MLA
    )
    lower_bound: float = 0  # of KDA's decay; 0: none
    convolution: int = 0  # inputs of a short convolution, which every second layer has instead of attention

    def convolves(self, layer: int) -> bool:
        return self.convolution > 0 and layer % 2 == 0

    def has_kda(self, layer: int) -> bool:
        return self.kda is not None and (layer + 1) % self.kda[2] != 0

    def recurrent(self, layer: int) -> bool:
        return self.delta is not None and layer < self.layers and (layer + 1) % self.delta.every != 0

    def windowed(self, layer: int) -> bool:
        return isinstance(self.window_pattern, tuple) and bool(self.window_pattern) and self.window_pattern[layer]

    def shares(self, layer: int) -> bool:
        return self.layers - self.shared <= layer < self.layers

    def ffn_of(self, layer: int) -> int:
        return self.ffn * (2 if self.shares(layer) else 1)

    @property
    def pre_norms(self) -> bool:
        return self.arch != "olmo2"

    @property
    def post_norms(self) -> bool:
        return self.arch in ("olmo2", "glm4", "gemma3", "gemma4")


_LLAMA3 = {
    128000: "<|begin_of_text|>",
    128001: "<|end_of_text|>",
    128006: "<|start_header_id|>",
    128007: "<|end_header_id|>",
    128008: "<|eom_id|>",
    128009: "<|eot_id|>",
}
_QWEN = {151643: "<|endoftext|>", 151644: "<|im_start|>", 151645: "<|im_end|>"}
_GLM = {
    154820: "<|endoftext|>",
    154822: "[gMASK]",
    154824: "<sop>",
    154826: "<|system|>",
    154827: "<|user|>",
    154828: "<|assistant|>",
    154829: "<|observation|>",
    154841: "<think>",
    154842: "</think>",
}
_DEEPSEEK = {100000: "<｜begin▁of▁sentence｜>", 100001: "<｜end▁of▁sentence｜>"}
_YOUTU = {128000: "<|begin_of_text|>", 128001: "<|end_of_text|>", 128002: "<|User|>", 128003: "<|Assistant|>"}
_KIMI = {
    163584: "[BOS]",
    163585: "[EOS]",
    163586: "<|im_end|>",
    163587: "<|im_user|>",
    163588: "<|im_assistant|>",
    163594: "<|im_system|>",
    163601: "<|im_middle|>",
}
_HARMONY = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}
_QWEN35 = {248044: "<|endoftext|>", 248045: "<|im_start|>", 248046: "<|im_end|>"}
_SMOLLM = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
_YARN: dict[str, str | int | float] = {
    "type": "yarn",
    "factor": 40.0,
    "original_context_length": 4096,
    "yarn_log_multiplier": 0.0707,
}
_V2_LITE = Shape(
    "deepseek2",
    27,
    2048,
    16,
    16,
    192,
    10944,
    102400,
    False,
    1e4,
    1e-6,
    163840,
    "deepseek-llm",
    _DEEPSEEK,
    100000,
    100001,
    MLA(0, 512, 128, 64, 128),
    MoE(64, 6, 1408, 2, 1),
    scaling=_YARN,
)

SHAPES = {
    "glm-4.7-flash": Shape(
        "deepseek2",
        47,
        2048,
        20,
        20,
        256,
        10240,
        154880,
        False,
        1e6,
        1e-5,
        202752,
        "glm4",
        _GLM,
        154822,
        154820,
        MLA(768, 512, 192, 64, 256),
        MoE(64, 4, 1536, 1, 1, 2, 1.8, True, True),
    ),
    "deepseek-v2-lite": _V2_LITE,
    "deepseek-v2-lite-legacy": replace(_V2_LITE, mla=MLA(0, 512, 128, 64, 128, legacy=True)),
    "youtu-llm-2b": Shape(
        "deepseek2",
        32,
        2048,
        16,
        16,
        192,
        6144,
        128256,
        True,
        1.6e6,
        1e-6,
        131072,
        "youtu",
        _YOUTU,
        128000,
        128001,
        MLA(1536, 512, 128, 64, 128),
    ),
    "moonlight-16b-a3b": Shape(
        "deepseek2",
        27,
        2048,
        16,
        16,
        192,
        11264,
        163840,
        False,
        5e4,
        1e-5,
        8192,
        "kimi-k2",
        _KIMI,
        163584,
        163585,
        MLA(0, 512, 128, 64, 128),
        MoE(64, 6, 1408, 2, 1, 2, 2.446, True, True),
    ),
    "llama-3.1-8b": Shape(
        "llama",
        32,
        4096,
        32,
        8,
        128,
        14336,
        128256,
        False,
        5e5,
        1e-5,
        131072,
        "llama-bpe",
        _LLAMA3,
        128000,
        128009,
        rope_freqs=8,
    ),
    "llama-3.2-1b": Shape(
        "llama",
        16,
        2048,
        32,
        8,
        64,
        8192,
        128256,
        True,
        5e5,
        1e-5,
        131072,
        "llama-bpe",
        _LLAMA3,
        128000,
        128009,
        rope_freqs=32,
    ),
    "qwen2.5-0.5b": Shape(
        "qwen2", 24, 896, 14, 2, 64, 4864, 151936, True, 1e6, 1e-6, 32768, "qwen2", _QWEN, 151643, 151645, qkv_bias=True
    ),
    "qwen3-0.6b": Shape(
        "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, 1e6, 1e-6, 40960, "qwen2", _QWEN, 151643, 151645, qk_norm=128
    ),
    "qwen3-30b-a3b": Shape(
        "qwen3moe",
        48,
        2048,
        32,
        4,
        128,
        6144,
        151936,
        False,
        1e6,
        1e-6,
        40960,
        "qwen2",
        _QWEN,
        151643,
        151645,
        moe=MoE(128, 8, 768),
        qk_norm=128,
    ),
    "olmoe-1b-7b": Shape(
        "olmoe",
        16,
        2048,
        16,
        16,
        128,
        1024,
        50304,
        False,
        1e4,
        1e-5,
        4096,
        "olmo",
        {50279: "<|endoftext|>"},
        50279,
        50279,
        moe=MoE(64, 8, 1024),
        qk_norm=2048,
    ),
    "gpt-oss-20b": Shape(
        "gpt-oss",
        24,
        2880,
        64,
        8,
        64,
        2880,
        201088,
        False,
        150000.0,
        1e-5,
        131072,
        "gpt-4o",
        _HARMONY,
        199998,
        200002,
        moe=MoE(32, 4, 2880),
        qkv_bias=True,
        window=128,
        scaling={"type": "yarn", "factor": 32.0, "original_context_length": 4096},
    ),
    "gemma-3-1b": Shape(
        "gemma3",
        26,
        1152,
        4,
        1,
        256,
        6912,
        262144,
        True,
        1e6,
        1e-6,
        32768,
        "default",
        {2: "<bos>", 1: "<eos>", 106: "<end_of_turn>"},
        2,
        1,
        qk_norm=256,
        window=512,
    ),
    "gemma-4-26b-a4b": Shape(
        "gemma4",
        30,
        2816,
        16,
        2,
        512,
        2112,
        262144,
        True,
        1e6,
        1e-6,
        262144,
        "default",
        {2: "<bos>", 1: "<eos>", 106: "<turn|>"},
        2,
        1,
        moe=MoE(128, 8, 704, fused=True),
        qk_norm=512,
        rope_freqs=1e30,
        window=1024,
        window_pattern=tuple(i % 6 != 5 for i in range(30)),
        window_heads=(8, 256),
        window_theta=10000.0,
        softcap=30.0,
    ),
    "kimi-linear-48b-a3b": Shape(
        "kimi-linear",
        27,
        2304,
        32,
        32,
        72,
        9216,
        163840,
        False,
        1e4,
        1e-5,
        1048576,
        "kimi-k2",
        _KIMI,
        163584,
        163586,
        MLA(0, 512, 128, 64, 128),
        MoE(256, 8, 1024, 1, 1, 2, 2.446, bias=True),
        kda=(128, 4, 4),
    ),
    "gemma-4-e2b": Shape(
        "gemma4",
        35,
        1536,
        8,
        1,
        512,
        6144,
        262144,
        True,
        1e6,
        1e-6,
        131072,
        "default",
        {2: "<bos>", 1: "<eos>", 106: "<turn|>"},
        2,
        1,
        qk_norm=512,
        rope_freqs=1e30,
        window=512,
        window_pattern=tuple(i % 5 != 4 for i in range(35)),
        window_heads=(1, 256),
        window_theta=10000.0,
        softcap=30.0,
        layer_embedding=256,
        shared=20,
    ),
    "qwen3.5-0.8b": Shape(
        "qwen35",
        24,
        1024,
        8,
        2,
        256,
        3584,
        248320,
        True,
        1e7,
        1e-6,
        262144,
        "qwen35",
        _QWEN35,
        248044,
        248046,
        qk_norm=256,
        rope_dims=64,
        delta=DeltaRule(16, 16, 128),
    ),
    "qwen3.6-35b-a3b": Shape(
        "qwen35moe",
        40,
        2048,
        16,
        2,
        256,
        0,
        248320,
        False,
        1e7,
        1e-6,
        262144,
        "qwen35",
        _QWEN35,
        248044,
        248046,
        moe=MoE(256, 8, 512, 1),
        qk_norm=256,
        rope_dims=64,
        delta=DeltaRule(16, 32, 128),
    ),
    "lfm2-1.2b": Shape(
        "lfm2",
        16,
        2048,
        32,
        8,
        64,
        8192,
        65536,
        True,
        1e6,
        1e-5,
        128000,
        "lfm2",
        {1: "<|startoftext|>", 7: "<|im_end|>"},
        1,
        7,
        qk_norm=64,
        convolution=3,
    ),
    "ling-3-small": Shape(  # its form, with numbers like those of Ling-mini: Ling-3's own are not at hand
        "bailingmoe3",
        20,
        2048,
        16,
        16,
        72,
        5120,
        157184,
        False,
        6e5,
        1e-6,
        131072,
        "bailingmoe2",
        {156891: "<|startoftext|>", 156892: "<|endoftext|>"},
        156891,
        156892,
        MLA(512, 512, 128, 64, 128),
        MoE(128, 8, 512, 1, 1, 2, 2.5, True, bias=True),
        kda=(128, 4, 4),
        lower_bound=-5.0,
    ),
    "smollm2-135m": Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, True, 1e5, 1e-5, 8192, "smollm", _SMOLLM, 1, 2),
    "smollm2-1.7b": Shape("llama", 24, 2048, 32, 32, 64, 8192, 49152, True, 1.3e5, 1e-5, 8192, "smollm", _SMOLLM, 1, 2),
}


def tensors(s: Shape) -> Iterator[Tensor]:
    """Every tensor of the model in file order."""

    def linear(name: str, *shape: int, gain: float = 1.0) -> Tensor:
        return f"{name}.weight", shape, gain / shape[-1] ** 0.5

    def norm(name: str, n: int) -> Tensor:
        return f"{name}.weight", (n,), 0.0

    value_dim = s.value_dim or s.head_dim
    yield "token_embd.weight", (s.vocab, s.dim), 2 / s.dim**0.5 if s.tied else 1.0
    yield norm("token_embd_norm" if s.convolution else "output_norm", s.dim)
    if not s.tied:
        yield linear("output", s.vocab, s.dim, gain=2)
    if n := s.layer_embedding:
        yield "per_layer_token_embd.weight", (s.vocab, s.layers * n), 1.0
        yield linear("per_layer_model_proj", s.layers * n, s.dim)
        yield norm("per_layer_proj_norm", n)
    if s.rope_freqs:
        yield "rope_freqs.weight", (s.head_dim // 2,), 0.0
    for i in range(s.layers + s.nextn):
        b = f"blk.{i}."
        if i >= s.layers:
            yield linear(b + "nextn.eh_proj", s.dim, 2 * s.dim)
            for x in ("enorm", "hnorm", *(() if s.nextn_own else ("shared_head_norm",))):
                yield norm(f"{b}nextn.{x}", s.dim)
            if s.nextn_own:
                yield f"{b}nextn.embed_tokens.weight", (s.vocab, s.dim), 1.0
                yield linear(b + "nextn.shared_head_head", s.vocab, s.dim)
        if s.pre_norms:
            yield norm(b + "attn_norm", s.dim)
        if s.kda and s.has_kda(i):
            width, taps, _ = s.kda
            for x in "qkv":
                yield linear(f"{b}attn_{x}", s.heads * width, s.dim)
                yield f"{b}ssm_conv1d_{x}.weight", (1, s.heads * width, 1, taps), 1.5 * taps**-0.5
            for x in "fg":
                yield linear(f"{b}ssm_{x}_a", s.heads * width if s.lower_bound else width, s.dim)
                if not s.lower_bound:
                    yield linear(f"{b}ssm_{x}_b", s.heads * width, width)
            yield linear(b + "ssm_beta", s.heads, s.dim)
            yield b + "ssm_a", (s.heads, 1) if s.lower_bound else (1, 1, s.heads, 1), 0.3
            yield b + "ssm_dt.bias", (s.heads * width,), 0.5
            yield norm(b + "ssm_norm", width)
            yield linear(b + "attn_output", s.dim, s.heads * width)
        elif m := s.mla:
            k_dim = m.nope + m.rope
            if m.q_lora:
                yield linear(b + "attn_q_a", m.q_lora, s.dim)
                yield norm(b + "attn_q_a_norm", m.q_lora)
                yield linear(b + "attn_q_b", s.heads * k_dim, m.q_lora)
            else:
                yield linear(b + "attn_q", s.heads * k_dim, s.dim)
            yield linear(b + "attn_kv_a_mqa", m.kv_lora + m.rope, s.dim)
            yield norm(b + "attn_kv_a_norm", m.kv_lora)
            if m.legacy:
                yield linear(b + "attn_kv_b", s.heads * (m.nope + m.v), m.kv_lora)
            else:
                yield f"{b}attn_k_b.weight", (s.heads, m.kv_lora, m.nope), m.kv_lora**-0.5
                yield linear(b + "attn_v_b", s.heads, m.v, m.kv_lora)
            if s.lower_bound:
                yield linear(b + "attn_gate", s.heads, s.dim)
            yield linear(b + "attn_output", s.dim, s.heads * m.v)
        elif s.convolves(i):
            yield linear(b + "shortconv.in_proj", 3 * s.dim, s.dim)
            yield b + "shortconv.conv.weight", (s.dim, s.convolution), s.convolution**-0.5
            yield linear(b + "shortconv.out_proj", s.dim, s.dim)
        elif (r := s.delta) and s.recurrent(i):
            values, channels = r.heads * r.head_dim, (2 * r.key_heads + r.heads) * r.head_dim
            yield linear(b + "attn_qkv", channels, s.dim)
            yield linear(b + "attn_gate", values, s.dim)
            yield b + "ssm_conv1d.weight", (channels, r.width), 1.5 * r.width**-0.5
            if s.arch == "qwen3next":
                yield linear(b + "ssm_ba", 2 * r.heads, s.dim)
            else:
                yield linear(b + "ssm_beta", r.heads, s.dim)
                yield linear(b + "ssm_alpha", r.heads, s.dim)
            yield b + "ssm_dt.bias", (r.heads,), 0.5
            yield b + "ssm_a", (r.heads,), 0.3
            yield norm(b + "ssm_norm", r.head_dim)
            yield linear(b + "ssm_out", s.dim, values)
        else:
            if s.fused_qkv:
                yield linear(b + "attn_qkv", s.heads * s.head_dim + s.kv_heads * (s.head_dim + value_dim), s.dim)
            q, k, v = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * value_dim
            qk_norm = s.qk_norm
            if s.windowed(i) and s.window_heads[0]:
                kv_heads, qk_norm = s.window_heads
                q, k, v = s.heads * qk_norm, kv_heads * qk_norm, kv_heads * qk_norm
            for x, rows in (("q", q), ("k", k), ("v", v)):
                if x == "v" and s.arch == "gemma4" and not s.windowed(i) and not s.layer_embedding:
                    continue
                if x != "q" and s.shares(i):
                    continue
                if not s.fused_qkv:
                    yield linear(f"{b}attn_{x}", rows * (2 if s.delta and x == "q" else 1), s.dim)
                if s.qkv_bias:
                    yield f"{b}attn_{x}.bias", (rows,), 0.2
            if s.qk_norm:
                yield norm(b + "attn_q_norm", qk_norm)
                if not s.shares(i):
                    yield norm(b + "attn_k_norm", qk_norm if s.qk_norm == s.head_dim else k)
            yield linear(b + "attn_output", s.dim, s.heads * value_dim if s.value_dim else q)
            if s.arch == "gemma4":
                yield norm(b + "layer_output_scale", 1)
            if s.arch == "gpt-oss":
                yield b + "attn_output.bias", (s.dim,), 0.2
                yield b + "attn_sinks.weight", (s.heads,), 1.0
        if s.post_norms:
            yield norm(b + "post_attention_norm", s.dim)
            yield norm(b + "post_ffw_norm", s.dim)
        if s.pre_norms:
            after = s.delta or s.arch in ("glm4moe", "gpt-oss")
            yield norm(b + ("post_attention_norm" if after else "ffn_norm"), s.dim)
        if (e := s.moe) and i >= e.dense:
            yield linear(b + "ffn_gate_inp", e.experts, s.dim, gain=1.5)
            if s.arch == "gpt-oss":
                yield b + "ffn_gate_inp.bias", (e.experts,), 0.2
                yield b + "ffn_gate_exps.bias", (e.experts, e.ffn), 0.5
                yield b + "ffn_up_exps.bias", (e.experts, e.ffn), 0.5
                yield b + "ffn_down_exps.bias", (e.experts, s.dim), 0.2
            if e.bias:
                yield b + "exp_probs_b.bias", (e.experts,), 0.05
            if s.arch == "gemma4":
                yield b + "ffn_gate_inp.scale", (s.dim,), s.dim**0.5
                yield b + "ffn_down_exps.scale", (e.experts,), 0.0
                for x in ("post_ffw_norm_1", "post_ffw_norm_2", "pre_ffw_norm_2"):
                    yield norm(b + x, s.dim)
            if e.fused:
                yield linear(b + "ffn_gate_up_exps", e.experts, 2 * e.ffn, s.dim)
            else:
                yield linear(b + "ffn_gate_exps", e.experts, e.ffn, s.dim)
                yield linear(b + "ffn_up_exps", e.experts, e.ffn, s.dim)
            yield linear(b + "ffn_down_exps", e.experts, s.dim, e.ffn)
            if e.shared and s.delta:
                yield b + "ffn_gate_inp_shexp.weight", (s.dim,), s.dim**-0.5
            if e.shared:
                yield linear(b + "ffn_gate_shexp", e.shared * e.ffn, s.dim)
                yield linear(b + "ffn_up_shexp", e.shared * e.ffn, s.dim)
                yield linear(b + "ffn_down_shexp", s.dim, e.shared * e.ffn)
        if not s.moe or i < s.moe.dense or s.arch == "gemma4":
            ffn = s.ffn_of(i)
            if s.arch != "glm4":
                yield linear(b + "ffn_gate", ffn, s.dim)
            yield linear(b + "ffn_up", ffn * (2 if s.arch == "glm4" else 1), s.dim)
            yield linear(b + "ffn_down", s.dim, ffn)
        if n := s.layer_embedding:
            yield linear(b + "inp_gate", n, s.dim, gain=2)
            yield linear(b + "proj", s.dim, n)
            yield norm(b + "post_norm", s.dim)


def is_float(name: str, shape: tuple[int, ...]) -> bool:
    """Whether files keep this tensor in F32."""
    parts = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
    return len(shape) < 2 or name.endswith((".bias", "ssm_a")) or any(part in name for part in parts)


def tensor_type(s: Shape, name: str, shape: tuple[int, ...], quant: str) -> Q:
    """What `llama-quantize MODEL QUANT` stores this tensor as (QUANT: a type's name, or Q4_K_M)."""
    if is_float(name, shape):
        return Q.F32
    base = Q.Q4_K if quant == "Q4_K_M" else Q[quant]
    if base == Q.MXFP4 and "_exps" not in name:  # as the published files of gpt-oss
        base = Q.Q8_0
    if base in (Q.F32, Q.F16, Q.BF16):
        return base
    if name == "output.weight" or (s.tied and name == "token_embd.weight"):
        kind = Q.Q8_0 if shape[-1] % GGML_QUANT_SIZES[base][0] else Q.Q8_0 if base == Q.Q8_0 else Q.Q6_K
    elif quant == "Q4_K_M" and name.endswith(
        ("attn_v.weight", "attn_kv_b.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
    ):
        i, n = int(name.split(".")[1]), s.layers
        kind = Q.Q6_K if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else Q.Q4_K
    else:
        kind = base
    return fitting(kind, shape[-1])


def fitting(kind: Q, cols: int) -> Q:
    """`kind`, or what `llama-quantize` takes instead where rows of `cols` values are no whole blocks of it."""
    choices = (kind, FALLBACK.get(kind, Q.F16), Q.F16)
    return next(k for k in choices if cols % GGML_QUANT_SIZES[k][0] == 0)


def metadata(w: GGUFWriter, s: Shape, name: str) -> None:
    w.add_name(f"{name} with random weights")
    w.add_quantization_version(2)
    w.add_block_count(s.layers + s.nextn)
    w.add_context_length(s.context)
    w.add_embedding_length(s.dim)
    w.add_feed_forward_length([s.ffn_of(i) for i in range(s.layers)] if s.shared else s.ffn)
    w.add_head_count(s.heads)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_rope_freq_base(s.theta)
    if s.nextn:
        w.add_nextn_predict_layers(s.nextn)
    for key, value in s.scaling.items():
        kind = {str: GGUFValueType.STRING, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}[type(value)]
        w.add_key_value(f"{s.arch}.rope.scaling.{key}", value, kind)
    if s.scales:
        w.add_embedding_scale(s.scales[0])
        w.add_residual_scale(s.scales[1])
        w.add_attention_scale(s.scales[2])
        w.add_logit_scale(s.scales[3])
    if m := s.mla:
        n = s.heads if m.legacy else 1
        w.add_head_count_kv([0 if s.has_kda(i) else n for i in range(s.layers)] if s.kda else n)
        w.add_key_length(m.nope + m.rope if m.legacy else m.kv_lora + m.rope)
        w.add_value_length(m.v if m.legacy else m.kv_lora)
        if not m.legacy:
            w.add_key_length_mla(m.nope + m.rope)
            w.add_value_length_mla(m.v)
        if m.q_lora or s.layers not in (26, 27):  # llama.cpp wants the key, but in models of 26 and 27 layers
            w.add_q_lora_rank(m.q_lora)
        w.add_kv_lora_rank(m.kv_lora)
        w.add_rope_dimension_count(m.rope)
        w.add_leading_dense_block_count(s.moe.dense if s.moe else s.layers)
        w.add_expert_shared_count(s.moe.shared if s.moe else 0)
        w.add_expert_feed_forward_length(s.moe.ffn if s.moe else 0)
    else:
        kv_heads, head_dim = s.window_heads
        kinds = [kv_heads if s.windowed(i) else s.kv_heads for i in range(s.layers)]
        if s.convolution:
            w.add_shortconv_l_cache(s.convolution)
            kinds = [0 if s.convolves(i) else s.kv_heads for i in range(s.layers)]
        w.add_head_count_kv(kinds if kv_heads or s.convolution else s.kv_heads)
        if s.arch == "gemma4":
            w.add_uint32("gemma4.attention.key_length_swa", head_dim)
            w.add_uint32("gemma4.attention.value_length_swa", head_dim)
            w.add_uint32("gemma4.rope.dimension_count_swa", head_dim)
            w.add_embedding_length_per_layer_input(s.layer_embedding)
            w.add_shared_kv_layers(s.shared)
            w.add_float32("gemma4.final_logit_softcapping", s.softcap)
        w.add_key_length(s.head_dim)
        w.add_value_length(s.value_dim or s.head_dim)
        w.add_rope_dimension_count(s.rope_dims or s.head_dim)
    if s.kda:
        w.add_kda_head_dim(s.kda[0])
        w.add_ssm_conv_kernel(s.kda[1])
    if s.lower_bound:
        w.add_float32(f"{s.arch}.kda.gate_lower_bound", s.lower_bound)
    if r := s.delta:
        w.add_ssm_conv_kernel(r.width)
        w.add_ssm_state_size(r.head_dim)
        w.add_ssm_group_count(r.key_heads)
        w.add_ssm_time_step_rank(r.heads)
        w.add_ssm_inner_size(r.heads * r.head_dim)
        w.add_uint32(f"{s.arch}.full_attention_interval", r.every)
        if s.arch != "qwen3next":
            pairs = (s.rope_dims or s.head_dim) // 2
            w.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
        if s.moe:
            w.add_expert_shared_feed_forward_length(s.moe.shared * s.moe.ffn)
    if s.window:
        w.add_sliding_window(s.window)
    if s.window_pattern:
        w.add_sliding_window_pattern(s.window_pattern)
    if s.window_theta:
        w.add_float32(f"{s.arch}.rope.freq_base_swa", s.window_theta)
    if s.temperature:
        w.add_float32(f"{s.arch}.attention.temperature_scale", s.temperature[0])
        w.add_uint32(f"{s.arch}.attention.temperature_length", s.temperature[1])
    if e := s.moe:
        w.add_expert_count(e.experts)
        w.add_expert_used_count(e.used)
        if s.delta or s.arch in ("qwen3moe", "glm4moe", "gpt-oss", "gemma4", "lfm2moe"):
            w.add_expert_feed_forward_length(e.ffn)
        if s.arch in ("glm4moe", "lfm2moe"):
            w.add_leading_dense_block_count(e.dense)
        if s.arch == "glm4moe":
            w.add_expert_shared_count(e.shared)
        if (s.mla or s.arch in ("glm4moe", "lfm2moe")) and e.gating is not None:
            w.add_uint32(f"{s.arch}.expert_gating_func", e.gating)
        if e.scale is not None:
            w.add_expert_weights_scale(e.scale)
        if e.norm is not None:
            w.add_expert_weights_norm(e.norm)
        if e.groups:
            w.add_expert_group_count(e.groups)
            w.add_expert_group_used_count(e.groups_used)


def byte_tokens() -> list[str]:
    """The 256 byte-level tokens in GPT-2's printable alphabet (byte b is token b)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in keep else chr(next(rest)) for b in range(256)]


def tokenizer(w: GGUFWriter, vocab: int, pre: str, specials: dict[int, str], bos: int, eos: int) -> None:
    """A byte-level BPE vocabulary of exactly `vocab` entries: specials at their ids, byte tokens and fillers
    elsewhere."""
    plain = iter([*byte_tokens(), "Ġt", "he", "Ġthe", *(f"Ġdummy{i}" for i in range(vocab))])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([specials[i] if i in specials else next(plain) for i in range(vocab)])
    w.add_token_types([3 if i in specials else 1 for i in range(vocab)])
    w.add_token_merges(["Ġ t", "h e", "Ġt he"])
    w.add_bos_token_id(bos)
    w.add_eos_token_id(eos)
    w.add_add_bos_token(pre in ("llama-bpe", "deepseek-llm"))


def f32_values(rng: np.random.Generator, s: Shape, name: str, n: int, std: float) -> np.ndarray:
    """The `n` values of a small F32 tensor."""
    if name == "rope_freqs.weight" and s.arch == "gemma4":  # a part of the pairs turns
        return np.where(np.arange(n) < n // 4, 1, 1e30).astype(np.float32)
    if name == "rope_freqs.weight":
        return np.clip(2.0 ** np.linspace(-3, 6, n), 1, s.rope_freqs).astype(np.float32)
    values = rng.standard_normal(n, np.float32)
    if name.endswith("ssm_a"):
        return np.exp(values) * np.float32(std if s.lower_bound else -std)
    return values * np.float32(std) if std else 1 + np.float32(0.1) * values


def q6_k(values: np.ndarray, std: float) -> np.ndarray:
    """`values` (rows, cols; standard deviation 1) times `std` as Q6_K: uint8 (rows, packed row)."""
    q = (
        np.clip(np.rint(values * 12) + 32, 0, 63).astype(np.uint8).reshape(-1, 2, 4, 32)
    )  # block, half, quarter of it, value
    out = np.empty((len(q), 210), np.uint8)
    out[:, :128] = (q[:, :, :2] & 15 | q[:, :, 2:] << 4).reshape(-1, 128)
    high = q >> 4
    out[:, 128:192] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(-1, 64)
    out[:, 192:208] = 1
    out[:, 208:] = np.frombuffer(np.float16(std / 12).tobytes(), np.uint8)
    return out.reshape(len(values), -1)


def successors(rng: np.random.Generator, table: np.ndarray, kind: Q, std: float, cycle: int) -> np.ndarray:
    """An output matrix (Q6_K, uint8) whose rows are those of the embedding `table` in another order, with deviation
    `std`. With `cycle`, the order goes in circles of so many tokens."""
    order, unit = rng.permutation(len(table)), dequantize(table[:1000], kind).std()
    if cycle:
        circles, order = np.split(order, range(cycle, len(order), cycle)), np.empty_like(order)
        for circle in circles:
            order[np.roll(circle, -1)] = circle
    head = np.empty(
        (len(table), table.shape[1] // GGML_QUANT_SIZES[kind][1] * GGML_QUANT_SIZES[kind][0] // 256 * 210), np.uint8
    )

    def fill(start: int) -> None:
        head[start : start + 2048] = q6_k(dequantize(table[order[start : start + 2048]], kind) / unit, std)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, range(0, len(table), 2048)))
    return head


def write(
    path: Path,
    name: str,
    quant: str = "Q4_0",
    layers: int | None = None,
    seed: int = 0,
    follow: float = 0.0,
    nextn: int = 0,
    cycle: int = 0,
) -> int:
    """Writes the model `name` of SHAPES to `path`; `layers` cuts (or extends) it, `nextn` blocks of multi-token
    prediction are behind them. Returns the file's size in bytes.

    With `follow`, the embedding has that standard deviation and no equal rows, each row of the output matrix is another
    token's embedding, which makes it that token's likely successor (a tied matrix becomes two), and all matrices have
    mean zero; with `cycle` the successors come round to the first after so many tokens.
    """
    s = SHAPES[name]
    s = replace(s, layers=layers or s.layers, tied=s.tied and not follow, nextn=nextn)
    if isinstance(s.window_pattern, tuple):
        s = replace(s, window_pattern=s.window_pattern[: s.layers])
    rng = np.random.default_rng(seed)
    w = GGUFWriter(path, s.arch)
    metadata(w, s, name)
    tokenizer(w, s.vocab, s.pre, s.specials, s.bos, s.eos)
    todo: list[tuple[str, Q, int, float]] = []
    for tensor, shape, std in tensors(s):
        kind = tensor_type(s, tensor, shape, quant)
        block, size = GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(shape)) // block * size
        w.add_tensor_info(tensor, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
        todo.append((tensor, kind, nbytes, std))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    assert w.fout is not None
    out, pools = w.fout[0], dict[tuple[Q, float], memoryview]()
    table: np.ndarray = np.empty(0, np.uint8)
    table_kind, negative = Q.F32, 0.5 if follow else 0.25
    w.write_padding(out, out.tell())
    for tensor, kind, nbytes, std in todo:
        if kind == Q.F32 and nbytes < 1 << 22:  # norms, biases, routers: small, so each has its own values
            out.write(f32_values(rng, s, tensor, nbytes // 4, std).tobytes())
        elif follow and tensor in ("token_embd.weight", "output.weight"):
            if tensor == "token_embd.weight":
                table = random_blocks(rng, kind, nbytes // GGML_QUANT_SIZES[kind][1], follow, 0.5).reshape(s.vocab, -1)
                table_kind = kind
                out.write(table.data)
            else:
                assert kind == Q.Q6_K
                out.write(successors(rng, table, table_kind, std, cycle).data)
        else:
            size = GGML_QUANT_SIZES[kind][1]
            if (kind, std) not in pools:  # an odd number of blocks: rows differ
                pools[kind, std] = random_blocks(rng, kind, (1 << 23) // size | 1, std, negative).reshape(-1).data
            pool = pools[kind, std]
            start, left = int(rng.integers(len(pool) // size)) * size, nbytes
            while left:
                left -= out.write(pool[start : start + left])
                start = 0
        w.write_padding(out, nbytes)
    w.close()
    return path.stat().st_size


def main() -> None:
    args = argparse.ArgumentParser(prog="python -m tests.support.shapes", description=__doc__.splitlines()[0])
    args.add_argument("model", choices=SHAPES)
    args.add_argument("--quant", default="Q4_0", choices=["Q4_K_M", *(q.name for q in QUANTS)])
    args.add_argument("--layers", type=int)
    args.add_argument("--follow", type=float, default=0.0)
    args.add_argument("-o", "--output", type=Path, required=True)
    a = args.parse_args()
    began = time.perf_counter()
    size = write(a.output, a.model, a.quant, a.layers, follow=a.follow)
    print(f"{a.output}: {size:,} bytes in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
