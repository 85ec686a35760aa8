"""The dialect of OpenAI's Chat Completions, with the fields that llama-server and vLLM add to it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinychat import __version__
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
from tinychat.backend.protocol import Usage as ContextUsage
from tinychat.server import sse
from tinychat.server.answer import Answer, AnswerJob, Joined, ServedModel, finish, timings, usage
from tinychat.server.fields import Fields
from tinychat.server.refusal import RequestRefused
from tinychat.server.sampling import (
    MAX_MESSAGES,
    MAX_STOP,
    MAX_STOPS,
    MAX_TOKENS,
    MAX_TOOLS,
    arguments,
    check_tools,
    content,
    function,
    max_tokens,
    model,
    response_format,
    sampling,
    schema_format,
)

STATS_S = 0.25  # between two sendings of the engine's figures to tinychat's own client
FINGERPRINT = f"b-tinychat-{__version__}"
REASONS = {"eos": "stop", "length": "length", "context": "length", "tool_calls": "tool_calls"}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
TYPES = {  # of errors
    "context": "exceed_context_size_error",
    "key": "authentication_error",
    "forbidden": "permission_error",
    "missing": "not_found_error",
    "busy": "unavailable_error",
    "internal": "server_error",
    "lost": "server_error",
}
CODES = {"context": "context_length_exceeded", "key": "invalid_api_key", "busy": "server_busy"}

# Annotations of the client, and hints at behaviour that is fixed here; none of them changes an answer.
NOTES = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
ONLY = {
    "n": (1,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "modalities": (["text"],),
    "verbosity": ("medium",),
    "reasoning_format": ("auto", "deepseek"),
    "include_reasoning": (True,),
    "parse_tool_calls": (True,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "functions": (),
    "function_call": (),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


def error(refused: RequestRefused) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {
        "error": {
            "message": refused.message,
            "type": TYPES.get(refused.kind, "invalid_request_error"),
            "param": refused.field,
            "code": CODES.get(refused.kind),
            **refused.details,
        }
    }


# Requests


def parse(body: dict[str, Any], served: ServedModel, *, strict: bool = True) -> AnswerJob:
    """What `body` asks for. `strict`: model is required, as OpenAI does."""
    fields = Fields(body)
    model(fields, strict)
    conversation = messages(fields.array("messages", MAX_MESSAGES), "messages")
    thinking, kwargs = _thinking(fields, served)
    tools, choice = _tools(fields, served)
    limit = fields.integer("max_tokens", None, -1, MAX_TOKENS)
    limit = fields.integer("max_completion_tokens", limit, -1, MAX_TOKENS)
    limit = fields.integer("n_predict", limit, -1, MAX_TOKENS)
    stream, include_usage = stream_options(fields)
    extras = Extras.take(fields)
    form = response_format(fields.fields("response_format"))
    if (schema := fields.object("json_schema")) is not None:
        form = schema_format(schema)
    if (grammar := fields.text("grammar")) and form is not None:
        raise fields.refuse("grammar", "and a schema cannot both be held")
    if grammar:
        form = {"type": "grammar", "grammar": grammar}
    request = Request(
        messages=conversation,
        sampling=sampling(fields, served),
        max_tokens=max_tokens(served, limit),
        stop=fields.strings("stop", MAX_STOPS, MAX_STOP),
        thinking=thinking,
        continue_final=_continues(fields, conversation),
        tools=tools,
        tool_choice=choice,
        response_format=form,
        template_kwargs=kwargs,
        logprobs=_logprobs(fields, served),
    )
    one_call = not fields.flag("parallel_tool_calls", True)
    fields.notes(*NOTES)
    fields.fixed(ONLY)
    fields.done()
    return AnswerJob(request, ChatReply(served, include_usage, extras, request.logprobs is not None), stream, one_call)


@dataclass
class Extras:
    """What llama-server and tinychat add to a stream when asked to."""

    progress: bool = False  # prompt_progress while the prompt is read
    timings: bool = False  # timings with every chunk
    tokens: bool = False  # tinychat: the tokens of every chunk, and at the end all figures
    told: float = 0.0  # when the figures were sent last, by time.monotonic()

    @classmethod
    def take(cls, fields: Fields) -> Extras:
        return cls(fields.flag("return_progress"), fields.flag("timings_per_token"), fields.flag("return_details"))

    def of_piece(self, piece: Piece, served: ServedModel) -> dict[str, Any]:
        """The pieces of a chunk with their tokens, for tinychat's own client, and a few times a second the engine's
        figures."""
        if not self.tokens:
            return {}
        parts = piece.parts if isinstance(piece, Joined) else (piece,)
        details: dict[str, Any] = {
            "kind": piece.kind,
            "pieces": [(p.text, [(t.id, t.text, t.logprob, t.top, t.source) for t in p.tokens]) for p in parts],
        }
        now = time.monotonic()
        if now - self.told >= STATS_S and (stats := served.backend.snapshot()):
            self.told = now
            details["now"] = stats.as_dict()
        return {"details": details}

    def of_moment(self, served: ServedModel) -> dict[str, Any]:
        """The engine's present figures."""
        stats = served.backend.snapshot() if self.timings else None
        return {"timings": timings(stats)} if stats else {}

    def of_end(self, finished: Finished) -> dict[str, Any]:
        """All figures of the answer, for tinychat's own client."""
        if not self.tokens:
            return {}
        return {
            "details": {
                "usage": usage_details(finished.usage),
                "stats": finished.stats.as_dict(),
                "reason": finished.reason,
                "stop_string": finished.stop_string,
            }
        }


