"""The saved conversations at the left of a wide screen."""

from __future__ import annotations

from contextlib import suppress

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tinychat.chat.days import by_day
from tinychat.chat.history import History, Summary
from tinychat.errors import TinychatError
from tinychat.ui.screens.sheet import cell, in_daemon

LISTED = 100  # the latest; F3 finds the others


class Sidebar(Vertical):
    """The latest conversations; a click opens one. It has no keys: F3 does the same and more with the keyboard."""

    class Opened(Message):
        """The user wants conversation `id`."""

        def __init__(self, id: str) -> None:
            super().__init__()
            self.id = id

    def __init__(self, history: History | None) -> None:
        super().__init__(id="sidebar")
        self._history = history
        self._shown: tuple[tuple[Summary, ...], str, int] | None = None

    def compose(self) -> ComposeResult:
        yield Static("conversations", classes="head")
        yield OptionList(markup=False, compact=True)

    def on_mount(self) -> None:
        self.query_one(OptionList).can_focus = False
        if self._history is None:
            self.display = False

    @work(exclusive=True)
    async def show(self, present: str) -> None:
        """Reads the list again; `present` is the id of the open conversation."""
        if self._history is None or not self.display:
            return
        with suppress(TinychatError):  # the history says what is wrong with it when a conversation is saved
            history = self._history
            found = tuple(await in_daemon(lambda: history.find(limit=LISTED)))
            if self.is_attached:
                self._list(found, present)

    def _list(self, found: tuple[Summary, ...], present: str) -> None:
        rows = self.query_one(OptionList)
        width = rows.content_size.width
        if (found, present, width) == self._shown:
            return
        self._shown = found, present, width
        options: list[Option] = []
        for day, group in by_day(found):
            options.append(Option(Content(("\n" if options else "") + day), disabled=True))
            options += [Option(_row(s, width), id=s.id) for s in group]
        rows.set_options(options)
        rows.highlighted = next((i for i, o in enumerate(options) if o.id == present), None)

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if event.option.id:
            self.post_message(self.Opened(event.option.id))


def _row(s: Summary, width: int) -> Content:
    """The title, and below it the project or the last turn's beginning."""
    below = s.project or s.preview
    line = Content(cell(s.title or "untitled", width))
    return line + Content.styled(f"\n{cell(below, width)}", "$foreground-muted") if below else line
