"""Streamed Markdown: whatever the pieces, the result is that of the whole text; nothing is lost; nothing is
executed."""

import asyncio
import random
import time
from dataclasses import replace

import pytest
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll

from scripts.smoothness import ANSWER
from tests.support.screens import until
from tests.support.scripted import INFO, Script, scripted
from tinychat.chat.conversation import Conversation, Turn
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.markdown.blocks import PARSER, ROWS, STRUCTURE, TEXT, Block, Splitter, in_open_fence
from tinychat.ui.chat.markdown.layout import lay_out

DOCUMENT = """# Title

A paragraph with **strong**, *em*, `code`, ~~gone~~ and a [link](https://example.com).
Second line of it.

1. **First**: text
   - nested one
   - nested two
2. Second
10. Tenth, long enough that it has to be wrapped somewhere on a narrow screen

- a

  second paragraph of a
- b
* other list

> quoted
> more

```python
def f(x: int) -> List[int]:
    return "<b>" * x
```

| name | value |
|:-----|------:|
| one | 1 |
| two and a longer cell | 22 |

Setext
------

List<int> and <think> stay. See [ref].

~~~
unclosed? no
~~~

---

[ref]: https://example.org

Done.
```js
open();
"""
TRICKY = [
    "",
    "\n\n",
    "a",
    "* a\n**bold** lazy\n* b",
    "- a\n- \n- b",
    "```\n```\n```x\n",
    "a\n===\nb\n---\n",
    "|a|b|\n|-|-|\n|1|2|\n\nafter",
    "1. a\n\n   ```py\n   x\n   ```\n2. b",
    "> - a\n> - b\n\nc",
    "    code\n\nafter",
    "a  \nb\\\nc",
    "- [ ] task\n- [x] done",
    "# a\n## b\ntext",
    "<div>\n\n**x**\n</div>",
    "&amp; &lt;b&gt; \\*",
    "![alt](x.png) text",
    "- a\n\n\n- b\n\n\n\nc",
    "a\u2028b\n\n- c",
    "````\n```\n````\nz",
]


def shown(blocks: list[Block], width: int) -> list[str]:
    lines: list[str] = []
    for i, block in enumerate(blocks):
        lines += [""] * block.gap_before(blocks[i - 1] if i else None)
        lines += [line.content.plain.rstrip() for line in lay_out(block.nodes, width)]
    return lines


def split(text: str, rng: random.Random) -> Splitter:
    splitter = Splitter()
    while text:
        n = rng.randint(1, 9)
        splitter.feed(text[:n])
        text = text[n:]
    return splitter


@pytest.mark.parametrize("text", [DOCUMENT, *TRICKY])
def test_pieces_do_not_matter(text):
    whole = Splitter()
    whole.feed(text)
    whole.finish()
    assert whole.source == text
    for seed in range(6):
        splitter = split(text, random.Random(seed))
        assert splitter.source == text, "nothing may be lost while it streams"
        splitter.finish()
        assert splitter.source == text
        for width in (12, 40, 100):
            assert shown(splitter.done, width) == shown(whole.done, width)


def test_most_blocks_are_done_while_it_streams():
    splitter = split(DOCUMENT, random.Random(1))
    assert len(splitter.done) >= 15 and len(splitter.tail) < 40


def parsed_lengths(monkeypatch, parser):
    """A list that grows with the length of each text that is parsed."""
    lengths = []
    monkeypatch.setattr(parser, "parse", lambda *args, parse=parser.parse: lengths.append(len(args[0])) or parse(*args))
    return lengths


def test_a_block_that_never_ends_is_looked_through_less_and_less_often(monkeypatch):
    parsed = parsed_lengths(monkeypatch, STRUCTURE)
    splitter = Splitter()
    for _ in range(2000):
        splitter.feed("> line of 20 letters\n")
    assert sum(parsed) < 30 * 2000 * 21 and not splitter.done
    splitter.feed("\nanother\n" + "and more\n" * 800)
    assert len(splitter.done) == 1