def prompted_details(prompted: Prompted) -> dict[str, Any]:
    """The prompt's size and parts, for tinychat's own client."""
    note = {"note": prompted.note} if prompted.note else {}
    return {"usage": usage_details(prompted.usage), "dropped": prompted.dropped, **note}


def progress(event: Prefilling, began: float) -> dict[str, Any]:
    """How much of the prompt is read, by llama-server's names; `began` by time.monotonic()."""
    return {
        "total": event.reused + event.total,
        "cache": event.reused,
        "processed": event.reused + event.done,
        "time_ms": int((time.monotonic() - began) * 1e3),
    }


def stream_options(fields: Fields) -> tuple[bool, bool]:
    """Whether to stream, and whether usage comes at the end of the stream."""
    stream = fields.flag("stream")
    options = fields.fields("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise fields.refuse("stream_options", "needs stream")
    include = options.flag("include_usage")
    options.fixed({"include_obfuscation": (False,), "continuous_usage_stats": (False,)})
    options.done()
    return stream, include


def messages(values: Sequence[Any] | None, where: str) -> tuple[Message, ...]:
    """The conversation, each message with role and content. Raises RequestRefused for what is no message."""
    if not values:
        raise RequestRefused("invalid", f"{where}: expected an array of at least one message", where)
    return tuple(_message(Fields(value, f"{where}[{i}]")) for i, value in enumerate(values))


def _message(fields: Fields) -> Message:
    role = fields.choice("role", ("system", "developer", "user", "assistant", "tool"))
    if role is None:
        raise fields.refuse("role", "is required")
    role = "system" if role == "developer" else role
    value = fields.any("content")
    found: dict[str, Any] = {"role": role, "content": content(value, fields.name("content"), ("text", "refusal"))}
    if role == "assistant":
        thought = fields.text("reasoning_content") or fields.text("reasoning")
        if thought:
            found["reasoning_content"] = thought
        if calls := fields.array("tool_calls", MAX_TOOLS):
            found["tool_calls"] = [_call(Fields(c, f"{fields.name('tool_calls')}[{i}]")) for i, c in enumerate(calls)]
        fields.notes("refusal", "annotations", "reasoning", "reasoning_details")
    elif value is None:
        raise fields.refuse("content", "is required")
    if role == "tool":
        found["tool_call_id"] = fields.text("tool_call_id", "")
    if name := fields.text("name"):
        found["name"] = name
    fields.done()
    return found


def _call(fields: Fields) -> dict[str, Any]:
    fields.fixed({"type": ("function",)})
    inner = fields.fields("function")
    if inner is None:
        raise fields.refuse("function", "is required")
    text = arguments(inner.any("arguments", "{}"), inner.name("arguments"))
    call = {
        "id": fields.text("id", ""),
        "type": "function",
        "function": {"name": inner.needed("name"), "arguments": text},
    }
    inner.done()
    fields.notes("index")
    fields.done()
    return call


def _tools(fields: Fields, served: ServedModel) -> tuple[tuple[dict[str, Any], ...], Any]:
    tools = []
    for i, value in enumerate(fields.array("tools", MAX_TOOLS) or ()):
        tool = Fields(value, f"tools[{i}]")
        if tool.text("type") != "function":
            raise tool.refuse("type", "only tools of type function are supported")
        inner = tool.fields("function")
        if inner is None:
            raise tool.refuse("function", "is required")
        tools.append(function(inner, "parameters", f"tools[{i}].function"))
        inner.done()
        tool.notes("cache_control")
        tool.done()
    choice = fields.any("tool_choice", "auto")
    if isinstance(choice, dict):
        outer = Fields(choice, "tool_choice")
        outer.fixed({"type": ("function",)})
        inner = outer.fields("function")
        if inner is None:
            raise outer.refuse("function", "is required")
        choice = {"type": "function", "function": {"name": inner.needed("name")}}
    elif choice not in ("auto", "none", "required"):
        raise fields.refuse("tool_choice", "expected none, auto, required or a function")
    found = tuple(tools)
    check_tools(served, found, choice)
    return found, choice


def _thinking(fields: Fields, served: ServedModel) -> tuple[bool | None, dict[str, Any]]:
    """Whether to think (None: the model's choice), and what else goes to the template."""
    kwargs = fields.object("chat_template_kwargs") or {}
    thinking = kwargs.pop("enable_thinking", None)
    if not isinstance(thinking, bool | None):
        raise fields.refuse("chat_template_kwargs.enable_thinking", "expected true or false")
    effort = fields.choice("reasoning_effort", EFFORTS)
    if (asked := fields.fields("reasoning")) is not None:  # OpenRouter's spelling, and that of Responses
        effort = asked.choice("effort", EFFORTS) or effort
        asked.choice("summary", ("auto", "concise", "detailed"))
        asked.done()
    if effort is not None:
        thinking = effort != "none"  # all levels but none are the same
    if thinking and not served.backend.info.can.thinking:
        name = "reasoning_effort" if effort else "chat_template_kwargs.enable_thinking"
        raise fields.refuse(name, "this model cannot think")
    return thinking, kwargs


def _continues(fields: Fields, conversation: Sequence[Message]) -> bool:
    """Whether the last message is an unfinished answer."""
    goes_on = fields.flag("continue_final_message")
    generate = fields.flag("add_generation_prompt", not goes_on)
    if goes_on and generate:
        raise fields.refuse("add_generation_prompt", "cannot be true together with continue_final_message")
    if not goes_on and not generate:
        raise fields.refuse("add_generation_prompt", "cannot be false without continue_final_message")
    if goes_on and conversation[-1]["role"] != "assistant":
        raise fields.refuse("continue_final_message", "needs an assistant's message at the end")
    return goes_on


def _logprobs(fields: Fields, served: ServedModel) -> int | None:
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs", None, 0, 20)
    if top and not wanted:
        raise fields.refuse("top_logprobs", "needs logprobs")
    if wanted and not served.backend.info.can.logprobs:
        raise fields.refuse("logprobs", "this model's probabilities are not known here")
    return (top or 0) if wanted else None


# Answers


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def usage_object(prompted: Prompted, finished: Finished, thought: int) -> dict[str, Any]:
    """Tokens as OpenAI counts them."""
    prompt, cached, generated = usage(prompted, finished)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": thought},
    }


