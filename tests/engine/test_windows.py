"""Conversations longer than what layers with a sliding window keep: answers are those of a cache that keeps all."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tinychat.engine import Engine
from tinychat.engine.engine import prepare
from tinychat.engine.kvstore import KVStore
from tinychat.kernels.sampling import GREEDY

PROMPT = np.random.default_rng(5).integers(0, 250, 330).tolist()


def answer(engine: Engine, prompt: list[int], n: int = 8) -> list[int]:
    return [t.id for t in engine.generate(prompt, GREEDY, n, raw=True) if t.id is not None]


@pytest.fixture(params=["gemma3_keys", "lfm2"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine, Engine]]:
    """Two that keep 192 rows and one that keeps all, with one folder of saved caches; lfm2 has states too."""
    prepared = prepare(tiny.write(tmp_path / "m.gguf", request.param, "Q8_0"), max_context=512)
    few = replace(prepared, plan=replace(prepared.plan, window_rows=192))
    made = [p.load(device="cpu", store=KVStore(1 << 28, tmp_path / "kv")) for p in (few, few, prepared)]
    yield made[0], made[1], made[2]
    for engine in made:
        engine.close()


def test_edit_fork_regenerate_continue_and_reopen(engines: tuple[Engine, Engine, Engine]) -> None:
    engine, reopened, whole = engines
    whole.store, states = None, bool(engine.plan.state_bytes)
    store, engine.store = engine.store, None
    assert engine.stats.kv_bytes < whole.stats.kv_bytes

    def same(engine: Engine, prompt: list[int], reused: int, with_states: int, restored: int = 0) -> list[int]:
        got = answer(engine, prompt)
        assert (engine.stats.reused_tokens, engine.stats.restored_rows) == (with_states if states else reused, restored)
        whole.session.cut(0)
        assert answer(whole, prompt) == got
        return got

    first = same(engine, PROMPT, 0, 0)
    end = len(PROMPT) + len(first) - 1
    same(engine, PROMPT + first + [7], end, end)  # continued
    same(engine, PROMPT, len(PROMPT) - 1, 320)  # regenerated
    edited = [*PROMPT[:300], 3, 4, 5]
    same(engine, edited, 300, 0)
    with engine.cache_kept():
        answer(engine, [1, 2, 3])
    same(engine, [*edited, 9], len(edited), 256)
    early = [*PROMPT[:100], 9]
    same(engine, early, 0, 0)  # those rows are gone
    same(engine, PROMPT[:150], 100, 64)  # and here again
    engine.store = store
    same(engine, PROMPT[:150], 149, 128)
    assert engine.save_cache("a")  # blocks with all rows
    same(engine, PROMPT, 150, 128)
    assert engine.save_cache("a")  # and behind them some that have lost rows
    saved = len(engine.tokens)

    longer = PROMPT + first + [7, 8]
    same(reopened, longer, saved, saved, saved)
    same(reopened, early, 100, 0, 100)  # from the disk, since these rows are there
    for tokens in (reopened.session.tokens, whole.session.tokens):
        tokens.clear()
    whole.store = store
    assert answer(whole, longer) == answer(reopened, longer)
    assert whole.stats.restored_rows == saved
