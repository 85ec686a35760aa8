"""Keys and commands, as they are right now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingsMap, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from tinychat.ui.keys import in_order, key_name
from tinychat.ui.screens.sheet import Sheet

Entry = tuple[str, str]
"""A line of the help: what to type, what it does."""


class HelpScreen(Sheet[None]):
    """`keys` default to the bindings of the screen below."""

    TITLE = "Help"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("f1", "close", "close", show=False)]
    DEFAULT_CSS = """
    HelpScreen VerticalScroll { height: 1fr; scrollbar-gutter: stable; }
    HelpScreen VerticalScroll > Static { height: auto; margin-bottom: 1; }
    HelpScreen VerticalScroll > .heading { margin-bottom: 0; }
    """

    def __init__(
        self, commands: Iterable[Entry] = (), keys: Iterable[Entry] | None = None, prompt: Iterable[Entry] = ()
    ) -> None:
        super().__init__()
        self._commands, self._keys, self._prompt = list(commands), keys, list(prompt)

    def body(self) -> ComposeResult:
        keys = keys_of(self.app.screen_stack[-2]) if self._keys is None else list(self._keys)
        with VerticalScroll():
            for heading, entries in (("Prompt", self._prompt), ("Keys", keys), ("Commands", self._commands)):
                if entries:
                    yield Static(Content.styled(heading, "bold $accent"), classes="heading")
                    yield Static(_table(entries))

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()


def keys_of(screen: Screen[object]) -> list[Entry]:
    """The keys that do something on `screen` now, with what they do; several keys of one action together.

    What every text field of every program understands (arrows, select all, ...) is left out.
    """
    by_action: dict[str, tuple[list[str], str]] = {}
    for active in in_order(screen):
        binding = active.binding
        if binding.description and (active.node is screen.app or binding.key in _own_keys(type(active.node))):
            keys, _ = by_action.setdefault(binding.action, ([], active.tooltip or binding.description))
            keys.append(key_name(binding.key))
    return [(", ".join(keys), text) for keys, text in by_action.values()]


def _own_keys(cls: type) -> set[str]:
    """The keys that `cls` binds itself, not Textual for it."""
    ours = [c for c in cls.__mro__ if not c.__module__.startswith("textual.")]
    return {key for c in ours for key in BindingsMap(c.__dict__.get("BINDINGS", ())).key_to_bindings}


def _table(entries: list[Entry]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, text in entries:
        table.add_row(Text(f"  {key}", "bold"), Text(text))
    return table