def logprob_entries(served: ServedModel, tokens: Iterable[TokenPiece]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities and those of the likeliest others."""
    entries = []
    for token in tokens:
        ids = [i for i, _ in token.top]
        names = served.tokenizing.token_bytes([token.id, *ids])
        entry = _entry(names[0], token.logprob)
        entry["token"] = token.text or entry["token"]
        entry["top_logprobs"] = [_entry(name, logprob) for name, (_, logprob) in zip(names[1:], token.top)]
        entries.append(entry)
    return entries


def _entry(name: bytes, logprob: float) -> dict[str, Any]:
    return {"token": name.decode("utf-8", "replace"), "logprob": min(0.0, logprob), "bytes": list(name)}


@dataclass
class ChatReply:
    """Formats one answer as Chat Completions does."""

    served: ServedModel
    include_usage: bool
    extras: Extras
    logprobs: bool
    id: str = field(default_factory=lambda: new_id("chatcmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    media_type = sse.EVENT_STREAM
    ping = sse.PING
    _prompted: Prompted | None = None
    _thought: int = 0
    _tokens: list[TokenPiece] = field(default_factory=list)  # whose log-probabilities were not sent yet
    _began: float = 0.0

    def begin(self, prompted: Prompted) -> bytes:
        self._prompted, self._began = prompted, time.monotonic()
        more = {"details": prompted_details(prompted)} if self.extras.tokens else {}
        return self._chunk({"role": "assistant", "content": None}, more=more)

    def event(self, event: Event) -> bytes:
        if isinstance(event, Piece):
            return self._piece(event)
        if isinstance(event, ToolCall):
            return self._call(event)
        if isinstance(event, Prefilling):
            return self._progress(event) if self.extras.progress else b""
        if isinstance(event, Finished):
            return self._finish(event)
        return b""

    def fail(self, refused: RequestRefused) -> bytes:
        return sse.data(error(refused)) + sse.DONE

    def whole(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None, "annotations": []}
        if answer.thinking:
            message["reasoning_content"] = answer.thinking
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in answer.calls
            ]
        logprobs = {"content": logprob_entries(self.served, answer.tokens), "refusal": None} if self.logprobs else None
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.served.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": finish(answer.finished.reason, REASONS),
                }
            ],
            "usage": usage_object(answer.prompted, answer.finished, answer.thought),
            "timings": timings(answer.finished.stats),
        }

    def _piece(self, piece: Piece) -> bytes:
        thinking = piece.kind == "thinking"
        self._thought += len(piece.tokens) if thinking else 0
        delta = {"reasoning_content" if thinking else "content": piece.text} if piece.text else {}
        more = self.extras.of_piece(piece, self.served)
        if self.logprobs and not thinking:
            self._tokens += piece.tokens
        if not delta and not more:
            return b""
        return self._chunk(delta, logprobs=self._entries() if delta and not thinking else None, more=more)

    def _entries(self) -> dict[str, Any] | None:
        """The log-probabilities of the tokens whose text is sent now."""
        if not self.logprobs:
            return None
        entries, self._tokens = logprob_entries(self.served, self._tokens), []
        return {"content": entries, "refusal": None}

    def _call(self, call: ToolCall) -> bytes:
        found: dict[str, Any] = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.name:
            found = {"index": call.index, "id": call.id, "type": "function"}
            found["function"] = {"name": call.name, "arguments": call.arguments}
        return self._chunk({"tool_calls": [found]})

    def _progress(self, event: Prefilling) -> bytes:
        return self._chunk({}, more={"prompt_progress": progress(event, self._began)})

    def _finish(self, finished: Finished) -> bytes:
        assert self._prompted is not None
        last = {"timings": timings(finished.stats)} | self.extras.of_end(finished)
        counted = usage_object(self._prompted, finished, self._thought)
        reason = finish(finished.reason, REASONS)
        if not self.include_usage:
            return self._chunk({}, reason, more=last) + sse.DONE
        empty = self._object([]) | {"usage": counted} | last
        return self._chunk({}, reason) + sse.data(empty) + sse.DONE

    def _chunk(
        self,
        delta: dict[str, Any],
        reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        now = self.extras.of_moment(self.served) if "role" not in delta else {}
        return sse.data(self._object([choice]) | now | (more or {}))

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.served.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def usage_details(u: ContextUsage) -> dict[str, Any]:
    """Tokens of the prompt by part, for tinychat's own client."""
    return {
        "system": u.system,
        "history": u.history,
        "thinking": u.thinking,
        "tools": u.tools,
        "answer": u.answer,
        "limit": u.limit,
        "cached": u.cached,
        "exact": u.exact,
    }
