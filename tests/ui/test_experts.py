"""The heat strip of experts: what the engine counts, how it is drawn at any size, and in the app on a real mixture of
experts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.screens import text_of, until
from tinychat.backend.instruments import ExpertCounts
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.engine.expert_use import RECENT, RecentExperts
from tinychat.kernels.sampling import Sampling
from tinychat.ui.app import TinychatApp
from tinychat.ui.panel import ExpertsStrip
from tinychat.ui.panel.experts import strip


def value(e: RecentExperts) -> ExpertCounts:
    return ExpertCounts(e.layers, e.experts, e.used, e.tokens, e.counts(), e.known)


def test_counts_of_the_last_tokens():
    routing = RecentExperts((1, 2), experts=4, used=2)
    assert routing.tokens == 0 and routing.counts().sum() == 0
    for _ in range(RECENT):
        routing.add(np.array([[0, 1], [3, 0]], np.int32))
    assert routing.counts().tolist() == [[RECENT, RECENT, 0, 0], [RECENT, 0, 0, RECENT]]
    routing.add(np.array([[2, 1], [3, 2]], np.int32))  # the oldest goes
    assert routing.counts().tolist() == [[RECENT - 1, RECENT, 1, 0], [RECENT - 1, 0, 1, RECENT]]
    assert routing.tokens == RECENT and routing.known
    routing.add(None)
    assert not routing.known


def filled(layers: int, experts: int, used: int) -> RecentExperts:
    rng, routing = np.random.default_rng(1), RecentExperts(tuple(range(1, layers + 1)), experts, used)
    for _ in range(150):
        routing.add(np.array([rng.permutation(experts)[:used] for _ in range(layers)], np.int32))
    return routing


def test_shades_say_how_often():
    routing = RecentExperts((3,), experts=6, used=1)
    for expert, times in ((0, 40), (1, 29), (2, 15), (3, 1)):
        for _ in range(times):
            routing.add(np.array([[expert]], np.int32))
    lines = [line.plain for line in strip(value(routing), 35, 10)]
    assert lines[1:] == ["3 █▓▒░··", "6 experts, 1 chosen a token", "85 tokens: · never ░▒▓█ to 47%"]
    assert strip(value(routing), 80, 10)[-1].plain == "6 experts, 1 chosen a token · 85 tokens: · never ░▒▓█ to 47%"


@pytest.mark.parametrize(
    ("layers", "experts", "used"), [(46, 64, 4), (48, 128, 8), (2, 8, 2), (1, 4, 1), (60, 512, 10)]
)
@pytest.mark.parametrize(("width", "height"), [(35, 0), (35, 12), (67, 60), (76, 0)])
def test_the_strip_fits(layers, experts, used, width, height):
    lines = strip(value(filled(layers, experts, used)), width, height)
    rows = [line for line in lines if line.plain[-1] in "·░▒▓█"]
    assert all(line.cell_length <= width for line in lines)
    assert min(4, layers) <= len(rows) <= layers and len(lines) <= max(height, 8)
    assert len({row.cell_length for row in rows}) == 1


def test_what_cannot_be_told_is_said():
    routing = RecentExperts((1,), 4, 2)
    assert "filled while an answer is written" in strip(value(routing), 40, 9)[-1].plain
    routing.add(None)
    assert strip(value(routing), 40, 9)[-1].plain == "not available on this device"


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_the_strip_of_a_real_mixture(size: tuple[int, int], tmp_path: Path) -> None:
    path, kept = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q8_0"), {}
    own = Settings(parameters=Parameters(sampling=Sampling(seed=1), max_tokens=40))
    app = TinychatApp("moe", path, own=own, device="cpu", remember=kept.update)
    async with app.run_test(size=size) as pilot:
        backend = await until(pilot, lambda: app.controller.instruments)

        async def say(text: str) -> None:
            app.chat.prompt.text = text
            await pilot.press("enter")
            await until(
                pilot, lambda: not app.chat.prompt.text and not app.controller.busy and not app.controller.queue
            )

        await say("before")
        assert backend.experts().tokens == 0 and "experts ─" not in text_of(app)
        await say("/experts on")
        await until(pilot, lambda: "filled while an answer is written" in text_of(app))
        assert kept["experts"] is True
        await say("hello")
        n = backend.snapshot().generated_tokens
        assert n > 1 and backend.experts().tokens == n
        assert (backend.experts().counts.sum(axis=1) == 2 * n).all()
        await until(pilot, lambda: f"{n} tokens: · never ░▒▓█ to" in text_of(app))
        assert "8 experts, 2 chosen a token" in text_of(app)
        assert app.chat.query_one(ExpertsStrip).display == (size[0] < 90)
        for row in strip(backend.experts(), 60, 9)[1:3]:
            assert row.plain in text_of(app)
        await pilot.resize_terminal(60, 15)
        await until(pilot, lambda: "experts ─" not in text_of(app))  # no room for it
        await pilot.resize_terminal(*size)
        await until(pilot, lambda: "experts ─" in text_of(app))
        await pilot.press("f7")
        await until(pilot, lambda: "experts ─" not in text_of(app))
        assert kept["experts"] is False
        await say("once more")
        assert backend.experts().tokens == n, "nothing is counted that nobody looks at"


async def test_a_device_that_does_not_tell_and_a_dense_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Settings(experts=True, parameters=replace(Parameters(), max_tokens=4))
    app = TinychatApp("moe", tiny.write(tmp_path / "m.gguf", "deepseek2_glm"), own=own, device="cpu")
    async with app.run_test(size=(100, 40)) as pilot:
        backend = await until(pilot, lambda: app.controller.backend)
        monkeypatch.setattr(backend._engine.executor, "routes", lambda: None)
        app.chat.prompt.text = "hello"
        await pilot.press("enter")
        await until(pilot, lambda: "not available on this device" in text_of(app))
        app.controller.load("dense", tiny.write(tmp_path / "d.gguf", "llama"), device="cpu")
        await until(pilot, lambda: app.controller.ready and app.controller.backend is not backend)
        await until(pilot, lambda: "experts ─" not in text_of(app))
        assert not app.chat.has_class("-experts")
