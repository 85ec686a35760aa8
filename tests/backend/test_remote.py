"""A backend over HTTP: it says what the local one says, and what is wrong with a server comes as one line."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support import tiny
from tests.support.serving import Replay, finished, pieces, replaying, serving, serving_app
from tinychat.backend import wire
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import (
    Capabilities,
    DoesNotFit,
    Event,
    Failed,
    Finished,
    ModelInfo,
    Piece,
    Prompted,
    Queued,
    Request,
    ToolCall,
    Usage,
    text_of,
)
from tinychat.backend.remote import RemoteBackend
from tinychat.backend.wire import refused
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import GREEDY, Sampling
from tinychat.server.answer import ServedModel
from tinychat.server.security import Policy

HI = ({"role": "user", "content": "Say hello to my cat."},)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@contextmanager
def remote(url: str, model: str | None = None, key: str | None = None, **options: Any) -> Iterator[RemoteBackend]:
    backend = RemoteBackend.open(url, model, key, **options)
    yield backend
    backend.close()


def comparable(events: list[Event]) -> list[Event]:
    """The events without times, which no two runs share, and without the place in a queue."""
    timeless = [replace(e, stats=finished().stats) if isinstance(e, Finished) else e for e in events]
    return [e for e in timeless if not isinstance(e, Queued)]


REQUESTS = [
    Request(messages=HI, sampling=GREEDY, max_tokens=24),
    Request(
        messages=HI, sampling=Sampling(temperature=0.9, seed=7, top_k=20, min_p=0.01, dry_multiplier=0.8), max_tokens=24
    ),
    Request(raw="Once upon a time", sampling=GREEDY, max_tokens=16),
    Request(messages=HI, sampling=GREEDY, max_tokens=24, stop=("!", "name")),
    Request(messages=HI, sampling=GREEDY, max_tokens=8, logprobs=0),
    Request(messages=HI, sampling=GREEDY, max_tokens=8, thinking=True),  # as the chat asks a model that cannot
    Request(
        messages=(*HI, {"role": "assistant", "content": "Hello, dear"}),
        sampling=GREEDY,
        max_tokens=8,
        continue_final=True,
    ),
    Request(
        messages=({"role": "system", "content": "Be brief."}, *HI, {"role": "assistant", "content": "Hi."}, *HI),
        sampling=GREEDY,
        max_tokens=8,
    ),
    Request(messages=({"role": "user", "content": "word " * 3000},), sampling=GREEDY),
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LocalBackend]:
    backend = LocalBackend.open(smollm2_path, max_context=1024, device="cpu")
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def both(smollm2: LocalBackend) -> Iterator[RemoteBackend]:
    with serving(ServedModel("smollm2:135m", smollm2, smollm2)) as url, remote(url) as backend:
        yield backend


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
def test_remote_of_a_server_of_local_is_local(request_: Request, smollm2: LocalBackend, both: RemoteBackend) -> None:
    """Event for event: texts, kinds, tokens, progress, usage, reason. Asked once before, so that both reuse as much."""
    list(smollm2.answer(request_))
    expected = list(smollm2.answer(request_))
    got = list(both.answer(request_))
    if isinstance(expected[-1], DoesNotFit):
        expected[-1] = replace(expected[-1], usage=Usage(history=expected[-1].usage.prompt, limit=1024), reserve=1)
    assert comparable(got) == comparable(expected)


def test_a_tiny_model_in_the_same_way(tmp_path: Path) -> None:
    tiny.write(tmp_path / "m.gguf", "qwen3", "F16", seed=3)
    local = LocalBackend.open(tmp_path / "m.gguf", max_context=128, device="cpu")
    request = Request(raw="ab", sampling=Sampling(temperature=1.0, seed=5))  # up to the end of the context
    with serving(ServedModel("tiny", local, local)) as url, remote(url) as backend:
        list(local.answer(request))
        expected = list(local.answer(request))
        assert comparable(list(backend.answer(request))) == comparable(expected)
        assert isinstance(expected[-1], Finished)
    local.close()


def test_thinking_and_tools_in_the_same_way() -> None:
    events: list[Any] = [
        *pieces("hm", " so", kind="thinking"),
        Piece("answer", "", pieces("x")[0].tokens),  # type: ignore[union-attr]
        *pieces("Su", "re."),
        ToolCall(0, "", "call_a", "add"),
        ToolCall(0, '{"a":'),
        ToolCall(0, "1}"),
        ToolCall(1, "{}", "call_b", "add"),
        finished("tool_calls", answer=9, cached=3),
    ]
    served = replaying(events)
    asked = Request(messages=HI, tools=(TOOL,), thinking=True, tool_choice="required", max_tokens=50)
    with serving(served) as url, remote(url) as backend:
        got = list(backend.answer(asked))
        assert isinstance(served.backend, Replay)
        assert served.backend.requests == [asked]
        assert got == list(served.backend.answer(asked))


def test_what_is_known_of_the_model(smollm2: LocalBackend, both: RemoteBackend) -> None:
    theirs, ours = smollm2.info, both.info
    assert ours.name == "smollm2:135m" and ours.device == theirs.device
    assert ours.max_context == 1024 and ours.quant == theirs.quant and ours.parameters == theirs.parameters
    assert ours.can == replace(theirs.can, instruments=False)
    for request in REQUESTS[:-1]:
        if request.raw is None:
            assert both.measure(request) == smollm2.measure(request)


def test_figures_come_along(smollm2: LocalBackend, both: RemoteBackend) -> None:
    end = list(both.answer(REQUESTS[0]))[-1]
    assert isinstance(end, Finished)
    assert end.stats == replace(smollm2.snapshot(), rss_bytes=end.stats.rss_bytes)
    assert end.stats.decode_tok_s > 0 and end.stats.gb_s > 0


def test_a_panel_sees_the_engine_behind_the_server(smollm2: LocalBackend, both: RemoteBackend) -> None:
    ours = smollm2.snapshot()
    with remote(both.url) as fresh:  # before anything was asked
        assert (fresh.snapshot().weight_bytes, fresh.snapshot().kv_bytes) == (ours.weight_bytes, ours.kv_bytes)
    stream = both.answer(REQUESTS[0])
    seen = [(e, both.snapshot()) for e in stream]
    running = [s for e, s in seen if isinstance(e, Piece)]
    assert all(s.weight_bytes == ours.weight_bytes for s in running)
    assert any(s.phase == "decode" and s.bytes_per_token for s in running)


def test_a_cancel_frees_the_server(smollm2: LocalBackend, both: RemoteBackend) -> None:
    request = Request(messages=HI, sampling=Sampling(temperature=3.0, top_k=0, top_p=1.0, min_p=0.0))
    stream = both.answer(request)
    got = [next(stream) for _ in range(6)]
    request.cancel.set()
    got += list(stream)
    assert isinstance(got[-1], Finished) and got[-1].reason == "stopped"
    assert got[-1].stats.phase == both.snapshot().phase == "idle"
    list(both.answer(REQUESTS[2]))
    assert smollm2.snapshot().generated_tokens <= 16


def test_a_cancel_before_the_first_byte() -> None:
    go = threading.Event()
    served = replaying([*pieces("a"), go, finished()])
    with serving(served) as url, remote(url) as backend:
        first, second = Request(messages=HI), Request(messages=HI)
        begun = backend.answer(first)
        assert isinstance(next(begun), Prompted)
        waiting = backend.answer(second)  # in the server's queue
        second.cancel.set()
        assert [type(e) for e in waiting] == [Finished]
        go.set()
        assert isinstance(list(begun)[-1], Finished)


def test_the_context_is_made_smaller_where_that_is_wanted(both: RemoteBackend) -> None:
    turns: list[Any] = [{"role": "system", "content": "Be brief."}]
    for i in range(12):
        turns += [{"role": "user", "content": f"{i} " + "word " * 90}, {"role": "assistant", "content": "ok"}]
    request = Request(messages=(*turns, *HI), sampling=GREEDY, max_tokens=4, overflow="oldest")
    events = list(both.answer(request))
    assert isinstance(events[-1], Finished)
    assert isinstance(events[0], Prompted) and 0 < events[0].dropped < 24
    refused = list(both.answer(replace(request, overflow="refuse")))[-1]
    assert isinstance(refused, DoesNotFit) and refused.usage.prompt > 1024


def test_a_busy_server_says_when_to_come_again() -> None:
    go = threading.Event()
    with serving(replaying([*pieces("a"), go, finished()]), queue_size=1) as url, remote(url) as backend:
        streams = [backend.answer(Request(messages=HI)) for _ in range(3)]
        ends: list[Event] = []
        while not ends:
            ends = [e for s in streams for e in s.poll() if isinstance(e, Failed)]
        go.set()
        assert isinstance(ends[0], Failed) and ends[0].cause == "busy" and ends[0].retry_s >= 1


def test_keys() -> None:
    with serving(replaying([finished()]), Policy(key="secret")) as url:
        for wrong in (None, "wrong"):
            with pytest.raises(TinychatError, match="API key"):
                RemoteBackend.open(url, key=wrong)
        with remote(url, key="secret") as backend:
            assert isinstance(list(backend.answer(Request(messages=HI)))[-1], Finished)


# Servers that are not ours


def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None} | more]}


class Foreign:
    """A server of another make: `say` streams an answer, `seen` is what it was sent."""

    def __init__(self, say: Callable[[], Any], models: tuple[str, ...] = ("m",), version: bool = True) -> None:
        self.say, self.seen = say, list[tuple[str, dict[str, Any], dict[str, str]]]()
        self.version = version
        self.app = Starlette(
            routes=[
                Route(
                    "/v1/models", lambda r: JSONResponse({"data": [{"id": m, "max_model_len": 100} for m in models]})
                ),
                Route("/version", self.get_version),
                Route("/tokenize", lambda r: JSONResponse({"count": 42}), methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def get_version(self, request: HTTPRequest) -> Response:
        return JSONResponse({"version": "0.33.0"}) if self.version else JSONResponse({}, 404)

    async def chat(self, request: HTTPRequest) -> Response:
        body = await request.json()
        self.seen.append((request.url.path, body, dict(request.headers)))
        if body.get("max_tokens") == 1 and "stream" not in body:
            return JSONResponse({})  # the probe
        said = self.say()
        return said if isinstance(said, Response) else StreamingResponse(said, media_type="text/event-stream")


def sse(*chunks: Any) -> Iterator[str]:
    for c in chunks:
        yield f"data: {json.dumps(c)}\n\n"
    yield "data: [DONE]\n\n"


def answer_of(foreign: Foreign, request: Request | None = None, **options: Any) -> list[Event]:
    with serving_app(foreign.app) as url, remote(url, **options) as backend:
        return list(backend.answer(request or Request(messages=HI)))


@pytest.mark.parametrize("spelling", ["reasoning_content", "reasoning"])
def test_thinking_in_both_spellings(spelling: str) -> None:
    usage = {
        "choices": [],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
    }
    chunks = (
        chunk({"role": "assistant", "content": ""}),
        chunk({spelling: "hm"}),
        chunk({"content": "Hi"}),
        chunk({}, finish_reason="stop", stop_reason="END"),
        usage,
    )
    events = answer_of(Foreign(lambda: sse(*chunks)))
    assert isinstance(events[0], Prompted) and not events[0].usage.exact
    assert (text_of(events, "thinking"), text_of(events)) == ("hm", "Hi")
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_string) == ("stop", "END")
    assert end.usage == Usage(history=9, answer=3, cached=4, limit=100)
    assert end.stats.generated_tokens == 3 and end.stats.ttft_s > 0


def test_a_call_without_an_index() -> None:
    """Ollama's and others' whole calls in one chunk."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    chunks = (chunk({"role": "assistant", "tool_calls": [call]}), chunk({}, finish_reason="tool_calls"))
    events = answer_of(Foreign(lambda: sse(*chunks)), Request(messages=HI, tools=(TOOL,)))
    assert [e for e in events if isinstance(e, ToolCall)] == [ToolCall(0, '{"a":1}', "c1", "add")]
    assert isinstance(events[-1], Finished) and events[-1].reason == "tool_calls"


