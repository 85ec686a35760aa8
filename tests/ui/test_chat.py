"""The chat on a screen, driven by keys and mouse, with a scripted backend."""

import asyncio
import contextlib
import json
import re
import threading
from dataclasses import replace

import pytest
from textual import events
from textual.css.stylesheet import Stylesheet
from textual.widgets import Input, OptionList

from tests.support.screens import text_of, until
from tests.support.scripted import INFO, LONG, Script, scripted
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import Draft, History
from tinychat.models import cache
from tinychat.ui import editor
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat import models, transcript
from tinychat.ui.chat.message import AnswerMessage, NoticeLine, TurnMessage, UserMessage
from tinychat.ui.chat.overflow import OverflowScreen
from tinychat.ui.chat.transcript import Between, Earlier
from tinychat.ui.driver import pasted


class Desk:
    """A running app and short words for what a user does."""

    def __init__(self, app, pilot, script):
        self.app, self.pilot, self.script = app, pilot, script
        self.chat, self.controller = app.chat, app.controller

    async def until(self, condition, seconds=120):
        return await until(self.pilot, condition, seconds)

    async def type(self, text, *keys):
        self.chat.prompt.insert(text)
        await self.pilot.pause()
        await self.pilot.press(*keys)

    async def send(self, text):
        await self.type(text, "enter")

    async def ask(self, text):
        await self.send(text)
        await self.settle()

    async def type_over(self, text):
        """Into the field of a dialog, then Enter."""
        self.app.screen.query_one(Input).value = text
        await self.pilot.press("enter")

    async def settle(self):
        await self.until(lambda: self.turns and not self.controller.busy and not self.controller.queue)
        await self.until(lambda: not self.answers or not self.answers[-1].live)
        await self.pilot.pause()

    @property
    def turns(self):
        return self.controller.conversation.turns

    @property
    def answers(self):
        return [m for m in self.chat.transcript.messages() if isinstance(m, AnswerMessage)]

    @property
    def notes(self):
        return [str(n.content) for n in self.chat.transcript.query_children(NoticeLine)]

    @property
    def screen(self):
        return text_of(self.app)


@contextlib.asynccontextmanager
async def desk(*answers, size=(100, 30), history=None, wait=True, **script_options):
    script = Script(answers=answers or ("Hello!",), **script_options)
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(script), history=history)
    async with app.run_test(size=size) as pilot:
        d = Desk(app, pilot, script)
        if wait:
            await d.until(lambda: app.controller.ready)
            await pilot.pause()
        yield d


async def test_a_question_and_its_answer():
    async with desk(LONG, size=(140, 50)) as d:
        assert "Ask scripted:1b something" in d.screen
        await d.ask("How does MLA save memory?")
        screen = d.screen
        for text in (
            "How does MLA save memory?",
            "▸ thought for",
            "Multi-head latent attention",
            "def absorb(q",
            "14.2x",
            "1. Down",
            "tok/s",
            "prefilled",
            "of 4,096",
        ):
            assert text in screen, text
        assert (
            screen.count("def absorb(q") == 1 and d.answers[0].view.source.strip() == LONG.split("</think>")[1].strip()
        )
        assert "<think>" not in screen and "Ask scripted:1b" not in screen
        assert d.chat.prompt.text == "" and d.chat.focused is d.chat.prompt


async def test_enter_sends_and_new_lines_and_pastes_do_not():
    async with desk(size=(80, 24)) as d:
        await d.pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert d.chat.prompt.text == "a\nb\nc" and not d.turns
        d.chat.prompt.post_message(events.Paste("x\r\ny\n" + "z\n" * 40))
        await d.pilot.pause()
        assert d.chat.prompt.text == "a\nb\ncx\ny\n" + "z\n" * 40 and not d.turns
        await d.until(lambda: "c[42 lines, 43 tokens]" in d.screen.replace("\xa0", " "))
        await d.until(lambda: "tab unfolds · 4" in d.screen)
        await d.pilot.press("tab")
        await d.until(lambda: "lines" not in d.screen and 6 <= d.chat.prompt.size.height <= 8)  # a third of the screen
        assert d.chat.prompt.text == "a\nb\ncx\ny\n" + "z\n" * 40
        await d.pilot.press("enter")
        await d.until(lambda: d.turns)
        assert d.turns[0].text.startswith("a\nb\ncx\ny\nz")
        await d.settle()
        await d.until(lambda: d.chat.prompt.size.height == 1)
        for message in pasted([events.Key("enter" if c == "\r" else c, c) for c in "ls -l\rcd ..\r"]):
            d.app.post_message(message)  # a terminal that does not mark a paste
        await d.until(lambda: d.chat.prompt.text == "ls -l\ncd ..\n")
        assert len(d.turns) == 2 and not d.controller.queue


async def test_fast_typing_loses_nothing():
    async with desk("one", "two", "three") as d:
        for key in [*"hello world", "enter", *"/think off", "enter", *"and on", "enter", *"rest"]:
            d.app.post_message(
                events.Key(
                    key if len(key) > 1 or key.isalnum() else {" ": "space", "/": "slash"}[key],
                    key if len(key) == 1 else "\r",
                )
            )
        await d.settle()
        assert [t.text for t in d.turns if t.role == "user"] == [
            "hello world",
            "and on",
        ] and d.chat.prompt.text == "rest"
        assert not d.controller.conversation.parameters.thinking


async def test_what_is_typed_while_it_loads_or_answers_waits_visibly():
    loads = threading.Event()
    async with desk("one " * 2000, "two", rate=50, hold=lambda step: loads.wait(120), wait=False) as d:
        await d.send("first")
        await d.until(lambda: "waiting first" in d.screen and "Loading" in d.screen)
        loads.set()
        await d.until(lambda: d.answers and d.answers[0].view.source)
        await d.send("second")
        await d.until(lambda: "waiting second" in d.screen)
        await d.pilot.press("escape")
        assert d.chat.prompt.text == "second" and d.controller.busy, "the first escape takes the message back"
        await d.pilot.press("enter", "escape", "escape")
        await d.until(lambda: not d.controller.busy)
        assert [t.text for t in d.turns if t.role == "user"] == ["first"] and d.chat.prompt.text == "second"


