"""Perplexity: the figures of llama.cpp's `llama-perplexity` (build of llama-cpp-python 0.3.36) on the same files and
text."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.forward64 import Model
from tinychat.engine import Engine
from tinychat.errors import TinychatError
from tinychat.measure.perplexity import Estimate, negative_log_likelihood, perplexity

TEXT = (Path(__file__).parents[1] / "data" / "prose.txt").read_text()
LLAMA_CPP = [
    ("llama", 64, None, 1689.5436, 111.04606),
    ("llama", 101, None, 1835.8631, 122.47832),
    ("qwen2", 64, 3, 2905.5508, 770.06658),
    ("deepseek2_glm", 300, None, 2303.3470, 148.61181),
]
SMOLLM2, SMOLLM2_FLOAT64 = 31.2224, 31.1371  # Q4_1, windows of 128; the second by tests/forward64.py
Load = Callable[..., Engine]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(variant: str, context: int = 128) -> Engine:
        return Engine.load(tiny.write(tmp_path / "m.gguf", variant), max_context=context, device="cpu")

    return load


def last(estimates: list[Estimate]) -> Estimate:
    return estimates[-1]


@pytest.mark.parametrize(("variant", "context", "chunks", "ppl", "error"), LLAMA_CPP)
def test_the_figures_of_llama_cpp(
    variant: str, context: int, chunks: int | None, ppl: float, error: float, load: Load
) -> None:
    """llama has add_bos, qwen2 has not; odd windows, windows longer than a step, limited windows."""
    result = last(list(perplexity(load(variant, 512), TEXT, context, chunks)))
    assert result.ppl == pytest.approx(ppl, rel=1e-4)
    assert result.ppl_err == pytest.approx(error, rel=1e-4)
    assert result.chunks == result.total_chunks == (chunks or result.total_chunks)
    assert result.tokens == result.chunks * (context - context // 2 - 1)


def test_smollm2_within_half_a_percent_of_llama_cpp_and_nearer_to_the_truth(smollm2_path: Path) -> None:
    engine = Engine.load(smollm2_path, max_context=128, device="cpu")
    ppl = last(list(perplexity(engine, TEXT, 128))).ppl
    assert ppl == pytest.approx(SMOLLM2, rel=0.005) and ppl == pytest.approx(SMOLLM2_FLOAT64, rel=0.001)
    engine.close()


def test_by_the_definition(load: Load, tmp_path: Path) -> None:
    engine = load("deepseek2_lite")
    ids = [engine.tokenizer.bos_id, *engine.tokenizer.encode(TEXT)]
    losses = []
    for start in (0, 16):
        window = [ids[0], *ids[start + 1 : start + 16]]
        p = np.exp(Model(tmp_path / "m.gguf")(window))
        p /= p.sum(-1, keepdims=True)
        losses += [-np.log(p[i, window[i + 1]]) for i in range(8, 15)]
    result = last(list(perplexity(engine, TEXT, 16, 2)))
    assert result.ppl == pytest.approx(np.exp(np.mean(losses)), rel=1e-3)
    assert result.ppl_err == pytest.approx(result.ppl * np.std(losses, ddof=1) / len(losses) ** 0.5, rel=1e-2)


def test_progress_rises_to_the_end(load: Load) -> None:
    seen = list(perplexity(load("llama"), TEXT, 64, 5))
    assert [e.progress for e in seen] == sorted({e.progress for e in seen}) and last(seen).progress == 1
    assert [e.chunks for e in seen] == sorted(e.chunks for e in seen)
    assert np.isnan(seen[0].ppl) and np.isfinite(seen[1].ppl)
    assert all(e.eta_s >= 0 for e in seen) and last(seen).eta_s == 0


def test_leaves_the_engine_usable(load: Load) -> None:
    engine = load("llama")
    prompt = engine.tokenizer.encode("the ferry")
    before = [t.id for t in engine.generate(prompt, max_tokens=5)]
    for _ in perplexity(engine, TEXT, 32):
        break  # given up half-way
    assert [t.id for t in engine.generate(prompt, max_tokens=5)] == before


@pytest.mark.parametrize(
    ("text", "context", "chunks", "says"),
    [
        ("too short", 64, None, "a window of 64 needs at least 128"),
        ("", 64, None, "the text has 1 tokens"),
        (TEXT, 3, None, "expected 4 to 128"),
        (TEXT, 129, None, "expected 4 to 128"),
        (TEXT, 64, 0, "0 windows"),
    ],
)
def test_bad_input(text: str, context: int, chunks: int | None, says: str, load: Load) -> None:
    with pytest.raises(TinychatError, match=says):
        perplexity(load("llama"), text, context, chunks)


def test_logits_of_any_size_do_not_overflow() -> None:
    logits = np.array([[1000.0, 0, -1000], [-1e4, -1e4, -1e4]], np.float32)
    np.testing.assert_allclose(negative_log_likelihood(logits, [1, 2]), [1000, np.log(3)], rtol=1e-6)
