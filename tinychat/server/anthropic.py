"""The dialect of Anthropic's Messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinychat.backend.protocol import Event, Finished, Message, Piece, Prompted, Request, ToolCall
from tinychat.server import sse
from tinychat.server.answer import Answer, AnswerJob, ServedModel, finish, usage
from tinychat.server.fields import Fields
from tinychat.server.openai_chat import new_id
from tinychat.server.refusal import RequestRefused, invalid
from tinychat.server.sampling import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    check_tools,
    content,
    function,
    max_tokens,
    model,
    part_text,
    sampling,
    schema_format,
)

REASONS = {
    "eos": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
}
TYPES = {  # of errors
    "key": "authentication_error",
    "forbidden": "permission_error",
    "missing": "not_found_error",
    "large": "request_too_large",
    "busy": "overloaded_error",
    "slow": "timeout_error",
    "internal": "api_error",
    "lost": "api_error",
}
ONLY = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
    "context_management": (),
    "mcp_servers": (),
    "inference_geo": (),
}
PING = sse.named({"type": "ping"})


def error(refused: RequestRefused) -> dict[str, Any]:
    """An error as Anthropic's clients read it."""
    kind = TYPES.get(refused.kind, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message} | refused.details, "request_id": None}


# Requests


def parse(body: dict[str, Any], served: ServedModel) -> AnswerJob:
    """What `body` asks for."""
    fields = Fields(body)
    limit = fields.integer("max_tokens", None, 1, MAX_TOKENS)
    if limit is None:
        raise fields.refuse("max_tokens", "is required")
    stream = fields.flag("stream")
    request, one_call = _request(fields, served, limit)
    return AnswerJob(request, MessagesReply(served), stream, one_call)


def count_request(body: dict[str, Any], served: ServedModel) -> Request:
    """The request whose tokens /v1/messages/count_tokens counts."""
    fields = Fields(body)
    fields.notes("max_tokens", "stream")  # clients send the whole request that they are about to make
    return _request(fields, served, None)[0]


def count_tokens(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/v1/messages/count_tokens: a request -> {input_tokens}."""
    counted = served.backend.measure(count_request(body, served))
    return {"input_tokens": counted.prompt + counted.answer}


def _request(fields: Fields, served: ServedModel, limit: int | None) -> tuple[Request, bool]:
    model(fields, True)
    conversation = [*_system(fields), *messages(fields.array("messages", MAX_MESSAGES))]
    tools, choice, one_call = _tools(fields, served)
    request = Request(
        messages=tuple(conversation),
        sampling=sampling(fields, served),
        max_tokens=max_tokens(served, limit),
        stop=fields.strings("stop_sequences", MAX_STOPS, MAX_STOP),
        thinking=_thinking(fields, served, limit),
        continue_final=conversation[-1]["role"] == "assistant",  # the beginning of the answer, as Anthropic has it
        tools=tools,
        tool_choice=choice,
        response_format=_form(fields),
    )
    fields.notes("metadata", "cache_control")
    fields.fixed(ONLY)
    fields.done()
    return request, one_call


def _system(fields: Fields) -> list[Message]:
    text = content(fields.any("system"), "system")
    return [{"role": "system", "content": text}] if text else []


def messages(values: Sequence[Any] | None) -> list[Message]:
    """The conversation as Chat Completions writes it: tool results are messages of their own."""
    if not values:
        raise invalid("expected an array of at least one message", "messages")
    return [m for i, value in enumerate(values) for m in _message(Fields(value, f"messages[{i}]"))]


def _message(fields: Fields) -> list[Message]:
    role = fields.choice("role", ("user", "assistant", "system"))
    if role is None:
        raise fields.refuse("role", "is required")
    value, where = fields.any("content"), fields.name("content")
    fields.done()
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or len(value) > MAX_PARTS:
        raise invalid(f"expected a string or an array of at most {MAX_PARTS:,} blocks", where)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for i, block in enumerate(value):
        inner = Fields(block, f"{where}[{i}]")
        kind = inner.text("type")
        if kind == "thinking" and role == "assistant":
            thoughts.append(inner.text("thinking", "") or "")
            inner.notes("signature")
            inner.done()
        elif kind == "tool_use" and role == "assistant":
            calls.append(_tool_use(inner))
        elif kind == "tool_result" and role == "user":
            results.append(_tool_result(inner))
        else:
            texts.append(part_text(block, f"{where}[{i}]", ("text",)))
    found: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    if calls:
        found["tool_calls"] = calls
    # Results belong to the message before, so they precede the user's text.
    return [*results, *([found] if texts or thoughts or calls or not results else [])]


def _tool_use(fields: Fields) -> dict[str, Any]:
    given = fields.object("input") or {}
    call = {
        "id": fields.needed("id"),
        "type": "function",
        "function": {"name": fields.needed("name"), "arguments": json.dumps(given, ensure_ascii=False)},
    }
    fields.notes("cache_control", "caller")
    fields.done()
    return call


def _tool_result(fields: Fields) -> Message:
    text = content(fields.any("content"), fields.name("content"))
    if fields.flag("is_error"):
        text = f"Error: {text}"  # the result has no other field that says so
    message = {"role": "tool", "tool_call_id": fields.needed("tool_use_id"), "content": text}
    fields.notes("cache_control")
    fields.done()
    return message


def _tools(fields: Fields, served: ServedModel) -> tuple[tuple[dict[str, Any], ...], Any, bool]:
    """The tools, the choice among them, and whether only one call is wanted."""
    tools = []
    for i, value in enumerate(fields.array("tools", MAX_TOOLS) or ()):
        tool = Fields(value, f"tools[{i}]")
        if tool.text("type", "custom") != "custom":
            raise tool.refuse("type", "only tools of the client's own are supported")
        tools.append(function(tool, "input_schema", f"tools[{i}]"))
        tool.notes("cache_control", "input_examples", "eager_input_streaming")
        tool.done()
    choice: Any = "auto"
    one_call = False
    if (chosen := fields.fields("tool_choice")) is not None:
        kind = chosen.choice("type", ("auto", "any", "tool", "none"))
        one_call = chosen.flag("disable_parallel_tool_use")
        choice = {"any": "required", "none": "none"}.get(kind or "", "auto")
        if kind == "tool":
            choice = {"type": "function", "function": {"name": chosen.needed("name")}}
        chosen.done()
    found = tuple(tools)
    check_tools(served, found, choice)
    return found, choice, one_call


def _thinking(fields: Fields, served: ServedModel, limit: int | None) -> bool | None:
    """Whether to think. A budget (tokens of thinking) is checked and otherwise ignored."""
    asked = fields.fields("thinking")
    if asked is None:
        return None
    kind = asked.choice("type", ("enabled", "disabled", "adaptive"))
    budget = asked.integer("budget_tokens", None, 1, MAX_TOKENS)
    if budget is not None and limit is not None and budget >= limit:
        raise asked.refuse("budget_tokens", "must be less than max_tokens")
    asked.choice("display", ("summarized", "omitted"))
    asked.done()
    if kind == "disabled":
        return False
    return True if kind == "enabled" and served.backend.info.can.thinking else None


def _form(fields: Fields) -> dict[str, Any] | None:
    """output_config.format: the JSON schema that the answer follows."""
    config = fields.fields("output_config")
    given = config.fields("format") if config else fields.fields("output_format")
    if config is not None:
        config.done()
    if given is None:
        return None
    if given.text("type") != "json_schema":
        raise given.refuse("type", "expected json_schema")
    schema = given.object("schema")
    given.done()
    return schema_format(schema or {})


# Answers


def usage_object(prompt: int, cached: int, generated: int, thought: int) -> dict[str, Any]:
    """Tokens as Anthropic counts them: what came from the cache is apart from the input."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation": None,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": thought},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; {} for JSON that is incomplete."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "citations": None}


