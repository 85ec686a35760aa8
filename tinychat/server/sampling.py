"""Fields that several dialects share: how tokens are chosen, messages, tools, the form of an answer."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinychat.backend.protocol import SAMPLING_PARAMETERS, Sampling
from tinychat.server.answer import ServedModel
from tinychat.server.fields import Fields
from tinychat.server.refusal import RequestRefused, invalid

MAX_TOKENS = 1 << 24
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 512
MAX_STOPS, MAX_STOP = 32, 1024

# Values that ask for the behaviour that is fixed here; every other value is refused by name.
OFF: Mapping[str, tuple[Any, ...]] = {
    "dry_sequence_breakers": (),
    "xtc_probability": (0, 0.0),
    "mirostat": (0,),
    "dynatemp_range": (0, 0.0),
    "typical_p": (1, 1.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "n_keep": (0,),
    "n_discard": (0,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "cache_prompt": (True,),
    "id_slot": (-1, 0),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "samplers": (),
    "grammar": (),
    "lora": (),
    "t_max_predict_ms": (0,),
    "n_indent": (0,),
    "post_sampling_probs": (False,),
    "min_keep": (0,),
}


ALIASES = {"repeat_penalty": "repetition_penalty"}  # vLLM's names
MINUS_ONE = {"top_k": 0, "repeat_last_n": 1_000_000}  # what -1 means where other servers take it for "all"


def sampling(fields: Fields, served: ServedModel) -> Sampling:
    """How tokens are chosen, from the fields that OpenAI, llama-server and vLLM have for it."""
    chosen = chosen_numbers(fields, served.sampling)
    fields.fixed(OFF)
    seed = pick_seed(fields.integer("seed", None, -1, 2**64 - 1), served)
    return replace(chosen, seed=seed, logit_bias=logit_bias(fields))


def chosen_numbers(fields: Fields, base: Sampling) -> Sampling:
    """`base` with the parameters of sampling that the request sets, by their own names and by ALIASES."""
    found: dict[str, Any] = {}
    for name, p in SAMPLING_PARAMETERS.items():
        value, low = getattr(base, name), -1 if name in MINUS_ONE else p.low
        for field in filter(None, (ALIASES.get(name), name)):
            if p.kind is int:
                value = fields.integer(field, value, int(low), int(p.high))
            else:
                value = fields.number(field, value, low, p.high)
        found[name] = MINUS_ONE.get(name, -1) if value == -1 else value
    return replace(base, **found)


def pick_seed(seed: int | None, served: ServedModel) -> int:
    """The seed of a request: its own, the server's, or a new one (-1 asks for that)."""
    if seed is None:
        seed = served.seed
    return secrets.randbits(32) if seed is None or seed < 0 else seed % 2**32


def max_tokens(served: ServedModel, asked: int | None) -> int | None:
    """The limit of an answer: the request's and the server's, whichever is less; None or -1: the context's."""
    limits = [n for n in (asked, served.most) if n is not None and n >= 0]
    return min(limits, default=None)


def model(fields: Fields, required: bool) -> None:
    """Takes the model's name. There is one model: it answers under any name, and the response has its own."""
    name = fields.text("model")
    if required and not name:
        raise fields.refuse("model", "is required")


def logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits."""
    asked = fields.object("logit_bias") or {}
    if len(asked) > MAX_MESSAGES:
        raise fields.refuse("logit_bias", f"has more than {MAX_MESSAGES:,} entries")
    bias = {}
    for token, value in asked.items():
        if not token.isdecimal() or len(token) > 9:
            raise fields.refuse("logit_bias", "expected token ids as keys")
        if not isinstance(value, int | float) or isinstance(value, bool) or not -100 <= value <= 100:
            raise fields.refuse("logit_bias", "expected values from -100 to 100")
        bias[int(token)] = float(value)
    return tuple(bias.items())


def content(value: Any, where: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """The text of a message's content: a string, or parts of text, each on lines of its own. Other parts are refused by
    their place and kind."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise invalid("expected a string or an array of parts", where)
    if len(value) > MAX_PARTS:
        raise invalid(f"has more than {MAX_PARTS:,} parts", where)
    return "\n".join(part_text(part, f"{where}[{i}]", kinds) for i, part in enumerate(value))


def part_text(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    """The text of one part of a message."""
    fields = Fields(part, where)
    kind = fields.text("type")
    if kind not in kinds:
        raise unsupported_part(kind, where)
    text = fields.text("refusal" if kind == "refusal" else "text")
    if text is None:
        raise fields.refuse("text", "is required")
    fields.notes("cache_control", "annotations", "logprobs", "citations")
    fields.done()
    return text


def unsupported_part(kind: Any, where: str) -> RequestRefused:
    """Says which part of a message cannot be read."""
    for media in ("image", "audio", "video", "file", "document"):
        if isinstance(kind, str) and media in kind:
            return invalid(f"{media} input is not supported", where)
    return invalid("a part of this type is not supported", f"{where}.type")


def tool_names(tools: tuple[Mapping[str, Any], ...]) -> set[str]:
    return {tool["function"]["name"] for tool in tools}


def function(fields: Fields, parameters: str, where: str) -> dict[str, Any]:
    """A tool as the Chat API writes it, from its name, description and the schema under `parameters`."""
    name = fields.needed("name")
    if len(name) > 128:
        raise fields.refuse("name", "is longer than 128 characters")
    found: dict[str, Any] = {"name": name}
    if description := fields.text("description"):
        found["description"] = description
    schema = fields.object(parameters)
    found["parameters"] = schema if schema is not None else {"type": "object", "properties": {}}
    if fields.flag("strict"):
        found["strict"] = True
    return {"type": "function", "function": found}


def arguments(value: Any, where: str) -> str:
    """A tool call's arguments as JSON text; clients also send the object itself."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise invalid("expected a string with a JSON object", where)
    return value


def check_tools(served: ServedModel, tools: tuple[Mapping[str, Any], ...], choice: Any) -> None:
    """Raises RequestRefused for tools that this model cannot call and for a choice that is none of them."""
    if tools and not served.backend.info.can.tools:
        raise invalid("this model cannot call tools", "tools")
    named = choice["function"]["name"] if isinstance(choice, dict) else None
    if named is not None and named not in tool_names(tools):
        raise invalid("names a tool that is not among the tools", "tool_choice")
    if choice == "required" and not tools:
        raise invalid("needs tools", "tool_choice")


def response_format(fields: Fields | None) -> dict[str, Any] | None:
    """The form of an answer as the Chat API writes it: None for plain text."""
    if fields is None:
        return None
    kind = fields.choice("type", ("text", "json_object", "json_schema"))
    found: dict[str, Any] | None = None
    if kind == "json_schema":
        inner = fields.fields("json_schema")
        if inner is None:
            raise fields.refuse("json_schema", "is required")
        found = json_schema(inner)
    elif kind == "json_object":
        schema = fields.object("schema")  # llama-server's way to send one
        found = {"type": "json_object"} if schema is None else schema_format(schema)
    elif kind is None:
        raise fields.refuse("type", "is required")
    fields.done()
    return found


def json_schema(fields: Fields) -> dict[str, Any]:
    """name, description, schema and strict of a JSON schema."""
    schema = fields.object("schema")
    if schema is None:
        raise fields.refuse("schema", "is required")
    found = schema_format(schema, fields.text("name") or "answer", fields.flag("strict", True))
    fields.notes("description")
    fields.done()
    return found


def schema_format(schema: dict[str, Any], name: str = "answer", strict: bool = True) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": strict}}
