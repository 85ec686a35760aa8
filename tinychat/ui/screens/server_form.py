"""A server of the settings as a form."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input, Label, Static

from tinychat.chat.servers import SavedServer, user_server
from tinychat.errors import TinychatError, printable
from tinychat.ui.screens.sheet import Sheet

FIELDS = (
    ("name", "what you call it"),
    ("url", "http://box:8080 or https://llm.example.com/v1"),
    ("model", "where it has several; empty asks the server"),
    ("key_env", "the environment variable that holds the key"),
    ("key_file", "or a file with the key that only you can read"),
)


class ServerForm(Sheet[SavedServer]):
    """Dismisses with the server as the form has it, None when it is given up. There is no field for the key itself."""

    TITLE = "A server"
    CSS_PATH = ["sheet.tcss", "server_form.tcss"]  # type: ignore[assignment]
    AUTO_FOCUS = "#name"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "save", priority=True),
        Binding("down", "app.focus_next", "next", show=False),
        Binding("up", "app.focus_previous", "previous", show=False),
    ]

    def __init__(self, server: SavedServer) -> None:
        super().__init__()
        self._server = server

    def body(self) -> ComposeResult:
        with Vertical():
            for name, help in FIELDS:
                with Horizontal(classes="field"):
                    yield Label(name.replace("_", " "))
                    yield Input(getattr(self._server, name), help, id=name, compact=True, select_on_focus=True)
        yield Static(classes="detail")

    @on(Input.Submitted)
    def action_save(self) -> None:
        said = {name: self.query_one(f"#{name}", Input).value.strip() for name, _ in FIELDS}
        try:
            server = user_server(said.pop("name"), said)
        except TinychatError as e:
            detail = self.query_one(".detail", Static)
            detail.update(Content(printable(str(e), newlines=False)))
            detail.add_class("-error")
            return
        self.dismiss(server)
