"""The built-in tools for files, as a model calls them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from tinychat.tools import search
from tinychat.tools.files import LINES, difference, matches, reading, writing
from tinychat.tools.folder import Folder
from tinychat.tools.protocol import CallContext, CallRefused, Question, Result
from tinychat.tools.toolbox import Toolbox, cut


class Called:
    """A toolbox on a folder, and the questions that it asked."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, Folder(path)
        self.box = Toolbox((*reading(self.folder), *writing(self.folder)))
        self.questions: list[Question] = []
        self.allowed, self.cancel = True, threading.Event()

    def ask(self, question: Question) -> None:
        self.questions.append(question)
        if not self.allowed:
            raise CallRefused("the user refused this")

    def __call__(self, name: str, **arguments: Any) -> Result:
        return self.box.call(name, json.dumps(arguments), CallContext(self.ask, self.cancel))


@pytest.fixture
def call(tmp_path: Path) -> Called:
    (tmp_path / "src").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("def hidden")
    (tmp_path / "src" / "a.py").write_text("def first():\n    return 1\n")
    (tmp_path / "src" / "b.txt").write_text("def nothing\n")
    (tmp_path / "README.md").write_text("".join(f"line {n}\n" for n in range(1, 1001)))
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0def")
    return Called(tmp_path)


def test_looking_around(call: Called) -> None:
    assert call("list_files").text == ".git/\nREADME.md  8,893 bytes\nimage.png  9 bytes\nsrc/"
    assert call("list_files", path="src").text == "a.py  26 bytes\nb.txt  12 bytes"
    assert call("glob", pattern="*.py").text == "src/a.py"
    assert call("glob", pattern="src/*").text == "src/a.py\nsrc/b.txt"
    assert call("glob", pattern="**/*.md").text == "README.md"
    assert call("glob", pattern="*.rs").text == "no files"
    assert {q.kind for q in call.questions} == {"read"} and len({q.exact for q in call.questions}) == 1


def test_reading_a_part(call: Called) -> None:
    first = call("read_file", path="README.md").text
    assert first.startswith(f"[lines 1 to {LINES} of 1000]\nline 1\n") and first.endswith(f"line {LINES}\n")
    assert call("read_file", path="README.md", start=999).text == "[lines 999 to 1000 of 1000]\nline 999\nline 1000\n"
    few = call("read_file", path="README.md", start=5, lines=1).text
    assert few.startswith("[lines 5 to 54 of 1000]\nline 5\n") and few.endswith("\nline 54\n")
    assert call("read_file", path="README.md", start=2000).text == "the file has only 1,000 lines"
    assert call("read_file", path="src/a.py").text == "def first():\n    return 1\n"
    assert call("read_file", path="image.png") == Result("error: 'image.png' is no UTF-8 text", "failed")
    assert call("read_file", path="../x").state == "failed"


def test_grep(call: Called) -> None:
    assert call("grep", pattern=r"def \w+").text == "src/a.py:1: def first():\nsrc/b.txt:1: def nothing"
    assert call("grep", pattern="def", glob="*.py").text == "src/a.py:1: def first():"
    assert call("grep", pattern="return", path="src/a.py").text == "src/a.py:2:     return 1"
    assert call("grep", pattern="zzz").text == "no lines"
    assert call("grep", pattern="zzz", path="src").text.startswith("no lines there; without path and glob")
    assert "[more than 500 lines" in call("grep", pattern="line").text
    assert "no regular expression" in call("grep", pattern="(").text
    assert call("grep", pattern="x", path="../..").state == "failed"
    assert call("grep", pattern="x", path="none").text == "error: 'none': no such file or directory"