async def test_stop_continue_and_again():
    async with desk("word " * 3000, " and the end", "another", rate=150) as d:
        await d.send("go")
        await d.until(lambda: len(d.turns) == 2 and len(d.turns[1].text) > 50)
        assert "esc stop" in d.screen
        await d.pilot.press("escape")
        await d.settle()
        partial = d.turns[1].text
        assert "stopped · " in d.screen and "f5 continue" in d.screen and 50 < len(partial) < 10000
        await d.pilot.press("f5")
        await d.settle()
        assert d.turns[1].text == partial + " and the end" and d.answers[0].view.source == d.turns[1].text
        await d.pilot.press("ctrl+r")
        await d.settle()
        assert [t.text for t in d.turns] == ["go", "another"] and len(d.answers) == 1 and "another" in d.screen


async def test_thinking_folds_by_key_and_click_and_can_be_skipped():
    async with desk("<think>\n" + "pondering " * 3000 + "</think>", "The answer.", rate=150) as d:
        await d.send("go")
        await d.until(lambda: "▸ thinking · " in d.screen and "tokens" in d.screen and "skip to the answer" in d.screen)
        assert "pondering" not in d.screen
        await d.pilot.press("ctrl+t")
        await d.until(lambda: "pondering pondering" in d.screen)
        await d.pilot.press("ctrl+g")
        await d.settle()
        assert d.turns[-1].text == "The answer." and d.script.prompts[-1].endswith("</think>\n\n")
        await d.pilot.press("ctrl+home")
        await d.until(lambda: "thought for" in d.screen)
        await d.pilot.click(d.answers[0].thinking.query_one(".thinking-head"))
        await d.until(lambda: "pondering" not in d.screen)


async def test_thinking_that_never_closes_is_said():
    async with desk("<think>\nforever") as d:
        await d.ask("go")
        assert "not finished" in d.screen and d.turns[-1].text == ""


async def test_slash_opens_a_filtered_list():
    async with desk(size=(80, 24)) as d:
        await d.pilot.press("/")
        await d.until(lambda: "/model [NAME]" in d.screen and "choose, download" in d.screen)
        await d.pilot.press("t", "h", "i")
        await d.until(lambda: "/model [NAME]" not in d.screen and "/think on|off" in d.screen)
        await d.pilot.press("tab")
        await d.until(lambda: d.chat.prompt.text == "/think ")
        await d.pilot.press("ctrl+u", *"/thi")
        await d.until(lambda: d.chat.box.list.option_count == 1)
        await d.pilot.press("enter")
        await d.until(lambda: d.chat.prompt.text == "/think ")
        await d.until(lambda: d.chat.box.list.option_count == 2)
        await d.pilot.press("down", "enter")
        await d.until(lambda: d.notes)
        assert (
            not d.controller.conversation.parameters.thinking
            and "thinking is off" in d.notes[-1]
            and d.chat.prompt.text == ""
        )
        await d.pilot.press("/", "escape")
        await d.pilot.pause()
        assert not d.chat.box.list.display and d.chat.prompt.text == "/"


async def test_commands_by_word():
    async with desk() as d:
        for text, note in [
            ("/set temperature 0.3", "temperature is 0.3"),
            ("/set temperature", "temperature is 0.3: 0 always"),
            ("/set temperature hot", "temperature is a number from 0 to 5"),
            ("/set heat 1", "no parameter 'heat'"),
            ("/nonsense", "no command /nonsense"),
            ("/system Be brief.", "system prompt is set"),
            ("/system", "the system prompt is: Be brief."),
            ("/regenerate", "nothing to answer again"),
            ("/stats", "weights"),
            ("/copy", "no answer to copy"),
            ("/save", "nothing to save"),
            ("/rename", "usage: /rename NAME"),
            ("/continue", "no answer to continue"),
            ("/inspect", "no prompt to inspect yet"),
        ]:
            await d.send(text)
            await d.until(lambda note=note: any(note in n for n in d.notes[-1:]))
            d.chat.prompt.put("")
        assert not d.turns
        await d.ask("//etc is a folder")
        assert d.turns[0].text == "/etc is a folder" and d.script.samplings[0].temperature == 0.3
        assert "Be brief." in d.script.prompts[0]
        await d.ask("/start Well,")
        assert d.turns[-1].text.startswith("Well,") and len(d.turns) == 2
        b = d.controller.backend
        b.info = replace(b.info, can=replace(b.info.can, instruments=False))
        await d.send("/inspect")
        await d.until(lambda: "only the prompt of a model that runs on this computer" in d.notes[-1])
        await d.send("/rename My talk")
        await d.until(lambda: "My talk" in d.screen)
        await d.send("/new")
        await d.until(lambda: not d.turns and "Ask scripted:1b" in d.screen)


async def test_raw_shows_and_sends_everything():
    async with desk("<think>a</think>**b**") as d:
        await d.send("/raw on")
        await d.ask("Once <|user|> upon")
        assert d.script.prompts == ["Once <|user|> upon"] and "<think>a</think>**b**" in d.screen


async def test_what_was_typed_comes_back_with_the_arrows(tmp_path):
    history = History(tmp_path / "h.db")
    async with desk(history=history) as d:
        await d.ask("first")
        await d.ask("second\nline")
        await d.type("draft", "up")
        assert d.chat.prompt.text == "second\nline"
        await d.pilot.press("up", "up")
        assert d.chat.prompt.text == "first"
        await d.pilot.press("down", "down", "down")
        assert d.chat.prompt.text == "draft"
    assert len(history.find()) == 1
    async with desk(history=history) as d:
        await d.pilot.press("up", "up", "up")
        assert d.chat.prompt.text == "first", "it is kept across runs"


