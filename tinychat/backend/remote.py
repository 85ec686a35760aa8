"""A backend on another machine, or in another program: any server that speaks OpenAI's Chat Completions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import httpx

from tinychat.backend.address import address
from tinychat.backend.protocol import (
    SAMPLING_PARAMETERS,
    Capabilities,
    DoesNotFit,
    Event,
    Failed,
    Finished,
    Message,
    ModelInfo,
    Request,
    Sampling,
    Usage,
)
from tinychat.backend.stream import EventStream
from tinychat.backend.wire import (
    ChunkReader,
    as_dict,
    as_int,
    as_list,
    chunks,
    message_of,
    one_line,
    read_chunk,
    refused,
    stats_of,
    usage_of,
    whole,
)
from tinychat.engine.stats import Stats
from tinychat.errors import TinychatError, printable

T = TypeVar("T")

STALL_S = 300.0  # without a byte, after which a server is left: it may keep a request waiting for others
CONNECT_S = 10.0
ASK_S = 20.0  # for what a server answers without its model
CANCEL_S = 0.1  # how often a cancel is looked for while nothing comes: each look takes time from an engine beside
LETTERS_PER_TOKEN = 4  # where the server does not count

ServerKind = Literal["tinychat", "llama", "vllm", "openai"]
"""What a server is, as far as it says: it decides which fields beyond OpenAI's it is sent."""

