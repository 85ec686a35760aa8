"""Exceptions that nobody expected, in the running app: one line, the typed text is back, the app lives on."""

import contextlib
import stat

import pytest
from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widgets import Static

from tests.support.screens import until
from tests.support.scripted import INFO, Script, scripted
from tinychat import crash
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat import commands
from tinychat.ui.chat.message import NoticeLine


class Surprise(RuntimeError):
    """What no part of tinychat raises."""


def fail(*args, **options):
    raise Surprise("a value of\nno use")


async def fail_later(*args, **options):
    fail()


def taken() -> list[str]:
    """The crash reports, which are deleted: a test that leaves one fails."""
    texts = []
    for path in crash.reports():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        texts.append(path.read_text())
        path.unlink()
    return texts


def notes(app):
    return [str(n.content) for n in app.chat.transcript.query_children(NoticeLine)]


@contextlib.asynccontextmanager
async def running(**options):
    app = TinychatApp("m", INFO.path, open_backend=scripted(Script(["Hello!"])), **options)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: app.controller.ready and app.chat.is_mounted)
        await pilot.pause()
        yield app, pilot


async def lives_on(app, pilot):
    """It answers a question, so every part of it works."""
    before = len(app.controller.conversation.turns)
    app.chat.prompt.put("hello")
    await pilot.press("enter")
    turns = await until(
        pilot, lambda: not app.controller.busy and (t := app.controller.conversation.turns)[before + 1 :] and t
    )
    assert turns[-1].text == "Hello!" and app.is_running


async def said(app, pilot):
    """The line on the screen, which names the report."""
    line = (await until(pilot, lambda: [n for n in notes(app) if "internal error" in n]))[-1]
    assert "\n" not in line and str(crash.reports()[-1]) in line
    return line


@pytest.mark.parametrize(
    "typed", ["@~nosuchuser/", "see @" + "x" * 256, "/model ~nosuchuser/x.gguf", "/model http://[::1/x.gguf"]
)
async def test_a_name_that_no_file_has_is_one_line(typed):
    """Whether it was expected or not: what is not in the prompt any more was sent, or is a line that says why not."""
    async with running() as (app, pilot):
        for character in typed[:40]:
            app.chat.prompt.insert(character)
            await pilot.pause()
        app.chat.prompt.insert(typed[40:])
        await pilot.press("escape", "enter")
        await until(pilot, lambda: notes(app) or app.controller.conversation.turns)
        await until(pilot, lambda: not app.controller.busy)
        sent = [t.text for t in app.controller.conversation.turns if t.role == "user"]
        assert app.chat.prompt.text == typed or sent == [typed] or (typed.startswith("/") and notes(app))
        app.chat.prompt.put("")
        await lives_on(app, pilot)
    taken()


async def test_an_exception_while_a_message_is_sent(monkeypatch):
    async with running() as (app, pilot):
        with monkeypatch.context() as m:
            m.setattr(app.controller, "ask", fail)
            app.chat.prompt.put("my long message")
            await pilot.press("enter")
            line = await said(app, pilot)
        assert app.chat.prompt.text == "my long message" and not app.controller.conversation.turns
        assert "Surprise: a value of\\nno use" in line
        (report,) = taken()
        assert "test_faults.py" in report and "Surprise: a value of" in report and "my long message" not in report
        await lives_on(app, pilot)


async def test_an_exception_in_a_command(monkeypatch):
    async with running() as (app, pilot):
        with monkeypatch.context() as m:
            m.setattr(commands, "COMMANDS", tuple(commands.COMMANDS))
            m.setattr(commands, "find", fail)
            app.chat.prompt.put("/system you are a long text")
            await pilot.press("enter")
            await said(app, pilot)
        assert app.chat.prompt.text == "/system you are a long text"
        assert len(taken()) == 1
        await lives_on(app, pilot)


async def test_an_exception_in_the_handler_of_a_key(monkeypatch):
    async with running() as (app, pilot):
        monkeypatch.setattr(type(app.chat), "action_toggle_thinking", fail)
        monkeypatch.setattr(type(app.chat), "check_action", lambda *a: True)
        app.chat.prompt.put("a draft")
        await pilot.press("ctrl+t")
        await said(app, pilot)
        assert app.chat.prompt.text == "a draft" and len(taken()) == 1
        await lives_on(app, pilot)


