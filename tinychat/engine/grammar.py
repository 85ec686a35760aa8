"""Constrained decoding on `llguidance`: the tokens that a JSON schema, a regular expression or a grammar allows next.

A `Grammar` describes the allowed answers. A `Matcher` follows one answer: it gives a bit mask per step for the sampler,
and the forced tokens, which need no sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinychat.engine.tokenizer import Tokenizer
from tinychat.engine.tool_calls import ID, CallFormat, ToolSchema
from tinychat.errors import TinychatError, printable

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")


@dataclass(frozen=True)
class Grammar:
    """The answers that are allowed. `source` is in llguidance's own form; errors call the grammar `name`."""

    source: str
    name: str

    @classmethod
    def from_schema(cls, schema: object) -> Grammar:
        """The JSON values that a JSON schema allows, written on one line."""
        return cls(_as_lark(_schema(schema)), "the JSON schema")

    @classmethod
    def from_regex(cls, pattern: str) -> Grammar:
        """The texts that a regular expression matches as a whole."""
        import llguidance

        return cls(llguidance.LLMatcher.grammar_from_regex(pattern), "the regular expression")

    @classmethod
    def from_lark(cls, text: str) -> Grammar:
        """The texts of a grammar in llguidance's dialect of Lark or in llama.cpp's GBNF. Raises TinychatError for a
        GBNF grammar that cannot be parsed."""
        import llguidance

        try:
            return cls(llguidance.grammar_from("gbnf", text), "the grammar")
        except ValueError as e:
            raise TinychatError(f"the grammar cannot be read: {_line(e)}") from None


def behind_thinking(grammar: Grammar, closing: int) -> Grammar:
    """The same after thinking that the prompt has opened and the token `closing` ends. For grammars of a schema."""
    front = f"start: thought <[{closing}]> /\\s*/ answer\nthought: /(?s:.*)/\nanswer:"
    return Grammar(grammar.source.replace("start:", front, 1), grammar.name)


class _Tokens:
    """A tokenizer as llguidance.TokenizerWrapper takes it."""

    def __init__(self, tokenizer: Tokenizer, stop_id: int) -> None:
        self.tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, stop_id, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.n_vocab)]
        self.special_token_ids = sorted({i for text, i in tokenizer.marks if not text.isspace()})

    def __call__(self, text: bytes | str) -> list[int]:
        return self.tokenizer.encode(text if isinstance(text, str) else text.decode())


class Vocabulary:
    """A model's tokens in llguidance's form. `size`: logits per step, at least the number of the tokenizer's tokens.

    `ll` holds _Tokens in memory of Rust, which Python's garbage collector does not see: nothing of _Tokens may lead
    back to `ll`, or neither is ever freed.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        import llguidance

        stop_ids = sorted(tokenizer.stop_ids)
        if not stop_ids:
            raise TinychatError("this model has no token that ends an answer; it cannot be held to a grammar")
        self.stop_id, self.size = stop_ids[0], size
        wrapper = llguidance.TokenizerWrapper(_Tokens(tokenizer, self.stop_id))
        self.ll = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=stop_ids)


class Matcher:
    """One answer under a grammar."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        """Raises TinychatError for a grammar that is wrong or uses what is not supported."""
        import llguidance

        self._matcher = llguidance.LLMatcher(vocabulary.ll, grammar.source, log_level=0)
        if self._matcher.is_error():
            raise TinychatError(_explain(self._matcher.get_error(), grammar.name))
        self._stop_id, self._words = vocabulary.stop_id, -(-vocabulary.size // 32)
        self._name = grammar.name
        self._forced: list[int] = []

    @property
    def done(self) -> bool:
        """Whether only the end of the answer can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return self._matcher.is_accepting()

    def mask(self) -> np.ndarray:
        """uint32 ((vocab + 31) // 32,): bit i % 32 of word i // 32 is set where token i may come."""
        # llguidance has bits for the tokens of the tokenizer, and up to one word more
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        mask = np.zeros(self._words, np.uint32)
        mask[: len(found)] = found[: self._words]
        return mask

    @property
    def forces(self) -> bool:
        """Whether only one token can follow."""
        self._forced = self._forced or ([self._stop_id] if self.done else self._matcher.compute_ff_tokens())
        return bool(self._forced)

    def forced(self) -> list[int]:
        """Returns and accepts the tokens that have to come next; the end of the answer is one of them."""
        tokens, self._forced = (self._forced if self.forces else []), []
        if not self.done:
            self._matcher.consume_tokens(tokens)
        return tokens

    def accept(self, token: int) -> None:
        """Advances by the chosen token. Raises TinychatError for one that the mask forbids."""
        if not self.done and not self._matcher.consume_token(token):
            raise TinychatError(f"the answer left {self._name}: {_line(self._matcher.get_error())}")


