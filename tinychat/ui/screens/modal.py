"""What every dialog and sheet is: a modal screen that gives one answer."""

from __future__ import annotations

from typing import TypeVar

from textual import events, on
from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen

Outcome = TypeVar("Outcome")


class Modal(ModalScreen[Outcome]):
    """Two keys in one burst may both mean an answer: the first one counts.

    Every widget of a screen that opens is styled when it is mounted, and laid out by the resume. Textual would style
    all of them again on the resume and lay them out again on the first resize, a third of the time that a form takes
    to open."""

    _answered = False

    @on(events.ScreenResume)
    def _opened(self, event: events.ScreenResume) -> None:
        if self.stack_updates == 0:
            event.refresh_styles = False
            self.app.stylesheet.apply(self)  # its own style sheet was read behind its registration

    @on(events.Resize)
    def _sized(self, event: events.Resize) -> None:
        if event.size == self.outer_size:  # that of the last layout; `size` is the app's
            event.prevent_default()

    def dismiss(self, result: Outcome | None = None) -> AwaitComplete:
        if self._answered or not self.is_current:
            return AwaitComplete.nothing()
        self._answered = True
        return super().dismiss(result)
