"""Drafts: what the index finds, how many are run, and that an answer is the same with any number of them."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tinychat.engine import drafts
from tinychat.engine.drafts import LONGEST, TextIndex
from tinychat.engine.engine import Engine
from tinychat.engine.speculation import Speculate, Speculation
from tinychat.engine.stats import Stats
from tinychat.kernels.sampling import Sampling

MOST = 15


def longest(text: Sequence[int]) -> int:
    """How many of the last tokens stand in the text before, at most LONGEST; 0 for a single one."""
    found = 0
    for n in range(2, min(LONGEST, len(text) - 1) + 1):
        if any(text[i : i + n] == text[-n:] for i in range(len(text) - n)):
            found = n
    return found


@pytest.mark.parametrize("letters", [2, 20, 40])
def test_the_longest_match(letters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a search through all of the text, where the places to look at are not too many."""
    monkeypatch.setattr(drafts, "INTERRUPTED", LONGEST + 1)
    rng, index, text = random.Random(letters), TextIndex(10_000), list[int]()
    index.start([])
    for _ in range(400):
        token = index.expected if index.expected is not None and rng.random() < 0.5 else rng.randrange(letters)
        text.append(token)
        index.add(token)
        want = longest(text)
        assert index.length == want if letters > 2 else (index.length > 0) == (want > 0) and index.length <= want
        if n := index.length:
            draft = index.draft(5)
            places = [i for i in range(len(text) - n) if text[i : i + n] == text[-n:]]
            assert len(draft) == 5 and any(text[i + n : i + n + 5] == draft[: len(text) - i - n] for i in places)
        else:
            assert index.draft(5) == []