# --- tool calls ---


def calls_grammar(
    form: CallFormat,
    tools: Sequence[ToolSchema],
    tokenizer: Tokenizer,
    *,
    thinking: Sequence[str] | None = None,
    opened: bool = False,
    parallel: bool = True,
) -> Grammar:
    """One or more calls of `tools` in the markup of `form`, arguments under their schemas, and nothing else.

    A schema that does not say so allows no other arguments. Keywords that are not supported are passed over, but in a
    tool that is "strict". Where strings stand bare in the markup, only their length and pattern are held.
    `thinking`: the tags of thinking that may stand in front; `opened`: the prompt has opened it. Raises TinychatError
    for thinking tags that are no tokens of this model.
    """
    functions = [tool["function"] for tool in tools]
    lines: list[str] = []

    def text(markup: str) -> str:
        parts = tokenizer.split(markup.replace(ID, "\0"), special=True)
        return " ".join(f"<[{p}]>" if isinstance(p, int) else _literal(p) for p in parts)

    for i, function in enumerate(functions):
        body = _call(form, function, text, f"v{i}", lines)
        lines.append(f"c{i}: {body}")
    one = " | ".join(f"c{i}" for i in range(len(functions)))
    several = parallel and form.parallel
    if form.array:
        calls = '"[" one (", " one)* "]"' if several else '"[" one "]"'
        calls = " ".join(part for part in (text(form.call_open), calls, text(form.call_close)) if part)
    else:
        call = " ".join(part for part in (text(form.call_open), "one", text(form.call_close)) if part)
        repeat = " ".join(part for part in (text(form.between), call) if part)
        calls = f"{call} ({repeat})*" if several else call
    start = [text(form.section_open.lstrip()), calls, text(form.section_close)]
    if thinking:
        tags = [tokenizer.token_id(tag) for tag in thinking]
        if None in tags:
            raise TinychatError("this model's thinking tags are no tokens; ask it not to think")
        front = f"thought <[{tags[1]}]>"
        lines.append("thought: /(?s:.*)/")
        start.insert(0, front if opened else f"(<[{tags[0]}]> {front})?")
        start.insert(1, r"/\s*/")
    lines = [f"start: {' '.join(part for part in start if part)}", f"one: {one}", *lines]
    return Grammar("%llguidance {}\n" + "\n".join(lines), "a tool")


