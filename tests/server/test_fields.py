"""Every field that the official clients can send is honoured (the request says so), a note that asks for nothing, or
refused by its name. The fields are read from the clients' own types, so that a new one is refused and not ignored."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from tests.support.serving import finished, replaying
from tinychat.server import anthropic, ollama, openai_chat, openai_completions, openai_responses
from tinychat.server.answer import AnswerJob, ServedModel
from tinychat.server.refusal import RequestRefused

HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object"}
TOOL = {"name": "f", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": TOOL}
Look = Callable[[AnswerJob], Any]


def schema(job: AnswerJob) -> Any:
    return ((job.request.response_format or {}).get("json_schema") or {}).get("schema")


def sampled(name: str) -> Look:
    return lambda job: getattr(job.request.sampling, name)


def asked(name: str) -> Look:
    return lambda job: getattr(job.request, name)


# What llama-server, vLLM and SGLang take beside OpenAI's fields, by their documentation.
SAMPLING: dict[str, tuple[Any, Look, Any]] = {
    "temperature": (0.25, sampled("temperature"), 0.25),
    "top_p": (0.5, sampled("top_p"), 0.5),
    "top_k": (7, sampled("top_k"), 7),
    "min_p": (0.25, sampled("min_p"), 0.25),
    "seed": (11, sampled("seed"), 11),
    "repeat_penalty": (1.5, sampled("repeat_penalty"), 1.5),
    "repetition_penalty": (1.5, sampled("repeat_penalty"), 1.5),
    "repeat_last_n": (9, sampled("repeat_last_n"), 9),
    "presence_penalty": (0.5, sampled("presence_penalty"), 0.5),
    "frequency_penalty": (-0.5, sampled("frequency_penalty"), -0.5),
    "dry_multiplier": (0.5, sampled("dry_multiplier"), 0.5),
    "dry_base": (2.5, sampled("dry_base"), 2.5),
    "dry_allowed_length": (3, sampled("dry_allowed_length"), 3),
    "dry_penalty_last_n": (64, sampled("dry_penalty_last_n"), 64),
}
REFUSED = {  # with a value that would change the answer
    "n": 2,
    "best_of": 2,
    "echo": True,
    "suffix": "end",
    "store": True,
    "service_tier": "flex",
    "verbosity": "low",
    "modalities": ["text", "audio"],
    "background": True,
    "ignore_eos": True,
    "min_tokens": 5,
    "mirostat": 2,
    "typical_p": 0.5,
    "xtc_probability": 0.5,
    "dynatemp_range": 0.5,
    "top_n_sigma": 1.0,
    "grammar": "root ::= x",
    "samplers": ["top_k"],
    "cache_prompt": False,
    "id_slot": 3,
    "n_keep": 5,
    "n_probs": 5,
    "min_keep": 5,
    "post_sampling_probs": True,
    "t_max_predict_ms": 5,
    "lora": [{"id": 0}],
    "use_beam_search": True,
    "length_penalty": 2.0,
    "skip_special_tokens": False,
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "guided_json": SCHEMA,
    "guided_regex": "a+",
    "structured_outputs": SCHEMA,
    "bad_words": ["a"],
    "stop_token_ids": [1],
    "allowed_token_ids": [1],
    "include_stop_str_in_output": True,
    "priority": 3,
    "json_schema_strict": True,
    "regex": "a+",
    "ebnf": "a",
    "logits_processors": ["a"],
}
MORE = (*SAMPLING, *REFUSED)


@dataclass(frozen=True)
class Dialect:
    """`honoured`: field -> (a value, where the request shows it, what it shows); `notes`: fields that by their
    definition ask for nothing."""

    parse: Callable[[dict[str, Any], ServedModel], AnswerJob]
    base: Mapping[str, Any]
    fields: tuple[str, ...]
    honoured: Mapping[str, tuple[Any, Look, Any]]
    notes: Mapping[str, Any] = field(default_factory=dict)
    besides: Mapping[str, Any] = field(default_factory=dict)  # what a field needs beside it


def documented(params: Any) -> tuple[str, ...]:
    return tuple(typing.get_type_hints(params))


OPENAI_NOTES = {
    "user": "u",
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
}
STREAM = {
    "stream": (True, lambda job: job.stream, True),
    "timings_per_token": (True, lambda job: job.reply.extras.timings, True),
    "return_progress": (True, lambda job: job.reply.extras.progress, True),
}
USAGE = {"stream_options": ({"include_usage": True}, lambda job: job.reply.include_usage, True)}

CHAT = Dialect(
    openai_chat.parse,
    {"model": "m", "messages": HI},
    (*documented(ChatParams), *MORE, "reasoning", "chat_template_kwargs", "continue_final_message", "json_schema"),
    SAMPLING
    | STREAM
    | USAGE
    | {
        "messages": ([{"role": "user", "content": "Ho"}], lambda job: job.request.messages[0]["content"], "Ho"),
        "model": ("n", lambda job: job.reply.served.model, "replay"),  # there is one, and the answer says its name
        "max_tokens": (5, asked("max_tokens"), 5),
        "max_completion_tokens": (6, asked("max_tokens"), 6),
        "n_predict": (7, asked("max_tokens"), 7),
        "stop": (["a", "b"], asked("stop"), ("a", "b")),
        "logit_bias": ({"5": -100}, sampled("logit_bias"), ((5, -100.0),)),
        "logprobs": (True, asked("logprobs"), 0),
        "top_logprobs": (3, asked("logprobs"), 3),
        "response_format": ({"type": "json_object"}, asked("response_format"), {"type": "json_object"}),
        "json_schema": (SCHEMA, schema, SCHEMA),
        "grammar": ("root ::= [a]", asked("response_format"), {"type": "grammar", "grammar": "root ::= [a]"}),
        "tools": ([CHAT_TOOL], asked("tools"), (CHAT_TOOL,)),
        "tool_choice": ("required", asked("tool_choice"), "required"),
        "parallel_tool_calls": (False, lambda job: job.one_call, True),
        "reasoning_effort": ("low", asked("thinking"), True),
        "reasoning": ({"effort": "none"}, asked("thinking"), False),
        "chat_template_kwargs": ({"enable_thinking": False}, asked("thinking"), False),
        "continue_final_message": (True, asked("continue_final"), True),
    },
    OPENAI_NOTES,
    {
        "top_logprobs": {"logprobs": True},
        "stream_options": {"stream": True},
        "tool_choice": {"tools": [CHAT_TOOL]},
        "continue_final_message": {"messages": [*HI, {"role": "assistant", "content": "He"}]},
    },
)
COMPLETIONS = Dialect(
    openai_completions.parse,
    {"model": "m", "prompt": "Once"},
    (*documented(CompletionParams), *MORE),
    SAMPLING
    | STREAM
    | USAGE
    | {
        "prompt": ("Twice", asked("raw"), "Twice"),
        "model": ("n", lambda job: job.reply.served.model, "replay"),
        "max_tokens": (5, asked("max_tokens"), 5),
        "n_predict": (7, asked("max_tokens"), 7),
        "stop": ("a", asked("stop"), ("a",)),
        "logit_bias": ({"5": 1.5}, sampled("logit_bias"), ((5, 1.5),)),
        "logprobs": (2, asked("logprobs"), 2),
    },
    OPENAI_NOTES,
    {"stream_options": {"stream": True}},
)
RESPONSES = Dialect(
    openai_responses.parse,
    {"model": "m", "input": "Hi"},
    (*documented(ResponseCreateParamsBase), *MORE),
    SAMPLING
    | STREAM
    | {
        "input": ("Ho", lambda job: job.request.messages[0]["content"], "Ho"),
        "instructions": ("Be", lambda job: job.request.messages[0], {"role": "system", "content": "Be"}),
        "model": ("n", lambda job: job.reply.served.model, "replay"),
        "max_output_tokens": (5, asked("max_tokens"), 5),
        "top_logprobs": (3, asked("logprobs"), 3),
        "include": (["message.output_text.logprobs"], asked("logprobs"), 0),
        "text": ({"format": {"type": "json_object"}}, asked("response_format"), {"type": "json_object"}),
        "tools": ([{"type": "function", **TOOL}], asked("tools"), (CHAT_TOOL,)),
        "tool_choice": ("required", asked("tool_choice"), "required"),
        "parallel_tool_calls": (False, lambda job: job.one_call, True),
        "reasoning": ({"effort": "high"}, asked("thinking"), True),
        "truncation": ("auto", asked("overflow"), "oldest"),
    },
    OPENAI_NOTES,
    {"tool_choice": {"tools": [{"type": "function", **TOOL}]}},
)
ANTHROPIC_TOOL = {"name": "f", "input_schema": SCHEMA}
MESSAGES = Dialect(
    anthropic.parse,
    {"model": "m", "max_tokens": 20, "messages": HI},
    (*documented(MessageCreateParamsBase), *MORE, "output_format", "mcp_servers", "context_management"),
    SAMPLING
    | {
        "stream": STREAM["stream"],
        "messages": ([{"role": "user", "content": "Ho"}], lambda job: job.request.messages[0]["content"], "Ho"),
        "model": ("n", lambda job: job.reply.served.model, "replay"),
        "max_tokens": (5, asked("max_tokens"), 5),
        "stop_sequences": (["a"], asked("stop"), ("a",)),
        "system": ("Be", lambda job: job.request.messages[0], {"role": "system", "content": "Be"}),
        "thinking": ({"type": "enabled", "budget_tokens": 9}, asked("thinking"), True),
        "tools": ([ANTHROPIC_TOOL], asked("tools"), (CHAT_TOOL,)),
        "tool_choice": ({"type": "any"}, asked("tool_choice"), "required"),
        "output_config": (
            {"format": {"type": "json_schema", "schema": SCHEMA}},
            schema,
            SCHEMA,
        ),
        "output_format": (
            {"type": "json_schema", "schema": SCHEMA},
            schema,
            SCHEMA,
        ),
    },
    {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}},
    {"tool_choice": {"tools": [ANTHROPIC_TOOL]}},
)


OLLAMA = Dialect(
    ollama.parse_chat,
    {"model": "m", "messages": HI},
    ("logprobs", "top_logprobs", "tool_choice", "template", "context", "raw", "suffix", "images"),
    {
        "model": ("n", lambda job: job.reply.served.model, "replay"),
        "messages": ([{"role": "user", "content": "Ho"}], lambda job: job.request.messages[0]["content"], "Ho"),
        "tools": ([CHAT_TOOL], asked("tools"), (CHAT_TOOL,)),
        "format": ("json", asked("response_format"), {"type": "json_object"}),
        "stream": (False, lambda job: job.stream, False),
        "think": (False, asked("thinking"), False),
    },
    {"keep_alive": "5m"},  # the model always stays
)
OLLAMA_OPTIONS: dict[str, tuple[Any, Look, Any]] = {
    **{
        k: SAMPLING[k]
        for k in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "repeat_penalty",
            "repeat_last_n",
            "presence_penalty",
            "frequency_penalty",
        )
    },
    "num_predict": (5, asked("max_tokens"), 5),
    "stop": (["a"], asked("stop"), ("a",)),
}
OLLAMA_REFUSED = {
    "num_ctx": 1 << 20,
    "mirostat": 1,
    "mirostat_tau": 1.0,
    "mirostat_eta": 0.5,
    "typical_p": 0.5,
    "tfs_z": 0.5,
    "penalize_newline": False,
    "num_keep": 5,
}

DIALECTS = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "ollama": OLLAMA,
}
CASES = [(name, f) for name, d in DIALECTS.items() for f in dict.fromkeys((*d.fields, *d.honoured, *d.notes))]


@pytest.mark.parametrize(("name", "field"), CASES)
def test_honoured_or_refused_by_name(name: str, field: str) -> None:
    d, served = DIALECTS[name], replaying([finished()])
    base = {**d.base, **d.besides.get(field, {})}
    without = {k: v for k, v in base.items() if k != field}
    if field in d.honoured:
        value, look, seen = d.honoured[field]
        assert look(d.parse({**base, field: value}, served)) == seen
        if field not in d.base:
            assert field == "seed" or look(d.parse(without, served)) != seen
    elif field in d.notes:
        d.parse({**base, field: d.notes[field]}, served)
    else:
        with pytest.raises(RequestRefused) as raised:
            d.parse({**base, field: REFUSED.get(field, {"a": 1})}, served)
        assert raised.value.status == 400 and (raised.value.field or "").startswith(field)


@pytest.mark.parametrize("field", [*OLLAMA_OPTIONS, *OLLAMA_REFUSED])
def test_options_of_ollama(field: str) -> None:
    served = replaying([finished()])
    if field in OLLAMA_OPTIONS:
        value, look, seen = OLLAMA_OPTIONS[field]
        assert look(ollama.parse_chat({**OLLAMA.base, "options": {field: value}}, served)) == seen
    else:
        with pytest.raises(RequestRefused) as raised:
            ollama.parse_chat({**OLLAMA.base, "options": {field: OLLAMA_REFUSED[field]}}, served)
        assert raised.value.field == f"options.{field}"


def test_ollama_looks_for_repetitions_in_the_whole_context() -> None:
    job = ollama.parse_chat({**OLLAMA.base, "options": {"repeat_last_n": -1}}, replaying([finished()]))
    assert job.request.sampling.repeat_last_n >= 512


@pytest.mark.parametrize(
    "change",
    [
        {"logit_bias": {"99999999": -100}},
        {"logprobs": True, "top_logprobs": 2},
        {"chat_template_kwargs": {"reply_in": "verse"}},
        {"reasoning_effort": "low"},
    ],
)
def test_what_this_engine_cannot_do_is_refused_by_name(url: str, change: dict[str, Any]) -> None:
    body = {"model": "m", "messages": HI, "max_tokens": 2} | change
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    error = answer.json()["error"]
    assert answer.status_code == 400 and any(name in error["message"] for name in change), error
    assert error["param"] in change or error["param"].partition(".")[0] in change
