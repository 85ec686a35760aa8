"""Greedy answers against expected tokens."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import tiny
from tinychat.cli import main
from tinychat.engine import Engine, Token
from tinychat.engine.gguf import GGUF
from tinychat.measure import smoke
from tinychat.models import cache
from tinychat.models.registry import resolve


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model") / "m.gguf", "llama", "Q8_0", seed=3)


@pytest.fixture
def answer(path: Path) -> smoke.Smoke:
    (answer,) = smoke.check(lambda: Engine.load(path, device="cpu", threads=1), "m")
    return answer


def expect(monkeypatch: pytest.MonkeyPatch, path: Path, tokens: tuple[int, ...], **others: tuple[int, ...]) -> None:
    answers = {smoke.QUESTION: tokens, **others}
    monkeypatch.setitem(smoke.EXPECTED, GGUF.open(path).fingerprint(), smoke.Expected("m", "this test", answers))


def test_without_an_expectation_nothing_is_passed(answer: smoke.Smoke) -> None:
    assert answer.result == "unverified" and len(answer.token_ids) == smoke.LENGTH
    assert answer.ttft_s > 0 < answer.decode_tok_s and answer.load_s > 0


def test_every_way_to_differ(answer: smoke.Smoke, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got, stop = answer.token_ids[:5], answer.token_ids[5]
    original = Engine.load

    def load() -> Engine:
        engine = original(path, device="cpu", threads=1)
        engine.tokenizer.stop_ids = frozenset([stop])
        return engine

    assert stop not in got
    for expected, result, words in (
        (got, "passed", "this test"),
        ((*got[:2], got[2] + 1, *got[3:]), "failed", f"token 3 is {got[2]}"),
        ((*got, 7), "failed", "ends after 5"),
        (got[:4], "failed", "continues after"),
    ):
        expect(monkeypatch, path, expected)
        (found,) = smoke.check(load, "m")
        assert (found.result, words in found.detail) == (result, True), found
        assert found.token_ids == got[: len(expected) + 1]


def test_every_question_is_asked_from_an_empty_cache(
    answer: smoke.Smoke, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect(monkeypatch, path, answer.token_ids, **{smoke.QUESTION + " ": (7,), "Who?": (answer.token_ids[0] + 1, 2)})
    asked: list[int] = []

    def load() -> Engine:
        engine = Engine.load(path, device="cpu", threads=1)
        generate = engine.generate

        def watched(*args: object, **options: object) -> Iterator[Token]:
            yield from generate(*args, **options)  # type: ignore[arg-type]
            asked.append(engine.stats.reused_tokens)

        monkeypatch.setattr(engine, "generate", watched)
        return engine

    found = smoke.check(load, "m")
    assert [f.question for f in found] == list(smoke.EXPECTED[GGUF.open(path).fingerprint()].answers)
    assert asked == [0, 0, 0] and found[0].token_ids[:-1] == answer.token_ids
    assert {f.result for f in found} == {"failed"} and all(f.ttft_s and f.load_s for f in found)


def test_what_cannot_be_loaded_has_failed(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    (found,) = smoke.check(lambda: Engine.load(tmp_path / "x.gguf"), "x")
    assert found.result == "failed" and found.detail and not found.token_ids


def test_the_table_is_safe(answer: smoke.Smoke, capsys: pytest.CaptureFixture[str]) -> None:
    from tinychat.console import show

    show(smoke.table([replace(answer, text="\x1b[31m[red]\n", result="failed")]))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "[red]" in out and "failed" in out


def test_command(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["smoke", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["passed"], shown["failed"], shown["unverified"]) == (0, 0, 1)
    expect(monkeypatch, path, (1, 2, 3))
    assert main(["smoke", str(path)]) == 1
    out, err = capsys.readouterr()
    assert "failed" in out and "1 failed" in err
    assert main(["smoke"]) == 1 and "the cache holds no model" in capsys.readouterr().err
    assert main(["smoke", "glm-4.7:flash"]) == 1 and "cache pull" in capsys.readouterr().out


def test_the_real_model_passes(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.add(smollm2_path, resolve("smollm2"))
    assert main(["smoke", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["passed"], shown["failed"], shown["unverified"]) == (5, 0, 0)
    assert shown["results"][0]["text"] == "The capital of France is Paris."
    assert all(r["load_s"] > 0 and r["ttft_s"] > 0 and r["decode_tok_s"] > 0 for r in shown["results"])
