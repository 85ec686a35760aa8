"""The first screen without a model: what is suggested, and the way from it to the first answer."""

import threading

import pytest

from tests.support import tiny
from tests.support.screens import text_of, until
from tests.support.scripted import Script, scripted
from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.download import DownloadStopped
from tinychat.ui.app import TinychatApp
from tinychat.ui.screens import first_run, picker_rows
from tinychat.ui.screens.downloads import Downloads
from tinychat.ui.screens.first_run import FirstRun, suggested
from tinychat.ui.screens.picker import PickerScreen


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """16 GB of memory, read at 40 GB/s."""
    monkeypatch.setattr(picker_rows, "available_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(first_run, "available_memory", lambda: 16 * 10**9)
    monkeypatch.setattr(first_run, "memory_gb_s", lambda threads: 40.0)


def names(gb, gb_s, monkeypatch):
    monkeypatch.setattr(picker_rows, "available_memory", lambda: int(gb * 1e9))
    return [r.model.name for r in suggested(picker_rows.rows((), 4096, 0, {}, {}, gb_s))]


def test_three_that_fit(monkeypatch):
    assert names(16, 40, monkeypatch) == ["smollm2:135m", "qwen3:1.7b", "qwen3:8b"]
    assert names(64, 200, monkeypatch) == ["smollm2:135m", "qwen3:30b-a3b", "glm-4.7:flash-Q4_0"]
    assert names(4, 10, monkeypatch) == ["smollm2:135m", "llama3.2:1b-q4", "qwen3:1.7b"]
    assert len(names(16, 0, monkeypatch)) == 3, "where no speed is known"
    assert names(0.6, 40, monkeypatch) == ["smollm2:135m"]
    assert names(0.1, 40, monkeypatch) == []


def an_app(pull):
    app = TinychatApp(open_backend=scripted(Script()))
    app.chat.downloads = Downloads(pull)
    return app


@pytest.mark.parametrize("key", ["1", "enter"])
async def test_one_key_to_the_first_answer(key, tmp_path):
    path, go = tiny.write(tmp_path / "m.gguf", "llama"), threading.Event()

    def pull(model, progress, stop):
        progress(30_000_000, 98_000_000, 1e6, "downloading")
        if not go.wait(120):
            raise DownloadStopped
        return path

    app = an_app(pull)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, FirstRun))
        await until(pilot, lambda: "~36.1 tok/s" in text_of(app))
        text = text_of(app)
        assert "16.0 GB" in text and "download of 98.4 MB" in text and "enter start" in text and "code, math" in text
        await pilot.press(key)
        await until(pilot, lambda: " 31%  30.0 MB" in text_of(app))
        go.set()
        await until(pilot, lambda: app.controller.ready and app.screen is app.chat)
        assert app.controller.conversation.model == ("smollm2:135m" if key == "1" else "qwen3:1.7b")
        await pilot.press(*"hi", "enter")
        await until(pilot, lambda: "Hello! How can I help?" in text_of(app))


async def test_a_download_that_fails_says_why_and_the_list_of_all_models_is_one_key_away():
    def pull(model, progress, stop):
        raise TinychatError("the server does not answer")

    app = an_app(pull)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "tok/s" in text_of(app))
        await pilot.press("up", "enter")
        await until(pilot, lambda: "the server does not answer" in text_of(app) and "enter start" in text_of(app))
        await pilot.press("m")
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))


async def test_with_a_model_here_the_picker_opens():
    model = picker_rows.MODELS[0]
    cache.downloads_dir().mkdir(parents=True)
    (cache.downloads_dir() / cache.key_of(model.sources[0])).write_bytes(b"GGUF")
    app = TinychatApp(open_backend=scripted(Script()))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, PickerScreen))
