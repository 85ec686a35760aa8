"""The OpenAI dialects, by OpenAI's own client and by what is on the wire."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving import Replay, asking, figure, finished, pieces, replaying, serving, until
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Failed, Finished, Piece, Request, ToolCall, text_of
from tinychat.kernels.sampling import SAMPLING_PARAMETERS, Sampling
from tinychat.server.fields import Fields
from tinychat.server.refusal import RequestRefused
from tinychat.server.sampling import chosen_numbers

HI: Any = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLS = [
    *pieces("Sure."),
    ToolCall(0, "", "call_a", "add"),
    ToolCall(0, '{"a":'),
    ToolCall(0, "1}"),
    ToolCall(1, "{}", "call_b", "sub"),
    finished("tool_calls", answer=9),
]


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(url + path, json=body, timeout=120)


def chunks(url: str, path: str = "/v1/chat/completions", **body: Any) -> list[Any]:
    """The data of every server-sent event, "[DONE]" among them."""
    with httpx.stream("POST", url + path, json={"model": "m", "stream": True} | body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    data = [line.removeprefix("data: ") for line in lines if not line.startswith("event: ")]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


def test_an_answer_is_what_the_backend_says(client: openai.OpenAI, smollm2: LocalBackend) -> None:
    request = Request(messages=tuple(HI), sampling=Sampling(temperature=0.0), max_tokens=12)
    expected = list(smollm2.answer(request))
    answer = client.chat.completions.create(model="any", messages=HI, max_tokens=12)
    end = expected[-1]
    assert isinstance(end, Finished)
    assert answer.choices[0].message.content == text_of(expected)
    assert answer.model == "smollm2:135m"  # whatever name was asked for
    assert answer.usage is not None and answer.usage.prompt_tokens == end.usage.prompt
    assert answer.usage.completion_tokens == end.usage.answer
    assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[end.reason]


def test_a_stream_says_the_same_as_a_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=HI, max_completion_tokens=20)
    stream = client.chat.completions.create(
        model="m", messages=HI, max_completion_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    got = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in got if c.choices)
    assert text == whole.choices[0].message.content
    assert got[-1].usage is not None and whole.usage is not None
    assert got[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert got[-1].usage.prompt_tokens_details is not None
    assert got[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1  # all but the last


def test_the_stream_on_the_wire() -> None:
    """role first and once, no empty deltas, one id, finish_reason alone at the end, then usage, then [DONE]."""
    events = [*pieces("hm", kind="thinking"), Piece("thinking", ""), *pieces("He", "", "llo"), finished(answer=4)]
    with serving(replaying(events)) as url:
        *got, done = chunks(url, messages=HI, stream_options={"include_usage": True})
    assert done == "[DONE]"
    head, thought, *said, last = [c["choices"][0]["delta"] for c in got[:-1]]
    assert (head, thought, last) == ({"role": "assistant", "content": None}, {"reasoning_content": "hm"}, {})
    assert all(list(delta) == ["content"] and delta["content"] for delta in said)
    assert "".join(delta["content"] for delta in said) == "Hello"
    assert [c["choices"][0]["finish_reason"] for c in got[:-1]] == [*[None] * (len(got) - 2), "stop"]
    assert len({c["id"] for c in got}) == 1 and got[0]["id"].startswith("chatcmpl-")
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 4,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 1},
    }
    assert got[-1]["timings"]["predicted_per_second"] == pytest.approx(12)  # three steps in 0.25 s


def test_what_comes_together_goes_out_together() -> None:
    """One chunk for the pieces of one moment: an answer that is there at once needs few."""
    with serving(replaying([*pieces(*"abc" * 200), finished(answer=600)])) as url:
        said = [c["choices"][0]["delta"].get("content") or "" for c in chunks(url, messages=HI)[:-1]]
    assert "".join(said) == "abc" * 200 and len(said) < 60


def test_without_include_usage_there_is_none() -> None:
    with serving(replaying([*pieces("a"), finished(answer=1)])) as url:
        got = chunks(url, messages=HI)
    assert not any("usage" in c for c in got[:-1])


def test_calls_of_tools_in_a_stream() -> None:
    """The first piece of a call has index, id, type and name; later ones only the index and more arguments."""
    with serving(replaying(CALLS)) as url:
        got = chunks(url, messages=HI, tools=[TOOL])
    calls = [c["choices"][0]["delta"]["tool_calls"] for c in got[:-1] if "tool_calls" in c["choices"][0]["delta"]]
    assert calls == [
        [{"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": '{"a":'}}],
        [{"index": 0, "function": {"arguments": "1}"}}],
        [{"index": 1, "id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}}],
    ]
    assert got[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_calls_of_tools_in_one_piece() -> None:
    with serving(replaying(CALLS)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        choice = client.chat.completions.create(model="m", messages=HI, tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Sure."
    assert choice.message.tool_calls is not None
    assert [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [  # type: ignore[union-attr]
        ("call_a", "add", '{"a":1}'),
        ("call_b", "sub", "{}"),
    ]


def test_one_call_only_where_the_client_wants_one() -> None:
    cut = [*CALLS[:-1], *pieces("<tool_call> of a call that is cut off"), CALLS[-1]]
    with serving(replaying(cut)) as url:
        body = post(url, "/v1/chat/completions", model="m", messages=HI, tools=[TOOL], parallel_tool_calls=False).json()
    assert body["choices"][0]["message"]["content"] == "Sure."
    assert [c["id"] for c in body["choices"][0]["message"]["tool_calls"]] == ["call_a"]
    assert body["choices"][0]["finish_reason"] == "tool_calls"


def test_what_is_said_reaches_the_backend() -> None:
    served = replaying([finished()])
    conversation = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "1+1?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "Use the tool.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "It is"},
    ]
    with serving(served) as url:
        answer = post(
            url,
            "/v1/chat/completions",
            model="m",
            messages=conversation,
            temperature=0.5,
            top_p=0.9,
            top_k=11,
            min_p=0.02,
            seed=99,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            dry_multiplier=0.8,
            dry_penalty_last_n=256,
            stop=["a", "b"],
            max_completion_tokens=5,
            logprobs=True,
            top_logprobs=3,
            logit_bias={"5": -100},
            tools=[TOOL],
            tool_choice={"type": "function", "function": {"name": "add"}},
            chat_template_kwargs={"enable_thinking": False, "style": "x"},
            response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
            continue_final_message=True,
            add_generation_prompt=False,
            user="me",
            metadata={"a": "b"},
        )
    assert answer.status_code == 200, answer.text
    assert isinstance(served.backend, Replay)
    (request,) = served.backend.requests
    assert request == Request(
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is\n1+1?"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "Use the tool.",
                "tool_calls": conversation[2]["tool_calls"],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "It is"},
        ),
        sampling=Sampling(
            0.5,
            11,
            0.9,
            0.02,
            repeat_penalty=1.1,
            presence_penalty=-0.5,
            dry_multiplier=0.8,
            dry_penalty_last_n=256,
            logit_bias=((5, -100.0),),
            seed=99,
        ),
        max_tokens=5,
        stop=("a", "b"),
        thinking=False,
        continue_final=True,
        tools=(TOOL,),
        tool_choice={"type": "function", "function": {"name": "add"}},
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
        template_kwargs={"style": "x"},
        logprobs=3,
    )


def test_stop_strings_across_the_borders_of_tokens(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=HI, max_tokens=20).choices[0].message.content or ""
    stop = whole[4:11]
    choice = client.chat.completions.create(model="m", messages=HI, max_tokens=20, stop=stop).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_a_grammar_in_llama_cpps_form(url: str) -> None:
    answer = post(url, "/v1/chat/completions", model="m", messages=HI, grammar="root ::= [xyz]{4}", max_tokens=9).json()
    text = answer["choices"][0]["message"]["content"]
    assert len(text) == 4 and set(text) <= set("xyz")
    for wrong in ({"grammar": "root ::= this is (not"}, {"grammar": "root ::= [a]", "json_schema": {}}):
        refused = post(url, "/v1/chat/completions", model="m", messages=HI, **wrong)
        assert refused.status_code == 400 and "grammar" in refused.json()["error"]["message"]


def test_log_probabilities_add_up_to_the_text(client: openai.OpenAI) -> None:
    choice = client.chat.completions.create(model="m", messages=HI, max_tokens=8, logprobs=True).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(t.token for t in choice.logprobs.content) == choice.message.content
    assert all(t.logprob <= 0 and bytes(t.bytes or []).decode() == t.token for t in choice.logprobs.content)


def test_completions(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="m", prompt="Once upon a time", max_tokens=10, logprobs=0)
    stream = client.completions.create(model="m", prompt="Once upon a time", max_tokens=10, stream=True)
    assert "".join(c.choices[0].text for c in stream) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.choices[0].logprobs is not None
    assert "".join(whole.choices[0].logprobs.tokens or []) == whole.choices[0].text


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": HI}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": [{"role": "user"}]}, "messages[0].content"),
        ({"model": "m", "messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"model": "m", "messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0]",
        ),
        ({"model": "m", "messages": HI, "n": 2}, "n"),
        ({"model": "m", "messages": HI, "temperature": "hot"}, "temperature"),
        ({"model": "m", "messages": HI, "temperature": True}, "temperature"),
        ({"model": "m", "messages": HI, "top_p": 2}, "top_p"),
        ({"model": "m", "messages": HI, "presence_penalty": 2.5}, "presence_penalty"),
        ({"model": "m", "messages": HI, "no_such_field": 1}, "no_such_field"),
        ({"model": "m", "messages": HI, "stop": [""]}, "stop"),
        ({"model": "m", "messages": HI, "top_logprobs": 3}, "top_logprobs"),
        ({"model": "m", "messages": HI, "reasoning_effort": "high"}, "reasoning_effort"),
        ({"model": "m", "messages": HI, "response_format": {"type": "sound"}}, "response_format.type"),
        ({"model": "m", "messages": HI, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"model": "m", "messages": HI, "continue_final_message": True}, "continue_final_message"),
        ({"model": "m", "messages": HI, "tool_choice": "required"}, "tool_choice"),
        ({"model": "m", "messages": HI, "max_tokens": 1.5}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(url: str, body: dict[str, Any], field: str) -> None:
    answer = post(url, "/v1/chat/completions", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == field and error["message"].startswith(f"{field}: ")
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"]


def test_null_asks_for_nothing(url: str) -> None:
    answer = post(url, "/v1/chat/completions", model="m", messages=HI, max_tokens=1, tools=None, no_such_field=None)
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit(client: openai.OpenAI, stream: bool) -> None:
    """An HTTP error in both cases: a stream has not begun yet."""
    long: Any = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model="m", messages=long, stream=stream)
    body: Any = raised.value.body
    assert body["type"] == "exceed_context_size_error" and body["n_ctx"] == 2048 and body["n_prompt_tokens"] > 3000


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_in_the_middle(stream: bool) -> None:
    """A stream that has begun ends with an error and [DONE]; a whole answer is an error."""
    seen = threading.Event()
    with serving(replaying([*pieces("a"), seen, Failed("the device\nis gone")])) as url:
        if stream:
            body = {"model": "m", "messages": HI, "stream": True}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                seen.set()
                *_, error, done = (line.removeprefix("data: ") for line in lines if line)
            assert done == "[DONE]"
            error = json.loads(error)
        else:
            seen.set()
            answer = post(url, "/v1/chat/completions", model="m", messages=HI)
            error = answer.json()
            assert answer.status_code == 500
    assert error["error"]["message"] == "the device is gone"


def test_a_client_that_stops_reading_frees_the_engine(client: openai.OpenAI, smollm2: LocalBackend) -> None:
    stream = client.chat.completions.create(model="m", messages=HI, stream=True, max_tokens=400, temperature=2)
    for _ in range(3):
        next(iter(stream))
    stream.close()
    client.chat.completions.create(model="m", messages=HI, max_tokens=1)
    assert smollm2.snapshot().generated_tokens == 1


def test_a_client_that_hangs_up_ends_its_answer(url: str) -> None:
    with asking(url, "/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 400, "temperature": 2}):
        until(url, "running_requests", 1)
    until(url, "running_requests", 0)
    assert post(url, "/v1/completions", model="m", prompt="a", max_tokens=1).status_code == 200


def test_a_client_that_hangs_up_while_its_prompt_is_read(
    url: str, smollm2: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt has several chunks; the engine is free before it has read them all."""
    reading, gone, executor = threading.Event(), threading.Event(), smollm2._loaded().executor
    forward, hung_up = executor.forward, figure(url, "hung_up_total")

    def held(*args: Any, **options: Any) -> Any:
        reading.set()
        gone.wait(120)
        return forward(*args, **options)

    monkeypatch.setattr(executor, "forward", held)
    body = {"model": "m", "prompt": " ".join(map(str, range(450))), "max_tokens": 300}
    with asking(url, "/v1/completions", body):
        assert reading.wait(120)
    until(url, "hung_up_total", hung_up + 1)
    gone.set()
    until(url, "running_requests", 0)
    stats = smollm2.snapshot()
    assert stats.prompt_tokens > 1000 and stats.generated_tokens == 0
    assert stats.reused_tokens + stats.prefilled_tokens < stats.prompt_tokens - 1