async def test_attached_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes of mine.txt").write_text("the sky is green")
    (tmp_path / "photo.bin").write_bytes(b"\0\1")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.md").write_text("the sea is red")
    async with desk() as d:
        await d.type("look at @no")
        await d.until(lambda: "notes of mine.txt" in d.screen)
        await d.pilot.press("enter")
        assert d.chat.prompt.text == 'look at @"notes of mine.txt" ' and not d.turns
        await d.pilot.press(*"and @sub", "tab")
        await d.until(lambda: "all text files in it" in d.screen and "sub/deep.md" in d.screen)
        assert d.chat.prompt.text == 'look at @"notes of mine.txt" and @sub/'
        await d.pilot.press("enter")
        await d.settle()
        assert "the sky is green" in d.script.prompts[0] and "+ notes of mine.txt" in d.screen
        assert "the sea is red" in d.script.prompts[0] and "sub/deep.md (14 characters)" in d.screen
        for text, why in [("@photo.bin", "binary"), ("see @./none.txt", "no such file")]:
            await d.type(text, "escape", "enter")
            await d.until(lambda why=why: any(why in n for n in d.notes[-1:]))
            assert d.chat.prompt.text == text and len(d.turns) == 2, "nothing is lost, nothing is sent"
            d.chat.prompt.put("")
        await d.ask("mail me@example.com or @bob")
        assert len(d.turns) == 4


async def test_messages_by_keyboard():
    async with desk("one\n\n```py\nx = 1\n```", "two", "three") as d:
        await d.ask("a")
        await d.ask("b")
        await d.pilot.press("ctrl+up")
        assert d.chat.focused is d.answers[-1] and "c copy" in d.screen and "y copy code" not in d.screen
        for key in (
            "ctrl+down",
            "ctrl+up",
            "up",
            "up",
        ):  # a burst, as over a slow link
            d.app.post_message(events.Key(key, None))
        await d.until(lambda: "y copy code" in d.screen and "t thinking" not in d.screen)
        await d.pilot.press("y")
        assert d.app.clipboard == "x = 1"
        await d.pilot.press("c")
        assert d.app.clipboard == d.turns[1].text
        await d.pilot.press("up", "e")
        await d.pilot.pause()
        assert d.chat.prompt.text == "a" and d.chat.focused is d.chat.prompt and "✎" in d.screen
        await d.type("!", "enter")
        await d.settle()
        assert [t.text for t in d.turns] == ["a!", "three"] and "✎" not in d.screen
        await d.pilot.press("ctrl+up", "f")
        await d.until(lambda: "this is a copy" in d.screen)
        assert [t.text for t in d.turns] == ["a!", "three"] and "(fork)" in d.controller.conversation.title
        await d.pilot.press("escape")
        assert d.chat.focused is d.chat.prompt


async def test_messages_by_mouse():
    async with desk("one") as d:
        await d.ask("a")
        message = d.chat.transcript.messages()[0]
        assert isinstance(message, UserMessage)
        await d.pilot.hover(message)
        await d.pilot.pause()
        line = next(s for s in d.screen.splitlines() if "edit  copy  fork" in s)
        y = d.screen.splitlines().index(line)
        await d.pilot.click(offset=(line.index("edit") + 1, y))
        await d.until(lambda: d.chat.prompt.text == "a")


async def test_code_is_copied_by_key_and_by_number():
    async with desk("```\none\n```\n\n```\ntwo\n```") as d:
        await d.ask("a")
        await d.pilot.press("ctrl+o")
        assert d.app.clipboard == "two"
        await d.send("/copy code 1")
        await d.until(lambda: d.app.clipboard == "one")
        await d.send("/copy code 3")
        await d.until(lambda: "has 2 code blocks" in d.screen)
        await d.send("/copy all")
        await d.until(lambda: d.app.clipboard.startswith("# a"))


async def test_the_user_is_asked_before_the_context_overflows():
    small = replace(INFO, max_context=128)
    async with desk("word " * 30, info=small, size=(80, 24)) as d:
        for text in ("first", "second", "third"):
            await d.ask(text)
        await d.send("fourth")
        await d.until(lambda: isinstance(d.app.screen, OverflowScreen))
        await d.until(lambda: "The context is full" in d.screen and "leave out the oldest turns" in d.screen)
        await d.pilot.press("escape")
        await d.until(lambda: not isinstance(d.app.screen, OverflowScreen))
        await d.until(lambda: d.chat.prompt.text == "fourth")  # the message is back in the prompt
        assert len(d.turns) == 6
        await d.pilot.press("enter")
        await d.until(lambda: isinstance(d.app.screen, OverflowScreen))
        await d.until(lambda: "load the model with a context of 256 tokens" in d.screen)
        assert "/set context" not in d.screen
        assert "let the model summarise the oldest turns" in d.screen
        await d.pilot.press("down", "down", "enter")
        await d.settle()
        assert "left out the oldest 2 turns" in d.screen
        assert d.controller.conversation.first == 2 and "first" not in d.script.prompts[-1]
        await d.pilot.press("ctrl+home")
        await d.pilot.pause()
        assert "no longer sent to the model" in d.screen
        await d.pilot.press("ctrl+end")
        await d.ask("fifth")
        assert len(d.turns) == 10 and d.controller.conversation.first == 4, "it does not ask again"


async def test_a_larger_context_is_one_key_away():
    small = replace(INFO, max_context=128)
    async with desk("word " * 30, info=small, size=(80, 24)) as d:
        for text in ("first", "second", "third"):
            await d.ask(text)
        await d.send("fourth")
        await d.until(lambda: isinstance(d.app.screen, OverflowScreen))
        await d.pilot.press("enter")
        await d.until(lambda: len(d.turns) == 8 and d.turns[-1].complete)
        assert d.script.loads[-1]["max_context"] == 256 and "first" in d.script.prompts[-1]
        assert d.chat.prompt.text == "" and d.controller.conversation.first == 0
        d.script.fail_load = "not enough memory"
        await d.send("word " * 200)
        await d.until(lambda: isinstance(d.app.screen, OverflowScreen))
        await d.pilot.press("enter")
        await d.until(lambda: any("not enough memory" in n for n in d.notes))
        await d.until(lambda: d.chat.prompt.text.startswith("word word"))