def test_a_pattern_that_never_ends_can_be_stopped(call: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    (call.path / "evil.txt").write_text("a" * 60 + "!")
    threading.Timer(0.5, call.cancel.set).start()
    assert call("grep", pattern="(a+)+$", path="evil.txt").state == "stopped"
    call.cancel.clear()
    monkeypatch.setattr(search, "SECONDS", 0.3)
    assert "took more than" in call("grep", pattern="(a+)+$", path="evil.txt").text


def test_writing_shows_the_difference_first(call: Called) -> None:
    assert call("write_file", path="new/x.py", content="a\nb\n").text == "written: +2 -0 lines"
    assert (call.path / "new/x.py").read_text() == "a\nb\n"
    _, question = call.questions
    assert question.kind == "write" and question.title == "Create new/x.py?"
    assert question.detail == "--- /dev/null\n+++ b/new/x.py\n@@ -0,0 +1,2 @@\n+a\n+b\n"
    assert call("edit_file", path="src/a.py", old="return 1", new="return 2").text == "written: +1 -1 lines"
    assert "-    return 1\n+    return 2\n" in call.questions[-1].detail
    assert call("write_file", path="src/a.py", content="def first():\n    return 2\n").text.startswith("the file holds")
    assert [q.kind for q in call.questions] == ["read", "write", "read", "write", "read"]


def test_a_refusal_writes_nothing(call: Called) -> None:
    call.allowed = False
    assert call("write_file", path="src/a.py", content="x") == Result("the user refused this", "refused")
    assert call("read_file", path="src/a.py").state == "refused"
    assert (call.path / "src/a.py").read_text() == "def first():\n    return 1\n"


def test_what_changes_between_question_and_answer_is_not_overwritten(call: Called) -> None:
    def ask(question: Question) -> None:
        if question.kind == "write":
            (call.path / "src/a.py").write_text("somebody else")

    arguments = json.dumps({"path": "src/a.py", "old": "return 1", "new": "return 2"})
    result = call.box.call("edit_file", arguments, CallContext(ask, call.cancel))
    assert result.state == "failed" and "changed since" in result.text
    assert (call.path / "src/a.py").read_text() == "somebody else"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"path": "src/a.py", "old": "zzz", "new": ""}, "occurs nowhere"),
        ({"path": "src/a.py", "old": "r", "new": ""}, "occurs 3 times"),
        ({"path": "src/a.py", "old": "", "new": "x"}, "is empty"),
        ({"path": "image.png", "old": "P", "new": "x"}, "no UTF-8"),
        ({"path": "none", "old": "P", "new": "x"}, "no such file"),
        ({"path": "src", "old": "P", "new": "x"}, "is a directory"),
    ],
)
def test_edits_that_cannot_be_made(call: Called, arguments: dict[str, str], why: str) -> None:
    result = call("edit_file", **arguments)
    assert result.state == "failed" and why in result.text
    assert [q.kind for q in call.questions] == ["read"]


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("nothing", "{}", "there is no tool 'nothing'; there are list_files"),
        ("read_file", "[1]", "no JSON object"),
        ("read_file", "{", "not JSON"),
        ("read_file", "{}", "'path' is missing"),
        ("read_file", '{"path": 3}', "of type string"),
        ("read_file", '{"path": "README.md", "start": true}', "of type integer"),
        ("read_file", "[" * 100_000, "not JSON"),
    ],
)
def test_calls_that_are_wrong(call: Called, name: str, arguments: str, why: str) -> None:
    result = call.box.call(name, arguments, CallContext(call.ask, call.cancel))
    assert result.state == "failed" and why in result.text


def test_results_are_cut_in_the_middle(call: Called) -> None:
    result = call.box.call("read_file", '{"path": "README.md"}', CallContext(call.ask, call.cancel), limit=100)
    assert result.text.startswith("[lines 1 to") and "characters left out" in result.text and len(result.text) < 150
    assert result.text.endswith(f"line {LINES}\n")
    assert cut("short", 100) == "short"


def test_difference_of_a_missing_line_break() -> None:
    assert difference("x", b"a", b"a\n").splitlines()[3:] == ["-a", "\\ no line break at the end", "+a"]


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("*.py", "a/b/c.py", True),
        ("a/*.py", "a/b/c.py", False),
        ("a/**/*.py", "a/b/c.py", True),
        ("a/**/*.py", "a/c.py", True),
        ("**", "a/c.py", True),
        ("a/**", "b/c.py", False),
        ("**/b/**/d/**", "a/b/c/d/e", True),
        ("**/" * 20 + "x", "a/" * 40 + "y", False),
    ],
)
def test_patterns_of_paths(pattern: str, path: str, hit: bool) -> None:
    assert matches(tuple(path.split("/")), tuple(pattern.split("/"))) is hit
