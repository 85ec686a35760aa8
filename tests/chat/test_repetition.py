"""What is a repetition without end, and what only looks like one."""

import random

import pytest

from tests.support.scripted import LONG
from tinychat.chat.repetition import Repetition


def found(text: str, piece: int = 5, **kw) -> int:
    """After how many characters it is noticed; 0: never."""
    r = Repetition(**kw)
    return next((i + piece for i in range(0, len(text), piece) if r.feed(text[i : i + piece])), 0)


PARAGRAPH = "Let me check this again, step by step. Each number is the sum of the two before it, so the next one\n" * 3
ENDLESS = {
    "a word": "and ".join(["It is very "] + ["very "] * 900),
    "a line": "First, this.\n" + "I am sorry, I cannot help with that.\n" * 100,
    "a paragraph": "Hm. " + (PARAGRAPH + "Wait.\n\n") * 40,
    "a list item": "1. one\n" + "- The model is a large language model\n" * 100,
    "numbers": "0, " * 3000,
    "code": "```\n" + "    x = x + 1\n" * 600,
    "fences": "```python\nprint(1)\n```\nAnd again:\n" * 200,
    "another alphabet": "それは素晴らしいことです。" * 200,
}
ORDINARY = {
    "the demo": LONG,
    "prose": " ".join(random.Random(1).choices(LONG.split(), k=3000)),
    "a numbered list": "\n".join(f"{i}. The model is a large language model" for i in range(1, 400)),
    "a table": "| month | done |\n|---|---|\n" + "\n".join(f"| {i} | no |" for i in range(400)),
    "an empty table": "| a | b | c |\n|---|---|---|\n" + "|  |  |  |\n" * 100,
    "a rule": "-" * 200 + "\n" + "=" * 200,
    "a matrix": "```\n" + "\n".join(", ".join(["0"] * 32) for _ in range(32)) + "\n```",
    "html": "```html\n" + '    <li class="item"><a href="#">Link</a></li>\n' * 40 + "```",
    "code": "```python\n" + "\n".join(f"    assert f({i}) == 0\n    print()" for i in range(300)) + "\n```",
    "a chorus": ("La la la la la, we sing along\n" * 4 + "A verse that is another one each time {}\n") * 3,
    "json": '{"rows": [' + '{"value": null, "unit": ""}, ' * 100,
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_repetition_is_noticed(name):
    at = found(ENDLESS[name], random.Random(name).randint(1, 9))
    assert 0 < at < min(len(ENDLESS[name]), 10 * 2000 + 1000), at


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_text_is_not(name):
    assert found(ORDINARY[name], code=name == "json") == 0


def test_it_costs_little_however_long_the_answer_is():
    r = Repetition()
    assert not any(r.feed(f"word{i} ") for i in range(50_000)) and len(r._text) < 50_000
