"""Copying: which tool takes the text, what is said about it, and what a selection holds."""

import os

import pytest
from textual.geometry import Offset
from textual.selection import Selection

from tests.ui.test_chat import desk
from tinychat.ui import clipboard


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Installs a program that writes its arguments and its input to a file, or fails."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def install(name, fails=False):
        taken = tmp_path / f"{name}.taken"
        program = tmp_path / name
        keeps = f'echo "$@" > {taken}; cat >> {taken}'
        program.write_text(f"#!/bin/sh\n{'exit 1' if fails else keeps}\n")
        program.chmod(0o755)
        return taken

    return install


def test_the_first_tool_that_works_takes_the_text(tool, monkeypatch):
    assert clipboard.give("nowhere to go") == ""
    taken = tool("tmux")
    monkeypatch.setenv("TMUX", "/tmp/x")
    assert clipboard.give("a\nü") == "tmux" and taken.read_text() == "load-buffer -w -\na\nü"
    tool("wl-copy", fails=True)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    taken.unlink()
    assert clipboard.give("b") == "tmux" and taken.read_text().endswith("b")


def said(d):
    return [n.message for n in d.app._notifications]


async def test_copying_says_who_has_it(tool, monkeypatch):
    async with desk("the answer") as d:
        await d.ask("a")
        await d.send("/copy answer")
        await d.until(lambda: "sent the answer to the terminal" in said(d))
        taken = tool("xclip")
        monkeypatch.setenv("DISPLAY", ":9")
        await d.send("/copy answer")
        await d.until(lambda: "copied the answer (xclip)" in said(d))
        assert taken.read_text() == "-selection clipboard\nthe answer"


async def test_a_selection_has_no_line_ends_that_were_only_wrapping():
    words = " ".join(f"word{i}" for i in range(40))
    answer = f"{words}\n\nnext\nline\n\n- {words}\n- two"
    async with desk(answer, size=(120, 40)) as d:
        await d.ask("a")
        view = d.answers[0].view
        everything = Selection(Offset(0, 0), Offset(200, view.size.height - 1))
        text, _ = view.get_selection(everything)
        assert words in text and text.count(words) == 2 and "next\nline" in text
        assert not d.chat.query_one("#figures").allow_select
