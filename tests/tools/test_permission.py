"""What an answer allows, and what it does not."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from tinychat.errors import TinychatError
from tinychat.tools import mcp_config
from tinychat.tools.folder import Folder
from tinychat.tools.permission import Permissions
from tinychat.tools.protocol import Question

READ = Question("read", "Read?", "/x", "read /x", "")
RUN = Question("run", "Run?", "ls", "run /x\nls", "run /x")
OTHER = Question("run", "Run?", "rm", "run /x\nrm", "run /x")


def test_what_each_answer_covers(tmp_path: Path) -> None:
    p, beside = (Permissions(tmp_path / "p.json") for _ in range(2))
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
    more = Question("run", "Run?", "df", "run /x\ndf", "run /x")
    beside.remember(more, "always", "c")  # another process, which has not read what was stored since
    later = Permissions(tmp_path / "p.json")
    assert (
        later.allows(more, "e")
        and later.allows(RUN, "e")
        and not later.allows(OTHER, "c")
        and not later.allows(READ, "c")
    )
    assert (tmp_path / "p.json").stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_allows_nothing(tmp_path: Path) -> None:
    for text in ("{", "3", '{"a": 1}', "[1, null]"):
        (tmp_path / "p.json").write_text(text)
        assert not Permissions(tmp_path / "p.json").allows(RUN, "c")


def test_a_full_disk_is_one_line_and_what_was_there_stays(tmp_path: Path) -> None:
    """All that this room writes: permissions, the switch of an MCP server, a file that a tool changes."""
    config = '{"mcpServers": {"one": {"command": "true"}}}'
    (tmp_path / "mcp.json").write_text(config)
    (tmp_path / "a.txt").write_text("as it was")
    p, folder = Permissions(tmp_path / "p.json"), Folder(tmp_path)
    p.remember(RUN, "always", "c")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        for write in (
            lambda: p.remember(OTHER, "always", "c"),
            lambda: mcp_config.switch(tmp_path / "mcp.json", "one", False),
            lambda: folder.replace("a.txt", b"longer than five bytes", b"as it was"),
        ):
            with pytest.raises(TinychatError, match="file too large") as e:
                write()
            assert "\n" not in str(e.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert p.allows(OTHER, "c"), "for this process it counts, as the user said"
