"""The dialect of Ollama: lines of JSON, times in nanoseconds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tinychat.backend.protocol import Event, Finished, Message, Piece, Prompted, Request, Sampling, ToolCall
from tinychat.server import sse
from tinychat.server.answer import Answer, AnswerJob, ServedModel, WholeCall, finish, usage
from tinychat.server.fields import Fields
from tinychat.server.openai_chat import new_id
from tinychat.server.refusal import RequestRefused
from tinychat.server.sampling import (
    MAX_MESSAGES,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    arguments,
    check_tools,
    chosen_numbers,
    function,
    max_tokens,
    pick_seed,
    schema_format,
)
from tinychat.units import parameter_count

VERSION = "0.12.0"  # of Ollama's API that this is; clients compare it
REASONS = {"eos": "stop", "length": "length", "context": "length"}
OPTIONS_OFF = {
    "mirostat": (0,),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "penalize_newline": (True,),
    "num_keep": (0,),
}
# How the engine is set up, which a request does not change: threads, batches, where the weights are.
SETUP = ("num_thread", "num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "low_vram", "numa")


def error(refused: RequestRefused) -> dict[str, Any]:
    """An error as Ollama's clients read it."""
    return {"error": refused.message}


# Requests


def parse_chat(body: dict[str, Any], served: ServedModel) -> AnswerJob:
    """What a body of /api/chat asks for."""
    fields = Fields(body)
    fields.needed("model")
    values = fields.array("messages", MAX_MESSAGES)
    if not values:
        raise fields.refuse("messages", "expected an array of at least one message")
    tools = []
    for i, value in enumerate(fields.array("tools", MAX_TOOLS) or ()):
        tool = Fields(value, f"tools[{i}]")
        inner = tool.fields("function")
        if tool.text("type") != "function" or inner is None:
            raise tool.refuse("type", "only tools of type function are supported")
        tools.append(function(inner, "parameters", f"tools[{i}].function"))
        inner.done()
        tool.done()
    check_tools(served, tuple(tools), "auto")
    found = _messages(values)
    return _job(fields, served, Request(messages=found, tools=tuple(tools)), chat=True)


def parse_generate(body: dict[str, Any], served: ServedModel) -> AnswerJob:
    """What a body of /api/generate asks for: a template around the prompt, or with `raw` none."""
    fields = Fields(body)
    fields.needed("model")
    prompt, system = fields.text("prompt", "") or "", fields.text("system")
    if not prompt:
        raise fields.refuse("prompt", "expected a string that is not empty")
    if fields.flag("raw"):
        if system:
            raise fields.refuse("system", "is not possible together with raw")
        request = Request(raw=prompt)
    else:
        head: list[Message] = [{"role": "system", "content": system}] if system else []
        request = Request(messages=(*head, {"role": "user", "content": prompt}))
    fields.fixed({"suffix": (), "template": (), "context": ()})
    if fields.array("images", 1000):
        raise fields.refuse("images", "image input is not supported")
    return _job(fields, served, request, chat=False)


def _job(fields: Fields, served: ServedModel, request: Request, *, chat: bool) -> AnswerJob:
    stream = fields.flag("stream", True)
    _keep_alive(fields)
    thinking = _think(fields, served)
    form = _format(fields)
    logprobs = fields.flag("logprobs")
    if logprobs:
        raise fields.refuse("logprobs", "is not supported in this dialect, /v1/chat/completions has it")
    sampling, limit, stop = _options(fields.fields("options") or Fields({}, "options"), served)
    fields.fixed({"top_logprobs": (0,), "truncate": (), "shift": ()})
    fields.done()
    wanted = Request(
        messages=request.messages,
        raw=request.raw,
        tools=request.tools,
        sampling=sampling,
        max_tokens=limit,
        stop=stop,
        thinking=thinking,
        response_format=form,
    )
    return AnswerJob(wanted, LinesReply(served, chat), stream)


