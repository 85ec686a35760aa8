"""Metadata and tensors that cannot be right: one line that names the key or tensor, what was expected and what was
found."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from tests.support import tiny
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError


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
        ("llama", metadata("general.architecture", "mamba"), "architecture 'mamba' is not supported"),
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


def test_every_variant_has_a_plan_that_counts_its_bytes(tmp_path: Path) -> None:
    for variant in tiny.VARIANTS:
        gguf = GGUF.open(tiny.write(tmp_path / f"{variant}.gguf", variant))
        config = ModelConfig.from_gguf(gguf)
        plan = build_plan(gguf, config)
        assert 0 < plan.bytes_per_token() <= gguf.nbytes
        assert plan.bytes_per_token(10) - plan.bytes_per_token() == 10 * plan.kv_bytes_per_token
        if config.latent:  # one latent row per token and layer, V a slice of it
            assert plan.kv_bytes_per_token == 2 * config.layers * (config.latent.kv_lora + config.rope.dims)
