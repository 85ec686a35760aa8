"""What every dialog and sheet is: a modal screen that gives one answer."""

from __future__ import annotations

from typing import TypeVar

from textual import events, on
from textual._time import get_time
from textual.await_complete import AwaitComplete
from textual.messages import Layout, Update
from textual.screen import ModalScreen
from textual.widget import Widget

Outcome = TypeVar("Outcome")


class Modal(ModalScreen[Outcome]):
    """Two keys in one burst may both mean an answer: the first one counts.

    Every widget of a screen that opens is styled when it is mounted, laid out and painted by the resume. Textual would
    style all of them again on the resume, and lay out and paint them again because each got its first size: half of the
    time that a form takes to open."""

    _answered = False
    _painted_at = 0.0  # when it was first, by the clock of messages

    @on(events.ScreenResume)
    def _opened(self, event: events.ScreenResume) -> None:
        if self.stack_updates == 0:
            event.refresh_styles = False
            self.app.stylesheet.apply(self)  # its own style sheet was read behind its registration
            self.call_next(self._painted)

    def _painted(self) -> None:
        """Called right behind the first layout. A widget that got scrollbars by it needs another one."""
        self._painted_at = get_time()
        for widget in self.walk_children(Widget, with_self=True):
            if not any(widget.scrollbars_enabled):
                widget._layout_required = widget._repaint_required = False

    @on(Layout)
    @on(Update)
    def _asked(self, message: Layout | Update) -> None:
        if message.time < self._painted_at:
            message.prevent_default().stop()

    @on(events.Resize)
    def _sized(self, event: events.Resize) -> None:
        if event.size == self.outer_size:  # that of the last layout; `size` is the app's
            event.prevent_default()

    def dismiss(self, result: Outcome | None = None) -> AwaitComplete:
        if self._answered or not self.is_current:
            return AwaitComplete.nothing()
        self._answered = True
        return super().dismiss(result)
