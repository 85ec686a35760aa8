"""The engine on tiny models: prefix reuse, stopping, limits, errors."""

import codecs
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import tiny
from tests.support.exactness import last_logits
from tinychat.engine import fit
from tinychat.engine.engine import Engine
from tinychat.engine.kvstore import KVStore
from tinychat.errors import TinychatError
from tinychat.kernels.cpu import executor as cpu
from tinychat.kernels.sampling import GREEDY, Sampling

PROMPT = [6, 17, 250, 33, 7, 7, 120]  # its greedy answer fills the context without an end-of-answer token


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("engine") / "tiny.gguf", "llama", "Q8_0")


@pytest.fixture(scope="module")
def engine(model: Path, speculation: str) -> Iterator[Engine]:
    engine = Engine.load(model, max_context=64, device=speculation)
    yield engine
    engine.close()


def answer(engine: Engine, prompt: list[int], n: int = 6, **options: object) -> list[int]:
    tokens = engine.generate(prompt, GREEDY, n, raw=True, **options)  # type: ignore[arg-type]
    return [t.id for t in tokens if t.id is not None]


def test_second_turn_prefills_only_what_is_new_and_changes_no_answer(engine: Engine, model: Path) -> None:
    engine.session.tokens = []
    first = answer(engine, PROMPT)
    assert (engine.stats.reused_tokens, engine.stats.prefilled_tokens) == (0, 6)
    prompt = PROMPT + first + [40, 41, 42]
    second = answer(engine, prompt)
    assert engine.stats.reused_tokens == len(PROMPT) + len(first) - 1  # the last token of an answer is never run
    assert engine.stats.prefilled_tokens == len(prompt) - 1 - engine.stats.reused_tokens
    step = last_logits(engine)
    fresh = Engine.load(model, max_context=64, device=engine.executor.kind)
    assert answer(fresh, prompt) == second
    want = last_logits(fresh)  # from a prompt, where the second turn has rows of decode steps
    assert np.linalg.norm(step - want) < 2e-3 * np.linalg.norm(want)


def test_rollback_to_a_changed_prompt(engine: Engine) -> None:
    engine.session.tokens = []
    before = answer(engine, PROMPT)
    answer(engine, [*PROMPT[:3], 90, 91, 92, 93])
    assert engine.stats.reused_tokens == 3
    assert answer(engine, PROMPT) == before


def test_the_same_prompt_again_runs_one_token(engine: Engine) -> None:
    answer(engine, PROMPT)
    answer(engine, PROMPT)
    assert engine.stats.prefilled_tokens == 0


def test_stop_reasons(engine: Engine) -> None:
    answer(engine, PROMPT, 3)
    assert engine.stop_reason == "length"
    full = answer(engine, PROMPT, 1000)
    assert engine.stop_reason == "context" and len(PROMPT) + len(full) == engine.info.max_context + 1
    stop = threading.Event()
    ids = []
    for token in engine.generate(PROMPT, GREEDY, 30, raw=True, stop=stop):
        ids.append(token.id)
        stop.set()
    assert engine.stop_reason == "stopped" and len(ids) <= 2
    stream = engine.generate(PROMPT, GREEDY, 30, raw=True)
    next(stream)
    stream.close()
    assert engine.stop_reason == "stopped" and engine.stats.phase == "idle"


def test_stop_during_prefill_keeps_what_was_prefilled(engine: Engine) -> None:
    engine.session.tokens = []
    stop = threading.Event()
    stop.set()
    assert answer(engine, PROMPT, stop=stop) == [] and engine.stop_reason == "stopped"


