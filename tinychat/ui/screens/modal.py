"""What every dialog and sheet is: a modal screen that gives one answer."""

from __future__ import annotations

from typing import TypeVar

from textual import events
from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen

Outcome = TypeVar("Outcome")


def open_once(screen: ModalScreen[Outcome], event: events.ScreenResume | events.Resize) -> None:
    """Called for both events of `screen` before Textual handles them. Every widget of a screen that opens is styled
    when it is mounted, and laid out by the resume; Textual would style all of them again on the resume and lay them
    out again on the first resize, a third of the time that a form takes to open."""
    if isinstance(event, events.Resize):
        if event.size == screen.size and screen.stack_updates == 1:
            event.prevent_default()
    elif screen.stack_updates == 0:
        event.refresh_styles = False
        screen.app.stylesheet.apply(screen)  # its own style sheet was read behind its registration


class Modal(ModalScreen[Outcome]):
    """Two keys in one burst may both mean an answer: the first one counts."""

    _answered = False

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        open_once(self, event)

    def on_resize(self, event: events.Resize) -> None:
        open_once(self, event)

    def dismiss(self, result: Outcome | None = None) -> AwaitComplete:
        if self._answered or not self.is_current:
            return AwaitComplete.nothing()
        self._answered = True
        return super().dismiss(result)
