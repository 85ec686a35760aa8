"""gpt-oss's messages on channels: the prompt, and the answer taken apart however it is cut."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support import vocab
from tinychat.engine.harmony import MARKS
from tinychat.engine.prompt import Chat
from tinychat.engine.scanner import MARK
from tinychat.engine.tokenizer import Tokenizer
from tinychat.engine.tool_calls import tool

TOOLS = [tool("get_weather", {"city": {"type": "string"}}, "The weather.")]
THOUGHT = "<|channel|>analysis<|message|>We should\ngreet.<|end|><|start|>assistant"
CALL = 'to=functions.get_weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>'


@pytest.fixture(scope="module")
def chat() -> Chat:
    metadata = vocab.bpe("gpt-4o", MARKS, eos_token_id="<|return|>")
    return Chat(metadata, Tokenizer(metadata))


def read(chat: Chat, answer: str, tools: Sequence[Any] = (), portion: int = 0, marked: bool = False) -> dict[str, Any]:
    """What a parser makes of `answer`, fed in portions of so many characters."""
    parser = chat.parser([], tools, marked)
    if marked:
        for mark in MARKS:
            answer = answer.replace(mark, MARK + mark)
    pieces = [answer[i : i + portion] for i in range(0, len(answer), portion)] if portion else [answer]
    fragments = [fragment for piece in pieces for fragment in parser.feed(piece)] + parser.flush()
    text = {kind: "".join(f.text for f in fragments if f.kind == kind) for kind in ("thinking", "answer", "call")}
    names = [f.name for f in fragments if f.kind == "call"]
    return text | {"names": names, "notes": parser.notes, "kind": parser.kind}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("portion", [0, 1, 2, 3, 7])
@pytest.mark.parametrize(
    ("answer", "thinking", "said", "call"),
    [
        (THOUGHT + "<|channel|>final<|message|>Hi < you<|return|>", "We should\ngreet.", "Hi < you", ""),
        ("<|channel|>final<|message|>Hi", "", "Hi", ""),
        (THOUGHT + "<|channel|>commentary " + CALL, "We should\ngreet.", "", '{"city": "Oslo"}'),
        (" to=functions.get_weather<|channel|>commentary json<|message|>{}<|call|>", "", "", "{}"),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary " + CALL,
            "",
            "I look.",
            '{"city": "Oslo"}',
        ),
        (
            "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Then.",
            "",
            "First.\n\nThen.",
            "",
        ),
        ("just text", "", "just text", ""),
        ("<|channel|>analysis<|message|>cut off", "cut off", "", ""),
        ("<|channel|>anal", "", "", ""),
    ],
)
def test_messages_on_channels(
    chat: Chat, answer: str, thinking: str, said: str, call: str, portion: int, marked: bool
) -> None:
    got = read(chat, answer, TOOLS, portion, marked)
    assert (got["thinking"], got["answer"], got["call"]) == (thinking, said, call)
    assert got["names"] == ["get_weather"] * bool(call) and not got["notes"]


def test_a_call_without_tools_or_with_broken_arguments_is_text(chat: Chat) -> None:
    assert read(chat, "<|channel|>commentary " + CALL)["answer"] == '{"city": "Oslo"}'
    broken = read(chat, "<|channel|>commentary to=functions.get_weather<|message|>{oh<|call|>", TOOLS)
    assert broken["answer"] == "{oh" and not broken["call"] and "no JSON object" in broken["notes"][0]


def test_text_that_reads_like_markup_is_text_where_markup_is_tokens(chat: Chat) -> None:
    parser = chat.parser([], (), marked=True)
    text = f"{MARK}<|channel|>final{MARK}<|message|>write <|end|> here{MARK}<|return|>"
    assert "".join(f.text for f in parser.feed(text) + parser.flush()) == "write <|end|> here"


def test_the_prompt(chat: Chat) -> None:
    def text(messages: list[dict[str, Any]], **options: Any) -> str:
        return chat.tokenizer.decode(chat.render(messages, **options), special=True)

    talk = [{"role": "system", "content": "S"}, {"role": "user", "content": "U1"}]
    said = [*talk, {"role": "assistant", "content": "A1", "reasoning_content": "R1"}, {"role": "user", "content": "U2"}]
    assert chat.source == "gpt-oss"
    assert text(said).endswith(
        "<|start|>developer<|message|># Instructions\n\nS\n\n<|end|><|start|>user<|message|>U1<|end|>"
        "<|start|>assistant<|channel|>final<|message|>A1<|end|><|start|>user<|message|>U2<|end|><|start|>assistant"
    )
    assert "Reasoning: medium" in text(talk) and "Reasoning: low" in text(talk, thinking=False)
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    used = [
        *talk,
        {"role": "assistant", "content": "", "reasoning_content": "R1", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert text(used, tools=TOOLS).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>R1<|end|><|start|>assistant<|channel|>commentary " + CALL + ""
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>rain<|end|><|start|>assistant"
    )
    assert "namespace functions" in text(used, tools=TOOLS) and json.dumps("city") in text(used, tools=TOOLS)
    # a message cannot pass for markup, and an answer that is continued stays open
    ids = chat.render([{"role": "user", "content": "<|end|>"}])
    assert ids.count(chat.tokenizer.token_id("<|end|>") or -1) == 2
    assert text(said[:3], continue_final=True).endswith("<|channel|>final<|message|>A1")
    cut_off = [*talk, {"role": "assistant", "content": "", "reasoning_content": "R1"}]
    assert text(cut_off, continue_final=True).endswith("<|start|>assistant<|channel|>analysis<|message|>R1")
    assert chat.opens_thinking(chat.render(cut_off, continue_final=True))
    assert not chat.opens_thinking(chat.render(said[:2]))
    open_thought = chat.tokenizer.encode("<|start|>assistant<|channel|>analysis<|message|>so", special=True)
    assert chat.opens_thinking(open_thought)
