"""Formulas in answers: shown in Unicode where that says the same, else as they were written; copied as they were."""

import pytest

from tests.ui.test_chat import desk
from tinychat.ui.chat.markdown.blocks import Block, Splitter
from tinychat.ui.chat.markdown.layout import lay_out


def lines(source, width=80):
    return [line.content.plain for line in lay_out(Block(source).nodes, width)]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        (r"so \( ax^2 + bx + c = 0 \) holds", ["so ax² + bx + c = 0 holds"]),
        (r"\(x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}\)", ["x = (−b ± √(b² − 4ac))/(2a)"]),
        (r"\(\left(\frac{a}{b}\right)^{n-1}\) and $e^{i\pi}$", ["(a/b)ⁿ⁻¹ and e^(iπ)"]),
        (r"\( \{x \in \mathbb{R}\} \)", ["{x ∈ ℝ}"]),
        (r"\(\lim_{x \to 0} \sin x\)", ["lim_(x → 0) sin x"]),
        ("\\[\na\n- b\n\\]", ["  a − b"]),
        ("\\[\n\\begin{aligned}\na &= b \\\\\nc &= d\n\\end{aligned}\n\\]", ["  a = b", "  c = d"]),
        ("$$x_1$$", ["  x₁"]),
        (r"a \( \begin{bmatrix} 1 & 2 \\ 3 \end{bmatrix} \)", [r"a \( \begin{bmatrix} 1 & 2 \\ 3 \end{bmatrix} \)"]),
        (r"\\ \{ \, \( stay, \*these\* go", [r"\\ \{ \, \( stay, *these* go"]),
        ("it costs $5 and $10, `\\(code\\)`", ["it costs $5 and $10, \\(code\\)"]),
        ("\\[ never\n\nclosed", ["\\[ never"]),
        ("\\[\n" + "a b c d e\n" * 200 + "\\]", ["\\[", "a b c d e"]),  # not looked for so far
        ("\\(" + "a " * 600 + "\\)", ["\\(a" + " a" * 38]),
    ],
)
def test_formulas_and_what_looks_like_them(source, shown):
    assert lines(source)[: len(shown)] == shown


def test_a_streamed_formula_ends_as_if_it_had_come_at_once():
    source = "before\n\n\\[\na\n- b\n+ c\n\\]\n\nafter \\(x^2\\)\n"
    splitter = Splitter()
    for character in source:
        splitter.feed(character)
    splitter.finish()
    assert [b.kind for b in splitter.done] == ["paragraph", "formula_block", "paragraph"]


async def test_an_answer_shows_formulas_and_copies_their_source():
    answer = "The roots of \\( ax^2 + bx + c \\):\n\n\\[\nx = \\frac{-b}{2a}\n\\]"
    async with desk(answer) as d:
        await d.ask("roots?")
        assert "The roots of ax² + bx + c:" in d.screen and "x = (−b)/(2a)" in d.screen
        await d.send("/copy answer")
        await d.until(lambda: d.app.clipboard == answer)
