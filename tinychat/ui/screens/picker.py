"""Choosing a model: what is here, what fits, how fast it is or will be; downloads run in their rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.filesize import decimal
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Input, Static
from textual.widgets.option_list import Option

from tinychat.backend.address import Server
from tinychat.chat import settings
from tinychat.chat.servers import SavedServer, is_address
from tinychat.errors import TinychatError, printable
from tinychat.measure import log
from tinychat.models.fit import memory_gb_s
from tinychat.models.registry import Model
from tinychat.ui.screens import picker_rows, picker_servers
from tinychat.ui.screens.dialogs import ConfirmScreen
from tinychat.ui.screens.downloads import Download, Downloads
from tinychat.ui.screens.headers import Headers
from tinychat.ui.screens.picker_rows import Row
from tinychat.ui.screens.picker_servers import ServerRow, Servers
from tinychat.ui.screens.server_form import ServerForm
from tinychat.ui.screens.sheet import Rows, SearchField, Sheet, in_daemon

_ENTER = ("open", "download", "resume", "pause")  # what Enter may mean


@dataclass(frozen=True)
class PickedModel:
    """What to load: the file, the name the user knows it by, and the chat preset it needs (None: the file's own
    template). Of a `server`, `path` is never read; it only identifies the server."""

    path: Path
    name: str
    preset: str | None
    server: Server | None = None


class PickerScreen(Sheet[PickedModel]):
    """`context`: tokens the verdicts are for; `freed`: bytes that unloading the present model will give back; `text`:
    what the search field says first; `loaded`: the present model, where it is a file.

    What is in the field decides what Enter means: a URL, path or folder shows its own rows and no others. Nothing is
    downloaded before its size is on the screen.
    """

    TITLE = "Choose a model"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open"),
        Binding("enter", "download", "download"),
        Binding("enter", "resume", "resume"),
        Binding("enter", "pause", "pause"),
        Binding("ctrl+d", "delete", "delete", priority=True),
        Binding("ctrl+s", "server", "add a server", priority=True),
    ]

    def __init__(
        self,
        context: int = 4096,
        freed: int = 0,
        downloads: Downloads | None = None,
        text: str = "",
        loaded: Model | None = None,
    ) -> None:
        super().__init__()
        self._loaded = loaded
        self._for_context, self._freed, self._downloads = context, freed, downloads or Downloads()
        self._rows: dict[str, Row] = {}
        self._servers = Servers()
        self._text = text
        self._search = ""  # the words that the rows match
        self._places: dict[str, Model] = {}  # what a typed URL, path or folder stands for, by name
        self._place_error = ""
        self._headers = Headers()
        self._gb_s = 0.0  # this machine's memory limit, when it is known
        self._open_when_done: str | None = None
        self._meaning: list[bool | None] = []  # what the keys do at present

    def body(self) -> ComposeResult:
        with Horizontal(classes="search-line"):
            yield Static("›", classes="prompt-mark")
            yield SearchField(self._text, "search, or a URL or path of a .gguf file")
        yield Static(classes="columns")
        rows = Rows(markup=False)
        rows.can_focus = False  # the search field keeps the focus, the arrows reach us anyway
        yield rows
        yield Static(classes="detail")

    def on_mount(self) -> None:
        self._settings = settings.load()
        self._servers = Servers(self._settings.servers)
        for server in self._servers.saved:
            self._ask(server)
        self._speeds = log.speeds(log.history())
        self._take(self._text)
        self._read_limit()
        self.set_interval(0.2, self._tick)
        self.query_one(SearchField).focus()

    def on_resize(self) -> None:  # also the first time there is a size
        self.call_after_refresh(self._resized)

    def _resized(self) -> None:
        if self._alive:
            here = next((name for name, row in self._rows.items() if row.path), None)
            self._show(self._highlighted or here)

    # what is shown

    def _refresh_rows(self) -> None:
        extra = [*self._settings.models, *self._places.values()]
        self._rows = {
            row.model.name: row
            for row in picker_rows.rows(
                extra, self._for_context, self._freed, self._speeds, self._headers.sizes, self._gb_s, self._loaded
            )
        }

    def _take(self, text: str) -> None:
        """Makes the rows those for `text`: what stands at a URL or path, or the models that match its words."""
        self._text, self._places, self._place_error, self._search = text, {}, "", text
        self._servers.typed = None
        if is_address(text):
            self._search = ""
            try:
                self._servers.type(text)
            except TinychatError as e:
                self._place_error = str(e)
        elif picker_rows.is_place(text):
            self._search = ""
            try:
                self._places = {m.name: m for m in picker_rows.at_place(text, self._settings.models)}
            except TinychatError as e:
                self._place_error = str(e)
        self._refresh_rows()

    @property
    def _alive(self) -> bool:
        """Whether the widgets still exist: those of a closing screen are removed before it is."""
        return self.is_attached and bool(self.query(Rows)) and bool(self.query(".detail"))

    @property
    def _highlighted(self) -> str | None:
        option = self.query_one(Rows).highlighted_option
        return option.id if option else None

    @property
    def _row(self) -> Row | None:
        return self._rows.get(self._highlighted or "")

    @property
    def _server(self) -> ServerRow | None:
        """The highlighted row, where it is a server's."""
        return next((r for r in self._servers.rows() if r.id == self._highlighted), None)

    @property
    def _width(self) -> int:
        return max(24, self.query_one(Rows).size.width - 2)

    def _show(self, keep: str | None) -> None:
        width, options = self._width, []
        found = picker_rows.sections(self._rows.values(), self._search)
        if self._place_error:
            found = []
        elif self._places:
            found = [("at this place", [row for name, row in self._rows.items() if name in self._places])]
        servers = [] if self._place_error or self._places else self._servers.rows(self._search)
        if servers:
            options.append(Option(Content("servers"), disabled=True))
            options += [Option(picker_servers.line(server, width), id=server.id) for server in servers]
        for name, rows in [] if self._servers.typed else found:
            options.append(Option(Content(picker_rows.cell(name, width)), disabled=True))
            options += [Option(self._line(row, width), id=row.model.name) for row in rows]
        self.query_one(".columns", Static).update(picker_rows.heading(width))
        self.query_one(Rows).show(options, keep)
        self._explain()

    def _line(self, row: Row, width: int) -> Content:
        return picker_rows.line(row, width, self._job(row))

    def _job(self, row: Row) -> Download | None:
        """The download of a row without its file; one whose file is here is over, though it may not say so yet."""
        return None if row.path else self._downloads.get(row.model)

    def _tick(self) -> None:
        """Paints the downloads' progress, 5 times a second at most: painting takes CPU time from decoding."""
        if not self._alive:
            return
        rows = self.query_one(Rows)
        shown = {option.id for option in rows.options}
        finished = False
        for name, row in self._rows.items():
            if job := self._job(row):
                finished = finished or bool(job.state == "done" and job.path and job.path.exists())
                if name in shown:
                    rows.replace_option_prompt(name, self._line(row, self._width))
        if finished:
            self._refresh_rows()
            self._show(self._highlighted)
        wanted = self._rows.get(self._open_when_done or "")
        if wanted and wanted.path:
            self._open_when_done = None
            if wanted == self._row and self.is_current:
                self.action_open()
        self._explain()

    def _explain(self) -> None:
        """The line below the list: the verdict, sizes, errors."""
        text, bad = self._explanation()
        detail = self.query_one(".detail", Static)
        if (text := printable(text, newlines=False)) != detail.content:  # an update lays the screen out again
            detail.update(Content(text))
        detail.set_class(bad, "-error")
        meaning = [self.check_action(action, ()) for action in (*_ENTER, "delete")]
        if meaning != self._meaning:  # the footer would flicker otherwise
            self._meaning = meaning
            self.refresh_bindings()

    def _explanation(self) -> tuple[str, bool]:
        if self._place_error:
            return self._place_error, True
        if (server := self._server) is not None:
            return picker_servers.explain(server)
        if (row := self._row) is None:
            return "nothing matches; a URL or a path of a .gguf file can be typed as well", False
        if not row.path and not row.partial and not row.model.why_not and not self._size_settled(row):
            return f"asking for the size of {row.model.name} …", False
        return picker_rows.explain(row, self._job(row), self._headers.errors.get(row.model.name))

    # what the user does

    @on(Input.Changed)
    def _searched(self, event: Input.Changed) -> None:
        if event.value != self._text:
            self._take(event.value)
            self._show(self._highlighted)

    @on(SearchField.Pressed)
    async def _pressed(self, event: SearchField.Pressed) -> None:
        if event.key == "enter":
            await self._act()
        else:
            self.query_one(Rows).walk(event.key)

    @on(Rows.OptionHighlighted)
    def _moved(self) -> None:
        if not self._alive:
            return
        self._explain()
        row = self._row
        if row and self._headers.missing(row):
            self._read_header(row)

    @on(Rows.OptionSelected)
    async def _act(self) -> None:
        """Does what Enter means for the highlighted row, if anything."""
        for action in _ENTER:
            if self.check_action(action, ()):
                await self.run_action(action)
                return

    @work
    async def _read_limit(self) -> None:
        """How fast models will be: where nothing was measured yet it is measured now."""
        self._gb_s = await in_daemon(partial(memory_gb_s, self._settings.threads))
        if self._alive:
            self._refresh_rows()
            self._show(self._highlighted)

    @work
    async def _read_header(self, row: Row) -> None:
        await self._headers.read(row)
        if self._alive:
            self._refresh_rows()
            self._show(self._highlighted)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """What the keys mean for the highlighted row."""
        if action not in (*_ENTER, "delete"):
            return True
        if not self.is_mounted or not self._alive:
            return False
        if (server := self._server) is not None:
            return action == "open" or (action == "delete" and server.saved)
        if (row := self._row) is None:
            return False
        job = self._downloads.get(row.model)
        running = bool(job and job.state == "running") and not row.path
        meaning = "open" if row.path else "pause" if running else "resume" if row.partial else "download"
        if action == "delete":
            return row.deletable and not row.model.path
        if action == "download" and not self._size_settled(row):
            return False
        return action == meaning and not (action in ("download", "resume") and bool(row.model.why_not))

    def _size_settled(self, row: Row) -> bool:
        """Whether the size of a download is known, or known to be unknowable."""
        return bool(row.size) or row.model.name in self._headers.errors

    def action_open(self) -> None:
        if (server := self._server) is not None:
            self._connect(server)
        elif (row := self._row) and row.path:
            self.dismiss(PickedModel(row.path, row.model.name, row.model.preset))

    def action_download(self) -> None:
        if (row := self._row) is None:
            return
        f, question = row.fit, ""
        if f.verdict == "does not fit":
            needs = f"it needs {decimal(f.needed)} of memory, {decimal(f.available)} are free"
            question = f"{row.model.name} does not fit: {needs}."
        elif not row.size and not row.partial:
            question = f"{row.model.name}: its size is not known ({self._headers.errors.get(row.model.name)})."
        if question:
            confirm = ConfirmScreen(question, "Download anyway")
            self.app.push_screen(confirm, lambda yes: self._start(row) if yes else None)
        else:
            self._start(row)

    action_resume = action_download

    def _start(self, row: Row) -> None:
        self._downloads.start(row.model)
        self._open_when_done = row.model.name
        self._tick()

    def action_pause(self) -> None:
        if row := self._row:
            self._downloads.pause(row.model)
            self._refresh_rows()
            self._show(self._highlighted)

    def action_delete(self) -> None:
        if server := self._server:
            name = server.server.name

            def forget(yes: bool | None) -> None:
                if yes:
                    self._change_servers(lambda: settings.delete_server(name))

            self.app.push_screen(ConfirmScreen(f"Forget the server {name}?", "Forget"), forget)
        elif row := self._row:
            what = f"the {decimal(row.partial)} that have arrived" if row.partial else "the file"

            def answer(yes: bool | None) -> None:
                if yes:
                    self._delete(row)

            self.app.push_screen(ConfirmScreen(f"Delete {what} of {row.model.name}?", "Delete"), answer)

    @work
    async def _delete(self, row: Row) -> None:
        try:
            await in_daemon(lambda: self._downloads.discard(row.model))
        except TinychatError as e:
            self.notify(printable(str(e)), severity="error", markup=False)
        if self._alive:
            self._refresh_rows()
            self._show(self._highlighted)

    # servers

    @work
    async def _ask(self, server: SavedServer, open_it: bool = False) -> None:
        """Asks for the models of `server`; `open_it`: and opens the only one."""
        await self._servers.ask(server)
        if not self._alive:
            return
        self._show(self._highlighted)
        rows = [r for r in self._servers.rows() if r.server.url == server.url and r.known]
        if open_it and len(rows) == 1 and self.is_current:
            self._connect(rows[0])

    def _connect(self, row: ServerRow) -> None:
        """Opens a server's model; one that is not known, or was not there, is asked for first."""
        if not row.known:
            self._ask(row.server, True)
            self._show(row.id)
            return
        try:
            server = row.server.connection()
        except TinychatError as e:
            self.notify(printable(str(e)), severity="error", markup=False)
            return
        self.dismiss(PickedModel(Path(server.url) / (server.model or ""), row.name, None, server))

    def action_server(self) -> None:
        """The form of the highlighted saved server, or of a new one."""
        row, typed = self._server, self._servers.typed
        known = next((s for s in self._servers.saved if row and s.name == row.server.name), None)

        def saved(server: SavedServer | None) -> None:
            if server is None:
                return
            self._change_servers(lambda: settings.save_server(server))
            self.query_one(SearchField).value = ""

        self.app.push_screen(ServerForm(known or SavedServer("", typed.url if typed else "")), saved)

    def _change_servers(self, change: Callable[[], settings.Settings]) -> None:
        try:
            self._settings = change()
        except TinychatError as e:
            self.notify(printable(str(e)), severity="error", markup=False)
            return
        typed, self._servers = self._servers.typed, Servers(self._settings.servers)
        self._servers.typed = typed
        for server in self._servers.saved:
            self._ask(server)
        self._show(self._highlighted)
