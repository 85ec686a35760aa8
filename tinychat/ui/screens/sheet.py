"""What every dialog has in common: a sheet over the chat with a title, a body and a footer of its keys; Esc closes
it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

from rich.cells import cell_len, set_cell_size
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from tinychat.errors import printable
from tinychat.ui import breakpoints
from tinychat.ui.keys import KeyLine
from tinychat.ui.screens.modal import Modal, Outcome

T = TypeVar("T")


class Sheet(Modal[Outcome]):
    """Subclasses set TITLE and compose their `body`; what Esc or a click beside the sheet means is `action_close`."""

    CSS_PATH = "sheet.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close")]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (16, "-high")]

    def compose(self) -> ComposeResult:
        breakpoints.place(self)
        with Vertical(classes="sheet"):
            yield Static(Content(self.TITLE or ""), classes="sheet-title")
            yield from self.body()
            yield KeyLine()

    def body(self) -> ComposeResult:
        """The widgets between title and footer."""
        yield from ()

    def set_title(self, title: str, note: str = "") -> None:
        """Shows `title` and, dimmed behind it, `note`. Both may hold untrusted text."""
        parts = [
            Content.styled(printable(title, newlines=False), "bold"),
            Content.styled(f"   {printable(note, newlines=False)}" * bool(note), "$foreground-muted"),
        ]
        self.query_one(".sheet-title", Static).update(Content("").join(parts))

    async def on_click(self, event: events.Click) -> None:
        if self.get_widget_at(event.screen_x, event.screen_y)[0] is self:  # beside the sheet
            await self.run_action("close")

    def action_close(self) -> None:
        self.dismiss(None)


class SearchField(Input, inherit_bindings=False):
    """A search field above Rows, which keeps the focus. The keys that act on the rows come as Pressed, behind the text
    typed before them; bindings with priority would overtake characters that are still on their way."""

    BINDINGS: ClassVar[list[BindingType]] = [b for b in Input.BINDINGS if isinstance(b, Binding) and b.key != "enter"]

    class Pressed(Message):
        """`key` is enter, up, down, pageup or pagedown."""

        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def __init__(self, text: str, placeholder: str) -> None:
        super().__init__(text, placeholder=placeholder, classes="search", select_on_focus=False, validate_on=())

    async def _on_key(self, event: events.Key) -> None:
        if event.key in ("enter", "up", "down", "pageup", "pagedown"):
            event.stop()
            event.prevent_default()
            self.post_message(self.Pressed(event.key))
        else:
            await super()._on_key(event)


class Rows(OptionList):
    """A list of rows where a click chooses a row and a second click (or Enter) acts on it.

    It can be driven from a search field with `walk`; headings are disabled options.
    """

    DEFAULT_CSS = """
    Rows { border: none; padding: 0; background: transparent; height: 1fr; }
    Rows:focus { border: none; }
    """

    async def _on_click(self, event: events.Click) -> None:
        event.prevent_default()
        index = event.style.meta.get("option")
        if index is not None and index < len(self.options) and not self.options[index].disabled:
            if self.highlighted == index:
                self.action_select()
            self.highlighted = index

    def walk(self, key: str) -> None:
        """Moves the cursor by a row (up, down) or a page (pageup, pagedown), past headings."""
        match key:
            case "up":
                self.action_cursor_up()
            case "down":
                self.action_cursor_down()
            case "pageup":
                self.action_page_up()
            case "pagedown":
                self.action_page_down()

    def show(self, options: list[Option], keep: str | None) -> None:
        """Replaces all rows; highlights the one with id `keep`, else the first that is no heading."""
        self.set_options(options)
        ids = [o.id for o in options]
        first = next((i for i, o in enumerate(options) if not o.disabled), None)
        self.highlighted = ids.index(keep) if keep is not None and keep in ids else first
        if self.highlighted is not None and self.highlighted <= 1:
            self.scroll_to(y=0, animate=False)


def in_daemon(job: Callable[[], T]) -> asyncio.Future[T]:
    """Awaits `job` run on a daemon thread: unlike asyncio.to_thread, quitting never waits for a slow server or disk."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = job()
        except BaseException as e:
            error = e
        with contextlib.suppress(RuntimeError):  # the app has quit
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True).start()
    return future


def cell(text: str, width: int, right: bool = False) -> str:
    """Untrusted `text` in exactly `width` terminal cells, cut with an ellipsis."""
    text = printable(text, newlines=False)
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…" if width > 0 else ""
    pad = " " * (width - cell_len(text))
    return pad + text if right else text + pad


def ago(then: float, now: float | None = None) -> str:
    """A Unix time as text: "5 min ago", "3 d ago", "2026-11-22"."""
    passed = (time.time() if now is None else now) - then
    for limit, unit, name in (
        (60, 0, "just now"),
        (3600, 60, "min ago"),
        (86400, 3600, "h ago"),
        (7 * 86400, 86400, "d ago"),
    ):
        if passed < limit:
            return f"{int(passed // unit)} {name}" if unit else name
    return time.strftime("%Y-%m-%d", time.localtime(then))