def _call(form: CallFormat, function: Mapping[str, Any], text: Any, rule: str, lines: list[str]) -> str:
    """The right side of a rule for one call of `function`, without the markup around it; `lines` gets more rules."""
    name, schema = function["name"], {"type": "object", "additionalProperties": False, **function.get("parameters", {})}
    lenient = not function.get("strict")
    if form.form == "json":
        wrapped: dict[str, Any] = {}
        if form.name_path:
            _put(wrapped, form.name_path, {"const": name})
            _put(wrapped, form.arguments_path, _without_definitions(schema))
        else:
            _put(wrapped, (name,), _without_definitions(schema))
        if form.id_path:
            _put(wrapped, form.id_path, {"type": "string", "pattern": "^[A-Za-z0-9]{9}$"})
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return _as_rule(wrapped | definitions, lenient)
    if form.form == "named":
        return f"{_literal(name)} {text(form.after_name)} {_as_rule(schema, lenient)}"
    parts = [_literal(name), text(form.after_name)]
    required = schema.get("required", ())
    for i, (key, kind) in enumerate((schema.get("properties") or {}).items()):
        string = isinstance(kind, Mapping) and kind.get("type") == "string" and not {"enum", "const"} & kind.keys()
        opening = text(form.key_open) + " " + _literal(key) + " "
        if string:
            closing = text(form.value_close)
            if closing.startswith("<["):  # a special token, which is no part of any text
                lines.append(f"{rule}_{i}: {_bare(kind)}")
                closing = " " + closing
            else:
                lines.append(f"{rule}_{i}[suffix={_literal(form.value_close)}]: {_bare(kind)}")
                closing = ""
            argument = f"{opening}{text(form.value_open)} {rule}_{i}{closing}"
        elif words := _words(kind):
            argument = f"{opening}{text(form.value_open)} ({words}) {text(form.value_close)}"
        else:
            whole = {"$defs": schema["$defs"]} if "$defs" in schema else {}
            argument = (
                f"{opening}{text(form.other_open)} {_as_rule({**kind, **whole}, lenient)} {text(form.value_close)}"
            )
        parts.append(f"({argument})" + ("" if key in required else "?"))
    return " ".join(part for part in parts if part)


def _bare(kind: Mapping[str, Any]) -> str:
    """The regular expression of a string that stands bare in markup."""
    if isinstance(pattern := kind.get("pattern"), str):
        head, tail = "" if pattern.startswith("^") else "(?s:.*)", "" if pattern.endswith("$") else "(?s:.*)"
        return f"/{head}({pattern.removeprefix('^').removesuffix('$').replace('/', chr(92) + '/')}){tail}/"
    low, high = kind.get("minLength", 0), kind.get("maxLength", "")
    return f"/(?s:.{{{low},{high}}})/" if low or high != "" else "/(?s:.*)/"


def _words(kind: Any) -> str:
    """The literals of a schema that lists strings, else ""."""
    words = [kind["const"]] if "const" in kind else kind.get("enum", ())
    return " | ".join(_literal(word) for word in words) if all(isinstance(word, str) for word in words) else ""


def _put(schema: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Makes `schema` an object with `value` at `path`, everything in it required and nothing else allowed."""
    schema |= {"type": "object", "additionalProperties": False}
    schema.setdefault("properties", {})
    schema.setdefault("required", []).extend([path[0]] if path[0] not in schema["properties"] else [])
    if len(path) == 1:
        schema["properties"][path[0]] = value
    else:
        _put(schema["properties"].setdefault(path[0], {}), path[1:], value)


def _without_definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}


def _schema(schema: object) -> dict[str, Any]:
    if not isinstance(schema, Mapping | bool):
        raise TinychatError("a JSON schema is an object")
    return dict(schema) if isinstance(schema, Mapping) else ({} if schema else {"not": {}})


def _as_rule(schema: Mapping[str, Any], lenient: bool = False) -> str:
    try:
        return "%json " + json.dumps({**schema, "x-guidance": _JSON_STYLE | {"lenient": lenient}})
    except (TypeError, ValueError, RecursionError) as e:
        raise TinychatError(f"the JSON schema cannot be read: {_line(e)}") from None


def _as_lark(schema: Mapping[str, Any]) -> str:
    return f"%llguidance {{}}\nstart: {_as_rule(schema)}"


def _literal(text: str) -> str:
    return json.dumps(text.replace("\0", "x"), ensure_ascii=False)


def _explain(error: str, name: str) -> str:
    """One line of llguidance's message."""
    if found := _KEYS.search(error):
        return f"{name} uses {found[1].replace(chr(34), '')}, which is not supported"
    return f"{name} cannot be used: {_line(error)}"


def _line(error: object) -> str:
    return printable(" ".join(str(error).split())[:200])
