"""The server: its routes, and the handling of a request from body to response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tinychat.backend.protocol import Event, Failed, Finished, Prompted, ToolCall
from tinychat.errors import TinychatError
from tinychat.server import anthropic, native, ollama, openai_chat, openai_completions, openai_responses, sse
from tinychat.server.answer import Answer, AnswerJob, Arrivals, ServedModel, joined, raise_failure
from tinychat.server.body import HungUp, read_object
from tinychat.server.queue import Queue
from tinychat.server.refusal import RequestRefused, invalid
from tinychat.server.security import Guard, Policy
from tinychat.server.web import Web
from tinychat.server.web import routes as web_routes

SEND_SECONDS = 60.0  # that a client may take to read what was sent to it

ErrorBody = Callable[[RequestRefused], dict[str, Any]]
Parse = Callable[[dict[str, Any], ServedModel], AnswerJob]
Ask = Callable[[dict[str, Any], ServedModel], dict[str, Any]]


def error_body(path: str) -> ErrorBody:
    """The format of errors on a path."""
    if path.startswith("/v1/messages"):
        return anthropic.error
    return ollama.error if path.startswith("/api/") else openai_chat.error


async def send_json(send: Send, status: int, value: Any, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """A whole response."""
    body = sse.encode(value)
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def refuse(refused: RequestRefused, scope: Scope, receive: Receive, send: Send) -> None:
    """A refusal in the format of the path's dialect."""
    headers = [(b"retry-after", str(int(refused.retry_s)).encode())] if refused.retry_s else []
    if refused.kind == "key":
        headers.append((b"www-authenticate", b"Bearer"))
    if refused.kind in ("large", "slow", "key", "forbidden"):
        headers.append((b"connection", b"close"))  # the rest of this request is not read
    await send_json(send, refused.status, error_body(scope["path"])(refused), headers)


class ServerState:
    """What all endpoints share: the queue, the counters, the model."""

    def __init__(self, served: ServedModel, queue: Queue) -> None:
        self.served, self.queue = served, queue
        self.counts = native.Counts()
        self._draining: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[Callable[[Arrivals], None]]:
        """The engine's turn of one request. Ends with the block, or, where Arrivals were handed to it, when the
        backend has ended them: after a client has hung up, the next turn begins only when the engine is free."""
        await self.queue.enter(client)
        held: list[Arrivals] = []
        try:
            yield held.append
        finally:
            if held and not held[0].ended:
                task = asyncio.create_task(self._drain(held[0]))
                self._draining.add(task)
                task.add_done_callback(self._draining.discard)
            else:
                self.queue.leave()

    async def _drain(self, arrivals: Arrivals) -> None:
        try:
            while await arrivals.next():
                pass
        finally:
            self.queue.leave()


@dataclass(frozen=True)
class AnswerEndpoint:
    """An endpoint where the model answers."""

    state: ServerState
    parse: Parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _guarded(self.state, scope, receive, send, self._answer)

    async def _answer(self, body: dict[str, Any], scope: Scope, send: Send) -> None:
        job = self.parse(body, self.state.served)
        counts = self.state.counts
        try:
            async with self.state.turn(_client(scope)) as hold:
                arrivals = Arrivals(self.state.served.backend.answer(job.request))
                hold(arrivals)
                first = await arrivals.until_prompted()
                events = _limited(job, first, arrivals)
                finished = await (_stream(job, events, send) if job.stream else _whole(job, events, send))
                counts.finished(finished)
        finally:
            job.request.cancel.set()


async def _limited(job: AnswerJob, first: list[Event], arrivals: Arrivals) -> AsyncIterator[list[Event]]:
    """The events in batches, `first` before those of `arrivals`; of an answer with one_call, up to its first call."""
    further, cut = arrivals.batches(), False
    batch: list[Event] | None = first
    while batch is not None:
        if job.one_call:
            kept = list[Event]()
            for event in batch:
                cut = cut or (isinstance(event, ToolCall) and event.index > 0)
                if isinstance(event, Finished) and cut:
                    event = replace(event, reason="tool_calls")
                if not cut or isinstance(event, Finished | Failed):  # the text of a call that is cut off is no answer
                    kept.append(event)
            batch = kept
        if cut:
            job.request.cancel.set()
        yield batch
        batch = await anext(further, None)


async def _whole(job: AnswerJob, batches: AsyncIterator[list[Event]], send: Send) -> Finished:
    events: list[Event] = []
    async for batch in batches:
        events += batch
    raise_failure(events)
    answer = Answer.of(events)
    await send_json(send, 200, job.reply.whole(answer))
    return answer.finished


