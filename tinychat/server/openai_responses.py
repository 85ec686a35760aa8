"""The dialect of OpenAI's Responses. Nothing is stored: every request contains the whole conversation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tinychat.backend.protocol import (
    Event,
    Finished,
    Message,
    Piece,
    Prefilling,
    Prompted,
    Request,
    TokenPiece,
    ToolCall,
)
from tinychat.server import sse
from tinychat.server.answer import Answer, AnswerJob, ServedModel, timings, usage
from tinychat.server.fields import Fields
from tinychat.server.openai_chat import EFFORTS, NOTES, Extras, error, logprob_entries, new_id, progress
from tinychat.server.refusal import RequestRefused, invalid
from tinychat.server.sampling import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    arguments,
    check_tools,
    content,
    function,
    json_schema,
    max_tokens,
    model,
    sampling,
)

TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
ONLY = {
    "background": (False,),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "max_tool_calls": (),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "context_management": (),
}
# Optional parts of a response. Reasoning is sent as plain text, so that there is none to encrypt.
INCLUDE = ("message.output_text.logprobs", "reasoning.encrypted_content")

__all__ = ["error", "parse"]


# Requests


def parse(body: dict[str, Any], served: ServedModel, *, strict: bool = True) -> AnswerJob:
    """What `body` asks for. `strict`: model is required, as OpenAI does."""
    echo = Echo(body)
    fields = Fields(body)
    model(fields, strict)
    instructions = fields.text("instructions")
    head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    conversation = [*head, *_input(fields)]
    tools, choice = _tools(fields, served)
    include = fields.array("include", len(INCLUDE)) or []
    for name in include:
        if name not in INCLUDE:
            raise fields.refuse("include", f"expected one of {', '.join(INCLUDE)}")
    top = fields.integer("top_logprobs", None, 0, 20)
    logprobs = (top or 0) if top or INCLUDE[0] in include else None
    stream = fields.flag("stream")
    if (options := fields.fields("stream_options")) is not None:
        options.fixed({"include_obfuscation": (False,)})
        options.done()
    extras = Extras(fields.flag("return_progress"), fields.flag("timings_per_token"))
    thinking = _thinking(fields, served)
    one_call = not fields.flag("parallel_tool_calls", True)
    cuts = fields.choice("truncation", ("auto", "disabled")) == "auto"
    request = Request(
        messages=tuple(conversation),
        sampling=sampling(fields, served),
        max_tokens=max_tokens(served, fields.integer("max_output_tokens", None, 1, MAX_TOKENS)),
        thinking=thinking,
        tools=tools,
        tool_choice=choice,
        response_format=_form(fields),
        logprobs=logprobs,
        overflow="oldest" if cuts else "refuse",
    )
    fields.notes(*NOTES)
    fields.fixed(ONLY)
    fields.done()
    return AnswerJob(request, ResponsesReply(served, echo, request, extras), stream, one_call)


def count(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/v1/responses/input_tokens: a request -> the tokens of its prompt."""
    counted = served.backend.measure(parse(body, served, strict=False).request)
    return {"object": "response.input_tokens", "input_tokens": counted.prompt + counted.answer}


@dataclass
class Echo:
    """The body of a request, of which the response repeats some fields."""

    body: dict[str, Any]

    def get(self, field: str, default: Any = None) -> Any:
        value = self.body.get(field)
        return default if value is None else value


def _input(fields: Fields) -> list[Message]:
    value = fields.any("input")
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise fields.refuse("input", "expected a string or an array of items, not empty")
    if len(value) > MAX_MESSAGES:
        raise fields.refuse("input", f"has more than {MAX_MESSAGES:,} items")
    found: list[dict[str, Any]] = []
    for i, item in enumerate(value):
        _add_item(Fields(item, f"input[{i}]"), found)
    return list(found)


