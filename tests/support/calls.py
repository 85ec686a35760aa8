"""Random tool calls, and what a template makes of them when a model has written them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinychat.engine.prompt import Chat
from tinychat.engine.scanner import MARK, Fragment
from tinychat.engine.tokenizer import Tokenizer

WORDS = [
    *(
        "Paris",
        "",
        " ",
        "\n",
        "two\nlines",
        "  both ends ",
        "\t",
        "é",
        "日本語",
        "😀👩🏽‍💻",
        "\u2028",
        "\\",
        "\\n",
        '"',
        "'",
        '\\"',
        "{",
        "}",
    ),
    *(
        "[",
        "]",
        ",",
        ":",
        "null",
        "True",
        "12",
        "1e5",
        "</",
        "<",
        ">",
        "|",
        "{}",
        '{"name": "x", "arguments": {}}',
        "a=b",
        "```",
    ),
]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text(rng: random.Random, markers: Sequence[str]) -> str:
    """Words, fragments of JSON, and now and then one of the format's own markers."""
    return "".join(rng.choice(markers if markers and rng.random() < 0.15 else WORDS) for _ in range(rng.randrange(5)))


def value(rng: random.Random, markers: Sequence[str], depth: int = 0) -> Any:
    """Any JSON value, nested at most three deep."""
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind < 3:
        return text(rng, markers)
    if kind < 6:
        return rng.choice([0, 1, -7, 10**12, 0.5, -1.25, 1e-7, True, False])
    if kind == 6:
        return [value(rng, markers, depth + 1) for _ in range(rng.randrange(3))]
    return {text(rng, markers): value(rng, markers, depth + 1) for _ in range(rng.randrange(3))}


def name(rng: random.Random) -> str:
    return rng.choice(LETTERS) + "".join(rng.choice(LETTERS + "_-0123456789") for _ in range(rng.randrange(1, 12)))


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def call(rng: random.Random, markers: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A call as OpenAI writes it, and its tool."""
    arguments = {name(rng).replace("-", "_"): value(rng, markers) for _ in range(rng.randrange(4))}
    function = name(rng)
    properties = {key: {"type": _TYPES[type(v)]} for key, v in arguments.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    identity = "".join(rng.choices(LETTERS, k=9))
    made = {"id": identity, "type": "function", "function": {"name": function, "arguments": json.dumps(arguments)}}
    return made, {"type": "function", "function": {"name": function, "description": "d", "parameters": schema}}


@dataclass
class Written:
    """An assistant's turn as the template writes it: the prompt in front and the answer, as text and as ids."""

    prompt: str
    answer: str
    ids: list[int]


def written(chat: Chat, tokenizer: Tokenizer, message: dict[str, Any], tools: Sequence[dict[str, Any]]) -> Written:
    """What the model would have written for `message` to be rendered so."""
    user = {"role": "user", "content": "Q"}
    prompt = chat.render([user], tools=tools)
    full = chat.render([user, message], add_generation_prompt=False, tools=tools)
    plain = chat.render([user, {"role": "assistant", "content": "A"}], add_generation_prompt=False, tools=tools)
    shared = next((i for i, (a, b) in enumerate(zip(full, prompt)) if a != b), min(len(full), len(prompt)))
    while full and full[-1:] == plain[-1:]:  # the end of the turn
        full, plain = full[:-1], plain[:-1]
    ids = full[shared:]
    if (
        chat.think_tags
        and chat.opens_thinking(prompt)
        and chat.think_tags[1] not in tokenizer.decode(ids, special=True)
    ):
        prompt = []  # a template that leaves out past thinking
    return Written(tokenizer.decode(prompt, special=True), tokenizer.decode(ids, special=True), ids)


def read(chat: Chat, tokenizer: Tokenizer, turn: Written, tools: Sequence[dict[str, Any]]) -> list[Fragment]:
    """The answer's ids taken apart as the engine does it, token by token."""
    parser = chat.parser(turn.prompt, tools, marked=True)
    decoder = tokenizer.decoder(show=chat.shown_ids(parser), mark=MARK)
    pieces = [piece for token in turn.ids for piece in parser.feed(decoder.feed(token))]
    return pieces + parser.feed(decoder.flush()) + parser.flush()


def prompt_text(chat: Chat, *args: Any, **options: Any) -> str:
    """What `chat.render` makes, as it would be written down."""
    return chat.tokenizer.decode(chat.render(*args, **options), special=True)


def parsed(chat: Chat, answer: str, tools: Sequence[dict[str, Any]] = (), prompt: str = "") -> dict[str, Any]:
    """`message_of` a whole answer, with "note" where a call was broken."""
    parser = chat.parser(prompt, tools)
    message = message_of(parser.feed(answer) + parser.flush())
    return message | ({"note": parser.notes[0]} if parser.notes else {})


def message_of(pieces: Sequence[Fragment]) -> dict[str, Any]:
    """Content, thinking and calls (name, arguments) that pieces carry."""
    calls: dict[int, list[Any]] = {}
    for piece in pieces:
        if piece.kind == "call" and piece.note:
            calls.pop(piece.index, None)
        elif piece.kind == "call":
            calls.setdefault(piece.index, [piece.name, ""])[1] += piece.text
    return {
        "content": "".join(p.text for p in pieces if p.kind == "answer"),
        "thinking": "".join(p.text for p in pieces if p.kind == "thinking"),
        "calls": [(n, json.loads(arguments)) for n, arguments in calls.values()],
    }
