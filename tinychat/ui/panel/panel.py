"""The widgets of the panel; figures.py says what is in them."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tinychat.ui.panel import experts, figures
from tinychat.ui.panel.reading import Reading

_PARTS = {
    "dim",
    "head",
    "rule",
    "big",
    "spark",
    "system",
    "history",
    "thinking",
    "tools",
    "answer",
    "free",
    "warm",
    "hot",
}


class Figures(Static):
    """Text that a selection over the chat leaves alone."""

    ALLOW_SELECT = False


class EnginePanel(VerticalScroll, can_focus=False):
    """Sections of figures beside the chat; what did not change is not painted again."""

    ALLOW_SELECT = False

    COMPONENT_CLASSES: ClassVar[set[str]] = _PARTS

    def compose(self) -> ComposeResult:
        yield Figures(id="figures")

    def on_mount(self) -> None:
        self._shown: Content | None = None
        self._reading, self._inner = Reading(), False

    def on_resize(self) -> None:
        self.show(self._reading, self._inner)

    def show(self, reading: Reading, inner: bool) -> None:
        """Paints `reading`, with the engine's inner figures if `inner`."""
        self._reading, self._inner = reading, inner
        if not self.display or not self.is_attached:
            return
        width = max(20, self.content_size.width)
        height = self.content_size.height
        lines = [figures.heading("engine", width), *figures.now(reading, width)]
        rest = self._rest(reading, width, inner, legend=inner)
        least = experts.strip(reading.experts, width, 0) if reading.experts else []
        if len(lines) + len(least) + len(rest) > height:
            rest = self._rest(reading, width, inner, legend=False)
        if reading.experts:  # asked for, so it goes before what may not fit
            lines += [Content(""), *experts.strip(reading.experts, width, height - len(lines) - len(rest) - 1)]
        lines += rest
        content = Content("\n").join(lines)
        if self._shown is None or not content.is_same(self._shown):
            higher = self._shown is None or self._shown.plain.count("\n") != len(lines) - 1
            self._shown = content
            self.query_one("#figures", Figures).update(content, layout=higher)

    def _rest(self, reading: Reading, width: int, inner: bool, legend: bool) -> list[Content]:
        """The sections below the engine's."""
        context = figures.context_rows(reading.usage, width, not legend) if reading.usage.limit else []
        time = ("time", figures.time_rows(reading, width))
        memory = ("memory", figures.memory_rows(reading, width, not inner))
        sections = [("context", context), memory, time]
        if inner:
            speed = ("speed", figures.speed_rows(reading, width))
            sections = [speed, time, ("context", context), ("machine", figures.machine_rows(reading, width)), memory]
        return [
            line for title, rows in sections if rows for line in (Content(""), figures.heading(title, width), *rows)
        ]


class ExpertsStrip(Figures):
    """The experts alone, for narrow screens."""

    COMPONENT_CLASSES: ClassVar[set[str]] = _PARTS

    def show(self, reading: Reading) -> None:
        if self.display and self.is_attached and reading.experts:
            self.update(Content("\n").join(experts.strip(reading.experts, self.content_size.width, 0)))
