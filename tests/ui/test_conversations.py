"""The list of conversations over a real history file."""

import time

import pytest
from rich.style import Style
from textual import events
from textual.widgets import Input

from tests.support.screens import UNSET, Host, text_of, until
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.days import by_day
from tinychat.chat.history import History, Summary
from tinychat.ui.screens.conversations import ConversationsScreen
from tinychat.ui.screens.dialogs import AskScreen, ConfirmScreen
from tinychat.ui.screens.sheet import Rows, ago, cell


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / "h.db")


def put(history, *texts, model="m"):
    c = Conversation(tuple(Turn(("user", "assistant")[i % 2], t) for i, t in enumerate(texts)), model)
    history.save(c)
    return c.id


def ids(app):
    return [o.id for o in app.screen.query_one(Rows).options if o.id]


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_search_and_open(history, size):
    old = put(history, "How does MLA work?", "It keeps one latent row", model="glm-4.7:flash")
    new = put(history, "Plan dinners")
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        assert ids(app) == [new, old]
        text = text_of(app)
        assert all(part in text for part in ("Plan dinners", "glm-4.7:flash", "2 turns", "1 turn ", "just now"))
        app.screen.query_one(Input).value = "LATENT row"
        await until(pilot, lambda: ids(app) == [old])
        assert "It keeps one latent row" in text_of(app)
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result == old


async def test_keys_and_mouse_choose(history):
    a, b, c = (put(history, t) for t in "abc")
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "down", "up")
        assert app.screen._highlighted == b
        await pilot.click(Rows, offset=(3, 3))
        await pilot.pause()
        assert app.screen._highlighted == a and app.result is UNSET
        await pilot.click(Rows, offset=(3, 3))
        await until(pilot, lambda: app.result == a)
        gone = events.Click(None, 0, 0, 0, 0, 1, False, False, False, style=Style(meta={"option": 9}))
        await Rows()._on_click(gone)
    assert c


async def test_rename(history):
    id = put(history, "first words")
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(app.screen, AskScreen))
        assert app.screen.query_one(Input).value == "first words"
        app.screen.query_one(Input).value = "My [bold]talk"
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
        assert "My [bold]talk" in text_of(app) and history.find()[0].title == "My [bold]talk"
        await pilot.press("f2", "escape")
        assert history.load(id).name == "My [bold]talk"


async def test_delete_asks_and_the_safe_answer_is_the_default(history):
    a, b = put(history, "a"), put(history, "b")
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("ctrl+d")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("enter")
        assert len(history.find()) == 2
        await pilot.press("ctrl+d")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.click("#yes")
        await until(pilot, lambda: [s.id for s in history.find()] == [a])
        await until(pilot, lambda: isinstance(app.screen, ConversationsScreen) and ids(app) == [a])
        await pilot.press("ctrl+d", "left", "enter")
        await until(pilot, lambda: not history.find())
        assert "no conversations yet" in text_of(app)
        await pilot.press("enter", "f2", "ctrl+d")  # with nothing there, nothing happens
        assert isinstance(app.screen, ConversationsScreen) and app.result is UNSET
    assert b


async def test_a_hostile_title_and_a_broken_store(history):
    put(history, "\x1b]0;owned\x07 [red]x\u202e", model="\x1b[2J")
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.pause()
        text = text_of(app)
        assert (
            "\\x1b]0;owned\\x07 [red]x" in text and "\\x1b[2J" in text and "\x1b" not in text and "\u202e" not in text
        )
        await pilot.press("ctrl+d")
        await pilot.pause()
        assert "\x1b" not in text_of(app) and "\\x1b]0;owned" in text_of(app)
        await pilot.press("escape")
        history._db.execute("DROP TABLE turns")
        app.screen.query_one(Input).value = "x"
        await until(pilot, lambda: "the history cannot be used" in text_of(app))


async def test_a_long_list_is_searched_once_for_what_is_typed_quickly(history, monkeypatch):
    """Hundreds of rows take a tenth of a second: a search for each letter came seconds behind the keys."""
    monkeypatch.setattr("tinychat.ui.screens.conversations.LISTED", 40)
    asked, find = [], history.find
    monkeypatch.setattr(history, "find", lambda words, project: asked.append(words) or find(words, 40, project))
    for i in range(41):
        put(history, f"conversation {i}")
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(ids(app)) == 40)
        assert app.screen.query_one(Rows).options[-1].prompt.plain == "these are the latest 40; a search finds others"
        asked.clear()
        for end in range(1, len("sation 12") + 1):
            app.screen.query_one(Input).value = "sation 12"[:end]
        await pilot.press("enter")  # acts on what is typed, even where it was not searched yet
        await until(pilot, lambda: app.result is not UNSET)
    assert history.load(app.result).turns[0].text == "conversation 12" and asked == ["sation 12"]


async def test_a_click_beside_the_sheet_closes_it(history):
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(140, 40)) as pilot:
        await pilot.click(offset=(40, 20))
        assert app.result is UNSET
        await pilot.click(offset=(1, 1))
        await until(pilot, lambda: app.result is None)


def test_cells_and_times():
    assert (
        cell("abc", 5) == "abc  "
        and cell("abc", 5, True) == "  abc"
        and cell("abcdef", 4) == "abc…"
        and cell("ab", 0) == ""
    )
    assert cell("注意力机制", 5) == "注意…" and cell("a\nb", 4) == "a\\nb"
    now = 1_000_000_000
    assert [ago(now - s, now) for s in (5, 90, 7200, 200_000)] == ["just now", "1 min ago", "2 h ago", "2 d ago"]
    assert ago(now - 10**7, now).startswith("2001-0")


async def test_days_previews_and_projects(history):
    put(history, "old question", "old answer")
    history._db.execute("UPDATE conversations SET updated = ?", (time.time() - 86400,))
    c = Conversation((Turn("user", "new question"), Turn("assistant", "new\n answer \ud800")), "m", project="Work")
    history.save(c)
    app = Host(ConversationsScreen(history))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        lines = [line.strip() for line in text_of(app).splitlines() if line.strip()]
        begins = ("Today", "Work · new answer", "Yesterday", "old answer")
        found = [next((i for i, line in enumerate(lines) if line.startswith(begin)), -1) for begin in begins]
        assert found == sorted(found) and found[0] > 0, lines
        await pilot.press("tab")
        await until(pilot, lambda: ids(app) == [c.id] and "project Work" in text_of(app))
        await pilot.press("tab")
        await until(pilot, lambda: len(ids(app)) == 2)
        app.screen.query_one(Input).value = "work"
        await until(pilot, lambda: ids(app) == [c.id])


def test_the_days_of_a_list():
    now = time.mktime((2026, 3, 10, 0, 30, 0, 0, 0, -1))
    ages = [0.1, 0.6, 24, 48, 24 * 7, 24 * 8 + 1, 24 * 40, 24 * 100]
    found = [Summary(str(a), "", "", 1, 0, now - 3600 * a) for a in ages]
    assert [(day, [s.id for s in group]) for day, group in by_day(found, now)] == [
        ("Today", ["0.1"]),
        ("Yesterday", ["0.6", "24"]),
        ("Previous 7 days", ["48", "168"]),
        ("March", ["193"]),
        ("January", ["960"]),
        ("November 2025", ["2400"]),
    ]
