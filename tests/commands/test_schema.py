"""`tinychat run --schema FILE`: the answer of a model validates, or there is one line that says why not."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from tests.support import tiny
from tinychat.cli import main

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "good": {"type": "boolean"}},
    "required": ["name", "good"],
    "additionalProperties": False,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"))


def test_the_answer_validates(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    file.write_text(json.dumps(SCHEMA))
    for seed in range(3):
        assert main(["run", model, "go", "--schema", str(file), "--seed", str(seed)]) == 0
        jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)


@pytest.mark.parametrize(
    ("text", "more", "line"),
    [
        ('{"propertyNames": {"minLength": 2}}', (), "the JSON schema uses propertyNames, which is not supported"),
        ("[1]", (), "a JSON schema is an object"),
        ("{", (), "not JSON"),
        ("[" * 200_000, (), "not JSON"),
        ("{}" + " " * (1 << 20), (), "too large"),
        (None, (), "no such file"),
        ("{}", ("--tools", "."), "cannot be used with --tools"),
        ("{}", ("--raw",), "cannot be used with --raw"),
        (json.dumps(SCHEMA), ("--max-tokens", "2"), r"the answer ended (length) before its JSON did"),
    ],
)
def test_what_is_wrong_is_one_line(
    model: str,
    tmp_path: Path,
    text: str | None,
    more: tuple[str, ...],
    line: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "s.json"
    if text is not None:
        file.write_text(text)
    assert main(["run", model, "go", "--schema", str(file), *more]) == 1
    assert line in capsys.readouterr().err.splitlines()[-1]
