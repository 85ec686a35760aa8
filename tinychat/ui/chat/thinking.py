"""The thinking of an answer: one line that counts, and below it, when unfolded, what was thought."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.panel.figures import seconds


class ThinkingBlock(Vertical):
    """Folded at first. Nothing is laid out while it is folded, so long thinking costs nothing."""

    def __init__(self) -> None:
        super().__init__(classes="thinking")
        self.display = False
        self.folded = True
        self._text: list[str] = []
        self._fed = 0
        self._state = ""
        self._view: MarkdownView | None = None  # made when it is first unfolded

    def compose(self) -> ComposeResult:
        yield Static(classes="thinking-head")

    def feed(self, text: str) -> None:
        self._text.append(text)
        self._sync()

    def show(self, tokens: int, elapsed: float, *, live: bool, cut: bool = False) -> None:
        """The line: `live` while the model thinks, `cut` when it was stopped before it had finished thinking."""
        self.display = True
        count = f"{tokens:,} token{'s' * (tokens != 1)}" if tokens else ""
        said = "thinking" if live else f"thought for {seconds(elapsed)}" + (", not finished" if cut else "")
        self._state = " · ".join(filter(None, [said, seconds(elapsed) if live else "", count]))
        self._head()

    def toggle(self) -> None:
        self.folded = not self.folded
        self._sync()
        self._head()

    def unfolded(self) -> MarkdownView | None:
        """Unfolds; the view of the text."""
        if self.folded:
            self.toggle()
        return self._view

    def _head(self) -> None:
        if self.children:
            content = Content(f"{'▸' if self.folded else '▾'} {self._state}")
            head = self.query_one(".thinking-head", Static)
            if head.content != content:
                head.update(content, layout=False)

    def _sync(self) -> None:
        if not self.children:
            return
        if self._view is None and not self.folded:
            self._view = MarkdownView(plain=True, classes="thinking-text")
            self.mount(self._view)
        if self._view is not None:
            if not self.folded and self._fed < len(self._text):
                self._view.feed("".join(self._text[self._fed :]))
                self._fed = len(self._text)
            self._view.display = not self.folded

    def on_mount(self) -> None:
        self._sync()
        self._head()

    def on_click(self, event: events.Click) -> None:
        if event.widget is not None and event.widget.has_class("thinking-head"):
            event.stop()
            self.toggle()