def _thinking_block(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _tool_block(id: str, name: str, given: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": name, "input": given, "caller": {"type": "direct"}}


@dataclass
class MessagesReply:
    """Formats one answer as Messages does: blocks of thinking, text and tool use, in order."""

    served: ServedModel
    id: str = field(default_factory=lambda: new_id("msg_"))
    media_type = sse.EVENT_STREAM
    ping = PING
    _prompted: Prompted | None = None
    _index: int = -1  # of the open block
    _open: str = ""  # its type
    _call: int = -1  # which call it is
    _thought: int = 0

    def begin(self, prompted: Prompted) -> bytes:
        self._prompted = prompted
        before = prompted.usage
        counted = usage_object(before.prompt + before.answer, 0, 0, 0)
        message = self._message([], None, None, counted)
        return sse.named({"type": "message_start", "message": message})

    def event(self, event: Event) -> bytes:
        if isinstance(event, Piece):
            thinking = event.kind == "thinking"
            self._thought += len(event.tokens) if thinking else 0
            if not event.text:
                return b""
            block, delta = (_thinking_block(""), "thinking") if thinking else (_text_block(""), "text")
            begun = b"" if self._open == block["type"] else self._close() + self._begin(block)
            return begun + self._delta({"type": f"{delta}_delta", delta: event.text})
        if isinstance(event, ToolCall):
            return self._tool(event)
        if isinstance(event, Finished):
            return self._finish(event)
        return b""

    def fail(self, refused: RequestRefused) -> bytes:
        return sse.named(error(refused))

    def whole(self, answer: Answer) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if answer.thinking:
            blocks.append(_thinking_block(answer.thinking))
        if answer.text or not answer.calls:
            blocks.append(_text_block(answer.text))
        blocks += [_tool_block(c.id, c.name, _input(c.arguments)) for c in answer.calls]
        reason = finish(answer.finished.reason, REASONS)
        counted = usage_object(*usage(answer.prompted, answer.finished), answer.thought)
        return self._message(blocks, reason, answer.finished.stop_string or None, counted)

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, stop: str | None, counted: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.served.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "usage": counted,
        }

    def _begin(self, block: dict[str, Any]) -> bytes:
        self._index += 1
        self._open = block["type"]
        return sse.named({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse.named({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": ""}) if self._open == "thinking" else b""
        self._open = ""
        return signed + sse.named({"type": "content_block_stop", "index": self._index})

    def _tool(self, call: ToolCall) -> bytes:
        begun = b""
        if call.index != self._call:
            self._call = call.index
            begun = self._close() + self._begin(_tool_block(call.id, call.name, {}))
        if not call.arguments:
            return begun
        return begun + self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _finish(self, finished: Finished) -> bytes:
        assert self._prompted is not None
        begun = self._begin(_text_block("")) if self._index < 0 else b""
        delta = {
            "stop_reason": finish(finished.reason, REASONS),
            "stop_sequence": finished.stop_string or None,
        }
        counted = usage_object(*usage(self._prompted, finished), self._thought)
        ending = sse.named({"type": "message_delta", "delta": delta, "usage": counted})
        return begun + self._close() + ending + sse.named({"type": "message_stop"})