@pytest.mark.parametrize(("variant", "kept"), [("deepseek2_glm", 0), ("qwen35", 256)])
def test_stop_while_a_chunk_is_read(variant: str, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU executor asks in between; a state would be lost, so that its chunk is run to the end."""
    monkeypatch.setattr(cpu, "WATCH_S", 0.0)
    prompt = np.random.default_rng(4).integers(0, tiny.VOCAB, 500).tolist()
    path = tiny.write(tmp_path / "m.gguf", variant, "Q8_0")
    engines = [Engine.load(path, max_context=512, device="cpu", threads=1) for _ in range(2)]
    engine, executor = engines[0], engines[0].executor
    assert isinstance(executor, cpu.CPUExecutor)
    stop, reports = threading.Event(), list[int]()

    def stop_soon(done: int, total: int, reused: int) -> None:
        reports.append(done)
        if done:
            stop.set()

    ticks = np.zeros((executor.threads, len(executor._ops), 2), np.uint64)
    executor._context.ticks = ticks.ctypes.data
    assert answer(engine, prompt, on_prefill=stop_soon, stop=stop) == [] and engine.stop_reason == "stopped"
    executor._context.ticks = None
    ran = ticks[:, :, 0].any(0)
    assert ran[0] and ran[len(ran) // 2 : -1].any() == bool(kept)
    assert reports[-1] == engine.stats.prefilled_tokens == len(engine.session.tokens) == kept
    assert 0 < next(filter(None, reports)) < 100  # how far a chunk has come is reported too
    assert answer(engine, prompt) == answer(engines[1], prompt)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("prompt", "says"), [([], "empty"), ([1] * 65, "the context holds 64"), ([1, 301], "vocabulary of 301")]
)
def test_prompts_that_cannot_run(engine: Engine, prompt: list[int], says: str) -> None:
    with pytest.raises(TinychatError, match=says):
        answer(engine, prompt)


def test_logits_in_one_go_and_token_by_token_agree(engine: Engine) -> None:
    together, single = engine.logits(PROMPT), engine.logits(PROMPT, decode=True)
    assert together.shape == (len(PROMPT), 301) and together.dtype == np.float32
    assert np.linalg.norm(together - single) < 1e-5 * np.linalg.norm(together)


def test_a_saved_cache_serves_a_later_process(model: Path, speculation: str, tmp_path: Path) -> None:
    store = KVStore(1 << 30, tmp_path)
    prompt = (PROMPT * 5)[:30]
    first = Engine.load(model, max_context=64, device=speculation, store=store)
    expected = answer(first, prompt)
    assert first.save_cache()
    later = Engine.load(model, max_context=64, device=speculation, store=store)
    assert answer(later, prompt) == expected and later.stats.prefilled_tokens == 0
    other = tiny.write(tmp_path / "other.gguf", "llama", "Q8_0", seed=1)
    stranger = Engine.load(other, max_context=64, device=speculation, store=store)
    answer(stranger, prompt)
    assert stranger.stats.reused_tokens == 0


@pytest.mark.parametrize("context", [0, -1])
def test_a_context_the_model_does_not_have(model: Path, context: int) -> None:
    with pytest.raises(TinychatError, match=f"{context} tokens is not possible; this model has 1 to 512"):
        Engine.load(model, max_context=context, device="reference")


def test_a_context_above_the_trained_one_is_that(model: Path) -> None:
    """A default of the settings does not make a small model unloadable."""
    engine = Engine.load(model, max_context=100_000, device="reference")
    assert engine.info.max_context == 512 == engine.stats.context_max
    assert any("512 tokens, not 100,000" in note and "\n" not in note for note in engine.notes)


@pytest.mark.parametrize("ending", ["stopped", "length"])
def test_an_answer_that_ends_inside_a_character_has_no_part_of_it(engine: Engine, ending: str) -> None:
    """Byte tokens of random weights: many answers end between the bytes of a character."""
    inside = 0
    for seed in range(40):
        engine.session.tokens = []
        stop = threading.Event()
        text, ids = "", []
        limit = 12 if ending == "length" else None
        tokens = engine.generate(PROMPT, Sampling(temperature=2.0, seed=seed), limit, stop=stop)
        for token in tokens:
            text += token.text
            ids += [token.id] if token.id is not None else []
            if len(ids) == 12 and ending == "stopped":
                stop.set()
        if engine.stop_reason not in ("stopped", "length"):
            continue
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        expected = decoder.decode(
            b"".join(engine.tokenizer.token_bytes(i) for i in ids if not engine.tokenizer.is_special(i))
        )
        assert text == expected
        inside += bool(decoder.getstate()[0])
    assert inside >= 3


def test_not_enough_memory_is_told_before_anything_is_loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "available_memory", lambda: 100 << 20)
    with pytest.raises(TinychatError, match=r"not enough memory: .* of 104\.9 MB free"):
        Engine.load(model, device="cpu")


def test_dry_ends_at_the_breakers_of_the_vocabulary(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor gets the ids of all tokens with a newline, colon, quote or asterisk, and only where DRY is on."""
    told: list[Sampling] = []
    decode = engine.session.decode

    def watched(token: int, sampling: Sampling, *rest: Any) -> Iterator[tuple[int, float]]:
        told.append(sampling)
        return decode(token, sampling, *rest)

    monkeypatch.setattr(engine.session, "decode", watched)
    for multiplier in (0.0, 0.8):
        list(engine.generate(PROMPT, Sampling(temperature=0.0, dry_multiplier=multiplier), 2, raw=True))
    texts = {i: engine.tokenizer.token_text(i) for i in told[1].dry_breakers}
    assert told[0].dry_breakers == () and {"\n", ":", '"', "*"} <= set(texts.values())
    assert all(set(text) & set('\n:"*') for text in texts.values())


def test_dry_stops_a_repetition(engine: Engine) -> None:
    """A prompt that repeats itself: the token that would continue the repetition is not chosen again."""
    prompt = [6, 17, 250, 160, 6, 17, 250]
    for sampling, again in ((GREEDY, True), (Sampling(temperature=0.0, dry_multiplier=100.0), False)):
        engine.session.tokens = []
        (token,) = engine.generate(prompt, sampling, 1, raw=True)
        assert (token.id == 160) == again