def test_what_kinds_of_servers_are_sent() -> None:
    """vLLM gets its own names of fields; a server that says nothing of itself gets OpenAI's fields only."""
    request = Request(messages=HI, sampling=Sampling(0.5, 11, 0.9, 0.02, 1.1, seed=3), thinking=False)
    vllm, plain = (Foreign(lambda: sse(chunk({}, finish_reason="stop")), version=v) for v in (True, False))
    answer_of(vllm, request)
    answer_of(plain, request)
    (_, sent, _), (_, bare, _) = vllm.seen[-1], plain.seen[-1]
    assert (sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (11, 0.02, 1.1)
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"top_k", "min_p", "repetition_penalty", "repeat_penalty", "chat_template_kwargs"} & bare.keys()
    assert bare["stream_options"] == {"include_usage": True}


def test_counts_are_the_servers_or_estimates() -> None:
    for version, expected in ((True, Usage(history=42, limit=100)), (False, Usage(history=5, limit=100, exact=False))):
        with serving_app(Foreign(lambda: sse(), version=version).app) as url, remote(url) as backend:
            assert backend.measure(Request(messages=HI)) == expected


def test_a_connection_that_breaks_keeps_what_came() -> None:
    def broken() -> Iterator[str]:
        yield f"data: {json.dumps(chunk({'content': 'Hel'}))}\n\n"

    with serving_app(Foreign(broken).app) as url, remote(url) as backend:
        events = list(backend.answer(Request(messages=HI)))
        assert backend.snapshot().phase == "idle", "nothing is decoded any more"
    assert text_of(events) == "Hel"
    assert isinstance(events[-1], Failed) and events[-1].cause == "lost"