def test_conversations_do_not_mix(url: str) -> None:
    """Many clients at once: every one gets the answer to its own question."""
    expected = {}
    for word in ("red", "blue", "green"):
        expected[word] = post(url, "/v1/completions", model="m", prompt=f"The {word} house", max_tokens=6).json()
    got: dict[str, Any] = {}

    def ask(word: str) -> None:
        got[word] = post(url, "/v1/completions", model="m", prompt=f"The {word} house", max_tokens=6).json()

    threads = [threading.Thread(target=ask, args=(word,)) for word in expected]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    texts = [{w: b["choices"][0]["text"] for w, b in bodies.items()} for bodies in (expected, got)]
    assert texts[0] == texts[1]


def test_progress_of_the_prompt(url: str) -> None:
    text = " ".join(map(str, range(400)))
    got = chunks(url, messages=[{"role": "user", "content": text}], max_tokens=1, return_progress=True)
    progress = [c["prompt_progress"] for c in got[:-1] if "prompt_progress" in c]
    assert progress[0]["processed"] == progress[0]["cache"]
    assert len(progress) > 2 and progress[-1]["processed"] == progress[-1]["total"]


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="m", input="Say hello.", max_output_tokens=20)
    assert answer.output_text and answer.output[0].id is not None
    events = list(client.responses.create(model="m", input="Say hello.", max_output_tokens=20, stream=True))
    assert [e.type for e in events[:2]] == ["response.created", "response.in_progress"]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == answer.output_text
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [e.sequence_number for e in events] == [*range(len(events))]


