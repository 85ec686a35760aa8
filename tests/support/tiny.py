"""Tiny seeded GGUFs: one for every form of every architecture that the engine runs, in every quant type.

    write(path, "deepseek2_glm", "Q4_K", seed=1)

Dimensions are a few blocks of 32; for types with blocks of 256, the row lengths grow to 256 where the architecture
allows it, and the other tensors take the type that `llama-quantize` falls back to. Weights are scaled so that
activations are O(1), the standard deviation of the logits is about 2, and routing has clear and close decisions.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from zlib import crc32

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFWriter
from gguf import GGMLQuantizationType as Q

from tests.support.blocks import MIXED, random_blocks
from tests.support.shapes import (
    MLA,
    DeltaRule,
    MoE,
    Shape,
    f32_values,
    fitting,
    is_float,
    metadata,
    tensor_type,
    tensors,
    tokenizer,
)

VOCAB = 301  # odd: rows of the output matrix are no multiple of any tile

_LLAMA = dict(
    enumerate(("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), 290)
)
_QWEN = dict(enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"), 290))
_GLM = dict(
    enumerate(
        ("[gMASK]", "<|endoftext|>", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"), 290
    )
)
_DEEPSEEK = {290: "<｜begin▁of▁sentence｜>", 291: "<｜end▁of▁sentence｜>"}
_YARN: dict[str, str | int | float] = {"type": "yarn", "factor": 40.0, "original_context_length": 4096}
_LITE_YARN = _YARN | {"yarn_log_multiplier": 0.0707}

_llama = Shape("llama", 2, 64, 4, 2, 32, 96, VOCAB, False, 1e4, 1e-5, 512, "llama-bpe", _LLAMA, 290, 294)
_qwen2 = Shape("qwen2", 2, 128, 4, 2, 32, 160, VOCAB, True, 1e6, 1e-6, 512, "qwen2", _QWEN, 290, 292, qkv_bias=True)
_qwen3 = Shape("qwen3", 2, 64, 4, 2, 32, 96, VOCAB, True, 1e6, 1e-6, 512, "qwen2", _QWEN, 290, 292, qk_norm=32)
_granite = replace(_llama, arch="granite", tied=True, scales=(12.0, 0.22, 0.015625, 8.0))
_qwen3moe = replace(_qwen3, arch="qwen3moe", tied=False, moe=MoE(8, 3, 32))
_olmoe = Shape(
    "olmoe",
    2,
    128,
    4,
    4,
    32,
    64,
    VOCAB,
    False,
    1e4,
    1e-5,
    512,
    "olmo",
    {290: "<|endoftext|>"},
    290,
    290,
    moe=MoE(8, 2, 64),
    qk_norm=128,
)
_glm = Shape(
    "deepseek2",
    3,
    64,
    5,
    5,
    128,
    160,
    VOCAB,
    False,
    1e6,
    1e-5,
    512,
    "glm4",
    _GLM,
    290,
    291,
    MLA(96, 64, 96, 32, 64),
    MoE(8, 2, 64, 1, 1, 2, 1.8, True, bias=True),
)
_lite = Shape(
    "deepseek2",
    3,
    64,
    4,
    4,
    96,
    96,
    VOCAB,
    False,
    1e4,
    1e-6,
    4096,
    "deepseek-llm",
    _DEEPSEEK,
    290,
    291,
    MLA(0, 64, 64, 32, 64),
    MoE(8, 3, 32, 2, 1),
    scaling=_LITE_YARN,
)
_olmo2 = replace(_olmoe, arch="olmo2", kv_heads=2, ffn=96, moe=None, eps=1e-6, tied=False)
_smollm3 = replace(_llama, arch="smollm3", layers=5, tied=True)
_glm4 = replace(_llama, arch="glm4", qkv_bias=True, rope_dims=16, pre="glm4", specials=_GLM, eos=291)
_glm4moe = replace(
    _glm4, arch="glm4moe", layers=3, moe=MoE(8, 3, 32, 1, 1, 2, 1.5, True, bias=True), eps=1e-5, theta=1e6
)
_gpt_oss = replace(
    _llama,
    arch="gpt-oss",
    layers=3,
    eps=1e-5,
    theta=150000.0,
    qkv_bias=True,
    moe=MoE(8, 3, 32),
    window=5,
    scaling={"type": "yarn", "factor": 32.0, "original_context_length": 64},
)
_gemma3 = replace(_qwen3, arch="gemma3", layers=7, theta=1e6, window=5, scaling={"type": "linear", "factor": 8.0})
_gemma4 = replace(
    _gemma3,
    arch="gemma4",
    layers=4,
    head_dim=64,
    kv_heads=1,
    qk_norm=64,
    rope_freqs=1e30,
    window=5,
    window_pattern=(True, True, False, True),
    window_heads=(2, 32),
    window_theta=10000.0,
    softcap=3.0,
    scaling={},
)
_qwen35 = replace(
    _qwen3,
    arch="qwen35",
    rope_dims=16,
    delta=DeltaRule(2, 4, 24, width=3, every=2),
    pre="qwen35",
    theta=1e7,
    tied=False,
)
_lfm2 = replace(_qwen3, arch="lfm2", heads=2, kv_heads=1, convolution=3, window=5, pre="lfm2", specials=_LLAMA, eos=294)
_moe = MoE(8, 3, 32, 1, 1)


def _with_moe(**changes: object) -> Shape:
    return replace(_glm, layers=2, moe=replace(_moe, **changes))  # type: ignore[arg-type]


VARIANTS: dict[str, Shape] = {
    "llama": _llama,
    "llama_rope_freqs": replace(_llama, tied=True, heads=9, kv_heads=3, rope_freqs=8),
    "llama_fused_qkv": replace(_llama, kv_heads=1, head_dim=64, fused_qkv=True),
    "llama_mha": replace(_llama, heads=3, kv_heads=3, head_dim=48, tied=True),
    "llama_short_values": replace(_llama, value_dim=16),
    "llama_long_values": replace(_llama, value_dim=64, fused_qkv=True),
    "llama_linear_rope": replace(_llama, scaling={"type": "linear", "factor": 4.0}),
    "qwen2": _qwen2,
    "qwen2_untied_fused": replace(_qwen2, tied=False, fused_qkv=True),
    "qwen2_yarn": replace(_qwen2, scaling={"type": "yarn", "factor": 4.0, "original_context_length": 128}),
    "qwen2_yarn_keys": replace(
        _qwen2,
        scaling={  # llama.cpp ignores the last two
            "type": "yarn",
            "factor": 4.0,
            "original_context_length": 128,
            "attn_factor": 1.2,
            "yarn_beta_fast": 8.0,
            "yarn_log_multiplier": 0.1,
        },
    ),
    "qwen3": _qwen3,
    "qwen3_untied": replace(_qwen3, tied=False, heads=3, kv_heads=1, head_dim=64, qk_norm=64),
    "qwen3moe": _qwen3moe,
    "qwen3moe_tied_top1": replace(_qwen3moe, tied=True, moe=MoE(8, 1, 32, scale=2.5)),  # llama.cpp ignores that scale
    "olmoe": _olmoe,
    "granite": _granite,
    "granite_no_scales": replace(_granite, tied=False, scales=(0.0, 0.0, 0.0, 1.0)),  # llama.cpp: 0 scales nothing
    "granite_experts": replace(_granite, ffn=32, moe=MoE(8, 3, 32), scales=(6.0, 0.5, 0.1, 2.0)),
    "olmo2": _olmo2,
    "olmo2_windows": replace(  # Olmo 3
        _olmo2,
        layers=5,
        window=5,
        scaling={"type": "yarn", "factor": 8.0, "original_context_length": 64, "attn_factor": 1.2},
    ),
    "smollm3": _smollm3,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "glm4moe_qk_norm": replace(_glm4moe, qk_norm=32, nextn=1, moe=MoE(8, 3, 32, 1, 0, None, 1.5, True, bias=True)),
    "gpt-oss": _gpt_oss,
    "gpt-oss_wide_window": replace(_gpt_oss, window=128, tied=False, scaling={}),
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4_experts": replace(_gemma4, layers=3, window_pattern=(True, False, True), moe=MoE(8, 3, 32, fused=True)),
    "gemma4_layer_embeddings": replace(_gemma4, layers=4, layer_embedding=32, shared=1),
    "gemma3_no_windows": replace(_gemma3, layers=2, window=0, scaling={}),
    "gemma3_keys": replace(_gemma3, layers=4, window=3, window_pattern=2, window_theta=500.0, tied=False),
    "qwen35": _qwen35,
    "qwen35moe": replace(
        _qwen35, arch="qwen35moe", delta=DeltaRule(2, 4, 32, every=2), nextn=1, tied=True, moe=MoE(8, 3, 32, 1)
    ),
    "qwen3next": replace(
        _qwen35, arch="qwen3next", delta=DeltaRule(2, 6, 32, every=2), moe=MoE(8, 3, 32, 2, fused=True), pre="qwen2"
    ),
    "lfm2": _lfm2,
    "lfm2moe": replace(_lfm2, arch="lfm2moe", moe=MoE(8, 3, 32, 0, 1, 2, bias=True), window=0),
    "deepseek2_glm": _glm,
    "deepseek2_lite": _lite,
    "deepseek2_lite_legacy": replace(_lite, mla=MLA(0, 64, 64, 32, 64, legacy=True)),
    "deepseek2_legacy_q_lora": replace(_glm, mla=MLA(96, 64, 48, 16, 80, legacy=True)),
    "deepseek2_yarn_no_log_mul": replace(_lite, layers=2, scaling=_YARN),
    "deepseek2_yarn_attn_factor": replace(_lite, layers=2, scaling=_LITE_YARN | {"attn_factor": 1.2}),
    "deepseek2_linear_rope": replace(_lite, layers=2, scaling={"factor": 4.0}),
    "deepseek2_youtu": replace(_glm, tied=True, layers=2, pre="youtu", moe=None, theta=1.6e6),
    "deepseek2_moonlight": replace(
        _lite, mla=MLA(0, 64, 64, 32, 64), moe=MoE(8, 3, 32, 2, 1, 2, 2.446, True, bias=True), scaling={}, pre="kimi-k2"
    ),
    "deepseek2_no_dense": _with_moe(dense=0, scale=1.0),
    "deepseek2_no_shared": _with_moe(shared=0),  # llama.cpp refuses it
    "deepseek2_default_gating": _with_moe(gating=None),
    "deepseek2_softmax_weight": _with_moe(gating=3, scale=0.0),
    "deepseek2_softmax_norm": _with_moe(gating=1, norm=True, scale=16.0),
    "deepseek2_sqrt_softplus": _with_moe(gating=4, norm=True, scale=1.5, bias=True),
    "deepseek2_sigmoid_raw": _with_moe(gating=2, norm=False, used=1),
    "deepseek2_groups": replace(
        _with_moe(gating=2, norm=True, scale=2.5, bias=True, groups=4, groups_used=2), tied=True
    ),
    "deepseek2_one_group": _with_moe(gating=2, norm=True, groups=1, groups_used=1),
    "deepseek2_nextn": replace(_glm, layers=2, nextn=1),
    "deepseek2_temperature": replace(_glm, layers=2, temperature=(0.7, 3)),
    "mistral4": replace(
        _glm,
        arch="mistral4",
        layers=2,
        moe=MoE(8, 3, 32, 1, 0, 1, 1.0, True, fused=True),
        scaling={"type": "yarn", "factor": 8.0, "original_context_length": 256, "yarn_log_multiplier": 0.1},
        temperature=(0.1, 4),
    ),
    "kimi-linear": replace(
        _glm,
        arch="kimi-linear",
        layers=2,
        heads=3,
        mla=MLA(0, 64, 32, 16, 48),
        kda=(24, 3, 2),
        moe=MoE(8, 3, 32, 1, 1, 4, 2.446, bias=True),
        pre="kimi-k2",
    ),
    "bailingmoe3": replace(
        _glm,
        arch="bailingmoe3",
        layers=2,
        heads=3,
        mla=MLA(64, 64, 32, 16, 48),
        kda=(24, 3, 2),
        lower_bound=-5.0,
        moe=MoE(8, 3, 32, 1, 1, 2, 2.5, True, bias=True),
        pre="bailingmoe2",
    ),
    "deepseek2_fused_experts": _with_moe(gating=2, norm=True, fused=True, shared=2),
    # llama.cpp does not believe the q_lora_rank of a model of 26 or 27 layers: see `write`
    "deepseek2_27_layers": replace(
        _lite, layers=27, dim=32, ffn=32, mla=MLA(0, 32, 32, 32, 32), moe=MoE(4, 2, 32, 1, 1)
    ),
}
# Wide enough for kernels that the variants are too small for: the GPU's scripts check these besides.
LARGER = {
    "qwen35_states": replace(VARIANTS["qwen35"], layers=3, delta=DeltaRule(2, 4, 128, every=3)),
    "kimi_states": replace(VARIANTS["kimi-linear"], layers=3, kda=(128, 4, 3), heads=2),
    "llama_wide_heads": replace(VARIANTS["llama"], head_dim=64),  # a group's results are whole warps' int8 blocks
} | {  # latent attention in clusters of blocks
    name: replace(VARIANTS[of], layers=2, heads=3, mla=MLA(256, 256, 64, 64, 128))
    for name, of in (("deepseek2_cluster", "deepseek2_glm"), ("ling_cluster", "bailingmoe3"))
}
SPLIT = {"deepseek2_split": "deepseek2_glm", "llama_split": "llama"}  # written in two parts
NAMES = (*VARIANTS, *SPLIT)


def shape(variant: str, quant: str) -> Shape:
    """The Shape of `variant` with row lengths that suit `quant`."""
    s = (VARIANTS | LARGER)[SPLIT.get(variant, variant)]
    if quant not in ("Q4_K_M", "IQ_MIX") and GGML_QUANT_SIZES[Q[quant]][0] != 256:
        return s
    s = replace(s, dim=256, ffn=256)
    if s.arch == "qwen2":  # q is as long as x
        s = replace(s, heads=8, kv_heads=2)
    if s.arch in ("olmoe", "olmo2"):
        s = replace(s, heads=8, kv_heads=8 if s.arch == "olmoe" else 4, qk_norm=256)
    if s.layer_embedding:
        s = replace(s, layer_embedding=256)
    if s.mla:
        s = replace(s, mla=replace(s.mla, kv_lora=256, q_lora=256 if s.mla.q_lora else 0))
    if s.moe:
        s = replace(s, moe=replace(s.moe, ffn=256, experts=8 if s.moe.groups > 1 else 4))
    return s


def write(
    path: Path,
    variant: str | Shape,
    quant: str = "F32",
    seed: int = 0,
    edit: Callable[[str, np.ndarray], np.ndarray] | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Writes `variant` with every matrix of type `quant` (or the mixes "Q4_K_M", and "IQ_MIX" of the types MIXED in
    turn); returns the path to open.

    `edit(name, values)` may replace the values of an F32 tensor, e.g. of a router; the file has the tensors that
    `only(name)` wants. A Shape is written as it is.
    """
    s = variant if isinstance(variant, Shape) else shape(variant, quant)
    variant = "" if isinstance(variant, Shape) else variant
    rng = np.random.default_rng((seed, crc32(variant.encode())))
    todo = list(tensors(s))
    w = GGUFWriter(path, s.arch, split_max_tensors=(len(todo) + 1) // 2 if variant in SPLIT else 0)
    metadata(w, s, variant or "a shape")
    if s.layers == 27:
        w.add_q_lora_rank(32)
    tokenizer(w, s.vocab, s.pre, s.specials, s.bos, s.eos)
    turn = cycle(MIXED)
    for name, dims, std in todo:
        if is_float(name, dims):
            kind = Q.F32
        elif quant == "Q4_K_M":
            kind = tensor_type(s, name, dims, quant)
        elif quant == "IQ_MIX":
            kind = fitting(next(turn), dims[-1])
        else:
            kind = fitting(Q[quant], dims[-1])
        n = int(np.prod(dims))
        if kind == Q.F32:
            values = f32_values(rng, s, name, n, std).reshape(dims)
            data = edit(name, values).astype(np.float32) if edit else values
        else:
            block, size = GGML_QUANT_SIZES[kind]
            data = random_blocks(rng, kind, n // block, std).reshape(*dims[:-1], dims[-1] // block * size)
        if only(name):
            w.add_tensor(name, data, raw_dtype=None if kind == Q.F32 else kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path.with_name(f"{path.stem}-00001-of-00002.gguf") if variant in SPLIT else path
