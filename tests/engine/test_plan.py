"""Metadata and tensors that cannot be right: one line that names the key or tensor, what was expected and what was
found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from tests.support import tiny
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.ops import Attention


def metadata(key: str, value: object) -> Callable[[GGUF], None]:
    return lambda g: g.metadata.update({key: value})


def without(key: str) -> Callable[[GGUF], None]:
    return lambda g: g.metadata.pop(key)


def tensor(name: str, **changes: object) -> Callable[[GGUF], None]:
    return lambda g: g.tensors.update({name: replace(g.tensors[name], **changes)})


def no_tensor(name: str) -> Callable[[GGUF], None]:
    return lambda g: g.tensors.pop(name)


@pytest.mark.parametrize(
    ("variant", "break_it", "says"),
    [
        (
            "llama",
            metadata("general.architecture", "zamba9"),
            "architecture 'zamba9' is not supported; tinychat runs ll",
        ),
        (
            "llama",
            metadata("general.architecture", "nemotron_h"),
            "'nemotron_h', which needs state-space layers, is not supported.*gemma4; `tinychat --server URL` chats",
        ),
        ("llama", metadata("general.architecture", "a\x1b[2J"), "not supported"),
        (
            "llama",
            without("llama.block_count"),
            "llama.block_count: expected a whole number of at least 1, it is missing",
        ),
        ("llama", metadata("llama.block_count", -1), "found -1"),
        ("llama", metadata("llama.embedding_length", "64"), "embedding_length: expected a whole number"),
        ("llama", metadata("llama.attention.head_count_kv", 3), "not a multiple of head_count_kv 3"),
        ("llama", metadata("llama.rope.scaling.type", "longrope"), "expected none, linear or yarn, found 'longrope'"),
        (
            "llama",
            metadata("llama.attention.layer_norm_rms_epsilon", float("nan")),
            "layer_norm_rms_epsilon: expected a number",
        ),
        ("llama", no_tensor("blk.1.attn_q.weight"), "blk.1.attn_q.weight is missing"),
        ("llama", no_tensor("token_embd.weight"), "token_embd.weight is missing"),
        (
            "llama",
            tensor("blk.0.ffn_up.weight", shape=(7, 64)),
            r"blk.0.ffn_up.weight: expected shape \(96, 64\), found \(7, 64\)",
        ),
        ("llama", tensor("blk.0.attn_norm.weight", type=Q.Q8_0), "expected type F32, found Q8_0"),
        (
            "llama",
            lambda g: g.tensors.update({"blk.0.mystery": g.tensors["blk.0.attn_norm.weight"]}),
            "mystery is not part of",
        ),
        (
            "qwen3moe",
            metadata("qwen3moe.expert_used_count", 9),
            "expert_used_count: expected at most expert_count 8, found 9",
        ),
        ("granite", metadata("granite.logit_scale", 0.0), "logit_scale: expected a number over 0, found 0.0"),
        ("granite", without("granite.logit_scale"), "logit_scale: expected a number, it is missing"),
        ("granite", metadata("granite.rope.scaling.finetuned", False), "without RoPE is not supported"),
        ("gpt-oss", no_tensor("blk.1.attn_sinks.weight"), "attn_sinks.weight is missing"),
        ("gpt-oss", tensor("blk.1.ffn_up_exps.bias", shape=(8, 31)), r"expected shape \(8, 32\), found \(8, 31\)"),
        ("gpt-oss", tensor("blk.1.ffn_up_exps.bias", type=Q.F16), "expected type F32, found F16"),
        (
            "gpt-oss",
            metadata("gpt-oss.attention.sliding_window_pattern", "x"),
            "sliding_window_pattern: expected a whole number, or true or false for every layer, found 'x'",
        ),
        (
            "gemma4",
            metadata("gemma4.embedding_length_per_layer_input", 64),
            "tensor blk.0.inp_gate.weight is missing",
        ),
        (
            "gemma4_layer_embeddings",
            tensor("per_layer_token_embd.weight", shape=(tiny.VOCAB, 160)),
            r"per_layer_token_embd.weight: expected shape \(301, 128\), found \(301, 160\)",
        ),
        (
            "gemma4_layer_embeddings",
            metadata("gemma4.attention.shared_kv_layers", 3),
            "shared_kv_layers: expected a layer with a cache in front of those that share one, of each kind, found 3",
        ),
        (
            "gemma4_layer_embeddings",
            metadata("gemma4.feed_forward_length", np.array([96, 96, 192, -1])),
            "feed_forward_length: expected whole numbers up to .* found -1",
        ),
        (
            "gemma4",
            metadata("gemma4.attention.head_count_kv", np.array([2, 1, 1, 2])),
            "head_count_kv: expected a whole",
        ),
        (
            "deepseek2_temperature",
            without("deepseek2.attention.temperature_length"),
            "temperature_length: expected a whole number of at least 1, it is missing",
        ),
        (
            "llama",
            metadata("general.architecture", "clip"),
            "'clip', which needs pictures .the file is the part",
        ),
        ("qwen35", metadata("qwen35.ssm.group_count", 3), "time_step_rank: expected a multiple of ssm.group_count 3"),
        ("qwen35", metadata("qwen35.ssm.inner_size", 95), "inner_size: expected .* 96, found 95"),
        ("qwen35", metadata("qwen35.ssm.conv_kernel", 1 << 20), "conv_kernel: expected at most 64"),
        ("qwen35", metadata("qwen35.attention.recurrent_layers", np.array([True])), "true or false for every layer"),
        ("qwen35", metadata("qwen35.rope.dimension_sections", np.array([8, 0, 0, 0])), "sections that take turns over"),
        ("qwen35", tensor("blk.0.ssm_conv1d.weight", type=Q.F16), "ssm_conv1d.weight: expected type F32, found F16"),
        ("lfm2", metadata("lfm2.attention.head_count_kv", 1), "whole numbers, 0 for a layer without attention"),
        ("lfm2", metadata("lfm2.attention.head_count_kv", np.array([0, 3])), "expected 0, or one number up to 2"),
        ("lfm2", tensor("blk.0.shortconv.conv.weight", shape=(64, 4)), r"expected shape \(64, 3\), found \(64, 4\)"),
        ("kimi-linear", no_tensor("blk.0.ssm_f_b.weight"), "ssm_f_b.weight is missing"),
        ("kimi-linear", metadata("kimi-linear.kda.head_dim", 32), r"expected shape .96, 64., found .72, 64."),
        ("qwen35moe", no_tensor("blk.0.ffn_gate_inp_shexp.weight"), "ffn_gate_inp_shexp.weight is missing"),
        (
            "qwen3next",
            lambda g: g.tensors.update({"blk.0.ssm_in.weight": g.tensors["blk.0.attn_qkv.weight"]}),
            "ssm_in.weight is of the first files of qwen3next; take a later file",
        ),
        ("glm4", no_tensor("blk.1.post_ffw_norm.weight"), "blk.1.post_ffw_norm.weight is missing"),
        ("deepseek2_glm", metadata("deepseek2.expert_gating_func", 9), "expert_gating_func: expected 1 softmax"),
        ("deepseek2_glm", metadata("deepseek2.attention.key_length_mla", 8), "key_length_mla 8 leaves nothing"),
        (
            "deepseek2_groups",
            metadata("deepseek2.expert_group_count", 3),
            "expert_group_count: expected groups that 8 experts",
        ),
    ],
)
def test_bad_models_are_one_clear_line(
    variant: str, break_it: Callable[[GGUF], None], says: str, tmp_path: Path
) -> None:
    gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", variant))
    build_plan(gguf, ModelConfig.from_gguf(gguf))  # it was right before
    break_it(gguf)
    with pytest.raises(TinychatError, match=says) as e:
        build_plan(gguf, ModelConfig.from_gguf(gguf))
    assert "\n" not in str(e.value) and "\x1b" not in str(e.value)


def test_windows_may_be_told_layer_by_layer(tmp_path: Path) -> None:
    gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", "gpt-oss"))
    assert ModelConfig.from_gguf(gguf).windowed == {0, 2}
    gguf.metadata["gpt-oss.attention.sliding_window_pattern"] = np.array([False, True, False])
    assert ModelConfig.from_gguf(gguf).windowed == {1}


def test_kanana_has_no_q_lora_whatever_its_file_says(tmp_path: Path) -> None:
    """llama.cpp does not believe the rank of deepseek2 models with 48 layers and 128,256 tokens, either."""
    gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", "deepseek2_glm"))
    latent = ModelConfig.from_gguf(gguf).latent
    assert latent and latent.q_lora == 96
    gguf.metadata["deepseek2.block_count"] = 48
    tensor("token_embd.weight", shape=(128256, 64))(gguf)
    latent = ModelConfig.from_gguf(gguf).latent
    assert latent and latent.q_lora == 0


def test_every_variant_has_a_plan_that_counts_its_bytes(tmp_path: Path) -> None:
    for variant in tiny.VARIANTS:
        gguf = GGUF.open(tiny.write(tmp_path / f"{variant}.gguf", variant))
        config = ModelConfig.from_gguf(gguf)
        plan = build_plan(gguf, config)
        assert 0 < plan.bytes_per_token() <= gguf.nbytes
        seen = [(op.window, plan.caches[op.layer].row_bytes) for op in plan.ops if isinstance(op, Attention)]
        assert plan.bytes_per_token(3) - plan.bytes_per_token() == 3 * sum(n for _, n in seen)
        assert plan.kv_bytes_per_token == sum(n for _, n in seen[: config.storing])  # layers that share store none
        if config.windowed:  # a layer with a window reads no more rows than that
            more = plan.bytes_per_token(config.window + 9) - plan.bytes_per_token(config.window)
            assert more == 9 * sum(n for window, n in seen if not window)
        if config.latent:  # one latent row per token and layer, V a slice of it
            assert plan.kv_bytes_per_token == 2 * len(seen) * (config.latent.kv_lora + config.rope.dims)
