"""What an answer allows, and what it does not."""

from __future__ import annotations

from pathlib import Path

from tinychat.tools.permission import Permissions
from tinychat.tools.protocol import Question

READ = Question("read", "Read?", "/x", "read /x", "")
RUN = Question("run", "Run?", "ls", "run /x\nls", "run /x")
OTHER = Question("run", "Run?", "rm", "run /x\nrm", "run /x")


def test_what_each_answer_covers(tmp_path: Path) -> None:
    p = Permissions(tmp_path / "p.json")
    assert not p.allows(READ, "c") and not p.allows(RUN, "c")
    p.remember(READ, "folder", "c")
    assert p.allows(READ, "d") and not p.allows(RUN, "c")
    p.remember(RUN, "once", "c")
    p.remember(RUN, "no", "c")
    assert not p.allows(RUN, "c")
    p.remember(RUN, "always", "c")
    assert p.allows(RUN, "d") and not p.allows(OTHER, "c")
    p.remember(OTHER, "conversation", "c")
    assert p.allows(OTHER, "c") and not p.allows(OTHER, "d")
    later = Permissions(tmp_path / "p.json")
    assert later.allows(RUN, "e") and not later.allows(OTHER, "c") and not later.allows(READ, "c")
    assert (tmp_path / "p.json").stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_allows_nothing(tmp_path: Path) -> None:
    for text in ("{", "3", '{"a": 1}', "[1, null]"):
        (tmp_path / "p.json").write_text(text)
        assert not Permissions(tmp_path / "p.json").allows(RUN, "c")
