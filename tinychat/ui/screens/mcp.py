"""The MCP servers: command, state, tools; a switch for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from tinychat.chat.mcp import details
from tinychat.errors import TinychatError, printable
from tinychat.tools.mcp import McpServers, McpStatus
from tinychat.ui.screens.sheet import Sheet

LOOK_HZ = 2  # how often the servers' states are looked at
_MARKS = {
    "off": ("○", "$foreground-muted"),
    "starting": ("◌", "$warning"),
    "ready": ("●", "$success"),
    "failed": ("✗", "$error"),
}


class McpScreen(Sheet[None]):
    """`file` is where the servers come from; `keep(name, on)` writes there what was switched."""

    TITLE = "MCP servers"
    CSS_PATH = "mcp.tcss"

    def __init__(self, servers: McpServers, file: Path, keep: Callable[[str, bool], None]) -> None:
        super().__init__()
        self._servers, self._file, self._keep = servers, file, keep
        self._shown: tuple[McpStatus, ...] | None = None

    def body(self) -> ComposeResult:
        yield OptionList(id="servers", compact=True)
        with VerticalScroll(id="server", can_focus=False):
            yield Static()

    def on_mount(self) -> None:
        if self._servers.status:
            self.set_title("MCP servers", f"enter switches one on or off · {self._file}")
        self.query_one(OptionList).focus()
        self._look()
        self.set_interval(1 / LOOK_HZ, self._look)

    def _look(self) -> None:
        if (status := self._servers.status) == self._shown:
            return
        rows, first = self.query_one(OptionList), self._shown is None
        self._shown = status
        if first:
            rows.add_options(Option(line(s)) for s in status)
            rows.highlighted = 0 if status else None
        for i, each in enumerate(status):
            rows.replace_option_prompt_at_index(i, line(each))
        if not status:
            self._say(f"No servers. {self._file} names them, as for other programs:\n\n{EXAMPLE}")
        else:
            self._details()

    @on(OptionList.OptionHighlighted)
    def _details(self) -> None:
        at = self.query_one(OptionList).highlighted
        if self._shown and at is not None:
            self._say(details(self._shown[at]) or "off; enter starts it" * (self._shown[at].stage == "off"))

    @on(OptionList.OptionSelected)
    def _switch(self, event: OptionList.OptionSelected) -> None:
        assert self._shown is not None
        config = self._shown[event.option_index].config
        self._servers.switch(config.name, not config.on)
        self._look()
        try:
            self._keep(config.name, not config.on)
        except TinychatError as e:
            self._say(str(e))

    def _say(self, text: str) -> None:
        self.query_one("#server Static", Static).update(Content(printable(text)))


EXAMPLE = """{"mcpServers": {
  "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/home/you/notes"]},
  "web": {"url": "https://example.com/mcp"}
}}"""


def line(status: McpStatus) -> Content:
    """● files   ready   12 tools · 2 prompts   npx -y server"""
    mark, colour = _MARKS[status.stage]
    name = printable(status.config.name, newlines=False)
    where = printable(status.config.where, newlines=False)
    return Content.assemble(
        (mark, colour),
        f" {name:<16.40} ",
        (f"{status.stage:<9}", colour),
        f"{amounts(status):<28} ",
        (where, "$foreground-muted"),
    )


def amounts(status: McpStatus) -> str:
    parts = (("tool", status.tools), ("prompt", status.prompts), ("resource", status.resources))
    return " · ".join(f"{len(found)} {what}{'s' * (len(found) != 1)}" for what, found in parts if found)
