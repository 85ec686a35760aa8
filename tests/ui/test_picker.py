"""The picker in a tiny app, with real files in a real cache and real downloads from a server on loopback."""

import threading
from dataclasses import replace

import pytest
from textual import events
from textual.widgets import Input

from tests.measure.test_bench import RESULT
from tests.support import tiny
from tests.support.screens import UNSET, Host, text_of, until
from tests.support.server import File, Server, make_gguf
from tests.support.serving import finished, replaying, serving
from tinychat.backend.address import Server as At
from tinychat.chat import settings
from tinychat.chat.servers import SavedServer
from tinychat.measure import log
from tinychat.models import cache
from tinychat.models.download import Notes
from tinychat.models.registry import MODELS, Model, resolve
from tinychat.server.security import Policy
from tinychat.ui.screens import headers, picker, picker_rows
from tinychat.ui.screens.dialogs import ConfirmScreen
from tinychat.ui.screens.downloads import Downloads
from tinychat.ui.screens.picker import PickedModel, PickerScreen
from tinychat.ui.screens.picker_rows import Row
from tinychat.ui.screens.server_form import ServerForm
from tinychat.ui.screens.sheet import Rows


@pytest.fixture(autouse=True)
def limit(monkeypatch):
    """A machine with 64 GB of memory that is read at 20 GB/s."""
    monkeypatch.setattr(picker_rows, "available_memory", lambda: 64 * 10**9)
    monkeypatch.setattr(picker, "memory_gb_s", lambda threads: 20.0)


@pytest.fixture
def server():
    with Server() as s:
        yield s


@pytest.fixture
def gguf(tmp_path):
    return tiny.write(tmp_path / "tiny.gguf", "llama", "Q4_0", seed=1)


def own_model(name, url):
    """A model of the user's own, in the settings file."""
    file = settings.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as f:
        f.write(f'[models."{name}"]\nurl = "{url}"\n')
    return resolve(name, settings.load().models)


def app_with(**options):
    return Host(PickerScreen(downloads=Downloads(), **options))


async def search(pilot, text):
    pilot.app.screen.query_one(Input).value = text
    await pilot.pause()


async def downloadable(pilot):
    """Enter downloads: the size of the highlighted model has been read, or cannot be."""
    await until(pilot, lambda: pilot.app.screen.check_action("download", ()))


def type_burst(app, text, *keys):
    """Text and keys in one read of the terminal: nothing is handled between them."""
    names = {" ": "space", "/": "slash", ".": "full_stop", ":": "colon", "-": "minus", "_": "underscore"}
    for c in text:
        app.post_message(events.Key(names.get(c, c), c))
    for key in keys:
        app.post_message(events.Key(key, "\r" if key == "enter" else None))


def detail(app):
    return str(app.screen.query_one(".detail").render())


def row_text(app, name):
    rows = app.screen.query_one(Rows)
    return str(rows.get_option(name).prompt)


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_what_a_row_says(gguf, size):
    cache.downloads_dir().mkdir(parents=True)
    smollm = resolve("smollm2:135m")
    here = cache.downloads_dir() / cache.key_of(smollm.sources[0])
    here.write_bytes(gguf.read_bytes())
    log.save(replace(RESULT, path=str(here), decode_tok_s=117.2))
    app = app_with(context=4096)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert app.screen._highlighted == "smollm2:135m"  # what is here comes first under the cursor
        text = text_of(app)
        headings = [str(o.prompt).strip() for o in app.screen.query_one(Rows).options if o.disabled]
        assert headings[:2] == ["on this computer", "to download"] and "SmolLM2" not in text
        assert "30B (3.6B)" in row_text(app, "glm-4.7:flash") and "↓ 5.0 GB" in row_text(app, "qwen3:8b")
        assert " 117 tok/s" in row_text(app, "smollm2:135m") and "↓" not in row_text(app, "smollm2:135m")
        assert "117 tok/s measured here" in " ".join(detail(app).split())
        assert "4,096 tokens" in detail(app)
        await until(pilot, lambda: "~4.0 tok/s" in row_text(app, "qwen3:8b"))
        assert "~10.0 tok/s" in row_text(app, "qwen3:30b-a3b"), "only what is active is read for a token"
        await search(pilot, "qwen3:8b")
        assert "a download of 5.0 GB" in detail(app) and "~4.0 tok/s is what" in " ".join(detail(app).split())
        widths = {o.prompt.cell_length for o in app.screen.query_one(Rows).options if not o.disabled}
        assert len(widths) == 1 and widths.pop() <= size[0]
        assert "enter open" in text  # the footer says what the key does


