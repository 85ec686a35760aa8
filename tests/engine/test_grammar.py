"""Constrained decoding: with random weights, which is the hard case, every answer is what was asked for."""

from __future__ import annotations

import copy
import gc
import json
import random
import weakref
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.support import call_templates, calls, schemas, tiny
from tinychat.engine.engine import Engine
from tinychat.engine.grammar import Grammar, Matcher, Vocabulary, calls_grammar
from tinychat.engine.tool_calls import tool
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import Sampling

PROMPT = [6, 17, 250, 33, 7, 7, 120]
TOOLS = [
    tool(
        "weather", {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    ),
    tool("toggle", {"on": {"type": "boolean"}, "mode": {"enum": ["a", "b"]}}),
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, speculation: str) -> Iterator[Engine]:
    path = tiny.write(tmp_path_factory.mktemp("grammar") / "tiny.gguf", "llama", "Q8_0")
    engine = Engine.load(path, max_context=512, device=speculation)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory, speculation: str) -> Iterator[Engine]:
    path = tiny.write(tmp_path_factory.mktemp("grammar") / "tiny.gguf", "qwen2", "Q8_0")
    engine = Engine.load(path, max_context=512, device="cpu")
    yield engine
    engine.close()


def answer(engine: Engine, grammar: Grammar, sampling: Sampling, n: int = 400) -> str:
    tokens = engine.generate(PROMPT, sampling, n, grammar=grammar)
    return "".join(token.text for token in tokens)


def test_answers_under_a_schema_are_valid(cpu: Engine) -> None:
    rng = random.Random(4)
    for seed in range(40):
        schema = schemas.whole(rng)
        text = answer(cpu, Grammar.from_schema(schema), Sampling(temperature=rng.choice((0.0, 0.8, 2.0)), seed=seed))
        assert cpu.stop_reason == "eos", (schema, text)
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_regular_expression_and_grammars(engine: Engine, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=3)
    assert set(answer(engine, Grammar.from_regex("[ab]{5}"), sampling)) <= {"a", "b"} and engine.stop_reason == "eos"
    assert answer(engine, Grammar.from_regex("forced text"), sampling) == "forced text"
    lark = 'start: ("one" | "two") " " /[0-9]{2}/'
    assert answer(engine, Grammar.from_lark(lark), sampling)[:4] in ("one ", "two ")
    gbnf = 'root ::= "<" [x-z]{3} ">"'
    text = answer(engine, Grammar.from_lark(gbnf), sampling)
    assert len(text) == 5 and set(text[1:-1]) <= set("xyz") and text[0] + text[-1] == "<>"


def test_forced_tokens_take_no_sampling(cpu: Engine) -> None:
    """They are run together, and the cache and the next choice are what they are without a grammar."""
    text = "a forced beginning, then "
    grammar = Grammar.from_regex(text + "[a-z]{3}")
    greedy = Sampling(temperature=0.0)
    ids = [t.id for t in cpu.generate(PROMPT, greedy, 200, grammar=grammar) if t.id is not None]
    s = cpu.stats
    assert len(ids) / 2 < s.forced_tokens < len(ids) and cpu.stop_reason == "eos"
    assert len(ids) + 1 == s.generated_tokens == s.forced_tokens + s.decode_steps + s.accepted_tokens
    prompt = [*PROMPT, *ids]
    (following,) = cpu.generate(prompt, greedy, 1, raw=True)
    assert cpu.stats.reused_tokens >= len(prompt) - 2
    assert following.id == int(cpu.logits(prompt)[-1].argmax())


def test_it_ends_where_the_context_does(cpu: Engine) -> None:
    long = Grammar.from_regex("(forced text that goes on and on ){40}")
    assert len(list(cpu.generate(PROMPT, Sampling(temperature=0.0), grammar=long))) > 0
    assert cpu.stop_reason == "context" and len(cpu.session.tokens) <= 512
    list(cpu.generate(PROMPT, Sampling(temperature=0.0), 5, grammar=long))
    assert cpu.stop_reason == "length" and len(cpu.session.tokens) == len(PROMPT) + 4


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: Grammar.from_schema({"type": "array", "uniqueItems": True}),
            "uses uniqueItems, which is not",
        ),
        (lambda: Grammar.from_schema({"properties": {"a": {"not": {}}}}), "uses not, which is not supported"),
        (lambda: Grammar.from_schema({"type": "string", "format": "nonsense"}), "format: nonsense"),
        (lambda: Grammar.from_schema({"$ref": "#/nowhere"}), "the JSON schema cannot be used"),
        (lambda: Grammar.from_schema([]), "a JSON schema is an object"),  # type: ignore[arg-type]
        (lambda: Grammar.from_regex("(?=a)"), "the regular expression cannot be used"),
        (lambda: Grammar.from_lark('start: "a'), "the grammar cannot be used"),
    ],
)
def test_what_is_not_supported_is_an_error_by_name(cpu: Engine, make: Any, why: str) -> None:
    with pytest.raises(TinychatError, match=why) as e:
        list(cpu.generate(PROMPT, grammar=make()))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_call_that_is_required_comes(cpu: Engine, temperature: float) -> None:
    """In the markup of the model's own template (here the plain one), and it is read back."""
    for seed in range(5):
        grammar = cpu.calls_grammar(TOOLS, PROMPT, parallel=False)
        sampling = Sampling(temperature=temperature, seed=seed)
        tokens = list(cpu.generate(PROMPT, sampling, 300, tools=TOOLS, grammar=grammar))
        assert cpu.stop_reason == "eos"
        pieces = [t.call or calls.Piece(t.kind, t.text) for t in tokens if t.text or t.call]
        got = calls.message_of(pieces)
        ((name, arguments),) = got["calls"]
        assert got["content"] == ""
        schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == name)
        jsonschema.validate(arguments, schema)


