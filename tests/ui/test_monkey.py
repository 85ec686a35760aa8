"""Random events against the app: a short run of scripts/monkey.py, and what its long runs have found."""

import contextlib

import pytest
from textual import events
from textual.command import CommandList, CommandPalette
from textual.geometry import Offset
from textual.widgets import OptionList

from scripts import monkey
from tests.support.screens import until
from tests.support.scripted import INFO, Script, scripted
from tinychat import crash
from tinychat.errors import TinychatError
from tinychat.models.registry import resolve
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.screens.picker_rows import at_place


@pytest.fixture
def sealed(tmp_path, monkeypatch):
    for name, value in monkey.sealed(tmp_path, tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.asynccontextmanager
async def running(script=None, size=(60, 20)):
    app = TinychatApp("m", INFO.path, open_backend=scripted(script or Script(["Hello!"])))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.controller.ready and app.chat.is_mounted)
        yield app, pilot
        await pilot.pause()
    assert not crash.reports()


async def test_200_random_events(sealed, monkeypatch):
    monkeypatch.setattr("textual.screen.UPDATE_PERIOD", 0.2)  # painting is most of the time
    counts = await monkey.monkey(200, 3, sealed)
    assert sum(counts.values()) >= 200 and min(counts[kind] for kind in ("key", "type", "command", "paste", "stop")) > 5


@pytest.mark.parametrize(
    "text", ["🙂日本 word", "- > 1. ```\n- > 日x", "|a|b|\n|-|-|\n|🙂🙂|x y|", "```py\nx = '日'\n```"]
)
@pytest.mark.parametrize("plain", [True, False])
def test_a_terminal_of_no_columns(text, plain):
    view = MarkdownView(text, plain=plain)
    for width in range(5, -1, -1):
        assert view.get_content_height(None, None, width) > 0


NAMES = ("~nosuchuser/", "~nosuchuser/x.gguf", "x" * 300 + ".gguf", "a\0.gguf", "http://[::1/x", "http://\ud800/x.gguf")


@pytest.mark.parametrize("name", NAMES)
def test_a_place_that_cannot_be_is_one_line(name):
    for job in (lambda: at_place(name, ()), lambda: resolve(name)):
        with pytest.raises(TinychatError) as e:
            job()
        assert "\n" not in str(e.value)


async def test_undo_and_deleting_where_the_scroll_bar_goes():
    async with running() as (app, pilot):
        text = "\n".join(map(str, range(40)))
        app.chat.prompt.post_message(events.Paste(text))
        await until(pilot, lambda: app.chat.prompt.text == text)
        await pilot.press("ctrl+z")
        assert app.chat.prompt.text == ""
        await pilot.press("ctrl+y")
        await until(pilot, lambda: app.chat.prompt.text == text)
        await pilot.press("f7", "delete", "a")
        assert app.chat.prompt.text == "a" and app.chat.prompt.cursor_location == (0, 1)


async def test_the_palette_again_while_another_one_closes():
    async with running() as (app, pilot):
        app.action_command_palette()
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        app.pop_screen()
        app.action_command_palette()
        await until(pilot, lambda: isinstance(app.screen, CommandPalette))
        await until(pilot, lambda: app.screen.query(OptionList))
        app.screen.query_one(OptionList).highlighted = 0
        await pilot.press("pageup", "pagedown", "escape")
        await until(pilot, lambda: app.screen is app.chat)
        app.action_command_palette()
        await until(pilot, lambda: app.screen.query(CommandList) and app.screen.query_one(CommandList).option_count)
        for _ in range(6):  # in one burst
            app.post_message(events.Key("enter", "\r"))
        await until(pilot, lambda: not isinstance(app.screen, CommandPalette))
        await until(pilot, lambda: not app.screen.is_modal or app.screen.dismiss() is None)
        await app.chat.run_command("theme")
        await until(pilot, lambda: app.screen.query(CommandList) and app.screen.query_one(CommandList).option_count)
        app.screen.dismiss()
        app.screen.dismiss()
        await pilot.press("x")
        assert app.screen is app.chat and app.chat.is_running and app.chat.prompt.text == "x"
        app.copy_to_clipboard("half a character: \ud800")


async def test_a_click_on_what_has_gone():
    """A row of a list that has become shorter, and a widget without a parent, both still painted."""
    async with running() as (app, pilot):
        app.chat.prompt.put("/")
        rows = app.chat.box.list
        await until(pilot, lambda: rows.display and rows.region.height > 3)
        at = rows.region.offset + Offset(3, 2)
        rows._options.clear()
        for kind in (events.MouseDown, events.MouseUp):
            app.post_message(kind(None, *at, 0, 0, 1, False, False, False, *at))
        await pilot.pause()
        widget = app.screen.get_widget_at(*at)[0]
        parent, widget._parent = widget._parent, None
        app.post_message(events.MouseDown(None, *at, 0, 0, 1, False, False, False, *at))
        await pilot.pause()
        widget._parent = parent


async def test_an_answer_begun_by_the_user_is_given_again():
    """One message on the screen, not what came the first time with the new text behind it."""
    async with running(Script([" is four.", " is 4."])) as (app, pilot):
        app.chat.prompt.put("2 + 2?")
        await pilot.press("enter")
        for text in ("/start It", "/regenerate"):
            await until(pilot, lambda: app.controller.ready and not app.controller.busy)
            await app.chat.run_command(text[1:])
            await until(pilot, lambda: not app.controller.busy)
            await app.chat.apply()
        answer = app.chat.transcript.last_answer
        assert app.controller.conversation.turns[1].text == answer.view.source == "It is 4."