async def test_a_model_that_holds_no_more_offers_no_larger_context():
    small = replace(INFO, max_context=128, trained_context=128)
    async with desk("word " * 30, info=small, size=(80, 24)) as d:
        await d.send("word " * 200)
        await d.until(lambda: isinstance(d.app.screen, OverflowScreen))
        (only,) = d.app.screen.query_one(OptionList).options
        assert only.id == "stop", "what cannot help is not offered"


async def test_copy_takes_code_or_else_the_answer():
    async with desk("Plain prose.") as d:
        await d.ask("a")
        await d.send("/copy")
        await d.until(lambda: d.app.clipboard == "Plain prose.")


async def test_stats_are_those_of_the_answer_and_not_of_a_benchmark():
    async with desk("Hello there.") as d:
        await d.ask("a")
        backend = d.controller.backend
        backend.stats = replace(backend.stats, prompt_tokens=128, ttft_s=7.0, prefill_tok_s=5555.0)
        await d.send("/stats")
        await d.until(lambda: d.notes)
        assert "128" not in d.notes[-1] and "5,555" not in d.notes[-1] and "7,000" not in d.notes[-1]
        assert f"prompt {d.turns[-1].stats['prompt_tokens']} " in d.notes[-1]
        spent = next(line for line in d.notes[-1].splitlines() if line.startswith("  time: "))
        assert re.findall("[a-z]+ (?=[0-9])", spent) == ["prefill ", "decode "], "what was not measured is not there"


async def test_the_help_names_the_keys_of_the_prompt_and_no_sheet_brings_a_style_sheet(monkeypatch):
    """Textual would parse all of them again and style all widgets again."""
    again = []
    monkeypatch.setattr(Stylesheet, "reparse", lambda styles: again.append(styles))
    async with desk(size=(100, 50)) as d:
        await d.pilot.press("f1")
        await d.until(lambda: "Prompt" in d.screen)
        for key in ("enter ", "shift+enter, ctrl+j", "tab completes", "up, down", "@  ", "ctrl+q"):
            assert key in d.screen, key
        await d.pilot.press("escape", "f4")
        await d.until(lambda: "temperature" in d.screen and "save as preset" in d.screen)
    assert not again


async def test_messages_of_the_app_hide_neither_prompt_nor_completions():
    script = Script(answers=("one",))
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(script))
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: app.controller.ready)
        app.chat.notify("copied the answer")
        await until(pilot, lambda: "copied the answer" in text_of(app))
        assert "copied the answer" in "\n".join(text_of(app).splitlines()[:3])


@pytest.mark.parametrize("where", ["loading", "answering"])
async def test_quitting_never_waits(where, tmp_path):
    history = History(tmp_path / "h.db")
    options = {"load_s": 60, "wait": False} if where == "loading" else {"rate": 200}
    async with desk("word " * 10000, history=history, **options) as d:
        if where == "answering":
            await d.send("go")
            await d.until(lambda: d.turns and len(d.turns[-1].text) > 20)
        await d.pilot.press("ctrl+q")
        await d.until(lambda: d.app._exit)  # long before the model is loaded or the answer ends
    if where == "answering":
        assert len(history.load(history.find()[0].id).turns[1].text) > 20


async def test_nothing_a_model_says_reaches_the_terminal():
    evil = "a\x1b]0;owned\x07b\x1b[31m\u202ec `\x1b[2J`\n\n```\x1b[0m\n\x1b[1m\n```"
    async with desk(f"<think>{evil}</think>{evil}") as d:
        await d.ask("x\x1b[5m")
        await d.pilot.press("ctrl+t")
        await d.pilot.pause()
        assert "\x1b" not in d.screen and "\\x1b]0;owned\\x07" in d.screen and "\u202e" not in d.screen
        assert "x\\x1b[5m" in d.screen


async def test_it_follows_the_end_until_the_user_scrolls():
    async with desk("line\n\n" * 4000, rate=200, size=(80, 24)) as d:
        t = d.chat.transcript
        await d.send("go")
        await d.until(lambda: t.max_scroll_y > 10)
        await d.until(lambda: t.scroll_y >= t.max_scroll_y - 2)
        await d.pilot.press("pageup")
        await d.pilot.pause()
        place, size = t.scroll_y, t.max_scroll_y
        await d.until(lambda: t.max_scroll_y > size + 20)
        assert t.scroll_y == place
        await d.pilot.press("ctrl+end")
        await d.until(lambda: t.max_scroll_y > size + 60 and t.scroll_y >= t.max_scroll_y - 4)
        await d.pilot.press("escape")


async def test_narrow_and_wide():
    async with desk(size=(120, 30)) as d:
        panel = d.chat.query_one("#panel")
        assert panel.display and d.screen.count("of 4,096") == 1
        await d.pilot.resize_terminal(80, 24)
        await d.until(lambda: not panel.display)
        await d.ask("hi")
        await d.until(lambda: d.screen.count("of 4,096") == 1)
        for line in d.screen.splitlines():
            assert len(line) == 80
        await d.pilot.press("f9")
        await d.until(lambda: "whole answer" in d.screen and "painted" not in d.screen)
        assert d.screen.count("of 4,096") == 1, "no figure twice"
        await d.pilot.press("f9")
        await d.until(lambda: "painted" in d.screen)
        await d.pilot.press("f9")
        await d.until(lambda: not panel.display and d.screen.count("of 4,096") == 1)
        await d.pilot.resize_terminal(200, 50)
        await d.pilot.press("f9")
        await d.until(lambda: panel.display)
        columns = {min(s.index(w) for s in d.screen.splitlines() if w in s) for w in ("Hello!", "scripted:1b", "›")}
        assert len(columns) == 1, "one left edge"
        assert d.answers[0].view.size.width == 100