def _messages(values: Sequence[Any]) -> tuple[Message, ...]:
    found: list[dict[str, Any]] = []
    names: list[str] = []  # of calls without a result so far: results come in their order, or by name
    for i, value in enumerate(values):
        fields = Fields(value, f"messages[{i}]")
        role = fields.choice("role", ("system", "user", "assistant", "tool"))
        if role is None:
            raise fields.refuse("role", "is required")
        if fields.array("images", 1000):
            raise fields.refuse("images", "image input is not supported")
        message: dict[str, Any] = {"role": role, "content": fields.text("content", "") or ""}
        if thinking := fields.text("thinking"):
            message["reasoning_content"] = thinking
        for j, value in enumerate(fields.array("tool_calls", MAX_TOOLS) or ()):
            call = _call(Fields(value, f"messages[{i}].tool_calls[{j}]"))
            message.setdefault("tool_calls", []).append(call)
            names.append(call["id"])
        if role == "tool":
            name = fields.text("tool_name") or fields.text("name")
            message["tool_call_id"] = fields.text("tool_call_id") or (names.pop(0) if names else "")
            message |= {"name": name} if name else {}
        fields.done()
        found.append(message)
    return tuple(found)


def _call(fields: Fields) -> dict[str, Any]:
    fields.fixed({"type": ("function",)})
    inner = fields.fields("function")
    if inner is None:
        raise fields.refuse("function", "is required")
    text = arguments(inner.any("arguments", {}), inner.name("arguments"))
    call = {"name": inner.needed("name"), "arguments": text}
    inner.notes("index", "description")
    inner.done()
    found = {"id": fields.text("id") or new_id("call_"), "type": "function", "function": call}
    fields.done()
    return found


def _options(fields: Fields, served: ServedModel) -> tuple[Sampling, int | None, tuple[str, ...]]:
    info = served.backend.info
    seed = fields.integer("seed", None, -(2**63), 2**64 - 1)
    sampling = replace(chosen_numbers(fields, served.sampling), seed=pick_seed(seed, served))
    limit = fields.integer("num_predict", None, -2, MAX_TOKENS)
    stop = fields.strings("stop", MAX_STOPS, MAX_STOP)
    context = fields.integer("num_ctx", None, 1, MAX_TOKENS)
    if context is not None and context > info.max_context:
        raise fields.refuse("num_ctx", f"the context here holds {info.max_context:,} tokens")
    fields.notes(*SETUP)
    fields.fixed(OPTIONS_OFF)
    fields.done()
    return sampling, max_tokens(served, limit), stop


def _keep_alive(fields: Fields) -> None:
    """How long the model has to stay loaded. It always stays, so only a request to unload it is refused."""
    value = fields.any("keep_alive")
    if value in (0, "0", "0s", "0m"):
        raise fields.refuse("keep_alive", "the model is not unloaded here")
    if value is not None and not isinstance(value, int | float | str):
        raise fields.refuse("keep_alive", "expected a duration")


def _think(fields: Fields, served: ServedModel) -> bool | None:
    value = fields.any("think")
    if value is None or isinstance(value, bool):
        thinking = value
    elif value in ("low", "medium", "high"):
        thinking = True
    else:
        raise fields.refuse("think", "expected true, false, low, medium or high")
    if thinking and not served.backend.info.can.thinking:
        raise fields.refuse("think", "this model cannot think")
    return thinking


def _format(fields: Fields) -> dict[str, Any] | None:
    value = fields.any("format")
    if value is None or value == "":
        return None
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise fields.refuse("format", "expected json or a JSON schema")
    return schema_format(value)


# Answers


