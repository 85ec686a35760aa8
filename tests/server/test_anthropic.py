"""The Anthropic dialect, by Anthropic's own client."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx
import pytest

from tests.support.serving import Replay, finished, pieces, replaying, serving
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Request, ToolCall
from tinychat.server.security import Policy

HI: Any = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
EVENTS = [
    *pieces("hm", kind="thinking"),
    *pieces("Su", "re."),
    ToolCall(0, "", "call_a", "add"),
    ToolCall(0, '{"a":'),
    ToolCall(0, "1}"),
    finished("tool_calls", prompt=7, answer=9, cached=3),
]


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def test_a_stream_says_the_same_as_a_whole_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="m", max_tokens=20, messages=HI)
    with client.messages.stream(model="m", max_tokens=20, messages=HI) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert whole.content[0].type == "text" and text == whole.content[0].text
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_input_tokens and last.usage.input_tokens == 1  # the last token is always read


def test_blocks_of_thinking_text_and_tools() -> None:
    with serving(replaying(EVENTS)) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none")
        whole = client.messages.create(model="m", max_tokens=20, messages=HI, tools=[TOOL])
        with client.messages.stream(model="m", max_tokens=20, messages=HI, tools=[TOOL]) as stream:
            events = [e for e in stream if e.type in ("content_block_start", "content_block_stop")]
            last = stream.get_final_message()
    assert [e.index for e in events] == [0, 0, 1, 1, 2, 2]
    for message in (whole, last):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        thinking, text, use = message.content
        assert thinking.type == "thinking" and thinking.thinking == "hm"
        assert text.type == "text" and text.text == "Sure."
        assert use.type == "tool_use" and (use.id, use.name, use.input) == ("call_a", "add", {"a": 1})
        assert message.stop_reason == "tool_use"
        assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (4, 3)
        assert message.usage.output_tokens == 9


def test_what_is_said_reaches_the_backend() -> None:
    served = replaying([finished()])
    conversation: Any = [
        {"role": "user", "content": "1+1?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Use the tool.", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    with serving(served) as url:
        anthropic.Anthropic(base_url=url, api_key="none").messages.create(
            model="m",
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief."}],
            messages=conversation,
            tools=[TOOL],
            tool_choice={"type": "any"},
            stop_sequences=["x"],
            thinking={"type": "enabled", "budget_tokens": 5},
            metadata={"user_id": "me"},
        )
    assert isinstance(served.backend, Replay)
    request = served.backend.requests[0]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert request == Request(
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": "", "reasoning_content": "Use the tool.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "Error: no"},
            {"role": "user", "content": "Well?"},
            {"role": "assistant", "content": "It is"},
        ),
        sampling=request.sampling,
        max_tokens=9,
        stop=("x",),
        thinking=True,
        continue_final=True,
        tools=(
            {
                "type": "function",
                "function": {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]},
            },
        ),
        tool_choice="required",
    )


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="m", max_tokens=20, messages=HI).content[0]
    assert whole.type == "text"
    stop = whole.text[3:8]
    got = client.messages.create(model="m", max_tokens=20, messages=HI, stop_sequences=[stop])
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", stop)


def test_tokens_are_counted(client: anthropic.Anthropic, smollm2: LocalBackend) -> None:
    counted = client.messages.count_tokens(model="m", messages=HI).input_tokens
    assert counted == smollm2.measure(Request(messages=tuple(HI))).prompt


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"thinking": {"type": "enabled", "budget_tokens": 30}}, "thinking.budget_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        ({"container": "c"}, "container"),
        ({"no_such_field": 1}, "no_such_field"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(url: str, change: dict[str, Any], field: str) -> None:
    answer = httpx.post(f"{url}/v1/messages", json={"model": "m", "max_tokens": 20, "messages": HI} | change)
    body = answer.json()
    assert answer.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"].startswith(f"{field}: ")


def test_errors_are_the_clients_own(url: str) -> None:
    with serving(replaying([finished()]), Policy(key="secret")) as locked:
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=locked, api_key="wrong").messages.create(model="m", max_tokens=1, messages=HI)
        right = anthropic.Anthropic(base_url=locked, api_key="secret")  # sent as X-Api-Key
        assert right.messages.create(model="m", max_tokens=1, messages=HI).type == "message"
    with pytest.raises(anthropic.BadRequestError, match="tokens"):
        long: Any = [{"role": "user", "content": "word " * 3000}]
        anthropic.Anthropic(base_url=url, api_key="none").messages.create(model="m", max_tokens=1, messages=long)
