"""The dialect of OpenAI's Completions: a prompt as it is, without a chat template."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tinychat.backend.protocol import Event, Finished, Piece, Prefilling, Prompted, Request, TokenPiece
from tinychat.server import sse
from tinychat.server.answer import Answer, AnswerJob, ServedModel, finish, timings
from tinychat.server.fields import Fields
from tinychat.server.openai_chat import (
    FINGERPRINT,
    NOTES,
    REASONS,
    Extras,
    error,
    new_id,
    progress,
    prompted_details,
    stream_options,
    usage_object,
)
from tinychat.server.refusal import RequestRefused
from tinychat.server.sampling import MAX_STOP, MAX_STOPS, MAX_TOKENS, max_tokens, model, sampling

DEFAULT_TOKENS = 16  # OpenAI's
ONLY = {"n": (1,), "echo": (False,), "suffix": (), "add_special_tokens": (True,)}

__all__ = ["error", "parse"]


def parse(body: dict[str, Any], served: ServedModel) -> AnswerJob:
    """What `body` asks for."""
    fields = Fields(body)
    model(fields, True)
    stream, include_usage = stream_options(fields)
    extras = Extras.take(fields)
    top = fields.integer("logprobs", None, 0, 20)
    if top is not None and not served.backend.info.can.logprobs:
        raise fields.refuse("logprobs", "this model's probabilities are not known here")
    limit = fields.integer("max_tokens", DEFAULT_TOKENS, -1, MAX_TOKENS)
    limit = fields.integer("n_predict", limit, -1, MAX_TOKENS)
    request = Request(
        raw=prompt(fields, served),
        sampling=sampling(fields, served),
        max_tokens=max_tokens(served, limit),
        stop=fields.strings("stop", MAX_STOPS, MAX_STOP),
        logprobs=top,
    )
    fields.notes(*NOTES)
    fields.fixed(ONLY)
    fields.done()
    return AnswerJob(request, CompletionReply(served, include_usage, extras, top is not None), stream)


def prompt(fields: Fields, served: ServedModel) -> str:
    """The prompt: a string, or an array of one string."""
    value = fields.any("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list) and value and not isinstance(value[0], str):
        raise fields.refuse("prompt", "token ids are not supported, send text")
    if isinstance(value, list) and len(value) > 1:
        raise fields.refuse("prompt", "several prompts in one request are not supported")
    if not isinstance(value, str) or not value:
        raise fields.refuse("prompt", "expected a string that is not empty")
    return value


@dataclass
class CompletionReply:
    """Formats one answer as Completions does."""

    served: ServedModel
    include_usage: bool
    extras: Extras
    logprobs: bool
    id: str = field(default_factory=lambda: new_id("cmpl-"))
    created: int = field(default_factory=lambda: int(time.time()))
    media_type = sse.EVENT_STREAM
    ping = sse.PING
    _prompted: Prompted | None = None
    _began: float = 0.0
    _offset: int = 0
    _tokens: list[TokenPiece] = field(default_factory=list)

    def begin(self, prompted: Prompted) -> bytes:
        self._prompted, self._began = prompted, time.monotonic()
        if not self.extras.tokens:
            return b""
        return sse.data(self._object([]) | {"details": prompted_details(prompted)})

    def event(self, event: Event) -> bytes:
        if isinstance(event, Piece):
            self._tokens += event.tokens
            if not event.text and not self.extras.tokens:
                return b""
            tokens, self._tokens = self._tokens, []
            more: dict[str, Any] = self.extras.of_piece(event, self.served) | self.extras.of_moment(self.served)
            return sse.data(self._object([self._choice(event.text, tokens, None)]) | more)
        if isinstance(event, Prefilling) and self.extras.progress:
            return sse.data(self._object([]) | {"prompt_progress": progress(event, self._began)})
        if isinstance(event, Finished):
            return self._finish(event)
        return b""

    def fail(self, refused: RequestRefused) -> bytes:
        return sse.data(error(refused)) + sse.DONE

    def whole(self, answer: Answer) -> dict[str, Any]:
        choice = self._choice(answer.text, answer.tokens, finish(answer.finished.reason, REASONS))
        more = {
            "usage": usage_object(answer.prompted, answer.finished, answer.thought),
            "timings": timings(answer.finished.stats),
        }
        return self._object([choice]) | more

    def _finish(self, finished: Finished) -> bytes:
        assert self._prompted is not None
        last = self._object([self._choice("", self._tokens, finish(finished.reason, REASONS))])
        more = {"timings": timings(finished.stats)} | self.extras.of_end(finished)
        if not self.include_usage:
            return sse.data(last | more) + sse.DONE
        counted = {"usage": usage_object(self._prompted, finished, 0)}
        return sse.data(last) + sse.data(self._object([]) | counted | more) + sse.DONE

    def _choice(self, text: str, tokens: list[TokenPiece], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self.logprobs else None
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, tokens: list[TokenPiece]) -> dict[str, Any]:
        """Columns, one entry per token: its text, log-probability, place in the answer, and the likeliest others."""
        columns: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            names = self.served.tokenizing.token_bytes([i for i, _ in token.top])
            others = {n.decode("utf-8", "replace"): logprob for n, (_, logprob) in zip(names, token.top)}
            columns["tokens"].append(token.text)
            columns["token_logprobs"].append(token.logprob)
            columns["top_logprobs"].append(others)
            columns["text_offset"].append(self._offset)
            self._offset += len(token.text)
        return columns

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.served.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }
