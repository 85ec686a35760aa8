"""/profile: where the time of a token goes, measured now, as `tinychat profile` prints it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from tinychat.backend.instruments import Instrumented, JobDone, JobProgress
from tinychat.backend.protocol import Failed
from tinychat.errors import printable
from tinychat.measure.profile import Profile, profile, view
from tinychat.ui.screens.sheet import Sheet

if TYPE_CHECKING:
    from tinychat.backend.instruments import OnProgress


class ProfileScreen(Sheet[None]):
    """Measures `steps` tokens when it opens."""

    TITLE = "Profile"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close")]
    DEFAULT_CSS = "ProfileScreen VerticalScroll { height: 1fr; } ProfileScreen Static { height: auto; }"

    def __init__(self, backend: Instrumented, steps: int = 10, name: str = "") -> None:
        super().__init__()
        self._backend, self._steps, self._model = backend, steps, name
        self._cancel = threading.Event()

    def body(self) -> ComposeResult:
        with VerticalScroll():
            yield Static("starting", classes="state")

    def on_mount(self) -> None:
        def measure(model: Any, report: OnProgress, cancel: threading.Event) -> Profile:
            return profile(model, self._steps, report, cancel, name=self._model)

        self._events = self._backend.run_job(measure, self._cancel)
        self.query_one(VerticalScroll).focus()
        self.set_interval(0.2, self._tick)

    def _tick(self) -> None:
        state = self.query_one(".state", Static)
        for event in self._events.poll():
            match event:
                case JobProgress():
                    state.update(Content(f"{event.text}, {event.fraction:.0%}"))
                case JobDone():
                    state.update(view(event.result))
                case Failed():
                    state.update(Content.styled(printable(event.message, newlines=False), "$text-error"))

    def action_close(self) -> None:
        self._cancel.set()
        self.dismiss(None)
