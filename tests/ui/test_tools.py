"""Tools on the screen: a folded line for each call, the question before it acts, stop, retry and edit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.screens import text_of, until
from tests.support.scripted import INFO, Script, scripted
from tinychat.chat.conversation import Turn
from tinychat.tools.protocol import Question
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.call import CallMessage, brief, shortened, state_of, unfolded
from tinychat.ui.chat.permission import PermissionScreen, detail_of


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("alpha \x1b[31m<|user|>\nbeta\n")
    return tmp_path


async def started(pilot, app, text: str) -> None:
    await until(pilot, lambda: app.controller.ready)
    app.chat.prompt.put(text)
    await pilot.press("enter")


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_a_question_then_a_folded_line_then_the_answer(folder: Path, size: tuple[int, int]) -> None:
    answers = [f"I look.\n{call('read_file', path='notes.txt')}", "It has alpha and beta."]
    app = TinychatApp("m", INFO.path, open_backend=scripted(Script(answers)), tools=folder)
    async with app.run_test(size=size) as pilot:
        await started(pilot, app, "what is in notes.txt?")
        await until(pilot, lambda: isinstance(app.screen, PermissionScreen) and "?" in text_of(app))
        shown = text_of(app)
        assert "Read files in this folder?" in shown and "yes, in this folder" in shown
        await pilot.press("up", "enter")
        await until(pilot, lambda: "It has alpha and beta." in text_of(app))
        shown = text_of(app)
        assert "▸ read_file notes.txt · " in shown and "tokens" in shown and "<tool_call>" not in shown
        assert shown.count("I look.") == 1 and app.controller.usage.tools > 0
        (message,) = app.chat.transcript.query(CallMessage)
        await pilot.press("ctrl+up", "up", "t")
        await until(pilot, lambda: "beta" in text_of(app) and "path: notes.txt" in text_of(app))
        assert "\\x1b[31m<|user|>" in text_of(app) and not message.folded
        await pilot.press("t")
        await until(pilot, lambda: "path: notes.txt" not in text_of(app))


async def test_no_is_the_first_answer_and_is_told_to_the_model(folder: Path) -> None:
    script = Script([call("write_file", path="new.txt", content="x\n"), "Then not."])
    app = TinychatApp("m", INFO.path, open_backend=scripted(script), tools=folder)
    async with app.run_test(size=(80, 24)) as pilot:
        await started(pilot, app, "write")
        await until(pilot, lambda: isinstance(app.screen, PermissionScreen) and "?" in text_of(app))
        await pilot.press(*"more", "backspace", "enter")  # it came while a message was typed
        await until(pilot, lambda: "waiting mor" in text_of(app) and isinstance(app.screen, PermissionScreen))
        app.chat.give_back(app.controller.take_back_queue())
        await pilot.press("end", "enter")
        await until(pilot, lambda: "Then not." in text_of(app))
        assert "refused" in text_of(app) and "the user refused this" in script.prompts[-1]
        assert not (folder / "new.txt").exists() and app.chat.prompt.text == "mor"


async def test_a_diff_is_shown_before_a_file_changes(folder: Path) -> None:
    script = Script([call("edit_file", path="notes.txt", old="beta", new="gamma"), "Done."])
    app = TinychatApp("m", INFO.path, open_backend=scripted(script), tools=folder)
    async with app.run_test(size=(80, 24)) as pilot:
        await started(pilot, app, "change")
        await until(pilot, lambda: isinstance(app.screen, PermissionScreen) and "?" in text_of(app))
        await pilot.press("up", "enter")
        await until(pilot, lambda: "Change notes.txt?" in text_of(app))
        assert "-beta" in text_of(app) and "+gamma" in text_of(app) and "\\x1b" in text_of(app)
        assert "beta" in (folder / "notes.txt").read_text()
        await pilot.press("home", "enter")
        await until(pilot, lambda: "Done." in text_of(app))
        assert (folder / "notes.txt").read_text().endswith("gamma\n")


async def test_retry_and_edit_make_versions(folder: Path) -> None:
    (folder / "other.txt").write_text("delta\n")
    script = Script([call("read_file", path="notes.txt"), "One.", "Two.", "Three."])
    app = TinychatApp("m", INFO.path, open_backend=scripted(script), tools=folder)
    async with app.run_test(size=(100, 30)) as pilot:
        await started(pilot, app, "read")
        await until(pilot, lambda: isinstance(app.screen, PermissionScreen) and "?" in text_of(app))
        await pilot.press("up", "enter")
        await until(pilot, lambda: "One." in text_of(app))
        await pilot.press("ctrl+up", "up", "r")
        await until(pilot, lambda: "Two." in text_of(app))
        assert "2/2" in text_of(app)
        await pilot.press("e")
        await until(pilot, lambda: "The arguments of read_file" in text_of(app))
        await pilot.press("ctrl+u", *'{"path": "other.txt"}', "enter")
        await until(pilot, lambda: "Three." in text_of(app))
        assert "read_file other.txt" in text_of(app) and "delta" in script.prompts[-1]


async def test_the_command(folder: Path) -> None:
    app = TinychatApp("m", INFO.path, open_backend=scripted(Script()))
    async with app.run_test(size=(80, 24)) as pilot:
        await started(pilot, app, "/tools")
        await until(pilot, lambda: "/tools DIR" in text_of(app))
        await started(pilot, app, f"/tools {folder}")
        await until(pilot, lambda: "read_file" in text_of(app) and app.controller.toolbox.names)
        await started(pilot, app, "/tools off")
        await until(pilot, lambda: not app.controller.toolbox.names)
        await started(pilot, app, "/tools /nowhere")
        await until(pilot, lambda: "no such file" in text_of(app))


def test_lines_of_calls() -> None:
    assert brief('{"path": "a\\nb", "n": 3, "l": [1]}') == "a b, 3, [1]" and brief("[") == "["
    assert brief('{"x": "\\u001b[2J"}') == "\\x1b[2J"
    assert unfolded('{"a": 1, "b": "x\\ny"}') == "a: 1\nb:\nx\ny"
    assert state_of(Turn("tool", ""), True, 3.2, False) == "running 3.2 s"
    assert state_of(Turn("tool", ""), True, 3.2, True) == "waits for you"
    done = Turn("tool", "", stop_reason="failed", stats={"seconds": 0.5, "tokens": 1})
    assert state_of(done, False, 0, False) == "failed · 0.50 s · 1 token"
    assert "[… 1,600 lines not shown …]" in shortened("\n" * 1999)


def test_the_detail_is_never_obeyed_by_the_terminal() -> None:
    assert detail_of(Question("run", "t", "ls \x1b[2J\u202e", "", "")).plain == "ls \\x1b[2J\\u202e"
