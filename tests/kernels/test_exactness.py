"""Whole models through `Engine.load` against the float64 forward, and against themselves.

The executors have their own tests of every architecture and quant type; here each variant is paired with one quant
type, and routing, prefixes, chunks and threads are tested where exactness is easily lost. The whole cross product is
`python -m scripts.exactness_table`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.blocks import MODEL_QUANTS
from tests.support.exactness import last_logits, relative
from tests.support.forward64 import Model, forward
from tinychat.engine import Engine
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import GREEDY

IDS = [290, 17, 204, 99, 3, 256, 258, 64, 131, 64, 17, 280]
REFERENCE = 1e-4  # relative L2; measured: 2e-6 at most
CPU = 2e-3  # its cache is F16, its activations have 16 bits; measured: 5e-4 (docs/exactness.md)

# Every quant type once, with the variants whose ops differ; the rest of the variants in F32.
PAIRS = {
    "llama": "Q4_0",
    "llama_rope_freqs": "Q4_1",
    "llama_fused_qkv": "Q6_K",
    "qwen2": "F16",
    "qwen2_yarn": "BF16",
    "qwen3": "Q5_K",
    "qwen3moe": "IQ4_NL",
    "olmoe": "Q3_K",
    "granite": "Q8_0",
    "gpt-oss": "MXFP4",
    "gemma3": "Q4_K_M",
    "gemma4_layer_embeddings": "Q4_K",
    "qwen35": "Q5_0",
    "qwen35moe": "Q4_K_M",
    "qwen3next": "Q6_K",
    "lfm2": "Q8_0",
    "lfm2moe": "Q4_0",
    "olmo2_windows": "Q4_0",
    "glm4": "Q5_1",
    "glm4moe_qk_norm": "Q4_K",
    "mistral4": "Q8_0",
    "deepseek2_glm": "Q4_K_M",
    "deepseek2_lite": "IQ_MIX",
    "deepseek2_lite_legacy": "Q5_0",
    "deepseek2_legacy_q_lora": "Q2_K",
    "deepseek2_moonlight": "Q5_1",
    "deepseek2_no_shared": "IQ4_XS",
    "deepseek2_softmax_weight": "MXFP4",
    "deepseek2_groups": "Q4_K",
}
# What the pairs lack of the plans' features: `test_the_reference_sees_every_feature_of_a_plan`.
MORE = (
    "bailingmoe3",
    "gemma4_experts",
    "gemma4_layer_embeddings",
    "granite_experts",
    "kimi-linear",
    "llama_short_values",
    "qwen3moe_tied_top1",
    "smollm3",
)
# Others, or the same in F32, have all of their blocks and fields; every quant type is held bit-exact by
# tinygrad/test_dequant.py.
HELD_BY_OTHERS = {
    "gemma4_layer_embeddings",
    "qwen35moe",
    "lfm2",
    "glm4moe_qk_norm",
    "deepseek2_lite",
    "deepseek2_legacy_q_lora",
    "deepseek2_moonlight",
    "deepseek2_no_shared",
    "deepseek2_softmax_weight",
}
ON_REFERENCE = [(v, q) for v, q in PAIRS.items() if v not in HELD_BY_OTHERS] + [(v, "F32") for v in MORE]
ROWS = [(v, PAIRS.get(v, "F32")) for v in tiny.NAMES if tiny.shape(v, "F32").layers < 20]


@contextmanager
def engine(path: Path, device: str = "cpu", context: int = 128, threads: int | None = None) -> Iterator[Engine]:
    eng = Engine.load(path, max_context=context, device=device, threads=threads)
    try:
        yield eng
    finally:
        eng.close()


def answer(eng: Engine, prompt: list[int], n: int) -> list[int]:
    return [t.id for t in eng.generate(prompt, GREEDY, n, raw=True) if t.id is not None]


def test_every_quant_occurs() -> None:
    assert {q for _, q in ROWS} == set(MODEL_QUANTS)


def features(value: object, name: str = "") -> set[str]:
    """What a step can tell apart in a plan: the type of every block, whether a field is there, flags and words, and of
    numbers whether they are 0, 1 or another one."""
    if is_dataclass(value):
        inner = (features(getattr(value, f.name), f"{type(value).__name__}.{f.name}") for f in fields(value))
        return {f"{name}: {type(value).__name__}"}.union(*inner)
    if isinstance(value, tuple):
        return {f"{name}: {bool(value)}"}.union(*(features(v, name) for v in value))
    if isinstance(value, bool | str) and name != "Weight.tensor":
        return {f"{name}: {value}"}
    return {f"{name}: {value if value in (0, 1) else value is not None}"}


def test_the_reference_sees_every_feature_of_a_plan(tmp_path: Path) -> None:
    """Plain tinygrad compiles for seconds what it has not seen; variants that differ in dimensions alone run on the CPU
    executor only (test_every_architecture)."""
    found: dict[str, set[str]] = {}
    for variant, _ in ROWS:
        gguf = GGUF.open(tiny.write(tmp_path / "m.gguf", variant))
        found[variant] = features(build_plan(gguf, ModelConfig.from_gguf(gguf)))
    unseen = set().union(*found.values()) - set().union(*(found[v] for v, _ in ON_REFERENCE))
    assert unseen == {"Dense.stream_scale: True"}  # gemma4; it is computed as LayerEmbedding's


@pytest.mark.parametrize(("variant", "quant"), ON_REFERENCE)
def test_reference(variant: str, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, quant)
    with engine(path, "reference", 16) as eng:
        logits = eng.logits(IDS)
    assert logits.dtype == np.float32
    assert np.linalg.norm(logits - (want := forward(path, IDS))) < REFERENCE * np.linalg.norm(want)


@pytest.mark.parametrize(("variant", "quant"), PAIRS.items())
def test_cpu(variant: str, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, quant)
    with engine(path) as eng:
        assert relative(eng.logits(IDS), forward(path, IDS)).max() < CPU


def equal(name: str, values: np.ndarray) -> np.ndarray:
    """All experts score the same: the first `used` are taken, with equal weights."""
    return np.zeros_like(values) if "ffn_gate_inp" in name or "exp_probs_b" in name else values


def twins(name: str, values: np.ndarray) -> np.ndarray:
    """Experts 2i and 2i+1 score the same; with an odd number of them used, the last place is a tie."""
    return np.repeat(values[::2], 2, 0) if "ffn_gate_inp" in name or "exp_probs_b" in name else values


def bias_rules(name: str, values: np.ndarray) -> np.ndarray:
    """The selection bias decides alone who is taken; the weights still come from the unbiased scores."""
    return np.arange(len(values)) % 3 * 10.0 + values if "exp_probs_b" in name else values


def vanishing(name: str, values: np.ndarray) -> np.ndarray:
    """As `bias_rules`, and where a token scores all of them next to nothing, the clamp in the weight norm keeps them
    small."""
    return values[:1].repeat(len(values), 0) * 12 if "ffn_gate_inp" in name else bias_rules(name, values)


@pytest.mark.parametrize(
    ("device", "variant", "edit"),
    [
        ("cpu", "qwen3moe", equal),
        ("cpu", "olmoe", equal),
        ("cpu", "deepseek2_groups", equal),
        ("cpu", "qwen3moe", twins),
        ("cpu", "deepseek2_no_dense", twins),
        ("cpu", "deepseek2_groups", twins),
        ("cpu", "deepseek2_softmax_weight", twins),
        ("cpu", "deepseek2_groups", bias_rules),
        ("cpu", "deepseek2_sqrt_softplus", bias_rules),
        ("cpu", "deepseek2_groups", vanishing),
        ("reference", "deepseek2_groups", equal),
        ("reference", "qwen3moe", twins),
        ("reference", "deepseek2_groups", vanishing),
    ],
)
def test_routing(device: str, variant: str, edit: Callable[[str, np.ndarray], np.ndarray], tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, edit=edit)
    model = Model(path)
    want = model(IDS)
    ties = [np.isclose(*np.sort(scores)[::-1][len(chosen) - 1 :][:2], atol=1e-12) for chosen, scores in model.routing]
    assert np.mean(ties) > 0.3 if edit in (equal, twins) else not any(ties)
    if edit is vanishing:
        sums = [(scores - model["blk.1.exp_probs_b.bias"])[chosen].sum() for chosen, scores in model.routing]
        assert min(sums) < 6e-5 < max(sums)
    with engine(path, device, 16) as eng:
        error = relative(eng.logits(IDS), want)
    assert error.max() < (REFERENCE if device == "reference" else CPU)


def test_reference_in_chunks_is_token_by_token(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_youtu", "Q5_1")  # with experts, a chunk is one token
    ids = IDS * 3
    with engine(path, "reference", 64) as eng:
        want = eng.logits(ids, decode=True)
        assert relative(eng.logits(ids), want).max() < 1e-5
        got = [eng.executor.forward(part, at, "all") for part, at in ((ids[:3], 0), (ids[3:], 3))]
        assert relative(np.concatenate(got), want).max() < 1e-5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("variant", "quant"),
    [("llama_rope_freqs", "Q4_0"), ("olmoe", "Q6_K"), ("deepseek2_glm", "Q4_K_M"), ("deepseek2_lite_legacy", "Q8_0")],
)
def test_a_reused_prefix_changes_no_answer(variant: str, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, quant)
    with engine(path) as eng:
        first = answer(eng, IDS, 20)
        for prompt, reused in ((IDS + first[:9] + [5, 6], len(IDS) + 9), ([*IDS[:5], 8, 9, 10], 5), (IDS, 5)):
            got, last = answer(eng, prompt, 12), last_logits(eng)
            assert eng.stats.reused_tokens == reused
            with engine(path) as fresh:
                assert answer(fresh, prompt, 12) == got
                # decode steps wrote a part of the rows
                assert relative(last_logits(fresh)[None], last[None]).max() < CPU


@pytest.mark.parametrize(
    ("variant", "quant"), [("llama_mha", "Q4_1"), ("qwen3", "Q5_K"), ("deepseek2_moonlight", "Q4_0")]
)
def test_threads_do_not_change_the_answer(variant: str, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, quant)
    answers = []
    for threads in (1, 2):
        with engine(path, threads=threads) as eng:
            answers.append(answer(eng, IDS, 100))
    assert answers[0] == answers[1] and len(answers[0]) > 5


def test_the_context_ends_loudly(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_youtu", "Q8_0")
    with engine(path, context=32) as eng:
        got = answer(eng, IDS, 1000)
        assert eng.stop_reason == "context" and len(IDS) + len(got) == 33  # the last token needs no row of its own
        with engine(path, context=128) as wide:
            assert answer(wide, IDS, len(got)) == got
        with pytest.raises(TinychatError, match="33 tokens, the context holds 32"):
            eng.logits([1] * 33)
        assert eng.logits([1] * 32).shape == (32, tiny.VOCAB)
