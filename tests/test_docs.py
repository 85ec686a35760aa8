"""The documents say what is there: docs/architecture.md names the rooms and files, README.md the commands."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tinychat.cli import parse

ROOT = Path(__file__).parents[1]
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_map_names_every_room() -> None:
    """The first column of the table of rooms has every folder and file at the top of the package, and no other."""
    table = ARCHITECTURE.split("## The rooms")[1].split("\n\n")[1]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    named = [name.rstrip("/").removesuffix(".py") for row in rows for name in re.findall(r"`([^`]+)`", row)]
    there = {p.stem for p in (ROOT / "tinychat").iterdir() if p.suffix == ".py" or list(p.glob("*.py"))} - {"__init__"}
    assert sorted(named) == sorted(there)


def test_the_map_names_only_files_that_exist() -> None:
    """Also a name without its folder, and a pattern, stands for at least one file or folder of the package or tests."""
    named = set(re.findall(r"`((?:[\w*]+/)*(?:[\w*]+/|[\w*]+\.(?:py|cu|cuh|c|h|md)))`", ARCHITECTURE))
    there = [str(p.relative_to(ROOT)) for top in ("tinychat", "tests", "docs") for p in (ROOT / top).rglob("*")]
    assert len(named) > 50
    assert not [n for n in sorted(named) if not any(fnmatch("/" + p, "*/" + n.rstrip("/")) for p in there)]


def test_the_readme_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The block of commands in README.md against `tinychat --help` and `tinychat cache --help`."""
    block = README.split("## The command line")[1].split("```")[1]
    usages = [re.split("  +", line)[0].removeprefix("tinychat ").split(" | ") for line in block.strip().splitlines()]
    words = [[u.split() for u in usage] for usage in usages]
    of_cache = [each[-1] for usage in words if usage[0][0] == "cache" for each in usage]
    others = [each[0] for usage in words if usage[0][0] != "cache" for each in usage if each[0].isalpha()]
    assert sorted({*others, "cache"}) == _commands(capsys, "--help")
    assert sorted(of_cache) == _commands(capsys, "cache", "--help")


def _commands(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    """The commands that a help lists, sorted."""
    with pytest.raises(SystemExit):
        parse(argv)
    found = re.findall(r"^    ([a-z]+)\b", capsys.readouterr().out, re.M)
    assert found
    return sorted(found)