def test_rows_and_verdicts_of_every_model():
    for row in picker_rows.rows((), 4096, 0, {}, {}):
        for width in (24, 40, 61, 74, 110):
            for shown in (row, replace(row, path=None, partial=1)):
                line = picker_rows.line(shown, width)
                assert row.model.name[:4] in str(line) and line.cell_length <= width
    kv = resolve("llama3.1:8b").kv_bytes(1)
    model = resolve("llama3.1:8b")
    need = model.size + 8192 * kv + (300 << 20)
    sizes = [picker_rows.verdict(model, 8192, available, {}).verdict for available in (need - 1, need + 1, 2 * need, 0)]
    assert sizes == ["does not fit", "tight", "fits", "unknown"]
    assert (
        picker_rows.verdict(model, 10**9, 2 * need, {}).needed < 2 * 131072 * kv
    )  # never more than it was trained for
    assert (
        picker_rows.verdict(model, 8192, need, {model.name: (1, lambda context: 0)}).verdict == "fits"
    )  # the file knows best


async def test_search(gguf):
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, "glm q6")
        rows = app.screen.query_one(Rows)
        assert [o.id for o in rows.options] == [None, "glm-4.7:flash-Q6_K"]
        assert app.screen._highlighted == "glm-4.7:flash-Q6_K"
        await search(pilot, "glm q6zzz")
        assert rows.option_count == 0 and "nothing matches" in detail(app)
        await search(pilot, "dslite0")
        assert app.screen._highlighted == "deepseek-v2-lite-Q4_0", "letters in their order are enough"
        await pilot.press("enter")
        assert app.result is UNSET
        await search(pilot, "")
        assert rows.option_count > len(MODELS)
        await pilot.press("escape")
        await until(pilot, lambda: app.result is None)


async def test_open_by_key_and_by_mouse(gguf):
    file = settings.path()
    file.parent.mkdir(parents=True)
    file.write_text(f'[models."a"]\npath = "{gguf}"\npreset = "llama3"\n[models."b"]\npath = "{gguf}"\n')
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        assert app.screen._highlighted == "a"
        await pilot.click(Rows, offset=(5, 2))
        await pilot.pause()
        assert app.screen._highlighted == "b" and app.result is UNSET  # the first click only chooses
        await pilot.press("up", "enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result == PickedModel(gguf, "a", "llama3")
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        await pilot.click(Rows, offset=(5, 2))
        await pilot.click(Rows, offset=(5, 2))
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result == PickedModel(gguf, "b", None)


async def test_download_pause_resume_finish(server, gguf, tmp_path):
    data = make_gguf(tmp_path / "big.gguf", 400_000)
    gate, seen, armed = threading.Event(), threading.Event(), threading.Event()

    def pace(sent):
        if sent > 150_000 and armed.is_set():
            seen.set()
            gate.wait(120)

    server.files["/m.gguf"] = File(data, pace=pace, block=4096)
    model = own_model("mine", server.url("/m.gguf"))
    app = app_with()
    async with app.run_test(size=(80, 24)) as pilot:
        await search(pilot, "mine")
        assert app.screen._highlighted == "mine"
        await downloadable(pilot)
        armed.set()
        await pilot.press("enter", "y")  # its header does not say how large it is
        await until(pilot, seen.is_set)
        await until(pilot, lambda: "%  " in row_text(app, "mine") and " of 40" in row_text(app, "mine"))
        assert "pause" in text_of(app) and "↓" in row_text(app, "mine")
        await pilot.press("enter")
        assert "paused" in row_text(app, "mine")
        gate.set()
        job = app.screen._downloads.get(model)
        await until(pilot, job.ended.is_set)
        (entry,) = cache.find(model)
        assert entry.partial and 0 < entry.size < len(data)
        app.screen._refresh_rows()
        await until(pilot, lambda: "resume" in text_of(app))
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)  # still under the cursor: it opens when it is whole
    assert app.result.name == "mine" and app.result.path.read_bytes() == data
    assert server.ranges[-1].startswith("bytes=") and server.ranges[-1] != "bytes=0-"


