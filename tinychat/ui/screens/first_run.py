"""The first screen where no model is here yet: three that fit this computer, and one key to start."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from rich.filesize import decimal
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static
from textual.widgets.option_list import Option

from tinychat.chat import settings
from tinychat.errors import printable
from tinychat.models.fit import available_memory, memory_gb_s
from tinychat.ui.screens import picker_rows
from tinychat.ui.screens.downloads import Download, Downloads
from tinychat.ui.screens.picker import PickedModel
from tinychat.ui.screens.picker_rows import Row
from tinychat.ui.screens.sheet import Rows, Sheet, in_daemon
from tinychat.units import track

GOOD_FOR = {  # the better answers come later
    "smollm2:135m": "to look around: it answers at once, and knows little",
    "qwen3:0.6b": "short questions; thinks before it answers",
    "llama3.2:1b-q4": "short texts and summaries",
    "qwen3:1.7b": "everyday questions and small pieces of code; thinks before it answers",
    "llama3.2:3b": "conversation, writing, summaries",
    "qwen3:8b": "code, mathematics and long texts; thinks before it answers",
    "qwen3:30b-a3b": "code, mathematics and long texts: a large mixture, as fast as a small model",
    "glm-4.7:flash-Q4_0": "code, tools and long tasks: a large mixture that thinks before it answers",
}
QUICK, READABLE = 25.0, 6.0  # tok/s: faster than people read, and about as fast
BAR = 24


def suggested(rows: Sequence[Row]) -> list[Row]:
    """At most three of GOOD_FOR that fit: the smallest, the best of those that are quick, the best that is fast enough
    to be read along. Where no speed is known they all count as quick."""
    by_name = {r.model.name: r for r in rows}
    fitting = [by_name[name] for name in GOOD_FOR if name in by_name and by_name[name].fit.verdict == "fits"]
    readable = [r for r in fitting if not r.predicted or r.predicted >= READABLE] or fitting[:1]
    quick = [r for r in readable if not r.predicted or r.predicted >= QUICK]
    chosen = [*readable[:1], *quick[-1:], *readable[-1:]]
    chosen += readable[::-1]  # where two of them are the same
    three = list({r.model.name: r for r in chosen}.values())[:3]
    return sorted(three, key=readable.index)


class FirstRun(Sheet[PickedModel | str]):
    """Dismisses with the model that was chosen and downloaded, or with "all" for the list of all models."""

    TITLE = "Welcome to tinychat"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "start", "start"),
        Binding("1", "start(0)", "start", show=False),
        Binding("2", "start(1)", "start", show=False),
        Binding("3", "start(2)", "start", show=False),
        Binding("up", "walk('up')", "previous", show=False),
        Binding("down", "walk('down')", "next", show=False),
        Binding("m", "all", "all models, files, URLs"),
        Binding("escape", "close", "not now"),
    ]
    DEFAULT_CSS = """
    FirstRun Rows { height: auto; max-height: 1fr; margin: 1 0; }
    FirstRun .what { height: auto; }
    """

    def __init__(self, downloads: Downloads) -> None:
        super().__init__()
        self._downloads = downloads
        self._rows: list[Row] = []
        self._waiting: Row | None = None  # what is being downloaded

    def body(self) -> ComposeResult:
        yield Static(classes="what")
        rows = Rows(markup=False)
        rows.can_focus = False  # Enter is the screen's, and so in the line of keys
        yield rows
        yield Static(classes="detail")

    def on_mount(self) -> None:
        self._settings = settings.load()
        self._show(0.0)
        self._measure()
        self.set_interval(0.2, self._tick)

    def on_resize(self) -> None:
        self.call_after_refresh(self._paint)

    @work
    async def _measure(self) -> None:
        gb_s = await in_daemon(partial(memory_gb_s, self._settings.threads))
        if self.is_attached and self._waiting is None:
            self._show(gb_s)

    def _show(self, gb_s: float) -> None:
        """The three models, as the speed of the memory lets them be."""
        self._rows = suggested(picker_rows.rows(self._settings.models, 4096, 0, {}, {}, gb_s))
        speed = f", read at {gb_s:.1f} GB/s" if gb_s else ""
        self.query_one(".what", Static).update(
            Content(
                "The model runs on this computer and is downloaded once. After that everything works offline.\n"
                f"These fit the {decimal(available_memory())} of memory that are free{speed}:"
            )
        )
        quick = [i for i, r in enumerate(self._rows) if r.predicted >= QUICK]
        options = [Option(self._text(i), id=str(i)) for i in range(len(self._rows))]
        self.query_one(Rows).show(options, str(quick[-1]) if quick else "0")
        self.refresh_bindings()

    def _paint(self) -> None:
        rows = self.query_one(Rows)
        for i in range(rows.option_count):
            rows.replace_option_prompt(str(i), self._text(i))

    def _text(self, i: int) -> Content:
        row = self._rows[i]
        width = max(40, self.query_one(Rows).size.width - 3)
        facts = [picker_rows.params(row.model), f"download of {decimal(row.size)}", picker_rows.speed_shown(row)]
        head = Content.assemble(
            (f" {i + 1}  ", "$accent"),
            (row.model.name, "bold"),
            (f"  {' · '.join(filter(None, facts))}", "$foreground 60%"),
        )
        below = GOOD_FOR[row.model.name]
        if (job := self._downloads.get(row.model)) is not None and job.state != "done":
            below = _progress(job)
        return Content("\n").join([head, Content(f"    {below}"[:width])])

    def _tick(self) -> None:
        """Paints the download, and goes on when it is done."""
        row = self._waiting
        job = self._downloads.get(row.model) if row is not None else None
        if row is None or job is None:
            return
        self._paint()
        if job.state == "done" and job.path is not None:
            self._waiting = None
            if self.is_current:
                self.dismiss(PickedModel(job.path, row.model.name, row.model.preset))
        elif job.state == "failed":
            self._waiting = None
            detail = self.query_one(".detail", Static)
            detail.update(Content(printable(job.error, newlines=False)))
            detail.set_class(True, "-error")
            self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "start" or (bool(self._rows) and self._waiting is None)

    @on(Rows.OptionSelected)
    def _selected(self, event: Rows.OptionSelected) -> None:
        self.action_start(event.option_index)

    def action_start(self, index: int | None = None) -> None:
        """Downloads model `index`, or the highlighted one, if none is being downloaded."""
        rows = self.query_one(Rows)
        index = rows.highlighted if index is None else index
        if index is None or index >= len(self._rows) or self._waiting is not None:
            return
        rows.highlighted = index
        self._waiting = self._rows[index]
        self._downloads.start(self._waiting.model)
        self.query_one(".detail", Static).update("")
        self._tick()
        self.refresh_bindings()

    def action_walk(self, key: str) -> None:
        self.query_one(Rows).walk(key)

    def action_all(self) -> None:
        self.dismiss("all")


def _progress(job: Download) -> str:
    """▓▓▓▓░░░░  45%  44.2 MB · 12.1 MB/s · 4 s."""
    if job.state == "failed":
        return "the download failed; enter tries again"
    facts = [f"{job.fraction:4.0%}  {decimal(job.done)}", f"{decimal(int(job.speed))}/s" if job.speed else job.stage]
    facts += [picker_rows.duration(job.eta)] if job.eta is not None else []
    return f"{track(job.fraction, BAR)} {' · '.join(facts)}"