async def test_the_conversations_at_the_left_of_a_wide_screen(tmp_path):
    history = History(tmp_path / "h.db")
    async with desk("one", "two", size=(160, 40), history=history) as d:
        await d.ask("first words")
        await d.until(lambda: d.screen.count("first words") == 3)  # its name at the left and at the top, and itself
        await d.pilot.press("ctrl+n")
        await d.ask("other words")
        await d.until(lambda: d.screen.count("other words") == 3 and "first words" in d.screen)
        line = next(s for s in d.screen.splitlines() if "first words" in s)
        await d.pilot.click(offset=(line.index("first"), d.screen.splitlines().index(line)))
        await d.until(lambda: [t.text for t in d.turns] == ["first words", "one"])
        assert d.chat.focused is d.chat.prompt
        await d.pilot.press("f3")
        await d.until(lambda: "open now" in d.screen)
        await d.pilot.press("ctrl+d", "y", "escape")
        await d.until(lambda: len(d.app.screen_stack) == 2)
        await d.until(lambda: d.screen.count("first words") == 3 and "other words" not in d.screen)
        await d.pilot.resize_terminal(159, 40)
        await d.until(lambda: d.screen.count("first words") == 2)


async def test_what_is_awaited_stands_where_the_answer_will_come():
    chunks = threading.Semaphore(1)
    async with desk("The answer.", hold=lambda step: step == "prefill" and chunks.acquire(timeout=120)) as d:
        await d.send("word " * 1200)
        await d.until(lambda: "reading the prompt, 256 of" in d.screen)
        above = next(i for i, s in enumerate(d.screen.splitlines()) if "reading the prompt" in s) - 2
        assert d.screen.splitlines()[above].strip(" ┃").startswith("word"), "below the question"
        chunks.release(100)
        await d.settle()
        assert "reading the prompt" not in d.screen and "The answer." in d.screen


async def test_long_conversations_keep_few_turns_mounted():
    turns = tuple(t for i in range(100) for t in (Turn("user", f"q{i}"), Turn("assistant", f"a{i}", stop_reason="eos")))
    async with desk() as d:
        d.controller.open(Conversation(turns, model="scripted:1b"))
        await d.until(lambda: len(d.answers) == 20)
        for i in range(5):
            await d.ask(f"more {i}")
        assert len(d.chat.transcript.messages()) <= 42
        await d.pilot.press("ctrl+home")
        await d.pilot.pause()
        assert "170 earlier turns" in d.screen
        await d.pilot.click("Earlier")
        await d.until(lambda: len(d.chat.transcript.messages()) >= 80)
        assert [m.index for m in d.chat.transcript.messages()] == list(range(130, 210))


async def test_what_is_found_far_above_brings_a_few_turns_and_not_all_between(monkeypatch):
    """In 10,000 messages it brought them all: a minute without an answer to any key, and 900 MB."""
    monkeypatch.setattr(transcript, "MOUNTED", 6)
    monkeypatch.setattr(transcript, "FAR", 20)
    turns = tuple(t for i in range(60) for t in (Turn("user", f"q{i}"), Turn("assistant", f"a{i}", stop_reason="eos")))
    async with desk() as d:
        d.controller.open(Conversation(turns, model="scripted:1b"))
        await d.until(lambda: len(d.answers) == 3)

        def mounted():
            return [m.index for m in d.chat.transcript.messages()]

        await d.send("/find q10")
        await d.until(lambda: mounted() == [*range(17, 23), *range(114, 120)])
        await d.until(lambda: "q10" in d.screen and "a10" in d.screen)
        await d.chat.transcript.show_earlier()
        assert mounted() == [*range(11, 23), *range(114, 120)] and "▴ 11 earlier turns" in lines_between(d)
        await asyncio.gather(d.chat.transcript.show_between(), d.chat.transcript.show_between())
        assert mounted() == [*range(11, 35), *range(114, 120)] and "▾ 79 turns between" in lines_between(d)
        await d.pilot.press("escape")
        await d.ask("another")
        assert mounted() == list(range(116, 122)) and "another" in d.screen
        await d.send("/find q54")  # not so far
        await d.until(lambda: mounted() == list(range(108, 122)))


def lines_between(d):
    return "\n".join(str(w.render()) for w in d.chat.transcript.children if isinstance(w, Earlier | Between))


async def test_saving_to_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with desk("fine") as d:
        await d.ask("How are you?")
        await d.send("/save md")
        await d.until(lambda: "saved as" in d.screen)
        await d.send("/export json talk.json")
        await d.until(lambda: (tmp_path / "talk.json").exists())
        await d.send("/save json talk.json")
        await d.until(lambda: any("exists; nothing was written" in n for n in d.notes))
    assert Conversation.from_dict(json.loads((tmp_path / "talk.json").read_text())).turns[1].text == "fine"
    assert "## You\n\nHow are you?" in next(tmp_path.glob("how-are-you-*.md")).read_text()


async def test_a_failed_load_says_why():
    async with desk(fail_load="x.gguf: not a GGUF file", wait=False) as d:
        await d.until(lambda: any("not a GGUF file" in n for n in d.notes))
        assert isinstance(d.chat, type(d.app.screen))
        await d.send("hello")
        await d.until(lambda: "choose one with /model" in d.screen and "waiting hello" in d.screen)


async def test_the_palette_knows_the_commands():
    async with desk("one") as d:
        await d.ask("a")
        await d.pilot.press("ctrl+p")
        await d.until(lambda: "/edit [N" in d.screen and "/model [NAME]" in d.screen)
        await d.pilot.press(*"rename")
        await d.until(lambda: "/rename NAME" in d.screen and "/edit" not in d.screen)
        await d.pilot.press("enter")
        await d.until(lambda: d.chat.prompt.text == "/rename ")