async def test_an_exception_in_the_prompt_itself(monkeypatch):
    """The loop of the widget that a handler belongs to goes on as well."""
    async with running() as (app, pilot):
        with monkeypatch.context() as m:
            m.setattr(type(app.chat.prompt), "action_cursor_left", fail)
            m.setattr(type(app.chat.prompt), "_on_paste", fail_later)
            app.chat.prompt.put("a draft")
            await pilot.press("left")
            await said(app, pilot)
        assert app.chat.prompt.text == "a draft" and len(taken()) == 1
        await lives_on(app, pilot)


async def test_an_exception_in_a_worker_and_in_callbacks():
    async with running() as (app, pilot):
        app.chat.run_worker(fail_later())
        await said(app, pilot)
        (report,) = taken()
        assert "fail_later" in report
        app.chat.call_later(fail)
        app.chat.call_after_refresh(fail)
        app.chat.call_next(fail)
        await pilot.pause()
        await lives_on(app, pilot)


async def test_an_exception_in_a_timer_is_said_once_and_the_timer_goes_on():
    async with running() as (app, pilot):
        ticks = []

        def tick():
            ticks.append(1)
            fail()

        timer = app.chat.set_interval(0.01, tick)
        await until(pilot, lambda: len(ticks) >= 20)
        assert len([n for n in notes(app) if "internal error" in n]) == 1 and len(taken()) == 1
        timer.stop()
        await lives_on(app, pilot)


@pytest.mark.parametrize("stage", ["compose", "on_mount", "child"])
async def test_a_sheet_that_cannot_be_made_is_closed(stage):
    class Child(Static):
        def on_mount(self) -> None:
            if stage == "child":
                fail()

    class Sheet(ModalScreen[None]):
        def compose(self) -> ComposeResult:
            if stage == "compose":
                fail()
            yield Child("sheet")

        def on_mount(self) -> None:
            if stage == "on_mount":
                fail()

    async with running() as (app, pilot):
        closed = []
        app.push_screen(Sheet(), closed.append)
        await said(app, pilot)
        await until(pilot, lambda: app.screen is app.chat)
        assert closed == [None] and len(taken()) == 1
        await lives_on(app, pilot)


async def test_a_fault_behind_a_sheet_is_seen():
    async with running() as (app, pilot):
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is not app.chat)
        app.screen.call_later(fail)
        await until(pilot, lambda: [n for n in app._notifications if "internal error" in n.message])
        assert len(taken()) == 1
        await pilot.press("escape")
        await lives_on(app, pilot)


async def test_a_worker_that_outlives_its_sheet_is_no_fault():
    """As Textual's palette, which still fills its list when a key has closed it."""
    async with running() as (app, pilot):
        await pilot.press("f1")
        await until(pilot, lambda: app.screen is not app.chat)
        sheet = app.screen

        async def late():
            sheet.query_one("#rows")

        await pilot.press("escape")
        await until(pilot, lambda: sheet not in app.screen_stack)
        worker = app.run_worker(late)
        await until(pilot, lambda: worker.is_finished)
        assert worker.error is not None and not taken()
        await lives_on(app, pilot)


async def test_an_exception_before_the_screen_ends_with_one_line(monkeypatch, capsys):
    app = TinychatApp("m", INFO.path, open_backend=scripted(Script(["Hello!"])))
    monkeypatch.setattr(type(app.chat), "compose", fail)
    with pytest.raises(Surprise):
        async with app.run_test():
            pass
    said = capsys.readouterr().err
    assert app.return_code == 1 and len(taken()) == 1 and said.startswith("internal error") and "Traceback" not in said


async def test_a_report_that_cannot_be_written_is_said(monkeypatch, tmp_path):
    (tmp_path / "f").write_text("")
    async with running() as (app, pilot):
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "f"))
        app.chat.call_later(fail)
        line = await until(pilot, lambda: [n for n in notes(app) if "internal error" in n])
        assert "no report could be written: not a directory" in line[0]
        await lives_on(app, pilot)


def test_old_reports_go():
    for i in range(crash.KEPT + 5):
        crash.report(ValueError(str(i)))
    assert len(taken()) == crash.KEPT


def test_a_report_tells_no_conversation():
    secret = "what was asked in private"
    try:
        fail(secret)
    except Surprise as e:
        crash.report(e)
    (report,) = taken()
    assert secret not in report and "in fail" in report
