"""llm-comply's tests in its three formats, by the official schemas."""

import pytest

from scripts.comply import FORMATS, comply
from tests.support.serving import finished, pieces, replaying, serving
from tinychat.backend.protocol import ToolCall

TOOLS = ("chat-tool-calling", "tool-calling", "anth-tool-calling")
REASONING = ("chat-reasoning-summary", "reasoning-summary", "anth-thinking-display")


@pytest.mark.parametrize("form", FORMATS)
def test_a_real_model(url: str, form: str) -> None:
    """All but calls of tools, which SmolLM2 does not know, and images."""
    results = comply(url, "smollm2:135m", forms=[form])
    failed = [r for r in results if r.status == "failed" and r.id not in TOOLS]
    assert not failed, failed
    assert len([r for r in results if r.status == "passed"]) >= 6


def test_calls_of_tools() -> None:
    events = [ToolCall(0, "", "call_a", "get_weather"), ToolCall(0, '{"location": "SF"}'), finished("tool_calls")]
    with serving(replaying(events)) as url:
        results = comply(url, "m", only=TOOLS)
    assert [r.status for r in results] == ["passed"] * 3, results


def test_reasoning() -> None:
    """llm-comply runs these for models of certain names only."""
    events = [*pieces("It is ", "555.", kind="thinking"), *pieces("555"), finished(answer=3)]
    with serving(replaying(events)) as url:
        results = comply(url, "gpt-5", only=REASONING) + comply(url, "claude-sonnet-4", only=REASONING)
    ran = {r.id: r for r in results if r.status != "skipped"}
    assert {r.status for r in ran.values()} == {"passed"}, ran
    assert len(ran) >= 2
