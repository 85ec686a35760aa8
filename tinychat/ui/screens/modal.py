"""What every dialog and sheet is: a modal screen that gives one answer."""

from __future__ import annotations

from typing import TypeVar

from textual.await_complete import AwaitComplete
from textual.screen import ModalScreen

Outcome = TypeVar("Outcome")


class Modal(ModalScreen[Outcome]):
    """Two keys in one burst may both mean an answer: the first one counts."""

    _answered = False

    def dismiss(self, result: Outcome | None = None) -> AwaitComplete:
        if self._answered or not self.is_current:
            return AwaitComplete.nothing()
        self._answered = True
        return super().dismiss(result)