def _add_item(fields: Fields, found: list[dict[str, Any]]) -> None:
    """Adds an item to the messages: reasoning, text and calls of one turn become one message of the assistant."""
    kind = fields.text("type", "message")
    fields.notes("id", "status", "phase")
    if kind == "message":
        role = fields.choice("role", ("system", "developer", "user", "assistant"))
        if role is None:
            raise fields.refuse("role", "is required")
        text = content(fields.any("content"), fields.name("content"), TEXTS)
        if role == "assistant":
            turn = _turn(found)
            turn["content"] = "\n".join(filter(None, (turn["content"], text)))
        else:
            found.append({"role": "system" if role == "developer" else role, "content": text})
    elif kind == "reasoning":
        thought = content(fields.any("content"), fields.name("content"), TEXTS)
        thought = thought or content(fields.any("summary"), fields.name("summary"), TEXTS)
        fields.notes("summary", "encrypted_content")
        if thought:
            _turn(found)["reasoning_content"] = thought
    elif kind == "function_call":
        text = arguments(fields.any("arguments", "{}"), fields.name("arguments"))
        call = {"name": fields.needed("name"), "arguments": text}
        calls = _turn(found).setdefault("tool_calls", [])
        calls.append({"id": fields.needed("call_id"), "type": "function", "function": call})
    elif kind == "function_call_output":
        text = content(fields.any("output"), fields.name("output"), TEXTS)
        found.append({"role": "tool", "tool_call_id": fields.needed("call_id"), "content": text})
    else:
        raise fields.refuse("type", "an item of this type is not supported")
    fields.done()


