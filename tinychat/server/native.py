"""Endpoints besides those that answer: health, properties, models, tokens, templates, and metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tinychat import __version__
from tinychat.backend.protocol import SAMPLING_PARAMETERS, Finished, Request
from tinychat.server import openai_chat
from tinychat.server.answer import ServedModel
from tinychat.server.fields import Fields
from tinychat.server.queue import Queue
from tinychat.server.refusal import RequestRefused
from tinychat.server.sampling import MAX_TOKENS


@dataclass
class Counts:
    """Counters of all requests, by outcome; used from one event loop."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_s: float = 0.0
    generating_s: float = 0.0
    hung_up: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    def finished(self, event: Finished) -> None:
        s = event.stats
        self.requests += 1
        self.prompt_tokens += s.prompt_tokens
        self.cached_tokens += s.reused_tokens
        self.generated_tokens += s.generated_tokens
        self.prompt_s += s.prefill_s
        self.generating_s += s.decode_s

    def refused(self, refused: RequestRefused) -> None:
        self.refusals[refused.kind] = self.refusals.get(refused.kind, 0) + 1


def routes(served: ServedModel, queue: Queue, counts: Counts) -> list[Route]:
    """GET endpoints: none of them waits for the engine."""

    async def health(request: HTTPRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def props(request: HTTPRequest) -> Response:
        return JSONResponse(properties(served))

    async def models(request: HTTPRequest) -> Response:
        return JSONResponse({"object": "list", "data": [model_object(served)]})

    async def one_model(request: HTTPRequest) -> Response:
        if request.path_params["name"] != served.model:
            refused = RequestRefused("missing", "there is no model of this name here")
            return JSONResponse(openai_chat.error(refused), refused.status)
        return JSONResponse(model_object(served))

    async def metrics(request: HTTPRequest) -> Response:
        return PlainTextResponse(prometheus(served, queue, counts), media_type="text/plain; version=0.0.4")

    return [
        Route("/health", health),
        Route("/v1/health", health),
        Route("/props", props),
        Route("/v1/models", models),
        Route("/models", models),
        Route("/v1/models/{name:path}", one_model),
        Route("/metrics", metrics),
    ]


def model_object(served: ServedModel) -> dict[str, Any]:
    """The model as /v1/models lists it; `meta` by llama-server's names."""
    info = served.backend.info
    return {
        "id": served.model,
        "object": "model",
        "created": served.started,
        "owned_by": "tinychat",
        "max_model_len": info.max_context,
        "meta": {
            "n_ctx_train": info.trained_context,
            "n_ctx": info.max_context,
            "n_params": info.parameters,
            "size": info.file_bytes,
        },
    }


def properties(served: ServedModel) -> dict[str, Any]:
    """/props by llama-server's names; `tinychat` has the fields that its own client reads."""
    info, s, stats = served.backend.info, served.sampling, served.backend.snapshot()
    return {
        "model_alias": served.model,
        "model_path": info.path.name if info.path else "",  # the file's name, not where it is
        "model_ftype": info.quant,
        "total_slots": 1,
        "build_info": f"tinychat-{__version__}",
        "modalities": {"vision": False, "audio": False},
        "default_generation_settings": {
            "n_ctx": info.max_context,
            "params": {
                "seed": -1 if served.seed is None else served.seed,
                **{name: getattr(s, name) for name in SAMPLING_PARAMETERS},
            },
        },
        "tinychat": {
            "version": __version__,
            "can": {name: getattr(info.can, name) for name in info.can.__dataclass_fields__},
            "architecture": info.architecture,
            "quant": info.quant,
            "parameters": info.parameters,
            "active_parameters": info.active_parameters,
            "layers": info.layers,
            "experts": info.experts,
            "experts_used": info.experts_used,
            "trained_context": info.trained_context,
            "device": info.device,
            "threads": info.threads,
            "weight_bytes": info.weight_bytes,
            "kv_bytes_per_token": info.kv_bytes_per_token,
            "file_bytes": info.file_bytes,
            "fingerprint": info.fingerprint,
            "sampling": served.recommended,
            "notes": list(info.notes),
            "stats": stats.of_model().as_dict() if stats else {},
        },
    }


def tokenize(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/tokenize: {content} -> {tokens}."""
    fields = Fields(body)
    text = fields.text("content")
    text = fields.text("prompt") if text is None else text  # vLLM's name for it
    if text is None:
        raise fields.refuse("content", "is required")
    whole, special = fields.flag("add_special"), fields.flag("parse_special", True)
    pieces = fields.flag("with_pieces")
    fields.notes("model")
    fields.done()
    ids = served.tokenizing.tokenize(text, special=special, whole=whole)
    if not pieces:
        return {"tokens": ids, "count": len(ids)}
    named = zip(ids, served.tokenizing.token_bytes(ids))
    return {"tokens": [{"id": i, "piece": _piece(name)} for i, name in named], "count": len(ids)}


def _piece(name: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are no text on their own."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return list(name)


def detokenize(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/detokenize: {tokens} -> {content}."""
    fields = Fields(body)
    ids = fields.array("tokens", MAX_TOKENS)
    if ids is None:
        raise fields.refuse("tokens", "is required")
    if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
        raise fields.refuse("tokens", "expected token ids")
    fields.notes("model")
    fields.done()
    return {"content": served.tokenizing.detokenize(ids)}


def apply_template(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/apply-template: a chat request -> the prompt that it becomes."""
    return {"prompt": served.tokenizing.prompt_text(chat_request(body, served))}


def count_chat(body: dict[str, Any], served: ServedModel) -> dict[str, Any]:
    """/v1/chat/completions/input_tokens: a chat request -> the tokens of its prompt, and what they are."""
    counted = served.backend.measure(chat_request(body, served))
    return {"input_tokens": counted.prompt + counted.answer, "details": openai_chat.usage_details(counted)}


def chat_request(body: dict[str, Any], served: ServedModel) -> Request:
    """A Chat Completions request of which only the prompt is made."""
    return openai_chat.parse(body, served, strict=False).request


def prometheus(served: ServedModel, queue: Queue, counts: Counts) -> str:
    """Figures in Prometheus' text format."""
    stats = served.backend.snapshot()
    rows = [
        ("requests_total", "counter", "answers that were finished", counts.requests),
        ("prompt_tokens_total", "counter", "tokens of their prompts", counts.prompt_tokens),
        ("cached_tokens_total", "counter", "of those, in the KV cache already", counts.cached_tokens),
        ("prompt_seconds_total", "counter", "spent reading prompts", counts.prompt_s),
        ("generated_tokens_total", "counter", "tokens of answers", counts.generated_tokens),
        ("generating_seconds_total", "counter", "spent generating behind the first tokens", counts.generating_s),
        ("hung_up_total", "counter", "requests whose client hung up", counts.hung_up),
        ("running_requests", "gauge", "requests that are answered now", queue.running),
        ("waiting_requests", "gauge", "requests that wait for their turn", queue.waiting),
        ("queue_size", "gauge", "requests that may wait", queue.size),
    ]
    if stats is not None:
        rows += [
            ("decode_tokens_per_second", "gauge", "of the running or last answer", stats.decode_tok_s),
            ("prefill_tokens_per_second", "gauge", "of the running or last prompt", stats.prefill_tok_s),
            ("context_tokens", "gauge", "in the KV cache", stats.context_used),
            ("context_max_tokens", "gauge", "that it holds", stats.context_max),
            ("resident_memory_bytes", "gauge", "of this process", stats.rss_bytes),
        ]
    lines = []
    for name, kind, help, value in rows:
        lines += [f"# HELP tinychat_{name} {help}", f"# TYPE tinychat_{name} {kind}", f"tinychat_{name} {value:.10g}"]
    lines += ["# HELP tinychat_refused_total requests that were refused", "# TYPE tinychat_refused_total counter"]
    lines += [f'tinychat_refused_total{{kind="{kind}"}} {n}' for kind, n in sorted(counts.refusals.items())]
    return "\n".join(lines) + "\n"
