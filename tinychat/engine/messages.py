"""The messages, tools and calls of a conversation, checked and in the form that chat templates take."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tinychat.engine.tool_calls import CallFormat, Message, ToolSchema
from tinychat.errors import TinychatError, printable

ROLES = ("system", "user", "assistant", "tool")


def checked(messages: Sequence[Message], think_tags: tuple[str, str] | None) -> list[dict[str, Any]]:
    """The messages, with thinking (text between `think_tags`) separated from the answers. Raises TinychatError."""
    prepared: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        reasoning, calls = message.get("reasoning_content"), message.get("tool_calls")
        if role not in ROLES:
            raise TinychatError(f"a message has the role {printable(repr(role))}; expected one of {', '.join(ROLES)}")
        content = "" if content is None and calls and role == "assistant" else content
        if not isinstance(content, str) or not isinstance(reasoning, str | None):
            raise TinychatError(f"the {role} message is no text")
        if role == "assistant" and reasoning is None and think_tags:
            opening, closing = think_tags
            if closing in content:  # taken apart as Qwen's and GLM's own templates do
                reasoning = content.split(closing)[0].rstrip("\n").split(opening)[-1].lstrip("\n")
                content = content.split(closing)[-1].lstrip("\n")
            elif content.lstrip().startswith(opening):  # the answer was stopped during thinking
                reasoning, content = content.lstrip()[len(opening) :].lstrip("\n"), ""
        prepared.append({"role": role, "content": content})
        if reasoning:
            prepared[-1]["reasoning_content"] = reasoning
        if calls and role == "assistant":
            prepared[-1]["tool_calls"] = _checked_calls(calls)
        if role == "tool":
            prepared[-1] |= {k: str(message[k]) for k in ("tool_call_id", "name") if message.get(k) is not None}
    return prepared


def checked_tools(tools: Sequence[ToolSchema] | None) -> list[dict[str, Any]]:
    """The tools, as templates expect them. Raises TinychatError."""
    out = []
    for tool in tools or ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise TinychatError('a tool is no {"type": "function", "function": {"name": ...}}')
        out.append({"type": "function", "function": {"description": "", "parameters": {}} | dict(function)})
    return out


def _checked_calls(calls: Any) -> list[dict[str, Any]]:
    """An assistant's calls with their arguments as objects, which is what templates expect. Raises TinychatError."""
    out = []
    for call in calls if isinstance(calls, list | tuple) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str):
            raise TinychatError('a tool call is no {"id": ..., "function": {"name": ..., "arguments": ...}}')
        arguments = function.get("arguments") or {}
        try:
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, Mapping):
            raise TinychatError(f"the arguments of a call of {printable(name)} are no JSON object")
        out.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": name, "arguments": dict(arguments)},
            }
        )
    return out


def suited(messages: list[dict[str, Any]], form: CallFormat) -> list[dict[str, Any]]:
    """The messages with ids that every template accepts, split into one call per message where `form` takes no more."""
    known: dict[str, tuple[str, str]] = {}  # id: the id in the prompt, the function's name
    out: list[dict[str, Any]] = []
    splits: list[dict[str, Any]] = []  # calls beyond the first of a message, each to follow a result
    for message in messages:
        if message["role"] == "tool":
            new, name = known.get(message.get("tool_call_id", ""), ("", ""))
            out.append(({"name": name} if name else {}) | message | ({"tool_call_id": new} if new else {}))
            if splits:
                out.append({"role": "assistant", "content": "", "tool_calls": [splits.pop(0)]})
            continue
        calls = []
        for call in message.get("tool_calls", ()):
            old, name, n = call["id"], call["function"]["name"], len(known)
            new = old if re.fullmatch("[A-Za-z0-9]{9}", old) else f"call{n:05d}"  # Mistral's templates refuse others
            known[old] = (f"functions.{name}:{n}" if form.id_is_name else new, name)
            calls.append(call | {"id": known[old][0]})
        splits = [] if form.parallel else calls[1:]
        out.append(message | ({"tool_calls": calls if form.parallel else calls[:1]} if calls else {}))
    return out
