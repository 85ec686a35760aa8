"""Stop strings across the borders of portions."""

import random

import pytest

from tinychat.backend.stops import StopStrings


def cut(text: str, stops: list[str], sizes: list[int]) -> tuple[str, str]:
    """What comes out, and the stop string found, when `text` is fed in portions of `sizes` again and again."""
    s, out, at, n = StopStrings(stops), "", 0, 0
    while at < len(text):
        size = sizes[n % len(sizes)]
        out += s.feed(text[at : at + size])
        at, n = at + size, n + 1
    return out + ("" if s.found else s.flush()), s.found


@pytest.mark.parametrize(
    ("text", "stops", "before", "found"),
    [
        ("one two three", ["two"], "one ", "two"),
        ("one two three", ["four"], "one two three", ""),
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("x\n\nUser: y", ["\nUser:", "\n\n"], "x", "\n\n"),
        ("ends with the beginning of st", ["stop"], "ends with the beginning of st", ""),
        ("abc", ["", "c"], "ab", "c"),
        ("abc", [], "abc", ""),
    ],
)
def test_portions_do_not_matter(text: str, stops: list[str], before: str, found: str) -> None:
    rng = random.Random(1)
    for sizes in ([1], [2], [3], [100], *([rng.randint(1, 5) for _ in range(7)] for _ in range(5))):
        assert cut(text, stops, sizes) == (before, found)


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    s = StopStrings(["<end>"])
    assert s.feed("a<e") == "a" and s.feed("x") == "<ex" and s.feed("<end") == "" and s.feed(">rest") == ""
    assert s.found == "<end>" and s.feed("more") == ""
