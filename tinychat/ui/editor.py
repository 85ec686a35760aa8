"""The text field that the prompt and the settings share."""

from __future__ import annotations

from textual.geometry import Offset
from textual.widgets import TextArea


class Editor(TextArea):
    """Textual's, which may ask for the cursor in the middle of an edit, when it is still behind the end of the text: a
    scroll bar that goes when lines do raised ValueError, and the edit was left half done."""

    def scroll_cursor_visible(self, center: bool = False, animate: bool = False) -> Offset:
        if self.cursor_location[0] >= self.document.line_count:
            return Offset()
        return super().scroll_cursor_visible(center, animate)
