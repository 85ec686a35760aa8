"""Thinking and answer are told apart wherever the stream happens to be cut."""

import pytest

from tinychat.engine.answer import AnswerParser
from tinychat.engine.scanner import Fragment

CASES = {
    "opened by the prompt": (True, "I add\n2 and 2.\n\n</think>\n\nIt is 4.\n", "I add\n2 and 2.", "It is 4.\n"),
    "opened by the model": (False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    "after white space": (False, " \n<think>hm</think>yes", "hm", "yes"),
    "no newlines": (True, "hm</think>yes", "hm", "yes"),
    "opened twice": (True, "<think>\nhm</think>yes", "hm", "yes"),
    "empty": (False, "<think>\n\n</think>\n\nyes", "", "yes"),
    "never closed": (True, "hm hm <thin</thinkk> ", "hm hm <thin</thinkk>", ""),
    "cut off in the tag": (True, "hm\n</thi", "hm\n</thi", ""),
    "no thinking": (False, "  yes <think>no</think> ok", "", "  yes <think>no</think> ok"),
    "almost a tag": (False, "<thing> ok", "", "<thing> ok"),
    "a second block is answer": (False, "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
    "indented code": (True, "hm</think>\n\n    code", "hm", "    code"),
    "blank lines inside": (True, "\n\na\n\nb <\n</\n</think> c", "a\n\nb <\n</", " c"),
    "nothing": (True, "", "", ""),
    "only the tag": (False, "<think>", "", ""),
    "half a tag": (False, "<thi", "", "<thi"),
    "only white space": (False, " \n", "", " \n"),
    "closed and silent": (True, "hm</think>\n\n", "hm", ""),
}


def split(opened: bool, portions: list[str]) -> list[Fragment]:
    parser = AnswerParser(("<think>", "</think>"), opened)
    return [piece for portion in portions for piece in parser.feed(portion)] + parser.flush()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
@pytest.mark.parametrize("case", CASES)
def test_split(case: str, size: int) -> None:
    opened, text, thinking, answer = CASES[case]
    pieces = split(opened, [text[i : i + size] for i in range(0, len(text), size)])
    assert "".join(p.text for p in pieces if p.kind == "thinking") == thinking
    assert "".join(p.text for p in pieces if p.kind == "answer") == answer
    kinds = [p.kind for p in pieces]
    assert kinds == sorted(kinds, reverse=True)  # never thinking after the answer has begun
    assert all(p.text for p in pieces)


def test_text_is_not_held_back_longer_than_needed() -> None:
    s = AnswerParser(("<think>", "</think>"), True)
    assert s.kind == "thinking" and s.feed("I think") == [Fragment("thinking", "I think")]
    assert s.feed(" a<") == [Fragment("thinking", " a")]
    assert s.feed("b") == [Fragment("thinking", "<b")]
    assert s.feed("\n\n") == [] and s.feed("</think>\n") == [] and s.kind == "answer"
    assert s.feed("so") == [Fragment("answer", "so")] and s.feed(" <think>") == [Fragment("answer", " <think>")]


def test_other_tags() -> None:
    s = AnswerParser(("[THINK]", "[/THINK]"))
    assert [*s.feed("[TH"), *s.feed("INK]a[/"), *s.feed("THINK]b"), *s.flush()] == [
        Fragment("thinking", "a"),
        Fragment("answer", "b"),
    ]
