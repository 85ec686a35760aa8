"""The application: themes, the backend, the chat screen. Everything else is in its own room."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.binding import Binding
from textual.driver import Driver
from textual.events import InputEvent
from textual.message import Message
from textual.screen import Screen
from textual.theme import Theme

from tinychat import process
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.factory import open_backend as open_any
from tinychat.backend.protocol import Backend
from tinychat.chat import settings
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation
from tinychat.chat.history import History
from tinychat.chat.loading import OpenBackend
from tinychat.chat.start import Start
from tinychat.errors import TinychatError, encodable
from tinychat.tools.mcp import McpServers
from tinychat.tools.permission import Permissions
from tinychat.ui import screens
from tinychat.ui.announcer import Announcer
from tinychat.ui.boundary import LastingApp
from tinychat.ui.chat import models
from tinychat.ui.chat.handlers import SettingsEdited
from tinychat.ui.chat.palette import PaletteScreen
from tinychat.ui.chat.screen import ChatScreen
from tinychat.ui.driver import TerminalDriver
from tinychat.ui.theme import THEMES

PAINTED = 5.0  # seconds that a load waits for the first screen at most
RESTED = 1.0  # seconds without a key after which a pause of the screen disturbs nobody
ANNOUNCED = 0.25  # seconds between two looks at what the terminal has to be told


class TinychatApp(LastingApp):
    """`path` is loaded on start and called `model`; without it the picker opens. `history` None saves nothing;
    `conversation` is shown first. `remember` gets settings that the user changed by choosing (theme, experts, the
    model); `mounted` is called when the app is; `stop_repetition` and `titles` are the controller's; `tools` is the
    folder that tools work in, `mcp` the servers that `mcp_file` names. Raises TinychatError where `tools` is no
    folder."""

    TITLE = "tinychat"
    CHAT = ChatScreen
    DRIVER: type[Driver] | None = TerminalDriver  # None: Textual's choice
    CSS_PATH = ["tinychat.tcss", *screens.STYLES]
    COMMANDS: ClassVar[set[Any]] = set()  # the chat screen's are all
    BINDINGS = [Binding("ctrl+q", "quit", "leave", show=False, priority=True)]

    def __init__(
        self,
        model: str | None = None,
        path: Path | None = None,
        *,
        conversation: Conversation | None = None,
        own: settings.Settings | None = None,
        history: History | None = None,
        open_backend: OpenBackend | None = None,
        remember: Callable[..., object] | None = None,
        mounted: Callable[[], object] | None = None,
        stop_repetition: bool = False,
        titles: bool = False,
        tools: Path | None = None,
        permissions: Permissions | None = None,
        mcp: McpServers | None = None,
        mcp_file: Path | None = None,
        **load_options: Any,
    ) -> None:
        super().__init__(driver_class=self.DRIVER)
        self.own = own or settings.Settings()
        for theme in THEMES:
            self.register_theme(theme)
        # Not with `self.theme =` when the app is mounted: the style sheets would be parsed and applied twice. They have
        # their colours from Textual's own theme so far.
        chosen = self.own.theme if self.own.theme in self.available_themes else THEMES[0].name
        self.set_reactive(TinychatApp.theme, chosen)
        self.stylesheet.set_variables(self.get_css_variables())
        conversation = conversation or Conversation(parameters=self.own.parameters)
        self._painted = threading.Event()
        open_backend = partial(_behind, self._painted, open_backend or partial(open_any, thread=EngineThread()))
        save = history.save if history else None
        self.controller = Controller(
            open_backend,
            conversation,
            save=save,
            permissions=permissions,
            stop_repetition=stop_repetition,
            titles=titles,
        )
        self.chat = self.CHAT(self.controller, history, self.own.experts, self.remember, mcp, mcp_file)
        if tools is not None:
            self.chat.use_folder(tools)
        notify: Any = self.own.notify
        self._announcer = Announcer(self._tell_terminal, notify, os.environ)
        self._remember, self._mounted = remember, mounted
        self._typed_at = -math.inf
        self._model, self._path, self._options = model, path, load_options

    async def _dispatch_message(self, message: Message) -> None:
        if isinstance(message, InputEvent):
            self._typed_at = time.monotonic()
        await super()._dispatch_message(message)

    def typed_within(self, seconds: float) -> bool:
        """Whether a key or the mouse was used in the last `seconds`."""
        return time.monotonic() - self._typed_at < seconds

    def _tell_terminal(self, sequence: str) -> None:
        """A sequence that is no part of the screen; only a terminal of our own gets it."""
        if isinstance(self._driver, TerminalDriver):
            self._driver.write(sequence)

    def _announce(self) -> None:
        c = self.controller
        asks = c.calling is not None and c.calling.asked is not None
        self._announcer.update(c.busy, asks, c.conversation.title, self.app_focus, time.monotonic())

    def on_mount(self) -> None:
        self.theme_changed_signal.subscribe(self, self._theme_chosen)
        self.push_screen(self.chat)
        self.chat.set_interval(ANNOUNCED, self._announce)  # of the screen: one of the app would outlive a panic
        self.chat.mcp.start()
        if self._path is not None:
            self.controller.load(self._model or self._path.name, self._path, **self._options)
        else:
            self.call_after_refresh(models.first_model, self.chat)
        for problem in self.own.problems:
            self.call_after_refresh(self.chat.say, problem, True)
        if isinstance(self._driver, TerminalDriver) and (typed := self._driver.typed_ahead):
            self.call_after_refresh(self.chat.type_ahead, typed)
        self.call_after_refresh(self._painted.set)
        if self._mounted is not None:
            self._mounted()

    @property
    def home(self) -> Screen[Any]:
        return self.chat

    def say_fault(self, line: str) -> None:
        """In the transcript; a sheet that is open would hide that, so before it as well."""
        self.call_later(self.chat.say, line, True)
        if self.screen is not self.chat:
            self.notify(line, severity="error", markup=False)

    def _theme_chosen(self, theme: Theme) -> None:
        if theme.name != (self.own.theme or THEMES[0].name):
            try:
                self.remember(theme=theme.name)
            except TinychatError as e:
                self.call_later(self.chat.say, str(e), True)

    def remember(self, **changes: Any) -> None:
        """Keeps what the user chose, fields of Settings. Raises TinychatError."""
        self.own = replace(self.own, **changes)
        if self._remember is not None:
            self._remember(**changes)

    @on(SettingsEdited)
    def _edited(self, event: SettingsEdited) -> None:
        """What can be otherwise at once is; the rest counts from the next conversation, load or start on."""
        self.own, c = event.own, self.controller
        c.stop_repetition, c.titles.on = self.own.stop_repetition, self.own.titles
        kind: Any = self.own.notify
        self._announcer.kind = kind
        self.chat.experts = self.own.experts
        self.chat.paint_panel()
        if self.own.theme in ("", *self.available_themes):
            self.theme = self.own.theme or THEMES[0].name

    def action_command_palette(self) -> None:
        """Its commands are the chat's. Without the fixed id that Textual gives it: one that is still closing must not
        forbid another."""
        if self.screen is self.chat:
            self.push_screen(PaletteScreen())

    def copy_to_clipboard(self, text: str) -> None:
        super().copy_to_clipboard(encodable(text))

    def exit(self, *args: Any, **kwargs: Any) -> None:
        """Leaves at once: the backend is told to stop and not waited for; a running answer is saved as it is."""
        if self.chat.is_mounted:
            self.chat.keep_draft()
        self.controller.leave()
        super().exit(*args, **kwargs)


def _behind(painted: threading.Event, open_backend: OpenBackend, path: Path, **options: Any) -> Backend:
    """Loads a model once the first screen is `painted`: the imports of the engine would take half of the interpreter
    from it."""
    painted.wait(PAINTED)
    return open_backend(path, **options)


def main(begun: Start) -> int:
    """Runs the app; where `begun` has no model, the picker opens."""
    own, model = replace(begun.own, problems=begun.problems), begun.model
    prepared = False

    def opened(path: Path, *, replaces: Backend | None, **options: Any) -> Backend:
        with process.starting():
            backend = begun.open_backend(path, replaces=replaces, **options)
        if replaces is not None:
            process.collect_frozen()
            process.freeze()
        return backend

    def rest() -> None:
        nonlocal prepared
        if app.controller.loading is not None or app.typed_within(RESTED):
            return
        process.collect_if_due()
        if not prepared:
            prepared = True
            threading.Thread(target=screens.import_all, name="dialogs", daemon=True).start()

    def mounted() -> None:
        process.freeze()
        app.chat.set_interval(RESTED, rest)
        loop = asyncio.get_running_loop()

        def end(number: int, frame: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(partial(app.exit, return_code=128 + number))

        process.on_signals(end)

    app = TinychatApp(
        model.name if model else None,
        model.path if model else None,
        conversation=begun.conversation,
        own=own,
        history=begun.history,
        remember=settings.update,
        open_backend=opened,
        mounted=mounted,
        stop_repetition=own.stop_repetition,
        titles=own.titles,
        permissions=Permissions.of_user(),
        mcp=begun.mcp,
        mcp_file=begun.mcp_file,
        tools=begun.tools,
        **(model.options if model else {}),
    )
    try:
        app.run()
    finally:
        begun.mcp.close()
    return app.return_code or 0
