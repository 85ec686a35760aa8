"""/profile: where the time of a token goes, measured now, as `tinychat profile` prints it."""

from __future__ import annotations

import threading
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tinychat.backend.worker import Done, Failed, Progress, Report, Worker
from tinychat.engine.engine import Engine
from tinychat.errors import printable
from tinychat.measure.profile import Report as Profile
from tinychat.measure.profile import profile, view
from tinychat.ui.screens.sheet import Sheet


class ProfileScreen(Sheet[None]):
    """Measures `steps` tokens when it opens. While it is open, it takes the worker's events."""

    TITLE = "Profile"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close")]
    DEFAULT_CSS = "ProfileScreen VerticalScroll { height: 1fr; } ProfileScreen Static { height: auto; }"

    def __init__(self, worker: Worker, steps: int = 10, name: str = "") -> None:
        super().__init__()
        self._worker, self._steps, self._model = worker, steps, name

    def body(self) -> ComposeResult:
        with VerticalScroll():
            yield Static("starting", classes="state")

    def on_mount(self) -> None:
        def job(engine: Engine, report: Report, stop: threading.Event) -> Profile:
            return profile(engine, self._steps, report, stop, name=self._model)

        self._request = self._worker.call(job)
        self.query_one(VerticalScroll).focus()
        self.set_interval(0.2, self._tick)

    def _tick(self) -> None:
        state = self.query_one(".state", Static)
        for event in self._worker.events():
            if getattr(event, "request", None) != self._request:
                continue
            if isinstance(event, Progress):
                state.update(Content(f"{event.text}, {event.fraction:.0%}"))
            elif isinstance(event, Done):
                state.update(view(event.result))
            elif isinstance(event, Failed):
                state.update(Content.styled(printable(event.message, newlines=False), "$text-error"))

    def action_close(self) -> None:
        self._worker.stop()
        self.dismiss(None)
