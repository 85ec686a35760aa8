"""gpt-oss's answers: messages on channels, instead of thinking in tags and calls in markup.

An answer goes on behind `<|start|>assistant` and is a row of messages, each a header, `<|message|>` and a body that
ends with `<|end|>`, `<|call|>` or `<|return|>`. The header names the channel: "analysis" is thinking, "final" and
"commentary" are for the reader, and with `to=functions.NAME` the body is a call's arguments.
https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Iterable
from typing import Any

from tinychat.engine.answer import AnswerParser
from tinychat.engine.scanner import MARK, Fragment, Steps
from tinychat.engine.tool_calls import CallFormat

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
THINK = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
CALLS = CallFormat(
    "named",
    call_open="<|channel|>commentary to=functions.",
    after_name=" <|constrain|>json<|message|>",
    call_close="<|call|>",
    parallel=False,
)
PRESET = (
    "<|start|>system<|message|>You are a large language model.\nReasoning: {{ reasoning_effort or 'medium' }}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
    "{{ \"\nCalls to these tools must go to the commentary channel: 'functions'.\" if tools }}<|end|>"
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if system or tools %}<|start|>developer<|message|>"
    "{{ '# Instructions\n\n' + system + '\n\n' if system }}{% if tools %}# Tools\n\n## functions\n\n"
    "namespace functions {\n\n{% for t in tools %}// {{ t.function.description }}\n"
    "type {{ t.function.name }} = (_: {{ t.function.parameters | tojson }}) => any;\n\n{% endfor %}"
    "} // namespace functions{% endif %}<|end|>{% endif %}"
    "{% set called = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>"
    "{% elif m.tool_calls %}{% set call = m.tool_calls[0].function %}{% set called.name = call.name %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>commentary to=functions.{{ call.name }} <|constrain|>json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_HEADER = re.compile(rf"\s*(?:to=|{MARK}?<\|(?:start|channel|message)\|>)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


def is_harmony(texts: Iterable[str]) -> bool:
    """Does a vocabulary with these special tokens write messages on channels?"""
    return {"<|start|>", "<|channel|>", "<|message|>", "<|end|>"} <= set(texts)


def named(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its thinking as gpt-oss's template calls it. In front of a call the template takes one text."""
    thinking = message.get("reasoning_content")
    return (
        message | {"thinking": thinking}
        if thinking and not (message["content"] and "tool_calls" in message)
        else message
    )


class HarmonyParser(AnswerParser):
    """An AnswerParser of messages on channels; text without any header is answer (thinking where it is `opened`)."""

    def __post_init__(self) -> None:
        self._count = 0  # calls so far
        self._answered = False
        super().__post_init__()

    def _run(self) -> Steps:
        yield
        scan, mark = self._scan, MARK if self.special else ""
        openings = ("to=", *(f"{mark}{text}" for text in MARKS[:3]))
        while not scan.ended:
            begin = scan.text[scan.at :].lstrip()
            if begin and not any(opening.startswith(begin) for opening in openings):
                break
            yield
        name = (yield from self._header()) if _HEADER.match(scan.text, scan.at) else ""
        while not scan.ended or scan.at < len(scan.text):
            yield from (self._call(name) if name else self._body(None))
            name = yield from self._header()

    def _header(self) -> Steps:
        """Passes a header; sets `kind`. The name of the tool that the body is for, or ""."""
        scan = self._scan
        while (end := scan.text.find("<|message|>", scan.at)) < 0:
            if scan.ended:
                scan.at = len(scan.text)
                return ""
            yield
        header = scan.text[scan.at : end]
        scan.at = end + len("<|message|>")
        channel, tool = _CHANNEL.search(header), _RECIPIENT.search(header)
        if tool and self.tools:
            self.kind = "call"
            return tool[1]
        self.kind = "thinking" if channel and channel[1] == "analysis" else "answer"
        if self.kind == "answer" and self._answered:
            scan.give("answer", "\n\n")
        self._answered |= self.kind == "answer"
        return ""

    def _body(self, to: list[str] | None) -> Steps:
        """Passes a body and its end: gives it out as it comes, or into `to`."""
        scan, mark = self._scan, MARK if self.special else ""
        ends = [mark + end for end in _ENDS]
        while True:
            found = min(((at, end) for end in ends if (at := scan.text.find(end, scan.at)) >= 0), default=(-1, ""))
            stop = found[0] if found[0] >= 0 else len(scan.text)
            if found[0] < 0 and not scan.ended:  # perhaps the beginning of an end
                tail = next((n for n in range(12, 0, -1) if any(e.startswith(scan.text[-n:]) for e in ends)), 0)
                stop = max(scan.at, stop - tail)
            part = scan.text[scan.at : stop]
            scan.at = stop
            if to is None:
                scan.give(self.kind, part)
            elif part:
                to.append(part)
            if found[0] >= 0:
                scan.at += len(found[1]) if found[1].removeprefix(MARK) in _ENDS[:3] else 0
                return
            if scan.ended:
                return
            yield

    def _call(self, name: str) -> Steps:
        """A body that is a call's arguments; it becomes text again where they are no JSON object."""
        parts: list[str] = []
        yield from self._body(parts)
        text = "".join(parts).replace(MARK, "").strip()
        try:
            good = isinstance(json.loads(text or "{}"), dict)
        except (ValueError, RecursionError):
            good = False
        self.kind = "answer"
        if not good:
            why = "its arguments are no JSON object"
            self.notes.append(f"a tool call could not be read: {why}")
            self._scan.fragments.append(Fragment("call", "", self._count, "", name, why))
            self._scan.give("answer", text)
            return
        made = "".join(random.choices(string.ascii_letters + string.digits, k=9))
        self._scan.fragments.append(Fragment("call", text or "{}", self._count, made, name))
        self._count += 1
