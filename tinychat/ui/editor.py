"""The text field that the prompt and the settings share."""

from __future__ import annotations

from textual.geometry import Offset
from textual.widgets import TextArea

BLINKS = 5.0  # seconds without a key that the cursor blinks: every blink paints a line


class Editor(TextArea):
    """Textual's, which may ask for the cursor in the middle of an edit, when it is still behind the end of the text: a
    scroll bar that goes when lines do raised ValueError, and the edit was left half done."""

    def on_mount(self) -> None:
        self._rest = self.set_interval(BLINKS, self._stop_blinking)

    def on_focus(self) -> None:
        self._blink()

    def on_key(self) -> None:
        self._blink()

    def _blink(self) -> None:
        self._rest.reset()
        self.cursor_blink = True

    def _stop_blinking(self) -> None:
        self.cursor_blink = False

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)