@dataclass
class LinesReply:
    """Formats one answer as Ollama does: /api/chat with messages, /api/generate with text."""

    served: ServedModel
    chat: bool
    media_type = "application/x-ndjson"
    ping = b""
    _began: float = field(default_factory=time.monotonic)
    _prompted: Prompted | None = None
    _calls: list[WholeCall] = field(default_factory=list)  # sent whole, when they are complete

    def begin(self, prompted: Prompted) -> bytes:
        self._prompted = prompted
        return b""

    def event(self, event: Event) -> bytes:
        if isinstance(event, Piece) and event.text:
            thinking = event.kind == "thinking"
            return self._line(self._said("" if thinking else event.text, event.text if thinking else ""))
        if isinstance(event, ToolCall):
            return self._call(event)
        if isinstance(event, Finished):
            assert self._prompted is not None
            return self._send_calls() + self._line(self._said("", "") | self._end(self._prompted, event))
        return b""

    def fail(self, refused: RequestRefused) -> bytes:
        return sse.encode(error(refused)) + b"\n"

    def whole(self, answer: Answer) -> dict[str, Any]:
        said = self._said(answer.text, answer.thinking, answer.calls)
        return self._object(said | self._end(answer.prompted, answer.finished))

    def _call(self, call: ToolCall) -> bytes:
        sent = b""
        if call.name:
            sent = self._send_calls()
            self._calls.append(WholeCall(call.id, call.name, ""))
        self._calls[-1].arguments += call.arguments
        return sent

    def _send_calls(self) -> bytes:
        calls, self._calls = self._calls, []
        return self._line(self._said("", "", calls)) if calls else b""

    def _said(self, text: str, thinking: str, calls: Sequence[WholeCall] = ()) -> dict[str, Any]:
        thought = {"thinking": thinking} if thinking else {}
        if not self.chat:
            return {"response": text, **thought}
        message: dict[str, Any] = {"role": "assistant", "content": text, **thought}
        if calls:
            message["tool_calls"] = [
                {"id": c.id, "function": {"index": i, "name": c.name, "arguments": _object_of(c.arguments)}}
                for i, c in enumerate(calls)
            ]
        return {"message": message}

    def _end(self, prompted: Prompted, finished: Finished) -> dict[str, Any]:
        prompt, _, generated = usage(prompted, finished)
        s = finished.stats
        return {
            "done": True,
            "done_reason": finish(finished.reason, REASONS),
            "total_duration": int((time.monotonic() - self._began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": prompt,
            "prompt_eval_duration": int(s.prefill_s * 1e9),
            "eval_count": generated,
            "eval_duration": int((s.first_token_s + s.decode_s) * 1e9),
        }

    def _object(self, values: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.served.model, "created_at": now, "done": False} | values

    def _line(self, values: dict[str, Any]) -> bytes:
        return sse.encode(self._object(values)) + b"\n"


def _object_of(text: str) -> Any:
    """A call's arguments; text where the model did not write JSON."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text


# What is here


def routes(served: ServedModel) -> list[Route]:
    """GET endpoints."""

    async def version(request: HTTPRequest) -> Response:
        return JSONResponse({"version": VERSION})

    async def tags(request: HTTPRequest) -> Response:
        return JSONResponse({"models": [model_object(served)]})

    return [Route("/api/version", version), Route("/api/tags", tags)]


def model_object(served: ServedModel) -> dict[str, Any]:
    """The model as /api/tags lists it."""
    info = served.backend.info
    return {
        "name": served.model,
        "model": served.model,
        "modified_at": datetime.fromtimestamp(served.started, UTC).isoformat().replace("+00:00", "Z"),
        "size": info.file_bytes,
        "digest": info.fingerprint,
        "details": _details(served),
    }


def _details(served: ServedModel) -> dict[str, Any]:
    info = served.backend.info
    return {
        "parent_model": "",
        "format": "gguf",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": parameter_count(info.parameters),
        "quantization_level": info.quant,
    }


def show(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/api/show: what the model is and can."""
    fields = Fields(body)
    if not (fields.text("model") or fields.text("name")):
        raise fields.refuse("model", "is required")
    fields.notes("name", "verbose")
    fields.fixed({"system": (), "template": (), "options": ()})
    fields.done()
    info = served.backend.info
    can = [name for name, has in (("tools", info.can.tools), ("thinking", info.can.thinking)) if has]
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value:g}" for name, value in served.recommended.items()),
        "template": "",
        "details": _details(served),
        "model_info": {
            "general.architecture": info.architecture,
            "general.parameter_count": info.parameters,
            f"{info.architecture}.context_length": info.trained_context,
            f"{info.architecture}.block_count": info.layers,
        },
        "capabilities": ["completion", *can],
        "modified_at": datetime.fromtimestamp(served.started, UTC).isoformat().replace("+00:00", "Z"),
    }