async def test_a_failed_download_says_why_and_can_be_tried_again(server, tmp_path):
    model = own_model("mine", server.url("/m.gguf"))
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, "mine")
        await downloadable(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "size is not known" in text_of(app)
        await pilot.press("y")
        await until(pilot, lambda: not isinstance(app.screen, ConfirmScreen))
        await until(pilot, lambda: "✗ failed" in row_text(app, "mine"))
        assert "404" in detail(app) and app.screen.query_one(".detail").has_class("-error")
        server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf"))
        await pilot.press("enter", "y")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result.path == cache.path_of(model)


async def test_a_download_goes_on_when_the_picker_is_closed(server, tmp_path):
    gate, armed = threading.Event(), threading.Event()

    def pace(sent):
        if armed.is_set():
            gate.wait(120)

    server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf"), pace=pace)
    model = own_model("mine", server.url("/m.gguf"))
    downloads = Downloads()
    app = Host(PickerScreen(downloads=downloads))
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, "mine")
        await downloadable(pilot)
        armed.set()
        await pilot.press("enter", "y", "escape")
        await until(pilot, lambda: app.result is None)
        app.push_screen(PickerScreen(downloads=downloads))
        await pilot.pause()
        await until(pilot, lambda: "%" in row_text(app, "mine"))
        gate.set()
        await until(pilot, lambda: "%" not in row_text(app, "mine"))
    assert cache.path_of(model)


async def test_delete_asks_first(gguf):
    model = resolve("qwen3:8b")
    cache.downloads_dir().mkdir(parents=True)
    part = cache.downloads_dir() / f"{cache.key_of(model.sources[0])}.part"
    part.write_bytes(b"GGUF" + bytes(1_000_000))
    app = app_with()
    async with app.run_test(size=(80, 24)) as pilot:
        await search(pilot, "qwen3:8b")
        assert "paused" in row_text(app, "qwen3:8b") and "1.0 MB" in row_text(app, "qwen3:8b")
        await pilot.press("ctrl+d")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        assert "1.0 MB" in text_of(app) and "qwen3:8b" in text_of(app)
        await pilot.press("enter")  # the safe answer has the focus
        assert part.exists()
        await pilot.press("ctrl+d", "y")
        await until(pilot, lambda: not part.exists())
        await until(pilot, lambda: "paused" not in row_text(app, "qwen3:8b"))
        assert not app.screen.check_action("delete", ())


def test_the_loaded_model_has_a_row_wherever_its_file_is(gguf):
    def loaded(model):
        return [r for r in picker_rows.rows((), 4096, 0, {}, {}, loaded=model) if r.loaded]

    for name in ("mine.gguf", MODELS[0].name):  # the other one is taken by a model that has another file
        (row,) = loaded(Model(name, path=gguf))
        assert row.path == gguf and row.model.name == (name if name == "mine.gguf" else str(gguf))
        assert not row.deletable and row.size == gguf.stat().st_size
        assert picker_rows.line(row, 80).plain.startswith("●")
        assert picker_rows.explain(row, None, None)[0].startswith("loaded · ")
    assert not loaded(None)
    other_way = gguf.parent / ".." / gguf.parent.name / gguf.name
    found = picker_rows.rows((Model("mine", path=gguf),), 4096, 0, {}, {}, loaded=Model("its file", path=other_way))
    assert [(r.model.name, r.path) for r in found if r.loaded or r.path == other_way] == [("mine", gguf)]


