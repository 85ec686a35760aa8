"""Multi-token prediction in the engine: the same answers, the same cache rows, its own file or a side file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.forward64 import Model
from tests.support.speculating import Wild
from tinychat.engine.engine import Engine
from tinychat.engine.kvstore import KVStore
from tinychat.engine.speculation import Speculate
from tinychat.kernels.sampling import GREEDY, Sampling

SHAPE = tiny.VARIANTS["deepseek2_nextn"]
PROMPT = [6, 17, 250, 33, 7, 7, 120, 9, 41, 200, 5, 61, 62, 63, 64, 65, 66, 67]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("mtp") / "m.gguf", SHAPE)


@contextmanager
def engine(path: Path, speculate: Speculate = 1, **options: Any) -> Iterator[Engine]:
    made = Engine.load(path, max_context=96, device="cpu", threads=1, speculate=speculate, **options)
    try:
        yield made
    finally:
        made.close()


def answer(engine: Engine, prompt: list[int], n: int = 60, sampling: Sampling = GREEDY) -> list[tuple[Any, float]]:
    return [(t.id, t.logprob) for t in engine.generate(prompt, sampling, n, raw=True)]


def rows(engine: Engine) -> bytes:
    """The cache, in whole tiles."""
    engine.session.complete()
    return engine.executor.read_cache(0, len(engine.tokens) // 16 * 16)


def foreseeing(name: str, values: np.ndarray) -> np.ndarray:
    """A model whose layers add nothing, so that a token alone says what comes next, and whose block sees that token."""
    if any(part in name for part in ("attn_output", "ffn_down")):
        return values * 0
    if "eh_proj" in name:
        return np.eye(*values.shape)
    return np.ones_like(values) if "norm" in name and values.ndim == 1 else values


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, seed=3)], ids=["greedy", "seeded"])
def test_answers_are_the_same(sampling: Sampling, model: Path) -> None:
    with engine(model, 0) as plain, engine(model) as fixed, engine(model, "auto") as auto:
        assert plain.plan.mtp is None and plain.plan.kv_bytes_per_token < fixed.plan.kv_bytes_per_token
        want = answer(plain, PROMPT, sampling=sampling)
        assert answer(fixed, PROMPT, sampling=sampling) == answer(auto, PROMPT, sampling=sampling) == want
        s = fixed.stats
        assert s.mtp_drafted_tokens > 20 and s.generated_tokens == s.decode_steps + s.accepted_tokens
        # its guesses and those of the text, at every step
        fixed.session.speculation = Wild("auto", 15, 96, s, fixed.session.clock)
        assert answer(fixed, PROMPT, sampling=sampling) == want
        assert 5 < s.mtp_drafted_tokens < s.drafted_tokens


def test_right_guesses_halve_the_steps(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", SHAPE, edit=foreseeing)
    np.testing.assert_allclose(Model(path).mtp(PROMPT), Model(path)(PROMPT), atol=1e-4)
    with engine(path, 0) as plain, engine(path) as guessing:
        want = answer(plain, PROMPT, 40, Sampling(temperature=0.3, seed=5))
        tokens = list(guessing.generate(PROMPT, Sampling(temperature=0.3, seed=5), 40, raw=True))
        assert [(t.id, t.logprob) for t in tokens] == want
        s = guessing.stats
        assert 0.6 * s.mtp_drafted_tokens < s.mtp_accepted_tokens == sum(t.source == "mtp" for t in tokens)


def test_rows_are_those_of_a_new_engine(model: Path, tmp_path: Path) -> None:
    """After an edit, after a restored cache, after single steps, and after other use of the cache."""
    store, edited = KVStore(1 << 30, tmp_path / "kv"), [*PROMPT[:9], 90, *PROMPT[9:]]
    with engine(model) as fresh, engine(model, store=store) as used:
        said = answer(fresh, edited)
        want = rows(fresh)
        answer(used, PROMPT)
        answer(used, edited)
        assert rows(used) == want
        with used.speculating(0):
            answer(used, PROMPT)
            answer(used, edited)
        with used.cache_kept():
            answer(used, PROMPT, 5)
        assert rows(used) == want and used.save_cache()
        with engine(model, store=store) as later:
            assert answer(later, [*edited, *(token for token, _ in said[:30])], 30) == said[30:]
            assert later.stats.restored_rows == len(edited) + 30 and rows(later) == want
        with engine(model, 0, store=store) as without:
            answer(without, edited, 1)
            assert not without.stats.restored_rows  # its rows are shorter


def test_a_side_file(model: Path, tmp_path: Path) -> None:
    block = "blk.2."
    trunk = tiny.write(tmp_path / "m-Q4_0.gguf", SHAPE, only=lambda name: not name.startswith(block))
    with engine(trunk) as alone:
        assert alone.plan.mtp is None and not alone.notes
        fingerprint = alone.info.fingerprint
    side = tiny.write(
        tmp_path / "mtp-m-Q8_0.gguf",
        SHAPE,
        only=lambda name: name.startswith((block, "token_embd", "output")),
    )
    with engine(trunk) as both, engine(model) as whole:
        assert both.info.fingerprint == fingerprint and both.info.file_bytes == trunk.stat().st_size
        assert answer(both, PROMPT) == answer(whole, PROMPT) and rows(both) == rows(whole)
    side.unlink()
    tiny.write(tmp_path / "mtp-m-Q4_0.gguf", "glm4moe_qk_norm")
    with engine(trunk) as other:
        assert other.plan.mtp is None and "is not of a deepseek2 model" in other.notes[0]
