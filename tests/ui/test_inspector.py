"""The inspector on a real tokenizer: ids, boundaries, special tokens, probabilities."""

import math
import random

import pytest
from rich.cells import cell_len

from tests.support import tiny
from tests.support.screens import Host, text_of, until
from tinychat.engine.engine import Engine, Token
from tinychat.kernels.ops import Sampling
from tinychat.ui.screens.inspector import InspectorScreen
from tinychat.ui.screens.token_view import Piece, TokenView, bar, lay_out


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = Engine.load(tiny.write(tmp_path_factory.mktemp("m") / "tiny.gguf", "qwen3", "Q4_0", seed=1), device="cpu")
    yield engine
    engine.close()


def detail(app):
    return " ".join(str(app.screen.query_one(".detail").render()).split())


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_a_real_answer(engine, size):
    prompt = engine.chat.render([{"role": "user", "content": "Hi <|im_end|> you"}])
    tokens = list(engine.generate(prompt, Sampling(temperature=0.0), 12))
    app = Host(InspectorScreen(engine, prompt, tokens))
    async with app.run_test(size=size) as pilot:
        view = app.screen.query_one(TokenView)
        assert [p.id for p in view.pieces] == [*prompt, *(t.id for t in tokens if t.id is not None)]
        special = [p for p in view.pieces[: len(prompt)] if p.special]
        assert "⟨<|im_start|>⟩▏" in text_of(app) and f"{len(prompt)} prompt tokens, {len(special)} special" in text_of(
            app
        )
        assert sum(p.text == "<|im_end|>" for p in special) == 1  # what the user typed stayed text
        assert f"id {prompt[0]}" in detail(app) and "special" in detail(app)
        await pilot.press("a")
        chosen = next(t for t in tokens if t.id is not None)
        assert view.cursor == len(prompt)
        assert f"probability {math.exp(chosen.logprob):.2%}" in detail(app) and "chosen by the model" in detail(app)
        await pilot.press("l")
        assert (
            f"{math.exp(chosen.logprob):.2%}" in text_of(app)
            and "answer" in text_of(app)
            and f" {chosen.id} " in text_of(app)
        )
        await pilot.press("c")
        assert app.clipboard == "".join(engine.tokenizer.token_text(i) for i in prompt)


async def test_moving(engine):
    tokens = [Token(i % 200, "", "answer", math.log(0.9 if i % 5 else 0.2)) for i in range(3000)]
    app = Host(InspectorScreen(engine, [5] * 50, tokens))
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.screen.query_one(TokenView)
        await pilot.press("right", "right", "left")
        assert view.cursor == 1
        await pilot.press("end")
        assert view.cursor == 3049 and view.scroll_offset.y > 0
        await pilot.press("home", "up")
        assert view.cursor == 0
        await pilot.press("down")
        assert 1 < view.cursor < 80
        await pilot.press("pagedown", "a", "n")
        assert view.cursor == 55
        await pilot.press("n", "p")
        assert view.cursor == 55
        await pilot.press("home")
        await pilot.click(TokenView, offset=(0, 1))
        await until(pilot, lambda: view.cursor > 1)
        await pilot.press("tab", "home", "down", "down", "up", "pagedown", "pageup")
        assert view.mode == "list"


async def test_without_tokens_and_tiny(engine):
    app = Host(InspectorScreen(engine, [], []))
    async with app.run_test(size=(30, 8)) as pilot:
        await pilot.press("right", "down", "end", "a", "n", "p", "l", "down", "pagedown")
        assert "no tokens" in text_of(app)


def test_layout_keeps_every_token_in_order_within_the_width():
    rng = random.Random(1)
    words = ["a", "·the", "↵", "注意力", "⟨<|im_start|>⟩", "x" * 70, "注" * 40, "∅", "·" * 9, "end↵↵"]
    for width in (8, 20, 77):
        texts = [rng.choice(words) for _ in range(400)]
        lines, starts = lay_out(texts, width)
        assert all(sum(cell_len(t) for _, t in line) <= width for line in lines)
        joined = {}
        for line in lines:
            for index, text in line:
                joined[index] = joined.get(index, "") + text
        assert [joined[i] for i in range(400)] == [t + "▏" for t in texts]
        assert all(any(i == index for i, _ in lines[at]) for index, at in enumerate(starts))


def test_what_a_piece_shows():
    assert Piece(1, " the\n", False).shown == "·the↵" and Piece(1, "<s>", True).shown == "⟨<s>⟩"
    assert Piece(1, "\x1b[31m\u202e", False).shown == "\\x1b[31m\\u202e" and Piece(1, "", False).shown == "∅"
    assert [bar(s, 4) for s in (0, 0.5, 1, 2)] == ["", "██", "████", "████"] and bar(1 / 32, 4) == "▏"


async def test_a_long_prompt_opens_at_once(engine):
    ids = [i % 250 for i in range(30_000)]
    app = Host(InspectorScreen(engine, ids, []))
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "30,000 prompt tokens" in text_of(app))
        await pilot.press("end", "l", "home")