_OPENAI = {name: name for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")}
_VLLM = _OPENAI | {"top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty"}
_NAMES: Mapping[ServerKind, Mapping[str, str]] = {"openai": _OPENAI, "vllm": _VLLM}
"""Parameters of sampling, by their names here, and what these servers call them; the others know all, as they are."""

_PROBE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


class RemoteBackend:
    """Answers through a server. `open` makes one.

    One thread of its own runs an event loop for all requests; how many of them the server answers at a time is its
    affair. The key is sent to that server and nobody else: redirects are not followed.
    """

    def __init__(self, url: str, key: str | None, stall_s: float) -> None:
        self.url = url
        self.key = key
        self._stall_s = stall_s
        self._kind: ServerKind = "openai"
        self._stats = Stats()
        self._running: set[threading.Event] = set()
        self._loop = asyncio.new_event_loop()
        self._client: httpx.AsyncClient | None = None
        self._info = ModelInfo("", 0, "", Capabilities())
        threading.Thread(target=self._loop.run_forever, name="remote", daemon=True).start()

    @classmethod
    def open(
        cls, url: str, model: str | None = None, key: str | None = None, *, stall_s: float = STALL_S
    ) -> RemoteBackend:
        """Asks the server at `url` (with or without /v1) what it has and can. `model` is needed where it has several;
        `stall_s` is how long it may be silent. Raises TinychatError."""
        backend = cls(address(url), key, stall_s)
        try:
            backend._call(backend._look(model))
        except BaseException:
            backend.close()
            raise
        return backend

    @classmethod
    def models(cls, url: str, key: str | None = None) -> list[str]:
        """The names of the models that the server at `url` has. Raises TinychatError."""
        backend = cls(address(url), key, ASK_S)
        try:
            return [str(m["id"]) for m in backend._call(backend._models())]
        finally:
            backend.close()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def answer(self, request: Request) -> EventStream[Event]:
        stream: EventStream[Event] = EventStream()
        self._running.add(request.cancel)
        asyncio.run_coroutine_threadsafe(self._serve(request, stream), self._loop)
        return stream

    def measure(self, request: Request) -> Usage:
        return self._call(self._measure(request))

    def snapshot(self) -> Stats:
        return self._stats

    def close(self) -> None:
        for cancel in [*self._running]:
            cancel.set()
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)

    # on the loop's thread

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _http(self) -> httpx.AsyncClient:
        """Made on the loop that uses it. TLS is verified: httpx does so unless told otherwise."""
        if self._client is None:
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
            timeout = httpx.Timeout(self._stall_s, connect=CONNECT_S)
            self._client = httpx.AsyncClient(headers=headers, timeout=timeout, follow_redirects=False)
        return self._client

    async def _close(self) -> None:
        while self._running:
            await asyncio.sleep(CANCEL_S)
        if self._client is not None:
            await self._client.aclose()
        await self._loop.shutdown_asyncgens()
        self._loop.stop()

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON at `path`; None where the server has no such thing. Raises TinychatError where it is not there."""
        try:
            method, timeout = ("GET", ASK_S) if body is None else ("POST", self._stall_s)
            async with self._http().stream(method, self.url + path, json=body, timeout=timeout) as response:
                content = await whole(response)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise TinychatError(_no_connection(self.url, e)) from None
        if response.status_code in (401, 403):
            raise TinychatError(f"{self.url} refuses: {message_of(response.status_code, content)}")
        if response.is_redirect:
            raise TinychatError(_redirected(self.url, response))
        try:
            return json.loads(content) if response.is_success else None
        except (ValueError, RecursionError):
            return None

    async def _models(self) -> list[Mapping[str, Any]]:
        """What the server lists at /v1/models; at least one."""
        listed = await self._ask("/v1/models")
        models = [m for m in as_list(as_dict(listed).get("data")) if isinstance(as_dict(m).get("id"), str)]
        if not models:
            raise TinychatError(f"{self.url} lists no models at /v1/models: is it an OpenAI-compatible server?")
        return models

    async def _look(self, wanted: str | None) -> None:
        """Finds out what the server is, which models it has, and what they can."""
        models = await self._models()
        names = [m["id"] for m in models]
        if wanted is None and len(names) > 1:
            shown = ", ".join(printable(n, newlines=False) for n in names[:20])
            raise TinychatError(f"{self.url} has several models, choose one with --model: {shown}")
        name = wanted or names[0]
        if name not in names:
            shown = ", ".join(printable(n, newlines=False) for n in names[:20])
            raise TinychatError(f"{self.url} has no model {printable(name, newlines=False)}; it has {shown}")
        entry = next(m for m in models if m["id"] == name)
        props = as_dict(await self._ask("/props"))
        own = as_dict(props.get("tinychat"))
        version = {} if props else as_dict(await self._ask("/version"))
        self._kind = "tinychat" if own else "llama" if "default_generation_settings" in props else "openai"
        if self._kind == "openai" and "version" in version:
            self._kind = "vllm"
        context = as_int(as_dict(props.get("default_generation_settings")).get("n_ctx"))
        context = context or as_int(entry.get("max_model_len")) or as_int(as_dict(entry.get("meta")).get("n_ctx"))
        notes: tuple[str, ...] = ()
        parts = urlsplit(self.url)
        if self.key and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            notes = ("the key goes to the server unencrypted; https:// would protect it",)
        info = ModelInfo(name, context, parts.netloc, await self._capabilities(name, props, own), notes=notes)
        self._info, self._stats = _described(info, own), stats_of(own.get("stats"))

    async def _capabilities(self, name: str, props: Mapping[str, Any], own: Mapping[str, Any]) -> Capabilities:
        """What the server says of itself, and, where it says nothing of tools, whether it takes a request with one."""
        if self._kind == "tinychat":
            can = as_dict(own.get("can"))
            known = {f.name: can.get(f.name) is True for f in fields(Capabilities)}
            return Capabilities(**known | {"instruments": False})
        if self._kind == "llama":
            template, caps = str(props.get("chat_template", "")), as_dict(props.get("chat_template_caps"))
            return Capabilities(
                thinking="enable_thinking" in template,
                tools=caps.get("supports_tools") is True or "tools" in template,
                logprobs=True,
                continue_final=True,
                exact_counts=True,
            )
        probe = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
        takes_tools = await self._ask("/v1/chat/completions", probe | {"tools": [_PROBE]}) is not None
        counts = False
        if self._kind == "vllm":
            counted = await self._ask("/tokenize", {"model": name, "messages": probe["messages"]})
            counts = bool(as_int(as_dict(counted).get("count")))
        vllm = self._kind == "vllm"
        return Capabilities(tools=takes_tools, logprobs=vllm, continue_final=vllm, exact_counts=counts)

    async def _measure(self, request: Request) -> Usage:
        """Counted by the server where it can, else estimated."""
        limit = self._info.max_context
        if self._info.can.exact_counts and request.raw is None:
            body = self._body(request)
            if self._kind == "vllm":
                keys = ("model", "messages", "tools", "add_generation_prompt", "continue_final_message")
                asked = {k: body[k] for k in keys if k in body}
                count = as_int(as_dict(await self._ask("/tokenize", asked)).get("count"))
            else:
                del body["stream"], body["stream_options"]
                counted = as_dict(await self._ask("/v1/chat/completions/input_tokens", body))
                if "details" in counted:
                    return usage_of(counted["details"], limit)
                count = as_int(counted.get("input_tokens"))
            if count:
                return Usage(history=count, limit=limit)
        return _estimate(request, limit)

    async def _serve(self, request: Request, stream: EventStream[Event]) -> None:
        """Answers one request; ends the stream in any case."""
        work = asyncio.ensure_future(self._answer(request, stream))
        cancelled = asyncio.ensure_future(_is_set(request.cancel))
        try:
            await asyncio.wait((work, cancelled), return_when=asyncio.FIRST_COMPLETED)
            work.cancel()  # hangs up, which frees the server's engine
            try:
                await work
            except asyncio.CancelledError:
                usage = Usage(limit=self._info.max_context, answer=self._stats.generated_tokens, exact=False)
                stream.put(Finished("stopped", usage, self._stats))
        except Exception as e:
            stream.put(Failed(f"internal error: {type(e).__name__}: {e}"))
        finally:
            cancelled.cancel()
            stream.end()
            self._running.discard(request.cancel)

    async def _answer(self, request: Request, stream: EventStream[Event]) -> None:
        dropped = 0
        while True:
            end = await self._try(request, stream, dropped)
            shorter = _shorter(request) if isinstance(end, DoesNotFit) else None
            if shorter is None:
                stream.put(end)
                return
            dropped += len(request.messages) - len(shorter.messages)
            request = shorter

    async def _try(self, request: Request, stream: EventStream[Event], dropped: int) -> Event:
        """One request to the server; puts its events but the last, which it returns."""
        if refusal := self._refusal(request):
            return Failed(refusal, "invalid")
        reading = ChunkReader(self._info.max_context, dropped, self._stats.of_model())
        path = "/v1/completions" if request.raw is not None else "/v1/chat/completions"
        try:
            async with self._http().stream("POST", self.url + path, json=self._body(request)) as response:
                if response.is_redirect:
                    return Failed(_redirected(self.url, response), "invalid")
                if not response.is_success:
                    return refused(response.status_code, await whole(response), response.headers, self._info)
                async for chunk in chunks(response):
                    if "error" in chunk:
                        message = one_line(as_dict(chunk["error"]).get("message") or chunk["error"])
                        return Failed(message)
                    stream.put(*read_chunk(reading, chunk))
                    self._stats = reading.stats
                    if request.cancel.is_set():
                        raise asyncio.CancelledError
        except httpx.TimeoutException:
            return Failed(f"nothing came from {self.url} for {self._stall_s:g} seconds", "lost")
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            return Failed(_no_connection(self.url, e), "lost")
        finally:
            self._stats = replace(self._stats, phase="idle")
        return reading.end()

    def _refusal(self, request: Request) -> str:
        """What the request asks for and this server cannot do."""
        can = self._info.can
        if request.continue_final and not can.continue_final:
            return "this server cannot continue an answer"
        if request.tools and not can.tools:
            return "this server's model cannot call tools"
        if request.logprobs is not None and not can.logprobs:
            return "this server does not tell probabilities"
        return ""

    def _body(self, r: Request) -> dict[str, Any]:
        """The request as JSON, with the fields that this kind of server knows."""
        body: dict[str, Any] = {
            "model": self._info.name,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_sampling(r.sampling, self._kind),
        }
        if self._kind == "llama" and r.sampling.dry_penalty_last_n < 0:  # it refuses our "all"
            body["dry_penalty_last_n"] = self._info.max_context
        if r.max_tokens is not None:
            body["max_tokens"] = r.max_tokens
        if r.stop:
            body["stop"] = list(r.stop)
        if r.sampling.logit_bias:
            body["logit_bias"] = {str(i): bias for i, bias in r.sampling.logit_bias}
        if r.raw is not None:
            unlimited = {"max_tokens": -1} if r.max_tokens is None and self._kind in ("tinychat", "llama") else {}
            details = {"return_details": True, "return_progress": True} if self._kind == "tinychat" else {}
            return body | unlimited | details | {"prompt": r.raw}
        body["messages"] = [dict(m) for m in r.messages]
        kwargs = dict(r.template_kwargs)
        if r.thinking is not None and (self._kind == "vllm" or self._info.can.thinking):  # vLLM does not tell
            kwargs["enable_thinking"] = r.thinking
        if kwargs:
            body["chat_template_kwargs"] = kwargs
        if r.continue_final:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if r.tools:
            body |= {"tools": [dict(t) for t in r.tools], "tool_choice": r.tool_choice}
        if r.response_format is not None:
            grammar = r.response_format.get("grammar")  # a field of its own, as llama-server has it
            body |= {"grammar": grammar} if grammar else {"response_format": dict(r.response_format)}
        if r.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": r.logprobs}
        if self._kind == "tinychat":
            body["return_details"] = True
        if self._kind in ("tinychat", "llama"):
            body["return_progress"] = True
        return body


def _sampling(sampling: Sampling, kind: ServerKind) -> dict[str, Any]:
    """The parameters by the names that this kind of server has for them."""
    names = _NAMES.get(kind) or {name: name for name in (*SAMPLING_PARAMETERS, "seed")}
    return {theirs: getattr(sampling, ours) for ours, theirs in names.items()}


def _no_connection(url: str, error: Exception) -> str:
    what = one_line(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError):
        what = f"nothing answers there ({what})"
    elif isinstance(error, httpx.RemoteProtocolError):
        what = f"it ended before the answer did ({what})"
    return f"the connection to {url} failed: {what}"


def _redirected(url: str, response: httpx.Response) -> str:
    target = one_line(response.headers.get("location", "somewhere else"))
    return f"{url} redirects to {target}; redirects are not followed, give that address if you trust it"


def _described(info: ModelInfo, own: Mapping[str, Any]) -> ModelInfo:
    """`info` with what a tinychat server tells of its model."""
    known: dict[str, Any] = {}
    for f in fields(ModelInfo):
        value = own.get(f.name)
        if f.name not in ("name", "max_context", "can", "path", "notes") and type(value) is type(getattr(info, f.name)):
            known[f.name] = printable(value, newlines=False) if isinstance(value, str) else value
    sampling = as_dict(own.get("sampling"))
    known["sampling"] = {k: v for k, p in SAMPLING_PARAMETERS.items() if p.takes(v := sampling.get(k))}
    notes = (*(one_line(n) for n in as_list(own.get("notes"))), *info.notes)
    return replace(info, **known, notes=notes)


def _estimate(request: Request, limit: int) -> Usage:
    """By the length of the texts."""

    def tokens(messages: list[Message], field: str) -> int:
        return sum(len(str(m.get(field) or "")) for m in messages) // LETTERS_PER_TOKEN

    system = [m for m in request.messages if m.get("role") == "system"]
    others = [m for m in request.messages if m.get("role") != "system"]
    history = tokens(others, "content") + len(request.raw or "") // LETTERS_PER_TOKEN
    tools = len(json.dumps([dict(t) for t in request.tools])) // LETTERS_PER_TOKEN if request.tools else 0
    return Usage(tokens(system, "content"), history, tokens(others, "reasoning_content"), tools, 0, limit, exact=False)


def _shorter(request: Request) -> Request | None:
    """The request without past thinking, or without the older half of its exchanges, as its `overflow` wants it; None
    where nothing is left to leave out."""
    messages = request.messages
    if request.overflow == "thinking":
        bare = tuple({k: v for k, v in m.items() if k != "reasoning_content"} for m in messages)
        return replace(request, messages=bare, overflow="refuse")
    if request.overflow == "oldest":
        head = 1 if messages and messages[0].get("role") == "system" else 0
        starts = [i for i, m in enumerate(messages) if m.get("role") == "user"]
        if len(starts) > 1:
            return replace(request, messages=(*messages[:head], *messages[starts[(len(starts) + 1) // 2] :]))
    return None


async def _is_set(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(CANCEL_S)
