"""The command palette: the table of commands, found by their names and by what they do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.fuzzy import Matcher

from tinychat.ui.chat.commands import COMMANDS, Command
from tinychat.ui.chat.view import ChatView
from tinychat.ui.screens.modal import Modal

USAGE = max(len(c.usage) for c in COMMANDS) + 2  # cells of the first column
KEY = max(len(c.key) for c in COMMANDS) + 2


class PaletteScreen(CommandPalette, Modal[None]):
    """Textual's palette, which opens as quickly as the sheets."""


class Palette(Provider):
    """For the chat screen."""

    async def discover(self) -> Hits:
        for command in filter(self._offered, COMMANDS):
            yield DiscoveryHit(_row(command), self._run(command), text=command.name)

    async def search(self, query: str) -> Hits:
        matcher = Matcher(query.removeprefix("/"))
        for command in filter(self._offered, COMMANDS):
            score = max(matcher.match(command.name), matcher.match(command.help) / 2)
            if score > 0:
                yield Hit(score, _row(command), self._run(command), text=command.name)

    def _offered(self, command: Command) -> bool:
        return cast(ChatView, self.screen).offers(command.name)

    def _run(self, command: Command) -> Callable[[], object]:
        """A command that needs arguments goes to the prompt."""
        chat = cast(ChatView, self.screen)
        needs = bool(command.arguments) and not command.arguments.startswith("[") and not command.values
        return (
            partial(self._prompt, chat, command) if needs else partial(chat.call_later, chat.run_command, command.name)
        )

    def _prompt(self, chat: ChatView, command: Command) -> None:
        chat.box.prompt.set_aside(f"/{command.name} ")
        chat.box.prompt.focus()


def _row(c: Command) -> Content:
    return Content.assemble(
        (c.usage.ljust(USAGE), "bold"), (c.key.ljust(KEY), "$accent"), (c.help, "$foreground 60% not bold")
    )
