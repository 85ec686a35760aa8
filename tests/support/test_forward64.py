"""The float64 forward against logits that llama.cpp (build of llama-cpp-python 0.3.36, F32 cache) gave for the same
files."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import forward64, tiny
from tests.support.blocks import MIXED, MODEL_QUANTS, QUANTS, random_blocks
from tests.support.forward64 import Model, forward, topk

IDS = [290, 17, 204, 99, 3, 256, 258, 64, 131, 64, 17, 280]
COLUMNS = [0, 1, 7, 99, 150, 258, 299, 300]
LLAMA_CPP = json.loads(
    (Path(__file__).parents[1] / "data" / "llama_cpp_logits.json").read_text()
)  # last position, COLUMNS


def geglu_of_halves(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """As llama.cpp computes it: looked up in a table of 2^16 halves (ggml/src/ggml-cpu/vec.h, ggml_vec_gelu_f32)."""
    half = gate.astype(np.float32).astype(np.float16).astype(np.float64)
    return forward64.geglu(half, np.ones_like(half)).astype(np.float16).astype(np.float64) * up


@pytest.mark.parametrize("variant", LLAMA_CPP)
def test_same_logits_as_llama_cpp(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gelu = variant.startswith("gemma")
    if gelu:
        monkeypatch.setattr(Model, "gated", lambda self, gate, up: geglu_of_halves(gate, up))
    logits = forward(tiny.write(tmp_path / "m.gguf", variant), IDS)
    assert logits.shape == (len(IDS), tiny.VOCAB)
    # a value between two halves may round to the other one
    np.testing.assert_allclose(logits[-1, COLUMNS], LLAMA_CPP[variant], atol=1e-3 if gelu else 1e-4, rtol=0)


def test_every_variant_that_llama_cpp_runs_is_compared() -> None:
    """It refuses experts without a shared one, and llama files whose values are not as long as their keys."""
    assert set(tiny.NAMES) - set(LLAMA_CPP) == {"deepseek2_no_shared", "llama_short_values", "llama_long_values"}


def test_causal(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_lite")
    np.testing.assert_allclose(forward(path, IDS[:5]), forward(path, IDS)[:5], rtol=1e-12, atol=1e-12)


def test_equal_scores_take_the_lower_index() -> None:
    assert topk(np.array([1.0, 3, 3, 2, 3]), 2).tolist() == [1, 2]


@pytest.mark.parametrize("quant", QUANTS, ids=lambda q: q.name)
def test_random_blocks_have_the_asked_spread(quant: tiny.Q) -> None:
    from gguf.quants import dequantize

    blocks = random_blocks(np.random.default_rng(1), quant, 2000, 0.02)
    values = dequantize(blocks.reshape(1, -1), quant)
    assert np.isfinite(values).all()
    assert 0.7 < values.std() / 0.02 < 1.6
    assert abs(values.mean()) < 0.1 * values.std()


@pytest.mark.parametrize("quant", MODEL_QUANTS)
def test_activations_stay_sane_in_every_quant(quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", quant)
    assert path.stat().st_size < 4_000_000
    model = Model(path)
    assert 1 < model(IDS).std() < 4
    kinds = {t.tensor_type for t in model.tensors.values()}
    assert kinds.issuperset({"Q4_K_M": {tiny.Q.Q4_K, tiny.Q.Q6_K}, "IQ_MIX": MIXED}.get(quant) or [tiny.Q[quant]])