async def test_no_message_takes_the_focus_by_a_click():
    async with desk("one") as d:
        await d.ask("a")
        await d.pilot.click(d.answers[0].view)
        await d.pilot.pause()
        assert d.chat.focused is d.chat.prompt and not isinstance(d.chat.focused, TurnMessage)


async def test_the_list_renames_and_deletes_the_open_conversation(tmp_path):
    history = History(tmp_path / "h.db")
    async with desk("Hello!", LONG * 20, history=history, rate=200) as d:
        await d.ask("first words")
        await d.pilot.press("f3")
        await d.until(lambda: "open now" in d.screen)
        await d.pilot.press("f2")
        await d.until(lambda: "Name of this conversation" in d.screen)
        await d.type_over("My talk")
        await d.until(lambda: "My talk" in d.screen and "Name of" not in d.screen)
        await d.pilot.press("escape")
        await d.until(lambda: "My talk" in d.screen.split("\n")[0])
        await d.send("and more")
        await d.until(lambda: d.answers and d.answers[-1].live and d.controller.running.tokens > 5)
        assert d.controller.conversation.title == "My talk"
        await d.pilot.press("f3")
        await d.until(lambda: "open now" in d.screen)
        await d.pilot.press("ctrl+d", "left", "enter")  # while its answer is being written
        await d.until(lambda: not history.find())
        await d.pilot.press("escape")
        await d.until(lambda: "Ask scripted:1b something" in d.screen)
        await d.until(lambda: not d.controller.busy)
        assert not d.turns and not history.find()


async def test_unfolded_thinking_is_brought_into_view():
    async with desk(LONG, size=(80, 24)) as d:
        await d.ask("why?")
        assert "thought for" not in d.screen
        await d.pilot.press("ctrl+t")
        await d.until(lambda: "▾ thought for" in d.screen and "So the saving is about 14 times." in d.screen)


async def test_an_edit_can_be_left():
    async with desk() as d:
        await d.ask("first")
        await d.send("/edit")
        await d.until(lambda: d.chat.prompt.text == "first" and "cancel the edit" in d.screen)
        await d.pilot.press("escape")
        await d.until(lambda: not d.chat.prompt.text and "cancel the edit" not in d.screen)
        assert d.chat.editing is None and d.turns[0].text == "first"


async def test_edits_and_new_answers_are_versions(tmp_path):
    history = History(tmp_path / "h.db")
    async with desk("one", "two", "three", "four", history=history) as d:
        await d.ask("a")
        await d.ask("b")
        await d.pilot.press("ctrl+r")
        await d.settle()
        assert [t.text for t in d.turns] == ["a", "one", "b", "three"] and "‹ 2/2 ›" in d.screen
        await d.pilot.press("ctrl+up", "left")
        await d.until(lambda: d.turns[-1].text == "two" and "‹ 1/2 ›" in d.screen)
        assert d.chat.focused is d.answers[-1], "the keys go on acting on the same message"
        await d.pilot.press("right")
        await d.until(lambda: d.turns[-1].text == "three")
        await d.pilot.press("escape")
        await d.type("/edit 1", "enter")
        await d.until(lambda: d.chat.prompt.text == "a")
        await d.type("!", "enter")
        await d.settle()
        assert [t.text for t in d.turns] == ["a!", "four"] and d.screen.count("‹ 2/2 ›") == 1
        await d.send("/undo")
        await d.until(lambda: [t.text for t in d.turns] == ["a", "one", "b", "three"])
        await d.send("/undo")
        await d.until(lambda: d.turns[-1].text == "two")
        line = next(s for s in d.screen.splitlines() if "‹ 1/2 ›" in s and "you" in s)
        await d.pilot.click(offset=(line.index("›"), d.screen.splitlines().index(line)))
        await d.until(lambda: [t.text for t in d.turns] == ["a!", "four"])
    (saved,) = history.find("three")
    assert [t.text for t in history.load(saved.id).turns] == ["a!", "four"]


async def test_the_tokens_of_a_draft_are_counted_behind_many_keys_and_not_at_each():
    """A worker for each key was cancelled by each of the next ones: the square of the keys that came at once."""
    async with desk() as d:
        begun, run_worker = [], d.chat.run_worker
        d.chat.run_worker = lambda work, **how: begun.append(how["group"]) or run_worker(work, **how)
        for _ in range(200):
            d.app.post_message(events.Key("x", "x"))
        await d.until(lambda: len(d.chat.prompt.text) == 200 and begun)
        await d.until(lambda: " tokens" in str(d.chat.box.border_subtitle))
        assert len(begun) < 10


async def test_a_draft_survives_commands_edits_and_mistyped_ones():
    async with desk("one") as d:

        async def from_palette(name: str) -> None:
            await d.pilot.press("ctrl+p")
            await d.until(lambda: "/model [NAME]" in d.screen)
            await d.pilot.press(*name)
            await d.until(lambda: "/model [NAME]" not in d.screen and f"/{name}" in d.screen)
            await d.pilot.press("enter")
            await d.until(lambda: d.chat.prompt.text == f"/{name} ")

        await d.ask("question")
        draft = "line\n" * 60 + "end"
        await d.type(draft)
        await from_palette("rename")
        await d.pilot.press("escape")
        assert d.chat.prompt.text == draft
        await from_palette("rename")
        await d.type("Mine", "enter")
        await d.until(lambda: d.controller.conversation.name == "Mine" and d.chat.prompt.text == draft)
        await d.pilot.press("ctrl+up", "up", "e")
        await d.until(lambda: d.chat.prompt.text == "question")
        await d.pilot.press("escape")
        assert d.chat.prompt.text == draft
        await d.pilot.press("ctrl+up", "up", "e")
        await d.type("?", "enter")
        await d.settle()
        assert d.turns[0].text == "question?" and d.chat.prompt.text == draft
        await d.pilot.press("ctrl+up", "up", "e")
        await d.type(" And why?")
        await from_palette("rename")
        await d.type("Yours", "enter")
        await d.until(lambda: d.controller.conversation.name == "Yours" and d.chat.prompt.text == "question? And why?")
        await from_palette("rename")
        await d.pilot.press("escape")
        assert d.chat.prompt.text == "question? And why?" and d.chat.editing == 0, "a command inside of an edit"
        await d.pilot.press("escape")
        assert d.chat.prompt.text == draft and d.chat.editing is None
        await d.pilot.press("ctrl+home", "up")
        assert d.chat.prompt.text == "question? And why?", "what was not sent is behind the up key"
        await d.type("!", "enter")
        await d.settle()
        assert d.turns[-2].text == "question? And why?!" and d.chat.prompt.text == draft
        d.chat.prompt.put("/sytem You are long and kind.")
        await d.pilot.press("escape", "enter")
        await d.until(lambda: any("no command /sytem" in n for n in d.notes))
        assert d.chat.prompt.text == "/sytem You are long and kind."