async def test_what_does_not_fit_asks_before_it_downloads(server, monkeypatch):
    monkeypatch.setattr("tinychat.ui.screens.picker_rows.available_memory", lambda: 1_000_000_000)
    started = []
    app = Host(PickerScreen(downloads=Downloads(lambda model, *rest: started.append(model.name))))
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, "qwen3:8b")
        assert "✗ 5.9 GB" in row_text(app, "qwen3:8b") and "too large for this" in text_of(app)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("escape")
        assert not started
        await pilot.press("enter", "y")
        await until(pilot, lambda: started == ["qwen3:8b"])
    app = Host(PickerScreen(freed=20_000_000_000))
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, "qwen3:8b")
        assert "too large" not in text_of(app)  # once the present model has gone


async def test_a_typed_path(gguf):
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, "/nowhere/x.gguf")
        assert "no such file" in detail(app)
        app.screen.query_one(Input).value = str(gguf)
        await until(pilot, lambda: app.screen._highlighted == "tiny.gguf")
        await until(pilot, lambda: "tok/s" in row_text(app, "tiny.gguf"))  # by its header
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result == PickedModel(gguf, "tiny.gguf", None)


async def test_a_typed_url_is_judged_before_it_is_fetched(server, gguf, tmp_path):
    server.files["/a/tiny.gguf"] = File(gguf.read_bytes())
    server.files["/bad.gguf"] = File(b"<html>" * 1000)
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        app.screen.query_one(Input).value = server.url("/bad.gguf")
        await until(pilot, lambda: "not a GGUF" in detail(app))
        app.screen.query_one(Input).value = server.url("/a/tiny.gguf")
        await until(pilot, lambda: app.screen._highlighted == "tiny.gguf")
        await until(pilot, lambda: "tok/s" in row_text(app, "tiny.gguf"))
        assert not list(cache.downloads_dir().glob("*.part"))
        assert "~71.3 kB" in row_text(app, "tiny.gguf"), "the size of its weights is there before Enter"
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result.path.read_bytes() == gguf.read_bytes()


async def test_a_hostile_name_is_shown_and_not_obeyed(gguf):
    cache.downloads_dir().mkdir(parents=True)
    url = "https://example.org/\x1b[31mred[bold]\u202e.gguf"
    key = cache.key_of(url)
    (cache.downloads_dir() / key).write_bytes(gguf.read_bytes())
    Notes(url, 5).save(cache.downloads_dir() / f"{key}.json")
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        await search(pilot, "red")
        await pilot.pause()
        text = text_of(app)
        assert "\\x1b[31mred[bold]" in text and "\x1b" not in text and "\u202e" not in text


