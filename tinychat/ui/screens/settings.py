"""The settings file as it is, editable: comments, presets and models of one's own included."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Static, TextArea

from tinychat.chat import settings
from tinychat.chat.settings import Settings
from tinychat.errors import TinychatError, printable
from tinychat.ui.editor import Editor
from tinychat.ui.screens.dialogs import ConfirmScreen
from tinychat.ui.screens.sheet import Sheet

EXAMPLE = """# tinychat's settings. What is left out has its default.
# model = "smollm2:135m"     # without it: the model of last time
# threads = 4
# theme = "tinychat-dark"
# notify = "bell"            # unseen answers; "desktop", "off"
# experts = true             # the heat strip, as /experts
# kv_cache_gb = 4            # disk for KV caches; 0 = none
# stop_repetition = false    # lets an answer repeat itself
# titles = false             # no titles made by the model

# [parameters]               # of a new conversation
# temperature = 0.7
# system = "Answer briefly."
# drop_oldest = true         # full context: does not ask

# [presets.coder]
# temperature = 0.2
# system = "You write Python."

# [models."mine"]
# path = "~/models/mine.gguf"

# [servers."box"]            # a server, shown by the picker
# url = "http://box:8080"
# key_file = "~/box.key"     # or key_env, the name of a variable
"""


class SettingsScreen(Sheet[Settings]):
    """Dismisses with the settings as saved."""

    TITLE = "Settings"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+s", "save", "save", priority=True)]
    DEFAULT_CSS = """
    SettingsScreen TextArea { height: 1fr; border: none; padding: 0; background: $background; }
    """

    def body(self) -> ComposeResult:
        yield Editor(show_line_numbers=True, compact=True, highlight_cursor_line=False)
        yield Static(classes="detail")

    def on_mount(self) -> None:
        file = settings.path()
        self.set_title("Settings", str(file))
        text = EXAMPLE
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as e:
            self.notify(printable(str(e)), severity="error", markup=False)
            self.dismiss(None)
        self._before = text
        area = self.query_one(TextArea)
        area.text = text
        area.focus()

    @on(TextArea.Changed)
    def _judge(self) -> bool:
        """Says what is wrong with the text as it is; whether it can be saved."""
        try:
            lines, good = settings.parse(self.query_one(TextArea).text).problems, True
        except ValueError as e:
            lines, good = (str(e),), False
        detail = self.query_one(".detail", Static)
        detail.update(Content(printable("\n".join(lines[:3]))))
        detail.set_class(bool(lines), "-error")
        return good

    def action_save(self) -> None:
        if self._judge():
            try:
                self.dismiss(settings.write_text(self.query_one(TextArea).text))
            except TinychatError as e:
                self.notify(printable(str(e)), severity="error", markup=False)

    def action_close(self) -> None:
        if self.query_one(TextArea).text == self._before:
            self.dismiss(None)
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.dismiss(None)

        self.app.push_screen(
            ConfirmScreen("Close without saving what you changed?", "Discard", "Keep editing"), answered
        )
