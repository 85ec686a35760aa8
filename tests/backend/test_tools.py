"""Tools and response formats through the seam: calls as events, an answer that is what was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support import tiny
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Event, Failed, Finished, Prompted, Request, Sampling, ToolCall, text_of
from tinychat.engine.tool_calls import tool

USER = {"role": "user", "content": "hello"}
TOGGLE = tool("toggle", {"on": {"type": "boolean"}})
CITY = tool("city", {"name": {"type": "string", "maxLength": 5}})


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory, speculation: str) -> Iterator[LocalBackend]:
    path: Path = tiny.write(tmp_path_factory.mktemp("tools") / "tiny.gguf", "deepseek2_lite", "Q8_0")
    backend = LocalBackend.open(path, device="cpu", max_context=2048)
    yield backend
    backend.close()


def ask(backend: LocalBackend, seed: int = 1, **changes: Any) -> list[Event]:
    request = Request((USER,), sampling=Sampling(temperature=1.0, seed=seed), thinking=False, max_tokens=150, **changes)
    return list(backend.answer(request))


def made(events: list[Event]) -> list[tuple[str, str]]:
    """(name, arguments as JSON text) of the calls that were not taken back."""
    calls: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, ToolCall) and event.note:
            del calls[event.index]
        elif isinstance(event, ToolCall):
            assert bool(event.id) == bool(event.name) == (event.index not in calls)
            calls.setdefault(event.index, [event.name, ""])[1] += event.arguments
    return [(name, arguments) for name, arguments in calls.values()]


def test_a_call_that_is_demanded_comes(backend: LocalBackend) -> None:
    assert backend.info.can.tools
    named = {"type": "function", "function": {"name": "toggle"}}
    for seed in range(4):
        for choice, names in (("required", {"toggle", "city"}), (named, {"toggle"})):
            events = ask(backend, seed, tools=(TOGGLE, CITY), tool_choice=choice)
            calls = made(events)
            assert calls and {name for name, _ in calls} <= names
            for name, arguments in calls:
                schema = (TOGGLE if name == "toggle" else CITY)["function"]["parameters"]
                jsonschema.validate(json.loads(arguments), schema)
            assert isinstance(events[-1], Finished) and events[-1].reason in ("tool_calls", "length")
            assert events[-1].reason == "length" or text_of(events) == ""


def test_tools_are_counted_and_none_hides_them(backend: LocalBackend) -> None:
    def usage(**changes: Any) -> Any:
        return next(e.usage for e in ask(backend, **changes) if isinstance(e, Prompted))

    with_tools, without = usage(tools=(TOGGLE,)), usage()
    assert with_tools.tools > 20 and without.tools == 0
    assert with_tools.prompt == without.prompt + with_tools.tools
    assert usage(tools=(TOGGLE,), tool_choice="none") == without
    assert "toggle" not in text_of(ask(backend, tools=(TOGGLE,), tool_choice="none"))


def test_a_response_format_is_held(backend: LocalBackend) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["a", "b"]}},
        "required": ["ok", "word"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(4):
        events = ask(backend, seed, response_format=asked)
        assert isinstance(events[-1], Finished) and events[-1].reason == "eos"
        jsonschema.validate(json.loads(text_of(events)), schema)
    assert text_of(ask(backend, response_format={"type": "json_object"})).startswith("{")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tools": (TOGGLE,), "tool_choice": "sometimes"}, "tool_choice is"),
        ({"tools": (TOGGLE,), "tool_choice": {"function": {"name": "other"}}}, "tool_choice is"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": ({},)}, "a tool is no"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "a JSON schema is an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "uses not"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(backend: LocalBackend, changes: dict[str, Any], why: str) -> None:
    (*_, last) = ask(backend, **changes)
    assert isinstance(last, Failed) and last.cause == "invalid" and why in last.message and "\n" not in last.message


def test_the_cache_is_kept_through_a_round(backend: LocalBackend) -> None:
    """The next prompt begins with this one: only the call, as the template writes it, and its result are read."""
    events = ask(backend, tools=(TOGGLE,), tool_choice="required")
    first, (name, arguments) = next(e for e in events if isinstance(e, Prompted)), made(events)[0]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": name, "arguments": arguments}}
    asked = {"role": "assistant", "content": text_of(events), "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "done " * 20}
    request = Request((USER, asked, result), sampling=Sampling(seed=1), thinking=False, max_tokens=5, tools=(TOGGLE,))
    last = [*backend.answer(request)][-1]
    assert isinstance(last, Finished) and last.usage.cached >= first.usage.prompt
    assert last.usage.tools > first.usage.tools + 20
