"""`tinychat run --tools`: calls are run, and what would ask is refused where there is no terminal."""

from __future__ import annotations

import importlib
import json
import os
import pty
import sys
from pathlib import Path

import pytest

from tests.chat.test_tools import call
from tests.support.scripted import Script, ScriptedBackend
from tinychat.chat.calling import ROUNDS
from tinychat.cli import main

run_module = importlib.import_module("tinychat.commands.run")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("alpha\n")
    return tmp_path / "in"


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, answers: list[str], *more: str) -> Script:
    script = Script(answers)
    monkeypatch.setattr(run_module, "_local", lambda *_: ScriptedBackend(script))
    assert main(["run", "smollm2:135m", "go", "--tools", str(folder), *more]) == 0
    return script


def test_reading_works_without_a_terminal_and_writing_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [call("read_file", path="a.txt") + call("write_file", path="b.txt", content="x"), "It says alpha."]
    script = run(monkeypatch, folder, answers, "--json")
    out = json.loads(capsys.readouterr().out)
    assert out["text"] == "It says alpha." and "alpha" in script.prompts[-1]
    assert [(c["name"], c["state"], c["round"]) for c in out["calls"]] == [
        ("read_file", "done", 1),
        ("write_file", "refused", 1),
    ]
    assert "no terminal" in out["calls"][1]["result"] and not (folder / "b.txt").exists()


def test_calls_are_said_on_stderr(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, folder, ["Let me see. " + call("glob", pattern="*\x1b[2J"), "Nothing."])
    out = capsys.readouterr()
    assert out.out == "Let me see.\nNothing.\n" and "▸ glob" in out.err and "\x1b" not in out.err


def test_the_rounds_have_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [call("glob", pattern=f"*{i}") for i in range(ROUNDS + 2)]
    assert len(run(monkeypatch, folder, many).prompts) == ROUNDS + 1


def test_one_call_again_and_again_ends_the_tools(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [call("read_file", path="a.txt")] * 3 + ["It says alpha."]
    script = run(monkeypatch, folder, answers, "--json")
    out = capsys.readouterr()
    assert json.loads(out.out)["text"] == "It says alpha." and "the same call of read_file" in out.err
    assert "Already called" in script.prompts[2] and ["<tools>" in p for p in script.prompts] == [True] * 3 + [False]


def test_a_terminal_is_asked_and_shown_the_difference(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(os.dup(theirs), "w") as err, os.fdopen(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stderr", err)
        os.write(ours, b"y\nn\n")
        answers = [call("write_file", path="b.txt", content="x\n"), call("write_file", path="c.txt", content="x\n")]
        run(monkeypatch, folder, [*answers, "Done."])
        err.flush()
        shown = ""
        while "Create c.txt?" not in shown:
            shown += os.read(ours, 100_000).decode()
    assert "Create b.txt?" in shown and "+x" in shown
    assert (folder / "b.txt").read_text() == "x\n" and not (folder / "c.txt").exists()


def test_what_is_no_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "smollm2:135m", "go", "--tools", str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err.splitlines()[-1]