async def test_it_survives_every_size():
    app = app_with()
    async with app.run_test(size=(140, 40)) as pilot:
        for size in ((30, 8), (80, 24), (200, 60), (40, 10), (20, 5)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            await pilot.press("down")
            if size > (20, 5):  # the chosen row can be seen whole, on one line, and what the keys do
                await until(pilot, lambda: app.screen._row.model.name[:6] in text_of(app))
                assert {o.prompt.plain.count("\n") for o in app.screen.query_one(Rows).options} == {0}
                assert "enter" in text_of(app)
        assert isinstance(app.screen._row, Row)


async def test_only_what_is_in_the_field_can_be_chosen(gguf, tmp_path):
    (tmp_path / "empty").mkdir()
    started = []
    app = Host(PickerScreen(downloads=Downloads(lambda model, *rest: started.append(model.name))))
    async with app.run_test(size=(100, 30)) as pilot:
        for text, why in ((f"{tmp_path}/empty", "without .gguf files"), ("/nowhere/x.gguf", "no such file")):
            await search(pilot, text)
            rows = app.screen.query_one(Rows)
            assert why in detail(app) and rows.option_count == 0 and app.screen._row is None
            await pilot.press("enter")
            assert app.result is UNSET and not started
        await search(pilot, str(tmp_path))  # a folder: the models in it, and no others
        assert [o.id for o in app.screen.query_one(Rows).options] == [None, "tiny.gguf"]
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result.path == gguf and not started


@pytest.mark.parametrize("attempt", range(3))
async def test_text_and_enter_in_one_burst_open_what_was_typed(gguf, attempt):
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.pause()
        type_burst(app, str(gguf), "enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result.path == gguf


async def test_a_url_and_enter_in_one_burst_download_nothing_unseen(server, gguf, monkeypatch):
    server.files["/tiny.gguf"] = File(gguf.read_bytes())
    handled, sizes_of = threading.Event(), headers.sizes_of  # the first Enter is, before the size is known
    monkeypatch.setattr(headers, "sizes_of", lambda *args: handled.wait(120) and sizes_of(*args))
    app = Host(PickerScreen(downloads=Downloads(), text=server.url("/tiny.gguf")))
    async with app.run_test(size=(100, 30)) as pilot:
        type_burst(app, "", "enter")
        await until(pilot, lambda: app.screen._highlighted == "tiny.gguf")
        for _ in range(10):  # on its way from the app to the list
            await pilot.pause()
        assert app.result is UNSET and not list(cache.downloads_dir().glob("*"))
        handled.set()
        await downloadable(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result.name == "tiny.gguf"


async def test_a_header_that_comes_after_the_sheet_has_gone_changes_nothing(gguf, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr("tinychat.ui.screens.headers.sizes_of", lambda model, path: release.wait(120) and (1, int))
    app = app_with()
    async with app.run_test(size=(100, 30)) as pilot:
        await search(pilot, str(gguf))
        picker = app.screen
        await picker.query("*").remove()  # what closing does first
        release.set()
        await until(pilot, lambda: picker._headers.sizes)
        await pilot.pause()
        picker._tick()
        app.pop_screen()
        await pilot.pause()


async def test_a_saved_server_is_asked_and_opened(monkeypatch):
    monkeypatch.setenv("BOX_KEY", "sk-secret")
    with serving(replaying([finished()]), Policy("sk-secret")) as url:
        settings.save_server(SavedServer("box", url, key_env="BOX_KEY"))
        app = app_with(text="box")
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "● answers" in text_of(app))
            assert "replay" in text_of(app) and "key from the variable BOX_KEY" in text_of(app)
            assert "sk-secret" not in text_of(app)
            await pilot.press("enter")
            await until(pilot, lambda: app.result is not UNSET)
    assert (app.result.name, app.result.server) == ("box", At(url, "replay", "sk-secret"))
    assert "sk-secret" not in repr(app.result) and "sk-secret" not in settings.path().read_text()


async def test_a_server_that_is_not_there_or_wants_a_key():
    with serving(replaying([finished()]), Policy("sk-secret")) as url:
        settings.save_server(SavedServer("locked", url))
        settings.save_server(SavedServer("gone", "http://127.0.0.1:9"))
        app = app_with(text="locked")
        async with app.run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: "API key is missing" in text_of(app))
            await search(pilot, "gone")
            await until(pilot, lambda: "the connection to http://127.0.0.1:9 failed" in text_of(app))
            await pilot.press("enter")
            await until(pilot, lambda: "✗ no answer" in text_of(app))
            assert app.result is UNSET


async def test_a_typed_address_is_opened_and_saved_under_a_name():
    with serving(replaying([finished()])) as url:
        app = app_with(text=url)
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: f"a server at {url}" in text_of(app))
            await pilot.press("ctrl+s")
            await until(pilot, lambda: isinstance(app.screen, ServerForm))
            await pilot.press("enter")
            await until(pilot, lambda: "needs a name" in text_of(app))
            app.screen.query_one("#name", Input).value = "mine"
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, PickerScreen))
            assert settings.load().servers == (SavedServer("mine", url),)
            await search(pilot, "mine")
            await until(pilot, lambda: "● answers" in text_of(app))
            await pilot.press("ctrl+d")
            await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
            await pilot.press("y")
            await until(pilot, lambda: settings.load().servers == ())
            await search(pilot, url)
            await pilot.press("enter")
            await until(pilot, lambda: app.result is not UNSET)
    assert (app.result.name, app.result.server) == (url, At(url, "replay"))