def test_layout_of_everything():
    whole = Splitter()
    whole.feed(DOCUMENT)
    whole.finish()
    text = "\n".join(shown(whole.done, 60))
    assert (
        text
        == """\
Title

A paragraph with strong, em, code, gone and a link.
Second line of it.

 1. First: text
     ◦ nested one
     ◦ nested two
 2. Second
10. Tenth, long enough that it has to be wrapped somewhere
    on a narrow screen

 • a

   second paragraph of a
 • b
 • other list

▎ quoted
▎ more

 python                                                copy
  def f(x: int) -> List[int]:
      return "<b>" * x

name                  │ value
──────────────────────┼──────
one                   │     1
two and a longer cell │    22

Setext

List<int> and <think> stay. See ref.

 code                                                  copy
  unclosed? no

────────────────────────────────────────────────────────────

Done.

 js                                                    copy
  open();"""
    )


@pytest.mark.parametrize("width", [14, 20, 33])
def test_nothing_is_wider_than_the_screen(width):
    whole = Splitter()
    whole.feed(DOCUMENT.replace("10. Tenth", "10. 東京は日本の首都です Tenth"))
    whole.finish()
    for block in whole.done:
        for line in lay_out(block.nodes, width):
            assert line.content.cell_length <= width, line


@pytest.mark.parametrize("width", [20, 80])
def test_of_a_long_table_only_the_last_rows_are_read_and_laid_out_again(monkeypatch, width):
    rows = [f"| {i} | {'long ' * (i % 7)}`row` | {'wide' * (i == 150)} |\n" for i in range(160)]
    text = f"Before\n\n| n | name | more |\n|--:|---|:-:|\n{''.join(rows)}\nafter it\n"
    view = MarkdownView()
    view._laid_width = width
    parsed = parsed_lengths(monkeypatch, PARSER)
    for i in range(0, len(text), 100):
        parsed.clear()
        view._splitter.feed(text[i : i + 100])
        view._lay(width)
        assert max(parsed) < 2 * ROWS
        if i % 900 == 0 and i + 100 < len(text):
            table = lay_out(Block(view.source.removeprefix("Before\n\n")).nodes, width)
            assert view._lines[-len(table) :] == table, "parts have the columns of the whole table"
    parsed.clear()
    done = len(view._splitter.done)
    assert done > 5 and view._splitter.finish() == done + 1 and max(parsed) < 2 * ROWS
    view._lay(width)
    monkeypatch.setattr("tinychat.ui.chat.markdown.blocks.ROWS", len(text))
    at_once = MarkdownView(text)
    at_once._lay(width)
    assert view.source == text and view._lines == at_once._lines


@pytest.mark.parametrize(
    "sentence",
    ["It goes on *and on* with `code`. ", "A line **of it**  \nbut_one_ [more\n", "没有空格的一段话**重点**"],
)
def test_of_a_long_paragraph_only_the_end_is_read_and_laid_out_again(monkeypatch, sentence):
    text = f"# Title\n{sentence * (4 * TEXT // len(sentence))}\n- item\n"
    view = MarkdownView()
    view._laid_width = 30
    parsed = parsed_lengths(monkeypatch, PARSER)
    for i in range(0, len(text), 150):
        parsed.clear()
        view._splitter.feed(text[i : i + 150])
        view._lay(30)
        assert max(parsed) < 1.2 * TEXT
        if i % 1500 == 0 and i + 150 < len(text):
            at_once = MarkdownView(view.source)
            at_once._lay(30)
            assert view._lines[:-1] == at_once._lines[:-1]
    assert view._splitter.done[3].joins
    joined = MarkdownView()  # in the middle of it
    joined._splitter.feed(text[: 3 * TEXT])
    joined._splitter.feed("a")
    assert len(joined._splitter.tail) < 1.1 * TEXT
    at_once = MarkdownView(text)
    at_once._lay(30)
    view.finish()
    view._lay(30)
    assert view.source == text and view._lines == at_once._lines


@pytest.mark.parametrize(
    "pieces", [["[a]: b\n"] * 400 + ["more\n"] * 400, ["more\n" * 300, "more\n- " + "b" * TEXT, "b\n"]]
)
def test_what_stands_before_or_behind_a_long_paragraph_is_no_part_of_it(pieces):
    view = MarkdownView()
    view._laid_width = 30
    for piece in pieces:
        view._splitter.feed(piece)
        view._lay(30)
    at_once = MarkdownView("".join(pieces))
    at_once._lay(30)
    assert view._lines == at_once._lines