@pytest.mark.parametrize("name", call_templates.SECTIONS)
def test_the_grammar_of_calls_is_the_markup_of_the_template(name: str) -> None:
    """Random walks under the mask, without any model, give what the parser reads back as valid calls."""
    chat, tokenizer = call_templates.model(call_templates.source(name))
    vocabulary = Vocabulary(tokenizer, tokenizer.n_vocab + 5)
    grammar = calls_grammar(chat.call_format, TOOLS, tokenizer)
    rng = random.Random(name)
    for _ in range(6):
        matcher, ids = Matcher(vocabulary, grammar), []
        while len(ids) < 3000:
            if forced := matcher.forced():
                ids += forced
            else:
                bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                choices = np.flatnonzero(bits)
                ending = [i for i in choices if i in tokenizer.stop_ids]
                ids.append(int(rng.choice(ending if ending and rng.random() < 0.5 else choices)))
                matcher.accept(ids[-1])
            if ids[-1] in tokenizer.stop_ids:
                break
        assert ids[-1] in tokenizer.stop_ids
        turn = calls.Written("", "", ids[:-1])
        got = calls.message_of(calls.read(chat, tokenizer, turn, TOOLS))
        assert got["calls"] and got["content"] == ""
        for called, arguments in got["calls"]:
            schema = next(t["function"]["parameters"] for t in TOOLS if t["function"]["name"] == called)
            jsonschema.validate(arguments, schema)


def test_a_mask_has_a_bit_for_each_logit(cpu: Engine) -> None:
    for size in range(cpu.tokenizer.n_vocab, cpu.tokenizer.n_vocab + 33):
        mask = Matcher(Vocabulary(cpu.tokenizer, size), Grammar.from_regex("[ab]c")).mask()
        assert len(mask) == (size + 31) // 32, size


def test_a_token_that_the_mask_forbids_is_an_error(cpu: Engine) -> None:
    matcher = Matcher(cpu.vocabulary, Grammar.from_regex("[ab]c"))
    forbidden = cpu.tokenizer.encode("z")[0]
    mask = matcher.mask()
    assert mask.dtype == np.uint32 and len(mask) == (cpu.plan.vocab + 31) // 32
    assert not mask[forbidden // 32] >> np.uint32(forbidden % 32) & 1
    with pytest.raises(TinychatError, match="left the regular expression"):
        matcher.accept(forbidden)


def test_thinking_may_come_before_a_call_that_is_required() -> None:
    chat, tokenizer = call_templates.model(call_templates.source("tagged"))
    vocabulary = Vocabulary(tokenizer, tokenizer.n_vocab)
    call = "<tool_call>toggle<arg_key>on</arg_key><arg_value>true</arg_value>"
    call += "<arg_key>mode</arg_key><arg_value>b</arg_value>"
    for opened, text in ((True, f"hm</think>{call}</tool_call>"), (False, f"<think>hm</think>\n{call}</tool_call>")):
        grammar = calls_grammar(chat.call_format, TOOLS, tokenizer, thinking=chat.think_tags, opened=opened)
        matcher = Matcher(vocabulary, grammar)
        for token in tokenizer.encode(text, special=True):
            matcher.accept(token)
        assert matcher.complete


def test_a_vocabulary_is_freed_with_its_tokenizer() -> None:
    tokenizer = copy.copy(call_templates.model(call_templates.source("json"))[1])
    vocabulary, freed = Vocabulary(tokenizer, tokenizer.n_vocab), weakref.ref(tokenizer)
    del vocabulary, tokenizer
    gc.collect()
    assert freed() is None


def test_a_strict_tool_is_held_to_every_keyword() -> None:
    chat, tokenizer = call_templates.model(call_templates.source("json"))
    odd = tool("f", {"a": {"type": "array", "uniqueItems": True, "maxItems": 2, "items": {"type": "boolean"}}})
    Matcher(Vocabulary(tokenizer, tokenizer.n_vocab), calls_grammar(chat.call_format, [odd], tokenizer))
    odd["function"]["strict"] = True
    with pytest.raises(TinychatError, match="a tool uses uniqueItems"):
        Matcher(Vocabulary(tokenizer, tokenizer.n_vocab), calls_grammar(chat.call_format, [odd], tokenizer))
