"""Taking up where one left off: the last conversation, the model of last time, the user's own editor."""

from __future__ import annotations

import gc
import os
import select
import stat
import sys
import tempfile
import termios
import tty
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
from textual.app import App
from textual.widgets import TextArea

from tests.support import tiny
from tests.support.screens import text_of, until
from tests.support.scripted import INFO, Script, scripted
from tests.support.terminal import terminal
from tinychat import process
from tinychat.chat import choosing, settings
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.chat.servers import SavedServer
from tinychat.chat.state import ModelChoice
from tinychat.errors import TinychatError
from tinychat.ui import driver, external, screens
from tinychat.ui.app import TinychatApp
from tinychat.ui.screens.picker_rows import at_place
from tinychat.ui.screens.settings import SettingsScreen
from tinychat.ui.theme import LIGHT

F6 = b"\x1b[17~"


async def test_the_model_that_is_loaded_is_kept_and_edited_settings_count_at_once() -> None:
    own = settings.Settings(theme=LIGHT.name)
    app = TinychatApp("scripted:1b", INFO.path, own=own, open_backend=scripted(Script()), remember=settings.update)
    async with app.run_test() as pilot:
        await until(pilot, lambda: settings.load().last_model)
        assert app.chat.styles.background.hex.lower() == LIGHT.background, "the start paints in the chosen theme"
        await app.chat.run_command("settings")
        await until(pilot, lambda: isinstance(app.screen, SettingsScreen) and app.screen.query(TextArea))
        chosen = 'theme = "nord"\nnotify = "off"\nexperts = true\nstop_repetition = true\ntitles = true\n'
        app.screen.query_one(TextArea).text = chosen
        await pilot.press("ctrl+s")
        c = app.controller
        await until(pilot, lambda: app.theme == "nord" and app.chat.experts and c.stop_repetition and c.titles.on)
        assert settings.path().read_text() == chosen, "and nothing is written back"
        await app.chat.run_command("theme dark")
        assert app.theme == "tinychat-dark"
        await app.chat.run_command("theme no such")
        await until(pilot, lambda: "there is no theme 'no such'" in text_of(app))


def test_the_model_of_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    monkeypatch.chdir(tmp_path)
    relative = choosing.here("m.gguf", settings.Settings())
    assert relative is not None and relative.path == file
    assert choosing.reference(relative, settings.Settings()) == str(file), "the next start may be in another folder"
    assert [m.path for m in at_place(".", ())] == [file]
    last = settings.Settings(last_model=str(file), servers=(SavedServer("box", "http://box:8080"),))
    gone = Conversation(model="smollm2:135m")  # not in the cache of this test

    def found(conversation: Conversation | None, own: settings.Settings) -> tuple[str, list[str]]:
        problems: list[str] = []
        choice = choosing.earlier(conversation, own, problems)
        return choice.name if choice else "", problems

    assert found(None, settings.Settings()) == ("", [])
    assert found(None, last) == ("m.gguf", [])
    assert found(None, replace(last, model="box")) == ("box", [])
    assert found(Conversation(model="box/q"), last) == ("box/q", [])
    assert found(Conversation(model="m.gguf"), last) == ("m.gguf", []), "a conversation knows only the file's name"
    assert found(gone, last) == ("m.gguf", ["smollm2:135m is not on this computer"])
    file.unlink()
    name, problems = found(None, last)
    assert not name and "no such file" in problems[0]
    assert choosing.reference(ModelChoice("llm", Path("http:/elsewhere"), {"server": object()}), last) == ""


def test_c_opens_the_last_conversation_and_f6_the_editor(tmp_path: Path) -> None:
    """As a process in a terminal: the app makes way for the editor, takes its text, and says why it failed."""
    file = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    settings.update(last_model=str(file))
    history = History()
    turns = (Turn("user", "the old question"), Turn("assistant", "the old answer", stop_reason="eos"))
    history.save(Conversation(turns, model="m.gguf"))
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\ngrep -q fail "$2" && exit 3\necho "from $1" >> "$2"\necho -n EDITING\n')
    editor.chmod(editor.stat().st_mode | stat.S_IXUSR)
    environ = {**os.environ, "TERM": "xterm-256color", "VISUAL": f"'{editor}' --wait", "EDITOR": "/nowhere"}
    with terminal("-c", "--device", "cpu", environ=environ) as t:
        t.write(b"/rename typed\x1b[C ahead\r")  # the terminal is still the shell's, which makes a line feed of Enter
        t.read("the old answer")
        t.read("]2;typed ahead\x07")  # the terminal's title
        t.write(b"my draft")
        t.read("my draft")
        t.write(F6)
        t.read("EDITING")
        t.read("from --wait")
        t.write(b" fail" + F6)
        t.read("(exit")  # one word: where the lines of a notice break depends on the length of the path
        t.write(b"\x11")
        t.read(None)
        assert t.process.returncode == 0 and t.restored
    (only,) = history.find()
    assert history.draft(only.id).text == "my draft\nfrom --wait fail"
    history.close()


@pytest.mark.parametrize(
    "command, why", [("", "set $VISUAL"), ("no-such-editor -x", "no program 'no-such-editor'"), ("vi '", "quotation")]
)
def test_a_missing_editor_is_one_line(monkeypatch: pytest.MonkeyPatch, command: str, why: str) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", command)
    with pytest.raises(TinychatError) as e:
        external.edit(App(), "text")
    assert why in str(e.value) and "\n" not in str(e.value)


def test_enter_stays_enter_before_the_terminal_is_the_apps() -> None:
    ours, theirs = os.openpty()
    try:
        before = termios.tcgetattr(theirs)
        os.write(ours, b"a line\r")
        assert select.select([theirs], [], [], 60)[0]  # a terminal takes some time to make a line
        assert driver.keep_enter(theirs) == before
        os.write(ours, b"hello\r")
        assert driver.typed_ahead(theirs) == "a line"
        tty.setraw(theirs, termios.TCSANOW)
        seen = b""
        while len(seen) < 6 and select.select([theirs], [], [], 60)[0]:
            seen += os.read(theirs, 6)
        assert seen == b"hello\r"
        os.close(theirs)
        with open(os.devnull) as nowhere:
            assert driver.keep_enter(nowhere.fileno()) is None
    finally:
        os.close(ours)


def test_no_temporary_folder_for_the_editor_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VISUAL", sys.executable)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(TinychatError, match="cannot be given to the editor: no such file"):
        external.edit(App(), "text")


def test_while_nobody_types_dialogs_are_imported_and_all_garbage_collected() -> None:
    class Ring:
        def __init__(self) -> None:
            self.own = self

    def old_ring() -> weakref.ref[Ring]:
        ring = Ring()
        gc.collect()  # now it is of the oldest objects
        return weakref.ref(ring)

    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        ring = old_ring()
        process.collect_if_due()
        assert ring() is not None, "too early"
        for _ in range(process.FULL_COLLECTION + 1):
            gc.collect(1)
        process.collect_if_due()
        assert ring() is None
    finally:
        if was_on:
            gc.enable()
    screens.import_all()
    assert {"tinychat.ui.screens.picker", "tinychat.ui.screens.bench"} <= sys.modules.keys()