async def test_drafts_are_kept_for_each_conversation_and_across_restarts(tmp_path):
    async with desk("one", history=History(tmp_path / "h.db")) as d:
        await d.ask("first")
        first = d.controller.conversation.id
        await d.type("about the first")
        await d.pilot.press("ctrl+n")
        await d.until(lambda: not d.turns and d.chat.prompt.text == "")
        await d.type("something new")
        d.chat.run_worker(models.reopen(d.chat, first))
        await d.until(lambda: d.turns and d.chat.prompt.text == "about the first")
        await d.pilot.press("ctrl+q")
        await d.until(lambda: d.app._exit)
    history = History(tmp_path / "h.db")
    async with desk("two", history=history) as d:
        assert d.chat.prompt.text == "something new"
        await d.pilot.press("enter")
        await d.settle()
        d.chat.keep_draft()
        assert history.draft("").text == "" and history.draft(first).text == "about the first"
        history.delete(first)
        assert history.draft(first) == Draft()
    async with desk("word " * 5000, history=history, rate=100) as d:
        await d.send("running")
        await d.send("waiting")
        await d.type("typed")
        await d.pilot.press("ctrl+q")
        await d.until(lambda: d.app._exit)
        assert history.draft(d.controller.conversation.id).text == "waiting\ntyped"


async def test_words_that_look_like_files_and_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async with desk() as d:
        await d.ask("What is @angular/core? And @bob?")
        await d.ask("/etc/hosts what is this?")
        assert [t.text for t in d.turns[::2]] == ["What is @angular/core? And @bob?", "/etc/hosts what is this?"]
        await d.send("read @READM.md")
        await d.until(lambda: any("READM.md: no such file" in n for n in d.notes))
        assert d.chat.prompt.text == "read @READM.md" and len(d.turns) == 4


async def test_keys_in_a_long_draft_belong_to_it(monkeypatch):
    monkeypatch.setattr("tinychat.ui.chat.screen.LEAVE_AGAIN", 600.0)  # on a busy machine 2 s pass between two keys
    async with desk(size=(80, 24)) as d:
        draft = "\n".join(f"line {i}" for i in range(40))
        await d.type(draft, "ctrl+home")
        assert d.chat.prompt.cursor_location == (0, 0)
        await d.pilot.press("pagedown")
        assert 0 < d.chat.prompt.cursor_location[0] < 39
        await d.pilot.press("ctrl+end")
        assert d.chat.prompt.cursor_location == (39, 7)
        await d.pilot.press("f7")
        assert d.chat.prompt.selected_text == draft and not d.chat.experts
        await d.pilot.press("right", "ctrl+c")
        assert d.chat.prompt.text == ""
        await d.pilot.press("ctrl+z")
        assert d.chat.prompt.text == draft
        await d.pilot.press("ctrl+c", "ctrl+c")
        assert not d.app._exit
        await d.pilot.press("ctrl+c")
        await d.until(lambda: d.app._exit)


async def test_ctrl_d_leaves_from_an_empty_prompt():
    async with desk() as d:
        await d.type("x", "home", "ctrl+d", "ctrl+d")
        await d.until(lambda: d.app._exit)
        assert d.chat.prompt.text == ""


async def test_stats_say_what_the_cache_on_the_disk_costs():
    async with desk() as d:
        b = d.controller.backend
        b.stats = replace(b.stats, restored_rows=1234, restore_s=0.5, saved_rows=64, saved_bytes=2 << 20, save_s=0.02)
        await d.send("/stats")
        await d.until(lambda: d.notes)
        assert "1,234 tokens of it read back in 500.0 ms" in d.notes[-1]
        assert "64 (2.1 MB) saved in 20.0 ms" in d.notes[-1]


async def test_reopening_what_another_program_has_changed(tmp_path):
    """The running answer is stored, as a copy, before the newer turns are read; it overwrites nothing."""
    history = History(tmp_path / "h.db")
    async with desk("one", "two " * 5000, rate=300, history=history) as d:
        await d.ask("first")
        id = d.controller.conversation.id
        await d.send("second")
        await d.until(lambda: len(d.turns) == 4 and d.turns[3].text)
        other = History(tmp_path / "h.db")
        theirs = other.load(id).add(Turn("user", "theirs"))
        other.save(theirs)
        await models.reopen(d.chat, id)
        assert d.controller.conversation.id == id and d.turns[-1].text == "theirs"
        assert other.load(id).turns[-1].text == "theirs" and len(other.find()) == 2
        other.close()
        reading, sent, load = threading.Event(), threading.Event(), history.load

        def slow(id):
            found = load(id)
            reading.set()
            sent.wait(120)
            return found

        history.load = slow
        reopened = asyncio.create_task(models.reopen(d.chat, id))
        await d.until(reading.is_set)
        d.controller.ask(Turn("user", "sent while the disk was read"))
        sent.set()
        await reopened
        assert d.turns[-2].text == "sent while the disk was read" and d.turns[-1].stop_reason == "stopped"


