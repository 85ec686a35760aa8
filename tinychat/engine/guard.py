"""Keeps special strings inside messages from becoming control tokens.

Before the template runs, the first character of every special string in a message is replaced by a private-use
character that occurs nowhere in the conversation. Afterwards the original characters are restored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from tinychat.engine.json_stream import MAX_DEPTH
from tinychat.engine.tool_calls import Message, ToolSchema
from tinychat.errors import TinychatError


class SpecialStrings:
    """The strings that must stay text in a message, longest first, with their first and last characters."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.heads = {text[:n] for text in texts for n in range(1, len(text))}
        self.tails = {text[n:] for text in texts for n in range(1, len(text))}


class MessageGuard:
    """Messages and tools in which every special string is broken; `restore` undoes it. `apart` is one more message."""

    def __init__(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[ToolSchema] | None,
        apart: Message | None,
        special: SpecialStrings,
    ) -> None:
        self._stand_ins = unused([*messages, apart or {}], tools)
        self._by_char: dict[str, str] = {}
        self._special = special
        self.messages = [{k: v if k == "role" else self._break(v) for k, v in m.items()} for m in messages]
        self.tools = self._break(list(tools or ()))
        self.apart = self._break(dict(apart or {}))
        self._back = str.maketrans({stand_in: char for char, stand_in in self._by_char.items()})

    def restore(self, text: str) -> str:
        if "\\u" in text or "\\U" in text:  # a template may write JSON in ASCII, or a value as Python does
            for char, stand_in in self._by_char.items():
                text = text.replace(json.dumps(stand_in)[1:-1], json.dumps(char)[1:-1])
                text = text.replace(repr(stand_in)[1:-1], repr(char)[1:-1])
        return text.translate(self._back)

    def _stand_in(self, char: str) -> str:
        return self._by_char.setdefault(char, self._stand_ins[len(self._by_char)])

    def _break(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise TinychatError(f"a tool or a call is nested deeper than {MAX_DEPTH}")
        if isinstance(value, Mapping):
            return {self._break(k): self._break(v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self._break(item, depth + 1) for item in value]
        return self._break_text(value) if isinstance(value, str) else value

    def _break_text(self, text: str) -> str:
        for mark in self._special.texts:
            if mark in text:
                text = text.replace(mark, self._stand_in(mark[0]) + mark[1:])
        # A special string may also come together from the edge of a message and what the template writes beside it.
        reach = len(self._special.texts[0]) if self._special.texts else 0
        for n in range(1, min(reach, len(text) + 1)):
            if text[-n:] in self._special.heads:
                text = text[:-n] + self._stand_in(text[-n]) + text[len(text) - n + 1 :]
            if text[:n] in self._special.tails:
                text = self._stand_in(text[0]) + text[1:]
        return text


def unused(messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[str]:
    """Private-use characters that occur in no message and no tool."""
    used = set(json.dumps([messages, tools], ensure_ascii=False, default=str))
    return list(islice((c for c in map(chr, range(0x100000, 0x10FFFE)) if c not in used), 4096))