def test_a_table_of_more_columns_than_the_screen_loses_none():
    row = "".join(f"|c{i}" for i in range(30))
    lines = lay_out(Block(f"{row}\n{'|-' * 30}\n{row}\n").nodes, 60)
    assert all(line.content.cell_length <= 60 for line in lines)
    assert " ".join(line.content.plain for line in lines).split("c29")[1].count("c") == 29


def test_a_line_of_code_as_long_as_a_file_is_not_coloured():
    shortly, long = (lay_out(Block(f"```cpp\n{'f(1);' * n}\n```").nodes, 80) for n in (100, 1000))
    assert len(shortly[1].content.spans) > 10 > len(long[1].content.spans)


FENCES = [
    ("```py\nx", True),
    ("```py\nx\n```", False),
    ("````\n```\n", True),
    ("~~~\n```\n", True),
    ("text", False),
    ("`` `\n", False),
    ("``` a`b\n", False),
    ("    ```\n", False),
]


@pytest.mark.parametrize("source,is_open", FENCES)
def test_open_fence(source, is_open):
    assert in_open_fence(source) is is_open


class Host(App[None]):
    def __init__(self, view: MarkdownView) -> None:
        super().__init__()
        self.view = view
        self.copied: list[str] = []
        self.links: list[str] = []

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self.view

    def on_markdown_view_copy_requested(self, event: MarkdownView.CopyRequested) -> None:
        self.copied.append(event.code)

    def on_markdown_view_link_clicked(self, event: MarkdownView.LinkClicked) -> None:
        self.links.append(event.href)


def screen_text(view: MarkdownView) -> list[str]:
    return ["".join(s.text for s in view.render_line(y)).rstrip() for y in range(view.size.height)]


async def test_view_streams_resizes_and_ends_exact():
    view = MarkdownView()
    app = Host(view)
    async with app.run_test(size=(60, 20)) as pilot:
        for i in range(0, len(DOCUMENT), 7):
            view.feed(DOCUMENT[i : i + 7])
            if i % 70 == 0:
                await pilot.pause()
        view.finish()
        await pilot.pause()
        whole = Splitter()
        whole.feed(DOCUMENT)
        whole.finish()
        assert view.source == DOCUMENT
        assert screen_text(view) == shown(whole.done, view.size.width)
        await pilot.resize_terminal(40, 20)
        await pilot.pause()
        assert screen_text(view) == shown(whole.done, view.size.width) and view.size.width < 41
        assert view.code_blocks == ['def f(x: int) -> List[int]:\n    return "<b>" * x', "unclosed? no", "open();"]


async def test_view_copies_code_and_reports_links_by_click():
    view = MarkdownView("see [x](https://example.com)\n\n```py\na = 1\n```\n")
    app = Host(view)
    async with app.run_test(size=(40, 10)) as pilot:
        await pilot.click(view, offset=(4, 0))
        await pilot.click(view, offset=(30, 2))
        await pilot.pause()
        assert app.links == ["https://example.com"] and app.copied == ["a = 1"]


async def test_plain_view_keeps_every_character_and_executes_none():
    view = MarkdownView(plain=True)
    app = Host(view)
    async with app.run_test(size=(40, 10)) as pilot:
        for piece in ("**a**\n", "\n", "b\x1b[31m", " <x>", "\nc"):
            view.feed(piece)
            await pilot.pause()
        assert screen_text(view) == ["**a**", "", "b\\x1b[31m <x>", "c"]
        assert "\x1b" not in "".join(screen_text(view))


async def test_selection_gives_text_without_code_gutter():
    view = MarkdownView("one two\n\n```\n  x\ny\n```")
    app = Host(view)
    async with app.run_test(size=(40, 10)) as pilot:
        await pilot.pause()
        view.text_select_all()
        assert app.screen.get_selected_text() == "one two\n\n  x\ny"


# Smoothness, with the whole app around it


async def test_a_long_fast_answer_ends_exact():
    """Every character of an answer at 700 tok/s is painted, once; how smoothly, scripts/smoothness.py measures."""
    script = Script(answers=(ANSWER,), rate=700, info=replace(INFO, max_context=16384))
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(script))
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.controller.ready)
        app.chat.prompt.put("go")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.conversation.turns and not app.controller.busy)
        view = app.chat.transcript.last_answer.view
        await until(pilot, lambda: not app.chat.transcript.last_answer.live)
        assert view.source == ANSWER and len(view.code_blocks) == 1
        whole = Splitter()
        whole.feed(ANSWER)
        whole.finish()
        await pilot.pause()
        assert [line.content.plain.rstrip() for line in view._lines] == shown(whole.done, view.size.width)
        assert app.chat.painter.meter.tokens > 0


