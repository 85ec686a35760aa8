"""Prompts in matrix tiles (AMX) or as words are as exact as in the vectors of decode steps and, without experts, do not
depend on how they are divided; decode steps stay what they are. The tiles' operations are written in C for machines
without them."""

from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cpu.test_executor import IDS, NATIVE, VECTORS, executor, relative
from tests.support import tiny
from tests.support.blocks import MODEL_QUANTS
from tests.support.forward64 import forward
from tinychat.kernels import limits
from tinychat.kernels.sampling import GREEDY

HEADS = replace(tiny.VARIANTS["deepseek2_youtu"], heads=3, mla=tiny.MLA(96, 256, 64, 32, 40))
"""Where long pieces of a prompt attend to keys and values of heads, from about 150 tokens on."""
TILES = (*NATIVE, "-DTILES=2")
WORDS = (*NATIVE, "-DTILES=0")
AVX2 = ("-march=haswell",)
ROUTED = "Q4_K_M"  # a model with a router


def assert_divided(parts: list[np.ndarray | None], prompt: np.ndarray, experts: bool) -> None:
    """A prompt in parts has the bits of the whole one; experts that few tokens of a part choose stay with vectors."""
    divided = np.concatenate([part for part in parts if part is not None])
    if experts:
        assert relative(divided, prompt) < 5e-4
    else:
        np.testing.assert_array_equal(divided, prompt)


@pytest.mark.parametrize("quant", sorted({*MODEL_QUANTS, ROUTED}))
def test_prompts_beside_vectors(quant: str, tmp_path: Path) -> None:
    llama = replace(tiny.shape("llama", quant), ffn=2304)  # two parts of a row, of five depths and three
    model = llama if quant != ROUTED else "deepseek2_glm"
    path, ids = tiny.write(tmp_path / "m.gguf", model, quant), IDS * 3
    n = len(ids)
    with executor(path, flags=VECTORS) as ex:
        vectors = ex.forward(ids, 0, "all")
        assert vectors is not None
        steps = list(islice(ex.decode(5, n, GREEDY, ids), 12))
        for flags in (TILES, WORDS):
            with executor(path, flags=flags) as planes:
                prompt = planes.forward(ids, 0, "all")
                assert prompt is not None and ("tiles" in planes.device) == (flags == TILES)
                assert 0 < relative(prompt, vectors) < 6e-4  # most of it is the cache's rounding
                ends = [0, 1, 6, 40, n]  # whole panels, narrow ones, one column
                parts = [planes.forward(ids[a:b], a, "all") for a, b in pairwise(ends)]
                assert_divided(parts, prompt, experts=quant == ROUTED)
                planes.write_cache(ex.read_cache(0, n), 0, n)
                assert list(planes.verify(5, [token for token, _ in steps[:-1]], n, GREEDY, ids)) == steps


@pytest.mark.parametrize("model", ["olmo2_windows", "deepseek2_temperature", "llama_mha"])
@pytest.mark.parametrize("flags", [TILES, WORDS], ids=["tiles", "words"])
def test_attention_over_several_chunks(flags: tuple[str, ...], model: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", model, "F32")
    ids = np.random.default_rng(1).integers(0, tiny.VOCAB, 330).tolist()
    with executor(path, flags=VECTORS) as ex, executor(path, flags=flags, threads=3) as planes:
        vectors, prompt = ex.forward(ids, 0, "all"), planes.forward(ids, 0, "all")
        assert vectors is not None and prompt is not None
        assert relative(prompt, vectors) < (5e-4 if flags == TILES else 7e-4)  # words round keys and values as well
        ends = [0, 37, 38, 300, 330]  # more queries than a task has, one, and a border within a tile of keys
        parts = [planes.forward(ids[a:b], a, "all") for a, b in pairwise(ends)]
        assert_divided(parts, prompt, experts=model.startswith("deepseek2"))


@pytest.mark.parametrize(
    ("flags", "legacy"), [(TILES, True), (WORDS, False), (AVX2, False)], ids=["tiles", "words", "avx2"]
)
def test_latent_rows_as_keys_and_values_of_heads(
    flags: tuple[str, ...], legacy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(HEADS, mla=replace(HEADS.mla or tiny.MLA(0, 0, 0, 0, 0), legacy=legacy))
    path = tiny.write(tmp_path / "m.gguf", shape, "Q8_0")
    ids = np.random.default_rng(2).integers(0, tiny.VOCAB, 420).tolist()
    with executor(path, flags=flags, threads=3) as ex:
        prompt = ex.forward(ids, 0, "all")
        assert prompt is not None and ex.prefill_chunk == 512
        assert relative(prompt, forward(path, ids)) < 7e-4
        parts = [ex.forward(ids[a:b], a, "all") for a, b in pairwise([0, 201, 420])]
        assert_divided(parts, prompt, experts=False)
        # a short piece attends to the rows as they are, wherever it begins and ends
        few = ex.forward(ids[-40:], 380, "all")
        assert few is not None and 0 < relative(few, prompt[-40:]) < 7e-4
        assert_divided([ex.forward(ids[a:b], a, "all") for a, b in pairwise([380, 387, 420])], few, experts=False)
    monkeypatch.setattr(limits, "HEADS_BYTES", 0)
    with executor(path, flags=flags) as ex:  # a head at a time
        np.testing.assert_array_equal(ex.forward(ids, 0, "all"), prompt)