async def test_an_answer_is_edited_and_a_turn_deleted_and_both_come_back():
    async with desk("one", "two", "three") as d:
        await d.ask("first")
        await d.ask("second")
        await d.type("a draft")
        await d.pilot.press("ctrl+up", "ctrl+up", "ctrl+up", "e")
        assert d.chat.prompt.text == "one", "the answer is in the prompt"
        d.chat.prompt.text = "/uno @nobody"
        await d.pilot.press("enter")
        await d.until(lambda: len(d.turns) == 2 and any("other version" in n for n in d.notes))
        assert d.turns[1].text == "/uno @nobody" and d.chat.prompt.text == "a draft"
        await d.until(lambda: "edited" in d.screen and "‹ 2/2 ›" in d.screen)
        d.chat.prompt.clear()
        await d.ask("third")
        assert "/uno @nobody" in d.script.prompts[-1] and "one" not in d.script.prompts[-1]
        await d.pilot.press("ctrl+up", "d")
        await d.until(lambda: len(d.turns) == 2 and any(n.startswith("deleted the question") for n in d.notes))
        await d.send("/undo")
        await d.until(lambda: [t.text for t in d.turns] == ["first", "/uno @nobody", "third", "three"])
        await d.send("/delete 2")
        await d.until(lambda: [t.text for t in d.turns] == ["first", "one", "third", "three"])


async def test_a_conversation_is_replayed_with_another_model_beside_the_first(monkeypatch, tmp_path):
    async with desk("one", "two", rate=400) as d:
        await d.ask("first")
        await d.ask("second")
        await d.send("/replay nothing:1b")
        await d.until(lambda: any("unknown model" in n for n in d.notes))
        path, d.script.answers = tmp_path / "other.gguf", ("ONE", "TWO", "word " * 3000)
        path.touch()
        monkeypatch.setattr(cache, "path_of", lambda model: path)
        await d.send(f"/replay {path}")
        await d.until(lambda: any("has answered 2 questions" in n for n in d.notes))
        assert [t.text for t in d.turns] == ["first", "ONE", "second", "TWO"] and d.script.loads[-1]["path"] == str(
            path
        )
        await d.until(lambda: "‹ 2/2 ›" in d.screen and "other.gguf · " in d.screen)
        await d.pilot.press("ctrl+up", "ctrl+up", "ctrl+up", "left")
        await d.until(lambda: [t.text for t in d.turns] == ["first", "one", "second", "two"])
        await d.until(lambda: d.screen.count("scripted:1b · ") == 2)
        await d.pilot.press("escape")
        await d.send(f"/replay {path}")
        await d.until(lambda: "replay 1/2" in d.screen and d.controller.running and d.controller.running.tokens)
        await d.pilot.press("escape")
        await d.until(lambda: any("ended after 1 of 2" in n for n in d.notes))
        assert d.turns[-1].stop_reason == "stopped" and len(d.turns) == 2
        await d.send("/undo")
        await d.until(lambda: [t.text for t in d.turns] == ["first", "one", "second", "two"])


async def test_a_folded_paste_is_one_thing_and_always_the_whole_text(tmp_path):
    history = History(tmp_path / "h.db")
    async with desk(history=history) as d:
        prompt, one, two = d.chat.prompt, "first\n" * 300, "other\n" * 300

        async def paste(text):
            prompt.post_message(events.Paste(text))
            await d.pilot.pause()

        await d.type("see ")
        await paste(one)
        await d.type(" and ")
        await paste(two)
        await paste("short\npaste")
        whole = f"see {one} and {two}short\npaste"
        await d.until(lambda: d.screen.replace("\xa0", " ").count("[300 lines, 301 tokens") == 2)
        assert prompt.text == whole and prompt.document.line_count == 2
        await d.pilot.press("ctrl+home", *["right"] * 5)
        assert prompt.cursor_location[1] == prompt.document.get_line(0).index("]") + 1, "the cursor steps over it"
        await d.pilot.press("backspace")
        assert prompt.document.line_count == 302 and prompt.text == whole, "it unfolds before anything is deleted"
        await d.pilot.press("ctrl+z")
        assert prompt.document.line_count == 2 and prompt.text == whole
        prompt.select_all()
        assert prompt.selected_text == whole
        await d.pilot.press("ctrl+x")
        assert d.app.clipboard == whole and not prompt.text
        await d.pilot.press("ctrl+z")
        d.chat.keep_draft()
        assert history.draft("") == (whole, (one, two))
        prompt.set_aside("/rename x")
        prompt.bring_back()
        assert prompt.document.line_count == 2 and prompt.text == whole
    async with desk(history=History(tmp_path / "h.db")) as d:
        await d.until(lambda: d.screen.replace("\xa0", " ").count("[300 lines, 301 tokens") == 2)
        assert d.chat.prompt.text == whole, "a draft of last time has its labels"
        await d.pilot.press("enter")
        await d.settle()
        assert d.turns[0].text == whole and one.strip() in d.script.prompts[0]


async def test_an_idle_app_rests_and_paints_what_comes_all_the_same(monkeypatch):
    monkeypatch.setattr(editor, "BLINKS", 0.05)
    async with desk("Good morning!") as d:
        d.chat._idle = 1000  # as after minutes
        await d.until(lambda: not d.chat.prompt.cursor_blink and not d.chat._drain._active.is_set())
        d.controller.ask(Turn("user", "hello"))  # not by a key: nobody but the slow tick can notice
        await d.until(lambda: "Good morning!" in d.screen)
        blinks = []
        d.chat.watch(d.chat.prompt, "cursor_blink", lambda blink: blinks.append(blink), init=False)
        await d.pilot.press("x")
        await d.until(lambda: True in blinks)
