"""States behind a prefix: where snapshots are made, and that answers do not depend on where a prompt goes on from."""

from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tinychat.engine import Engine, snapshots
from tinychat.engine.config import ModelConfig
from tinychat.engine.fit import sizes
from tinychat.engine.gguf import GGUF
from tinychat.engine.grammar import Grammar
from tinychat.engine.kvstore import BLOCK, KVStore
from tinychat.engine.plan import build_plan
from tinychat.engine.snapshots import Snapshots
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import GREEDY

PROMPT = np.random.default_rng(5).integers(0, 250, 150).tolist()


def answer(engine: Engine, prompt: list[int], n: int = 6) -> list[int]:
    return [t.id for t in engine.generate(prompt, GREEDY, n, raw=True) if t.id is not None]


def test_places_and_what_is_kept() -> None:
    every = snapshots.distance(256)
    assert every == 1024 and [snapshots.distance(n) for n in (2100, 1 << 30)] == [2048, 4096]
    assert snapshots.places(0, 60, every) == [] and snapshots.places(0, 150, every) == [128]
    assert snapshots.places(0, 135, every) == [64] and snapshots.places(100, 135, every) == []  # a margin at the end
    assert snapshots.places(1000, 2100, every) == [1024, 2048] and snapshots.places(1024, 1024 + 8, every) == []
    assert snapshots.places(0, 2047, 4096) == [1984]
    kept = Snapshots(3)
    for n in (128, 1024, 1088, 2048):
        kept.add(n, memoryview(bytes([n // 64])))
    assert [kept.last(n)[0] for n in (127, 128, 1087, 1088, 5000)] == [
        0,
        128,
        128,
        1088,
        2048,
    ]  # 1024 is the least loss
    kept.cut(2047)
    assert kept.last(5000) == (1088, bytes([17])) and kept.newest() == 1088
    assert [kept.due(n, 1024) for n in (2048, 2111, 2112, 2113, 2176)] == [False, False, True, False, True]
    assert Snapshots(3).last(10) == (0, b"") and Snapshots(3).newest() == 0


@pytest.mark.parametrize("variant", ["qwen35moe", "kimi-linear", "lfm2"])
def test_edit_fork_regenerate_continue_and_reopen(variant: str, tmp_path: Path) -> None:
    path, store = tiny.write(tmp_path / "m.gguf", variant, "Q8_0"), KVStore(1 << 28, tmp_path / "kv")
    engine = Engine.load(path, max_context=320, device="cpu", store=store)
    fresh = Engine.load(path, max_context=320, device="cpu")
    assert engine.session.speculation.most == 0

    def same(engine: Engine, prompt: list[int], reused: int) -> list[int]:
        got, state = answer(engine, prompt), engine.executor.read_state()
        assert engine.stats.reused_tokens == reused
        fresh.session.cut(0)
        assert answer(fresh, prompt) == got and fresh.stats.reused_tokens == 0
        want, kept = (np.frombuffer(s, np.float32) for s in (fresh.executor.read_state(), state))
        assert np.linalg.norm(kept - want) <= 2e-3 * np.linalg.norm(want)  # of prompts and of decode steps
        return got

    first = same(engine, PROMPT, 0)
    same(engine, PROMPT + first, len(PROMPT) + len(first) - 1)  # goes on behind the last token
    same(engine, PROMPT, 128)  # regenerated
    edited = [*PROMPT[:140], 3, 4, 5]
    same(engine, edited, 128)
    same(engine, [*PROMPT[:70], 9], 0)  # no snapshot so early, but one is made now
    same(engine, [*PROMPT[:69], 8], 0)
    with engine.cache_kept():
        answer(engine, [1, 2, 3])
    engine.session.cut(0)
    first = same(engine, PROMPT, 0)
    assert engine.save_cache("a")
    engine.close()

    reopened = Engine.load(path, max_context=320, device="cpu", store=store)
    longer = PROMPT + first + [7, 8]
    end = len(PROMPT) + len(first) - 1
    same(reopened, longer, end)  # the last state was saved too
    assert reopened.stats.restored_rows == end
    reopened.session.cut(0)
    same(reopened, edited, 128)  # the saved snapshot
    with pytest.raises(TinychatError, match="a saved state of 3 bytes"):
        reopened.executor.write_state(memoryview(b"123"))
    reopened.close()
    fresh.close()


def test_memory_counts_the_state_and_its_snapshots(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "qwen35")
    header = GGUF.open(path)
    plan = build_plan(header, ModelConfig.from_gguf(header))
    rule = 4 * 24 * 24 + 2 * (2 * 2 + 4) * 24  # matrices of the heads, inputs of the convolution
    assert plan.state_bytes == 4 * rule and plan.kv_bytes_per_token == 2 * 2 * 32 * 2
    assert snapshots.kept(plan) == snapshots.MOST and snapshots.memory(plan) == 17 * plan.state_bytes
    weights = sum(t.nbytes for t in header.tensors.values())
    told, of_context = sizes(path)
    assert (told, of_context(7)) == (weights, 7 * plan.kv_bytes_per_token + 17 * plan.state_bytes)
    assert snapshots.NEAREST % BLOCK == snapshots.FARTHEST % BLOCK == 0
    engine = Engine.load(path, max_context=32, device="cpu")
    assert engine.stats.kv_bytes == engine.executor.cache_bytes + 17 * plan.state_bytes
    assert engine.executor.state_bytes == 4 * (rule + 4 * 24 * 8)  # rows of whole vectors
    engine.close()


def test_a_generator_closed_among_forced_tokens_leaves_a_state_that_is_not_used(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "qwen35", "Q8_0")
    engine, fresh = (Engine.load(path, max_context=320, device="cpu") for _ in range(2))
    schema = {"type": "object", "properties": {"a_long_key": {"const": "long"}}, "required": ["a_long_key"]}
    stream = engine.generate(PROMPT, GREEDY, 40, raw=True, grammar=Grammar.from_schema(schema))
    next(token for token in stream if token.source == "grammar")
    stream.close()
    assert engine.session.state_at > len(engine.tokens)  # those that are forced are run together
    prompt = [*engine.tokens, 9]
    assert answer(engine, prompt) == answer(fresh, prompt)
    assert engine.stats.reused_tokens == 128 and engine.executor.read_state() == fresh.executor.read_state()
    engine.close()
    fresh.close()