async def test_thousands_of_turns_cost_no_more_than_the_first():
    """A soak in small: what is mounted, and what one turn costs, do not grow with the conversation."""
    script = Script(answers=("A short **answer**.\n\n- one\n- two",), info=replace(INFO, max_context=2048))
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(script))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.controller.ready)
        turns = tuple(
            t for i in range(1500) for t in (Turn("user", f"q{i}"), Turn("assistant", f"a{i}", stop_reason="eos"))
        )
        app.controller.open(Conversation(turns, first=2996, model="scripted:1b"))
        for i in range(12):
            app.controller.ask(Turn("user", f"question {i}"))
            await until(
                pilot, lambda i=i: not app.controller.busy and len(app.controller.conversation.turns) == 3002 + 2 * i
            )
            await until(pilot, lambda: app.chat.transcript.last_answer and not app.chat.transcript.last_answer.live)
        assert len(app.chat.transcript.messages()) <= 42
        assert len(app.chat.query("*")) < 500


async def test_a_timer_that_is_cancelled_while_messages_go_does_not_break_the_exit():
    """The app's timers are cancelled when it closes; the widgets that one of them removes must still end by
    themselves."""
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(Script()))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.controller.ready)
        turns = tuple(Turn("user", f"q{i}") for i in range(30))
        for passes in range(1, 9):
            await app.chat.transcript.reset(Conversation(turns), 0, False)
            tasks = [m._task for m in app.chat.transcript.messages()]
            timer = asyncio.create_task(app.chat.transcript.reset(Conversation(), 0, False))
            for _ in range(passes):
                await asyncio.sleep(0)
            timer.cancel()
            await asyncio.wait([timer, *tasks])
            assert len(tasks) == 30 and not any(t.cancelled() for t in tasks), passes


async def test_dear_paints_come_less_often(monkeypatch):
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(Script(answers=("word " * 4000,), rate=100)))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.controller.ready)
        app.controller.ask(Turn("user", "go"))
        painter, now, work = app.chat.painter, 100.0, 7.0
        monkeypatch.setattr(painter, "_painted_at", now)
        monkeypatch.setattr(painter, "_spent_at", work)
        cases = [(0.001, 0.006, True), (0.01, 0.04, False), (0.01, 0.06, True), (0.04, 0.08, False), (0.04, 0.11, True)]
        cases += [(1.0, 1.9, False), (1.0, 2.1, True)]
        for spent, passed, due in cases:
            with monkeypatch.context() as m:
                m.setattr(time, "monotonic", lambda p=passed: now + p)
                m.setattr(time, "thread_time", lambda s=spent: work + s)
                assert painter.due is due, (spent, passed)


def table(*rows: str, width: int) -> list[str]:
    text = "\n".join([rows[0], "|" + "---|" * rows[0].count("|"), *rows[1:]])
    view = MarkdownView(text)
    view._lay(width)
    return [line.content.plain for line in view._lines]


def test_a_wide_table_breaks_no_words():
    rows = (
        "| Algorithm | What it does | Cost |",
        "| Quicksort | " + "divides by a pivot and sorts both parts " * 3 + "| n log n |",
    )
    for width in (40, 50, 76):
        lines = table(*rows, width=width)
        assert all(len(line) <= width for line in lines)
        assert any("Quicksort" in line for line in lines) and any("Algorithm" in line for line in lines), lines
    lines = table("| a | b |", f"| {'x' * 60} | y |", width=30)
    assert all(len(line) <= 30 for line in lines) and sum(line.count("x") for line in lines) == 60


def test_diffs_have_colours():
    view = MarkdownView("```diff\n--- a\n+++ b\n-old\n+new\n same\n```")
    view._lay(60)
    styles = {line.content.plain.strip(): [str(s.style) for s in line.content.spans] for line in view._lines}
    assert "$text-success" in styles["+new"] and "$text-error" in styles["-old"]
    assert not {"$text-success", "$text-error"} & set(styles["same"])
