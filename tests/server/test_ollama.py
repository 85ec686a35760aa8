"""The Ollama dialect: lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.serving import Replay, finished, pieces, replaying, serving
from tinychat.backend.protocol import ToolCall

HI: Any = [{"role": "user", "content": "Say hello."}]


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json={"model": "m"} | body, timeout=120)


def lines(url: str, path: str, **body: Any) -> list[Any]:
    answer = post(url, path, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_chat_streams_by_default(url: str) -> None:
    got = lines(url, "/api/chat", messages=HI, options={"num_predict": 10})
    whole = post(url, "/api/chat", messages=HI, options={"num_predict": 10}, stream=False).json()
    assert "".join(g["message"]["content"] for g in got) == whole["message"]["content"]
    assert [g["done"] for g in got] == [False] * (len(got) - 1) + [True]
    assert got[-1]["done_reason"] == whole["done_reason"] == "length"
    assert got[-1]["eval_count"] == 10 and got[-1]["prompt_eval_count"] == whole["prompt_eval_count"] > 0
    assert got[-1]["total_duration"] >= got[-1]["eval_duration"] > 0


def test_generate_with_and_without_a_template(url: str) -> None:
    chat = post(url, "/api/chat", messages=HI, options={"num_predict": 8}, stream=False).json()
    templated = post(url, "/api/generate", prompt="Say hello.", options={"num_predict": 8}, stream=False).json()
    raw = post(url, "/api/generate", prompt="Say hello.", raw=True, options={"num_predict": 8}, stream=False).json()
    assert templated["response"] == chat["message"]["content"]
    assert raw["prompt_eval_count"] < templated["prompt_eval_count"]


def test_thinking_and_tools() -> None:
    events = [
        *pieces("hm", kind="thinking"),
        *pieces("ok"),
        ToolCall(0, "", "call_a", "add"),
        ToolCall(0, '{"a":1}'),
        finished("tool_calls"),
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    served = replaying(events)
    history = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "2", "tool_name": "add"},
    ]
    with serving(served) as url:
        got = lines(url, "/api/chat", messages=history, tools=[tool], think=True)
        whole = post(url, "/api/chat", messages=history, tools=[tool], stream=False).json()["message"]
    call = [{"id": "call_a", "function": {"index": 0, "name": "add", "arguments": {"a": 1}}}]
    assert [g["message"] for g in got] == [
        {"role": "assistant", "content": "", "thinking": "hm"},
        {"role": "assistant", "content": "ok"},
        {"role": "assistant", "content": "", "tool_calls": call},
        {"role": "assistant", "content": ""},
    ]
    assert whole == {"role": "assistant", "content": "ok", "thinking": "hm", "tool_calls": call}
    assert isinstance(served.backend, Replay)
    sent = served.backend.requests[0]
    assert sent.thinking is True and sent.messages[2]["tool_call_id"] == sent.messages[1]["tool_calls"][0]["id"]


def test_what_is_here(url: str) -> None:
    assert [m["name"] for m in httpx.get(f"{url}/api/tags").json()["models"]] == ["smollm2:135m"]
    shown = post(url, "/api/show").json()
    assert shown["details"]["family"] == "llama" and shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["llama.context_length"] == 8192 and shown["parameters"] == "temperature 0"
    assert "version" in httpx.get(f"{url}/api/version").json()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/api/chat", {}, "messages"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": HI, "keep_alive": 0}, "keep_alive"),
        ("/api/chat", {"messages": HI, "think": True}, "think"),
        ("/api/chat", {"messages": HI, "options": {"num_ctx": 100000}}, "options.num_ctx"),
        ("/api/chat", {"messages": HI, "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": HI, "options": {"no_such_field": 1}}, "options.no_such_field"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"prompt": ""}, "prompt"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(url: str, path: str, body: dict[str, Any], field: str) -> None:
    answer = post(url, path, **body)
    assert answer.status_code == 400 and answer.json()["error"].startswith(f"{field}: ")
