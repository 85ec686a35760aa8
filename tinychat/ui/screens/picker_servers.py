"""The servers that the picker offers beside models: which there are, what they have when asked, and their lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from textual.content import Content

from tinychat.backend.address import Server, address
from tinychat.backend.remote import RemoteBackend
from tinychat.chat.servers import SavedServer
from tinychat.errors import TinychatError
from tinychat.ui.screens.sheet import cell, in_daemon

PREFIX = "server:"  # of a row's id: no model is called so


@dataclass(frozen=True)
class ServerRow:
    """A model of a server, or a server whose models are not known. `name` is what the chat calls it; `error` is why it
    did not answer, `asked` whether it has been asked."""

    server: SavedServer
    name: str
    saved: bool
    asked: bool
    error: str = ""

    @property
    def id(self) -> str:
        return PREFIX + self.name

    @property
    def known(self) -> bool:
        """Whether the server answered."""
        return self.asked and not self.error and bool(self.server.model)


class Servers:
    """The saved servers, and the one whose address is typed."""

    def __init__(self, saved: Iterable[SavedServer] = ()) -> None:
        self.saved = tuple(saved)
        self.typed: SavedServer | None = None
        self._asked: set[SavedServer] = set()
        self._models: dict[SavedServer, list[str]] = {}
        self._errors: dict[SavedServer, str] = {}

    def type(self, text: str) -> None:
        """Offers the server at the address `text`. Raises TinychatError."""
        url = address(text)
        self.typed = SavedServer(url, url)

    async def ask(self, server: SavedServer) -> None:
        """Asks which models `server` has."""
        self._asked.add(server)
        self._errors.pop(server, None)
        try:
            self._models[server] = await in_daemon(partial(_models, server))
        except TinychatError as e:
            self._errors[server] = str(e)

    def rows(self, search: str = "") -> list[ServerRow]:
        """The typed server, else the saved ones that match the words of `search`."""
        rows = [row for server in ([self.typed] if self.typed else self.saved) for row in self._of(server)]
        words = search.casefold().split()
        return [r for r in rows if all(w in f"{r.name} {r.server.url} {r.server.model}".casefold() for w in words)]

    def _of(self, server: SavedServer) -> list[ServerRow]:
        saved, asked, error = server is not self.typed, server in self._asked, self._errors.get(server, "")
        models = self._models.get(server, [])
        if server.model and models and server.model not in models:
            error = f"{server.url} has no model {server.model}; it has {', '.join(models[:20])}"
        if error or not models or server.model:
            return [ServerRow(server, server.name, saved, asked, error)]
        names = [server.name] if len(models) == 1 else [f"{server.name}/{model}" for model in models]
        return [ServerRow(replace(server, model=m), name, saved, asked) for name, m in zip(names, models)]


def _models(server: SavedServer) -> list[str]:
    at: Server = server.connection()
    return RemoteBackend.models(at.url, at.key)


def line(row: ServerRow, width: int) -> Content:
    """One row in `width` cells."""
    word, style = ("✗ no answer", "$text-error") if row.error else ("● answers", "$text-success")
    if not row.error and not row.known:
        word, style = ("… asking" if row.asked else "", "$foreground-muted")
    name = max(8, min(32, width - 50))
    model = cell(row.server.model, max(8, width - name - 50 + 16))
    text = cell(f" {cell(row.name, name)}  {cell(row.server.url, 30)} {model}", width - 15) + " " + cell(word, 14)
    return Content(text).stylize(style, len(text) - 14, len(text))


def explain(row: ServerRow) -> tuple[str, bool]:
    """The line below the list, and whether it is about something that went wrong."""
    if row.error:
        return f"{row.error} (enter asks again)", True
    s = row.server
    key = f"key from the variable {s.key_env}" if s.key_env else f"key from {s.key_file}" if s.key_file else "no key"
    return f"a server at {s.url} · {key}" + (f" · model {s.model}" if s.model else ""), False