async def _stream(job: AnswerJob, batches: AsyncIterator[list[Event]], send: Send) -> Finished:
    reply = job.reply
    headers = [
        (b"content-type", reply.media_type.encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    last: Event | None = None
    try:
        async for batch in batches:
            raise_failure(batch)
            # A call that is taken back cannot be unsent: the client sees it incomplete, and its text behind it.
            said = joined([e for e in batch if not (isinstance(e, ToolCall) and e.note)])
            parts = [reply.begin(e) if isinstance(e, Prompted) else reply.event(e) for e in said]
            chunk = b"".join(parts) if batch else reply.ping
            last = batch[-1] if batch else last
            if chunk:
                async with asyncio.timeout(SEND_SECONDS):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
    except RequestRefused as e:
        await send({"type": "http.response.body", "body": reply.fail(e), "more_body": True})
        raise _Told(e) from None
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEND_SECONDS):
                await send({"type": "http.response.body", "body": b""})
    assert isinstance(last, Finished)
    return last


class _Told(Exception):
    """A refusal that was already sent to the client, in its stream."""

    def __init__(self, refused: RequestRefused) -> None:
        super().__init__(refused.message)
        self.refused = refused


@dataclass(frozen=True)
class Asking:
    """An endpoint that computes something without an answer of the model: a count of tokens. `turn`: it needs the
    engine."""

    state: ServerState
    ask: Ask
    turn: bool = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _guarded(self.state, scope, receive, send, self._ask)

    async def _ask(self, body: dict[str, Any], scope: Scope, send: Send) -> None:
        async with self.state.turn(_client(scope)) if self.turn else contextlib.nullcontext():
            value = await asyncio.to_thread(self.ask, body, self.state.served)
        await send_json(send, 200, value)


async def _guarded(
    state: ServerState,
    scope: Scope,
    receive: Receive,
    send: Send,
    work: Callable[[dict[str, Any], Scope, Send], Coroutine[Any, Any, None]],
) -> None:
    """Reads the body and runs `work`, which is cancelled when the client hangs up; an error is sent as one line."""
    started = False

    async def sending(message: Any) -> None:
        nonlocal started
        started = True
        await send(message)

    try:
        body = await read_object(scope, receive)
        task = asyncio.create_task(work(body, scope, sending))
        watch = asyncio.create_task(_hung_up(receive))
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                state.counts.hung_up += 1
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            task.cancel()
            watch.cancel()
    except HungUp:
        state.counts.hung_up += 1
    except asyncio.CancelledError:
        pass  # the server stops
    except _Told as e:
        state.counts.refused(e.refused)
    except Exception as e:
        refused = _refusal(e)
        state.counts.refused(refused)
        if not started:
            await refuse(refused, scope, receive, send)


def _refusal(error: Exception) -> RequestRefused:
    """Any exception as one line for the client; of an unexpected one, only its type."""
    if isinstance(error, RequestRefused):
        return error
    if isinstance(error, TinychatError):
        return invalid(" ".join(str(error).split()))
    return RequestRefused("internal", f"internal error: {type(error).__name__}")


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _client(scope: Scope) -> str:
    """The client's key in the queue: its address."""
    return scope["client"][0] if scope.get("client") else ""


def create_app(served: ServedModel, policy: Policy, queue_size: int, web: Web | None = None) -> ASGIApp:
    """The application, with the chat in a browser where `web` is given. The caller opens and closes the backend."""
    served = replace(served, started=served.started or int(time.time()))
    state = ServerState(served, Queue(queue_size))

    def posts(endpoint: Any, *paths: str) -> list[Route]:
        return [Route(path, endpoint, methods=["POST"]) for path in paths]

    def chat_loose(body: dict[str, Any], served: ServedModel) -> AnswerJob:
        return openai_chat.parse(body, served, strict=False)

    def responses_loose(body: dict[str, Any], served: ServedModel) -> AnswerJob:
        return openai_responses.parse(body, served, strict=False)

    routes = [
        *posts(AnswerEndpoint(state, openai_responses.parse), "/v1/responses"),
        *posts(AnswerEndpoint(state, responses_loose), "/responses"),
        *posts(AnswerEndpoint(state, anthropic.parse), "/v1/messages"),
        *posts(Asking(state, anthropic.count_tokens, turn=True), "/v1/messages/count_tokens"),
        *posts(AnswerEndpoint(state, ollama.parse_chat), "/api/chat"),
        *posts(AnswerEndpoint(state, ollama.parse_generate), "/api/generate"),
        *posts(Asking(state, ollama.show), "/api/show"),
        *ollama.routes(served),
        *posts(AnswerEndpoint(state, openai_chat.parse), "/v1/chat/completions"),
        *posts(AnswerEndpoint(state, chat_loose), "/chat/completions"),
        *posts(AnswerEndpoint(state, openai_completions.parse), "/v1/completions"),
        *posts(
            Asking(state, native.count_chat, turn=True),
            "/v1/chat/completions/input_tokens",
            "/chat/completions/input_tokens",
        ),
        *posts(
            Asking(state, openai_responses.count, turn=True), "/v1/responses/input_tokens", "/responses/input_tokens"
        ),
        *native.routes(served, state.queue, state.counts),
        *posts(Asking(state, native.tokenize), "/tokenize"),
        *posts(Asking(state, native.detokenize), "/detokenize"),
        *posts(Asking(state, native.apply_template, turn=True), "/apply-template"),
        *(web_routes(web) if web is not None else []),
    ]

    async def failed(request: HTTPRequest, error: Exception) -> Response:
        """Starlette's own errors, and exceptions outside of the endpoints above."""
        if isinstance(error, HTTPException):
            known = {404: "missing", 405: "method"}.get(error.status_code, "invalid")
            refused = RequestRefused(known, f"{error.detail}: {request.method} {request.url.path[:80]}")  # type: ignore[arg-type]
        else:
            refused = _refusal(error)
        body = sse.encode(error_body(request.url.path)(refused))
        return Response(body, refused.status, media_type="application/json")

    app = Starlette(routes=routes, exception_handlers={HTTPException: failed, Exception: failed})
    return Guard(app, policy, refuse)