def test_a_draft_goes_on_as_the_text_does() -> None:
    index = TextIndex(100)
    index.start([9, 1, 2, 3, 1, 2])
    assert index.length == 2 and index.draft(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_match_goes_on_behind_one_other_token() -> None:
    index = TextIndex(1000)
    index.start([*range(100, 120), 7, *range(100, 106)])
    assert index.length == 6 and index.reach == 7
    index.add(8)  # for 106
    assert index.length == 1 and index.reach == 6 and index.draft(2) == [107, 108]
    index.add(107)
    assert index.length == 6 and index.draft(1) == [108]
    for token in (8, 9):  # and behind a second one it does not
        index.add(token)
    assert index.length == 0 and index.reach == 2 and index.draft(1) == []


def test_an_edited_conversation_is_extended_and_another_one_forgets_it() -> None:
    index, first = TextIndex(1000), list(range(100, 160))
    index.start(first)
    for token in (7, 8, 9, 10):
        index.add(token)
    index.start([*first[:50], 1, 2, 7, 8])
    assert index.draft(2) == [9, 10]  # of the answer before the edit
    index.start([7, 80, 3, 7, 80])
    assert index.draft(1) == [3]
    index.start([*range(40), 7, 80])
    assert index.length == 0 and len(index.tokens) == 42
    small = TextIndex(70)
    small.start(first)
    small.start([*first[:50], 1, 2, 3])
    small.start([*first[:50], *range(30)])
    assert len(small.tokens) == 80  # over its limit it keeps the prompt alone


def learned(mode: Speculate = "auto", repeated: int = 20, singles: int = 1) -> tuple[Speculation, Stats]:
    """A speculation that knows a text, whose first tokens stand at its end again, and how long a single step takes."""
    stats = Stats()
    speculation = Speculation(mode, MOST, 1000, stats)
    speculation.start([*range(200), *range(repeated)])
    for _ in range(singles):
        speculation.took("", 0, 1.0)
    return speculation, stats


def run(speculation: Speculation, tokens: Sequence[int], cost: float) -> int:
    """Gives an answer of `tokens`; a step of n tokens costs 1 + cost * (n - 1). Returns the steps."""
    rest, steps = list(tokens), 0
    while rest:
        drafts = speculation.drafts(MOST)
        accepted = next((i for i, d in enumerate(drafts) if i + 1 >= len(rest) or rest[i] != d), len(drafts))
        for i in range(accepted + 1):
            speculation.took("text" if i else "", len(drafts), 0.0 if i else 1 + cost * len(drafts))
            speculation.add(rest.pop(0))
        steps += 1
    return steps


def test_long_drafts_where_the_text_is_copied() -> None:
    speculation, stats = learned()
    steps = run(speculation, range(20, 180), 0.2)
    assert steps < 20 and stats.accepted_tokens + steps == 160 and stats.speculation_gain > 2.5


def test_none_where_they_cost_more_than_they_bring() -> None:
    speculation, stats = learned()
    assert run(speculation, range(20, 180), 1.2) > 120  # a step of n tokens takes longer than n steps
    assert stats.speculation_gain > 0.9


def test_off_where_nothing_is_accepted_and_on_again() -> None:
    speculation, stats = learned()
    rng = random.Random(1)
    broken = [t for i in range(300) for t in (i % 100, i % 100 + 1, 1000 + rng.randrange(9000))]  # pairs of the text
    run(speculation, broken[:450], 0.2)
    before = stats.drafted_tokens
    run(speculation, broken[450:], 0.2)
    assert stats.drafted_tokens == before  # what the pairs promise was learned
    accepted = stats.accepted_tokens
    run(speculation, range(20, 180), 0.2)
    assert stats.accepted_tokens > accepted + 100


def guessing(share: float, cost: float, tokens: int = 400) -> Stats:
    """An answer without repetitions by a model that guesses right that often; a step of two costs 1 + `cost`. What the
    next step will be is told before it in nine of ten steps, and wrongly in few."""
    (speculation, stats), rng, place = learned(repeated=0, singles=3), random.Random(3), 0
    told, wrong, steps, expected = 0, 0, 0, -1
    while place < tokens:
        right = 1000 + place
        drafts = speculation.drafts(MOST, lambda right=right: right if rng.random() < share else 0)
        accepted, steps = drafts == [right], steps + 1
        told, wrong = told + (expected >= 0), wrong + (expected not in (-1, len(drafts)))
        expected = len(drafts) if speculation.alike(len(drafts), True) else -1
        assert not drafts or speculation.source == "mtp"
        for i in range(1 + accepted):
            speculation.took("mtp" if i else "", len(drafts), 0.0 if i else 1 + cost * len(drafts))
            speculation.add(1000 + place)
            place += 1
    assert told > 0.9 * steps and wrong < 0.02 * steps
    return stats


def test_guesses_where_they_pay() -> None:
    often = guessing(0.8, 0.2)
    assert often.mtp_accepted_tokens > 150 and often.speculation_gain > 1.2
    assert often.decode_steps + often.mtp_accepted_tokens in (403, 404)  # also the three of `learned`
    wrong, dear = guessing(0.05, 0.2), guessing(0.8, 1.5)
    assert wrong.mtp_drafted_tokens < 60 and wrong.speculation_gain > 0.95
    assert dear.mtp_drafted_tokens < 20 and dear.speculation_gain > 0.95


def test_guesses_again_where_they_would_pay() -> None:
    """What is not run is asked for now and then."""
    speculation, stats = learned(repeated=0, singles=3)
    asked, place = 0, 0

    def guess() -> int:
        nonlocal asked
        asked += 1
        return 1000 + place if place > 300 else 0

    for place in range(2000):
        drafts = speculation.drafts(MOST, guess)
        speculation.took("", len(drafts), 1 + 0.2 * len(drafts))
        speculation.add(1000 + place)
        if place == 300:
            assert 10 < stats.mtp_drafted_tokens < 60 and asked < stats.mtp_drafted_tokens + 12
            drafted = stats.mtp_drafted_tokens
    assert stats.mtp_drafted_tokens > drafted + 300


def test_a_fixed_number_is_always_run() -> None:
    speculation, _ = learned(3)
    assert speculation.drafts(MOST) == [20, 21, 22] and speculation.drafts(2) == [20, 21]
    off, _ = learned(0)
    assert off.drafts(MOST) == []


def test_one_disturbed_step_does_not_end_it() -> None:
    speculation, _ = learned()
    run(speculation, range(20, 60), 0.2)
    n = len(speculation.drafts(MOST))
    speculation.took("", n, 1000.0)
    assert n and speculation.drafts(MOST)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_the_same_and_its_figures_add_up(temperature: float, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "qwen3moe", "Q4_K")
    sampling, prompt = Sampling(temperature=temperature, top_k=2, seed=3), [6, 17, 250, 33, 7, 7, 120, 6, 17]
    answers = []
    modes: tuple[Speculate, ...] = (0, "auto", 1, 4, 15)
    for mode in modes:
        engine = Engine.load(path, max_context=256, device="cpu", speculate=mode)
        tokens = list(engine.generate(prompt, sampling, 230, raw=True))
        s = engine.stats
        answers.append([(t.id, t.logprob, t.text) for t in tokens])
        assert s.generated_tokens == s.decode_steps + s.accepted_tokens + s.forced_tokens == len(tokens)
        assert s.accepted_tokens == sum(t.source == "text" for t in tokens) <= s.drafted_tokens
        assert (s.drafted_tokens > 0) == (s.speculation_gain > 0) and (mode != 0 or not s.drafted_tokens)
        engine.close()
    assert all(answer == answers[0] for answer in answers)


def test_time_that_other_programs_take_is_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single steps are made to wait; those with drafts look no cheaper by that."""
    engine = Engine.load(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), max_context=256, device="cpu", threads=1)
    verify = engine.executor.verify

    def waiting(token: int, drafts: Sequence[int], *rest: Any, **named: Any) -> Iterator[tuple[int, float]]:
        if not drafts:
            time.sleep(0.02)
        return verify(token, drafts, *rest, **named)

    monkeypatch.setattr(engine.executor, "verify", waiting)
    list(engine.generate([*range(30), *range(20)], Sampling(temperature=0.0), 60, raw=True))
    speculation = engine.session.speculation
    assert engine.stats.decode_steps > 5 and 0 < speculation._single < 0.01
    engine.close()