def test_a_server_that_stalls_is_left() -> None:
    async def stalling() -> Any:
        yield f"data: {json.dumps(chunk({'content': 'Hel'}))}\n\n"
        await asyncio.sleep(600)

    events = answer_of(Foreign(stalling), stall_s=2)
    assert isinstance(events[-1], Failed) and events[-1].cause == "lost" and "2 seconds" in events[-1].message


@pytest.mark.parametrize(
    ("response", "cause", "message"),
    [
        (lambda: JSONResponse({"error": {"message": "no\nway"}}, 400), "invalid", "no way"),
        (lambda: JSONResponse({"error": "no way"}, 500), "internal", "no way"),
        (lambda: Response("<html>", 502), "internal", "status 502"),
        (lambda: JSONResponse({"message": "slow down"}, 429, {"retry-after": "7"}), "busy", "slow down"),
        (lambda: sse({"error": {"message": "boom"}}), "internal", "boom"),
        (lambda: iter(["data: {not json\n\n"]), "lost", "not JSON"),
        (lambda: iter(["data: " + "[" * 100_000 + "\n\n"]), "lost", "not JSON"),
        (lambda: iter(["x" * 2_000] * 2), "lost", "too long"),  # without an end of the line
        (lambda: Response("[" * 100_000, 502), "lost", "too long"),
        (lambda: iter(["nothing of use"]), "lost", "broke"),
    ],
)
def test_what_goes_wrong_is_one_line(
    response: Callable[[], Any], cause: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if message == "too long":
        monkeypatch.setattr(wire, "MAX_LINE", 3_000)
    end = answer_of(Foreign(response))[-1]
    assert isinstance(end, Failed)
    assert end.cause == cause and message in end.message and "\n" not in end.message
    assert end.retry_s == (7 if cause == "busy" else 0)


def test_the_key_does_not_follow_a_redirect() -> None:
    """Neither when the server is looked at nor when it answers."""
    elsewhere = Foreign(lambda: sse())
    with serving_app(elsewhere.app) as other:
        there = Foreign(lambda: RedirectResponse(f"{other}/v1/chat/completions", 307))
        end = answer_of(there, key="secret")[-1]
        assert isinstance(end, Failed) and "redirects to" in end.message
        whole = Starlette(routes=[Route("/v1/models", lambda r: RedirectResponse(f"{other}/v1/models"))])
        with serving_app(whole) as url, pytest.raises(TinychatError, match="redirects to"):
            RemoteBackend.open(url, key="secret")
    assert elsewhere.seen == []


def test_servers_that_are_none() -> None:
    with pytest.raises(TinychatError, match=r"connection to http://127\.0\.0\.1:9 failed"):
        RemoteBackend.open("127.0.0.1:9")
    with serving_app(Starlette()) as url, pytest.raises(TinychatError, match="lists no models"):
        RemoteBackend.open(url)
    for bad in ("", "ftp://a", "http://", "http://a:b@c", "http://a:99999", "http://a/?q"):
        with pytest.raises(TinychatError, match="server's address"):
            RemoteBackend.open(bad)


def test_one_of_several_models_is_chosen() -> None:
    foreign = Foreign(lambda: sse(chunk({}, finish_reason="stop")), models=("a", "b"))
    with serving_app(foreign.app) as url:
        with pytest.raises(TinychatError, match="choose one with --model: a, b"):
            RemoteBackend.open(url)
        with pytest.raises(TinychatError, match="has no model c"):
            RemoteBackend.open(url, "c")
        with remote(f"{url}/v1/", "b") as backend:
            list(backend.answer(Request(messages=HI)))
    assert foreign.seen[-1][1]["model"] == "b"


def test_no_server_makes_it_fall() -> None:
    """Types that no field should have: every answer ends with an event, none with an exception."""
    odd = [None, 1, "x", [], {}, [1], {"choices": 1}, {"choices": [1]}, {"choices": [{"delta": 5}]}]
    odd += [{"choices": [{"delta": {"tool_calls": [7]}}]}, {"choices": [], "usage": 3}, {"details": {"usage": 4}}]
    odd += [{"choices": [{"delta": {"content": 5}, "logprobs": {"content": ["a", {"logprob": "b"}]}}]}]
    odd += [{"details": {"tokens": [[1]]}, "choices": [{"delta": {"content": "a"}}]}]
    odd += [{"choices": [{"delta": {}, "finish_reason": "nonsense"}], "timings": {"prompt_ms": "x"}}]
    for number in (1e999, -1e999, float("nan"), 10**400, -(10**400)):
        figures = {"prompt_tokens": number, "completion_tokens": number, "prompt_ms": number, "predicted_ms": number}
        figures |= {"decode_tok_s": number, "context_max": number, "prompt_n": number, "total": number, "cache": number}
        details = {"usage": figures, "stats": figures, "dropped": number, "note": number}
        odd += [{"choices": [], "usage": figures, "timings": figures, "prompt_progress": figures, "details": details}]
    for value in odd:
        end = answer_of(Foreign(lambda value=value: sse(value)))[-1]  # type: ignore[misc]
        assert isinstance(end, Finished) or (isinstance(end, Failed) and "internal" not in end.message), (value, end)


@pytest.mark.parametrize(
    ("said", "tokens", "limit"),
    [
        ("maximum context length is 64 tokens. However, your prompt contains at least 65 input tokens, which", 65, 64),
        ("maximum context length is 64 tokens. However, your prompt contains 90 input tokens, which exceeds", 90, 64),
        ("maximum context length is 64 tokens. However, your prompt contains 900 characters (more than", 0, 64),
        (
            "context length is 64 tokens. However, you requested 16 output tokens and your prompt contains 50 input",
            50,
            64,
        ),
        ("context length is 64 tokens. However, you requested 66 tokens (50 in the messages, 16 in the", 50, 64),
        ("model's maximum context length of 64 tokens. You requested 99 tokens: 83 tokens from the input", 83, 64),
        ("The input (70 tokens) is longer than the model's context length (64 tokens).", 70, 64),
    ],
)
def test_servers_that_tell_a_full_context_in_words(said: str, tokens: int, limit: int) -> None:
    """vLLM, early and of 2026, and SGLang."""
    body = json.dumps({"error": {"message": said, "type": "BadRequestError", "code": 400}}).encode()
    event = refused(400, body, {}, ModelInfo("m", 2048, "", Capabilities()))
    assert isinstance(event, DoesNotFit) and (event.usage.prompt, event.usage.limit) == (tokens, limit)
