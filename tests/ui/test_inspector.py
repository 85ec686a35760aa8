"""The inspector on a real tokenizer: ids, boundaries, special tokens, probabilities."""

import math
import random

import pytest
from rich.cells import cell_len

from tests.support import tiny
from tests.support.screens import Host, text_of, until
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Piece, Request, Sampling
from tinychat.ui.screens.inspector import InspectorScreen
from tinychat.ui.screens.token_view import ShownToken, TokenView, lay_out
from tinychat.units import bar


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    path = tiny.write(tmp_path_factory.mktemp("m") / "tiny.gguf", "qwen3", "Q4_0", seed=1)
    backend = LocalBackend.open(path, device="cpu")
    yield backend
    backend.close()


def detail(app):
    return " ".join(str(app.screen.query_one(".detail").render()).split())


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_a_real_answer(backend, size):
    messages = ({"role": "user", "content": "Hi <|im_end|> you"},)
    events = list(backend.answer(Request(messages, sampling=Sampling(temperature=0.0), max_tokens=12)))
    tokens = [t for e in events if isinstance(e, Piece) for t in e.tokens]
    prompt = backend.last_prompt()
    texts = backend.token_texts([*prompt, *(t.id for t in tokens)])
    app = Host(InspectorScreen(texts, [t.logprob for t in tokens]))
    async with app.run_test(size=size) as pilot:
        view = app.screen.query_one(TokenView)
        assert [t.id for t in view.tokens] == [*prompt, *(t.id for t in tokens)]
        special = [t for t in view.tokens[: len(prompt)] if t.special]
        assert "⟨<|im_start|>⟩▏" in text_of(app) and f"{len(prompt)} prompt tokens, {len(special)} special" in text_of(
            app
        )
        assert sum(p.text == "<|im_end|>" for p in special) == 1  # what the user typed stayed text
        assert f"id {prompt[0]}" in detail(app) and "special" in detail(app)
        await pilot.press("a")
        chosen = tokens[0]
        assert view.cursor == len(prompt)
        assert f"probability {math.exp(chosen.logprob):.2%}" in detail(app) and "chosen by the model" in detail(app)
        await pilot.press("l")
        assert (
            f"{math.exp(chosen.logprob):.2%}" in text_of(app)
            and "answer" in text_of(app)
            and f" {chosen.id} " in text_of(app)
        )
        await pilot.press("c")
        assert app.clipboard == "".join(t.text for t in backend.token_texts(prompt))


async def test_accepted_drafts_are_told_apart(backend):
    texts = backend.token_texts([5, 6, 7, 8, 9])
    app = Host(InspectorScreen(texts, [-0.1, -0.2, 0.0], ["", "text", "grammar"]))
    async with app.run_test(size=(100, 24)) as pilot:
        view = app.screen.query_one(TokenView)
        assert "3 chosen" in text_of(app) and "2 of them drafts" in text_of(app)
        colours = [s.style.color for s in view.render_line(0) if s.text.strip("▏ ") and s.style][:5]
        assert colours[3] == colours[4] != colours[2] != colours[0]
        await pilot.press("end")
        assert "forced by the grammar" in detail(app)
        await pilot.press("left")
        assert "as drafted from the text" in detail(app)
        await pilot.press("l")
        assert "drafted" in text_of(app) and "forced" in text_of(app)


async def test_moving(backend):
    texts = backend.token_texts([*[5] * 50, *(i % 200 for i in range(3000))])
    app = Host(InspectorScreen(texts, [math.log(0.9 if i % 5 else 0.2) for i in range(3000)]))
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


async def test_without_tokens_and_tiny():
    app = Host(InspectorScreen([]))
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
    assert ShownToken(1, " the\n", False).shown == "·the↵" and ShownToken(1, "<s>", True).shown == "⟨<s>⟩"
    assert ShownToken(1, "\x1b[31m\u202e", False).shown == "\\x1b[31m\\u202e" and ShownToken(1, "", False).shown == "∅"
    assert [bar(s, 4) for s in (0, 0.5, 1, 2)] == ["", "██", "████", "████"] and bar(1 / 32, 4) == "▏"


async def test_a_long_prompt_opens_at_once(backend):
    texts = backend.token_texts([i % 250 for i in range(30_000)])
    app = Host(InspectorScreen(texts))
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "30,000 prompt tokens" in text_of(app))
        await pilot.press("end", "l", "home")