def _turn(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end; a new one where the last message has another role."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _tools(fields: Fields, served: ServedModel) -> tuple[tuple[dict[str, Any], ...], Any]:
    tools = []
    for i, value in enumerate(fields.array("tools", MAX_TOOLS) or ()):
        tool = Fields(value, f"tools[{i}]")
        if tool.text("type") != "function":
            raise tool.refuse("type", "only tools of type function are supported")
        tools.append(function(tool, "parameters", f"tools[{i}]"))
        tool.done()
    choice = fields.any("tool_choice", "auto")
    if isinstance(choice, dict):
        inner = Fields(choice, "tool_choice")
        inner.fixed({"type": ("function",)})
        choice = {"type": "function", "function": {"name": inner.needed("name")}}
        inner.done()
    elif choice not in ("auto", "none", "required"):
        raise fields.refuse("tool_choice", "expected none, auto, required or a function")
    found = tuple(tools)
    check_tools(served, found, choice)
    return found, choice


def _thinking(fields: Fields, served: ServedModel) -> bool | None:
    asked = fields.fields("reasoning")
    if asked is None:
        return None
    effort = asked.choice("effort", EFFORTS)
    asked.choice("summary", ("auto", "concise", "detailed"))
    asked.choice("generate_summary", ("auto", "concise", "detailed"))
    asked.done()
    if effort is None:
        return None
    if effort != "none" and not served.backend.info.can.thinking:
        raise fields.refuse("reasoning.effort", "this model cannot think")
    return effort != "none"  # all levels but none are the same


def _form(fields: Fields) -> dict[str, Any] | None:
    """text.format, which holds a schema's fields itself."""
    text = fields.fields("text")
    if text is None:
        return None
    text.fixed({"verbosity": ("medium",)})
    inner = text.fields("format")
    text.done()
    if inner is None:
        return None
    kind = inner.choice("type", ("text", "json_object", "json_schema"))
    if kind == "json_schema":
        return json_schema(inner)
    inner.done()
    if kind is None:
        raise invalid("is required", "text.format.type")
    return {"type": "json_object"} if kind == "json_object" else None


# Answers

Status = Literal["in_progress", "completed", "incomplete", "failed"]


@dataclass
class ResponsesReply:
    """Formats one answer as Responses does: items of reasoning, message and function calls, in order."""

    served: ServedModel
    echo: Echo
    request: Request
    extras: Extras
    id: str = field(default_factory=lambda: new_id("resp_"))
    created: int = field(default_factory=lambda: int(time.time()))
    media_type = sse.EVENT_STREAM
    ping = sse.PING
    _prompted: Prompted | None = None
    _sequence: int = -1
    _items: list[dict[str, Any]] = field(default_factory=list)  # finished ones, and the open one at the end
    _open: str = ""  # the type of the open one
    _text: list[str] = field(default_factory=list)  # of the open one
    _tokens: list[TokenPiece] = field(default_factory=list)  # of the open message
    _thought: int = 0
    _began: float = 0.0

    def begin(self, prompted: Prompted) -> bytes:
        self._prompted, self._began = prompted, time.monotonic()
        response = self._response("in_progress", [], None)
        return self._send("response.created", response=response) + self._send("response.in_progress", response=response)

    def event(self, event: Event) -> bytes:
        if isinstance(event, Piece):
            return self._piece(event)
        if isinstance(event, ToolCall):
            return self._call(event)
        if isinstance(event, Prefilling) and self.extras.progress:
            response = self._response("in_progress", [], None)
            return self._send("response.in_progress", response=response, prompt_progress=progress(event, self._began))
        if isinstance(event, Finished):
            return self._finish(event)
        return b""

    def fail(self, refused: RequestRefused) -> bytes:
        response = self._response("failed", self._items, None)
        response["error"] = {"code": "server_error", "message": refused.message}
        return self._send("response.failed", response=response)

    def whole(self, answer: Answer) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        status = _status(answer.finished)
        if answer.thinking:
            items.append(_reasoning(new_id("rs_"), answer.thinking, status))
        if answer.text or not answer.calls:
            items.append(self._message(new_id("msg_"), answer.text, answer.tokens, status))
        items += [_function_call(new_id("fc_"), c.id, c.name, c.arguments, "completed") for c in answer.calls]
        self._prompted, self._thought = answer.prompted, answer.thought
        return self._response(status, items, answer.finished) | {"timings": timings(answer.finished.stats)}

    # items, one open at a time

    def _piece(self, piece: Piece) -> bytes:
        if piece.kind == "thinking":
            self._thought += len(piece.tokens)
            if not piece.text:
                return b""
            begun = b"" if self._open == "reasoning" else self._close() + self._begin("reasoning")
            self._text.append(piece.text)
            return begun + self._part("response.reasoning_text.delta", delta=piece.text)
        self._tokens += piece.tokens
        if not piece.text:
            return b""
        begun = b"" if self._open == "message" else self._close() + self._begin("message")
        self._text.append(piece.text)
        new = piece.tokens if self.request.logprobs is not None else ()
        more = {"logprobs": _logprobs(self.served, new)} | self.extras.of_moment(self.served)
        return begun + self._part("response.output_text.delta", delta=piece.text, **more)

    def _call(self, call: ToolCall) -> bytes:
        begun = b""
        if call.name:
            begun = self._close()
            self._open, self._text = "function_call", []
            self._items.append(_function_call(new_id("fc_"), call.id, call.name, "", "in_progress"))
            begun += self._item("response.output_item.added")
        if not call.arguments:
            return begun
        self._text.append(call.arguments)
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return begun + self._send("response.function_call_arguments.delta", **place, delta=call.arguments)

    def _begin(self, kind: str) -> bytes:
        self._open, self._text = kind, []
        if kind == "message":
            item = self._message(new_id("msg_"), "", [], "in_progress")
            part = item["content"][0]
            item["content"] = []
        else:
            item = _reasoning(new_id("rs_"), "", "in_progress")
            part = item["content"][0]
            item["content"] = []
        self._items.append(item)
        return self._item("response.output_item.added") + self._part("response.content_part.added", part=part)

    def _close(self, status: Status = "completed") -> bytes:
        """Ends the open item."""
        if not self._open:
            return b""
        kind, self._open = self._open, ""
        text, old = "".join(self._text), self._items[-1]
        if kind == "function_call":
            self._items[-1] = _function_call(old["id"], old["call_id"], old["name"], text, status)
            place = {"item_id": old["id"], "output_index": len(self._items) - 1}
            done = self._send("response.function_call_arguments.done", **place, name=old["name"], arguments=text)
        elif kind == "reasoning":
            self._items[-1] = _reasoning(old["id"], text, status)
            done = self._part("response.reasoning_text.done", text=text)
            done += self._part("response.content_part.done", part=self._items[-1]["content"][0])
        else:
            self._items[-1] = self._message(old["id"], text, self._tokens, status)
            part = self._items[-1]["content"][0]
            done = self._part("response.output_text.done", text=text, logprobs=part["logprobs"])
            done += self._part("response.content_part.done", part=part)
        return done + self._item("response.output_item.done")

    def _finish(self, finished: Finished) -> bytes:
        begun = b"" if self._items else self._begin("message")
        status = _status(finished)
        ended = self._close(status)
        response = self._response(status, self._items, finished)
        return begun + ended + self._send(f"response.{status}", response=response, timings=timings(finished.stats))

    # their format

    def _send(self, kind: str, **values: Any) -> bytes:
        self._sequence += 1
        return sse.named({"type": kind, "sequence_number": self._sequence, **values})

    def _item(self, kind: str) -> bytes:
        return self._send(kind, output_index=len(self._items) - 1, item=self._items[-1])

    def _part(self, kind: str, **values: Any) -> bytes:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}
        return self._send(kind, **place, **values)

    def _message(self, id: str, text: str, tokens: Sequence[TokenPiece], status: Status) -> dict[str, Any]:
        entries = _logprobs(self.served, tokens) if self.request.logprobs is not None else []
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": entries}
        return {"type": "message", "id": id, "status": status, "role": "assistant", "content": [part]}

    def _response(self, status: Status, items: list[dict[str, Any]], finished: Finished | None) -> dict[str, Any]:
        request, echo, counted = self.request, self.echo, None
        if finished is not None and self._prompted is not None:
            prompt, cached, generated = usage(self._prompted, finished)
            counted = {
                "input_tokens": prompt,
                "output_tokens": generated,
                "total_tokens": prompt + generated,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens_details": {"reasoning_tokens": self._thought},
            }
        reasoning, text = echo.get("reasoning", {}), echo.get("text", {})
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.served.model,
            "previous_response_id": None,
            "instructions": echo.get("instructions"),
            "output": items,
            "error": None,
            "tools": [_tool(tool["function"]) for tool in request.tools],
            "tool_choice": echo.get("tool_choice", "auto"),
            "truncation": echo.get("truncation", "disabled"),
            "parallel_tool_calls": echo.get("parallel_tool_calls", True),
            "text": {"format": text.get("format") or {"type": "text"}},
            "top_p": request.sampling.top_p,
            "presence_penalty": request.sampling.presence_penalty,
            "frequency_penalty": request.sampling.frequency_penalty,
            "top_logprobs": request.logprobs or 0,
            "temperature": request.sampling.temperature,
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "usage": counted,
            "max_output_tokens": echo.get("max_output_tokens"),
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": echo.get("metadata", {}),
            "safety_identifier": echo.get("safety_identifier"),
            "prompt_cache_key": echo.get("prompt_cache_key"),
        }


def _status(finished: Finished) -> Status:
    return "incomplete" if finished.reason in ("length", "context") else "completed"


def _reasoning(id: str, text: str, status: Status) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"type": "reasoning", "id": id, "summary": [], "content": [part], "status": status}


def _function_call(id: str, call_id: str, name: str, arguments: str, status: Status) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": id,
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def _tool(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function["parameters"],
        "strict": function.get("strict", False),
    }


def _logprobs(served: ServedModel, tokens: Sequence[TokenPiece]) -> list[dict[str, Any]]:
    return logprob_entries(served, tokens) if tokens else []