def test_responses_with_thinking_and_tools() -> None:
    events = [*pieces("hm", kind="thinking"), *CALLS]
    with serving(replaying(events)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
        tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
        whole = client.responses.create(model="m", input="1+1?", tools=[tool])
        got = list(client.responses.create(model="m", input="1+1?", tools=[tool], stream=True))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    last = got[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    assert [item.arguments for item in last.response.output if item.type == "function_call"] == ['{"a":1}', "{}"]
    done = [e.arguments for e in got if e.type == "response.function_call_arguments.done"]
    assert done == ['{"a":1}', "{}"]


def test_a_turn_of_responses_is_one_message() -> None:
    served = replaying([finished()])
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "1+1?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}", "id": "f", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    with serving(served) as url:
        answer = post(url, "/v1/responses", model="m", input=items, instructions="Be brief.")
    assert answer.status_code == 200, answer.text
    assert isinstance(served.backend, Replay)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    assert served.backend.requests[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    )


@pytest.mark.parametrize("field", ["previous_response_id", "conversation", "prompt", "max_tool_calls"])
def test_responses_store_nothing(url: str, field: str) -> None:
    answer = post(url, "/v1/responses", model="m", input="a", **{field: "x"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_every_parameter_of_sampling_goes_over_http() -> None:
    """Under its own name and vLLM's; -1 is "all" where other servers mean that."""
    for name, p in SAMPLING_PARAMETERS.items():
        for value in (p.low, p.high):
            fields = Fields({name: value})
            assert getattr(chosen_numbers(fields, Sampling()), name) == value
            fields.done()
        with pytest.raises(RequestRefused, match=name):
            chosen_numbers(Fields({name: p.high + 1}), Sampling())
    assert chosen_numbers(Fields({"repetition_penalty": 1.5}), Sampling()).repeat_penalty == 1.5
    unlimited = chosen_numbers(Fields({"top_k": -1, "repeat_last_n": -1, "dry_penalty_last_n": -1}), Sampling())
    assert unlimited.top_k == 0 and unlimited.repeat_last_n > 100_000 and unlimited.dry_penalty_last_n == -1
