"""What executors refuse: one line at load, or another executor; and C code that differs from the Python code."""

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from tests.support import tiny
from tinychat.engine import Engine
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.blocks import GQA, Layer
from tinychat.kernels.cpu import executor as cpu
from tinychat.kernels.cpu import library
from tinychat.kernels.cpu.executor import CPUExecutor
from tinychat.kernels.limits import Limits, check, check_sampling
from tinychat.kernels.ops import Plan
from tinychat.kernels.sampling import Sampling

EVERYTHING = Limits(frozenset(GGMLQuantizationType))


def plan_of(path: Path, variant: str, quant: str = "F32") -> tuple[Plan, GGUF]:
    gguf = GGUF.open(tiny.write(path / "m.gguf", variant, quant))
    return build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf


@pytest.mark.parametrize(
    ("variant", "limits", "says"),
    [
        ("llama", {"quants": frozenset({GGMLQuantizationType.Q4_0})}, "token_embd.weight has type F32"),
        ("llama_mha", {"float_multiple": 10}, "the row length of tensor token_embd.weight is 64, which is not a"),
        ("llama", {"float_columns": 80}, "the row length of tensor blk.0.attn_output.weight is 128, at most 80"),
        ("llama", {"packed_rows": 300}, "the number of rows of tensor token_embd.weight is 301, at most 300"),
        ("llama", {"heads": 3}, "the number of heads is 4, at most 3"),
        ("llama", {"head_group": 1}, "the number of heads per kv head is 2, at most 1"),
        ("llama", {"kv_rows": 127}, "the context, over all kv heads, is 128, at most 127"),
        ("llama", {"key_length": 16}, "the key length is 32, at most 16"),
        ("llama_mha", {"key_multiple": 32}, "the key length is 48, which is not a multiple of 32"),
        ("llama_short_values", {"value_multiple": 32}, "the value length is 16, which is not a multiple of 32"),
        ("llama_long_values", {"equal_lengths": True}, "the value length 64 is not the key length 32"),
        ("deepseek2_glm", {"latent_row": 64}, "a latent cache row is 96, at most 64"),
        ("qwen3moe", {"experts": 7}, "the number of experts is 8, at most 7"),
        ("qwen3moe", {"experts_used": 2}, "the number of experts used is 3, at most 2"),
        ("deepseek2_groups", {"expert_groups": 3}, "the number of expert groups is 4, at most 3"),
        ("qwen35", {"state_dim": 16}, "a head of a delta rule is 24, at most 16"),
        ("qwen35", {"state_multiple": 16}, "a head of a delta rule is 24, which is not a multiple of 16"),
        ("lfm2", {"convolved": 2}, "the width of a convolution is 3, at most 2"),
        ("lfm2", {"state_multiple": 24}, "the number of channels of a convolution is 64, which is not"),
        ("qwen35", {"heads": 3}, "the number of heads is 4, at most 3"),
        ("kimi-linear", {"state_dim": 16}, "a head of a delta rule is 24, at most 16"),
    ],
)
def test_a_plan_beyond_a_limit_is_one_line(variant: str, limits: dict, says: str, tmp_path: Path) -> None:
    plan, _ = plan_of(tmp_path, variant)
    check(plan, EVERYTHING, "test", 64)
    with pytest.raises(TinychatError, match=says) as e:
        check(plan, replace(EVERYTHING, **limits), "test", 64)
    assert "\n" not in str(e.value) and str(e.value).startswith("the test executor does not run this model: ")


def test_caches_of_different_widths(tmp_path: Path) -> None:
    plan, gguf = plan_of(tmp_path, "llama")
    first = plan.layers[0]
    assert isinstance(first.attention, GQA)
    uneven = replace(plan, layers=(Layer(replace(first.attention, kv_heads=1), first.feed_forward), plan.layers[1]))
    check(uneven, EVERYTHING, "test", 64)
    CPUExecutor(uneven, gguf, 64).close()


def test_sampling_beyond_a_limit() -> None:
    check_sampling(Sampling(top_k=40), replace(EVERYTHING, sampling_top_k=40))
    with pytest.raises(TinychatError, match="top_k 41 is over this device's 40"):
        check_sampling(Sampling(top_k=41), replace(EVERYTHING, sampling_top_k=40))


def test_another_executor_takes_what_one_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "LIMITS", replace(cpu.LIMITS, heads=3))
    monkeypatch.setattr("tinychat.engine.devices.has_cuda", lambda: False)
    path = tiny.write(tmp_path / "m.gguf", "llama")
    with pytest.raises(TinychatError, match="the CPU executor does not run this model: the number of heads is 4"):
        Engine.load(path, max_context=16, device="cpu")
    engine = Engine.load(path, max_context=16)
    assert engine.executor.kind == "reference" and "the number of heads is 4" in engine.notes[0]
    engine.close()


@pytest.mark.parametrize("struct", ["CMatrix", "COp", "SampleSpec", "StepContext"])
def test_a_structure_that_differs_in_c_is_one_line(struct: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = type(struct, (library.ctypes.Structure,), {"_fields_": getattr(library, struct)._fields_[:-1]})
    monkeypatch.setattr(library, struct, shorter)
    with pytest.raises(TinychatError, match=f"differ: {struct} has ") as e:
        library.Library()
    assert "\n" not in str(e.value)


def test_quant_types_that_differ_in_c_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "QUANTS", library.QUANTS - {GGMLQuantizationType.Q4_0})
    with pytest.raises(TinychatError, match="the quant types are Q4_0, Q4_1"):
        library.Library()


def test_names_of_the_library() -> None:
    made = library.Library()
    assert list(made.tags)[:3] == ["embed", "linear", "attention"] and len(made.tags) == 19
    assert list(made.gatings) == ["softmax", "sigmoid", "softmax_weight", "sqrt_softplus"]
    assert made.chunk == 256
