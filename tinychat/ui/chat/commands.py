"""The commands: one table for the prompt, its completion, the palette and the help."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from textual.fuzzy import Matcher

from tinychat.chat import commands as texts
from tinychat.errors import TinychatError
from tinychat.ui.chat import handlers
from tinychat.ui.chat.prompt import Choice
from tinychat.ui.chat.view import ChatView

Handler = Callable[[ChatView, str], Awaitable[None] | None]


@dataclass(frozen=True)
class Command:
    """`/name arguments`. `run` gets the text behind the name; `values` are what may stand there; `key` does the
    same."""

    name: str
    arguments: str
    help: str
    run: Handler
    values: tuple[tuple[str, str], ...] = ()
    key: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.arguments}".strip()


COPY = (
    ("answer", "the last answer"),
    ("code", "its last code block; code 1 is the first"),
    ("all", "the conversation"),
)


def _shared(name: str, key: str = "", run: Handler | None = None) -> Command:
    """A command of chat/commands.py, perhaps with a handler around it."""
    c = texts.COMMANDS[name]
    return Command(c.name, c.arguments, c.help, run or handlers.said(c), c.values, key, c.aliases)


COMMANDS: tuple[Command, ...] = (
    Command("model", "[NAME]", "choose, download or load a model", handlers.model, key="f2"),
    _shared("new", "ctrl+n"),
    Command(
        "conversations", "", "earlier conversations: search, open, rename, delete", handlers.conversations, key="f3"
    ),
    Command("find", "[TEXT]", "find text in this conversation", handlers.find, key="ctrl+f"),
    _shared("rename"),
    _shared("project"),
    _shared("regenerate", "ctrl+r"),
    _shared("replay"),
    _shared("version"),
    _shared("undo"),
    _shared("compact"),
    _shared("continue", "f5"),
    _shared("start"),
    Command(
        "edit",
        "[N|answer]",
        "edit your last message (or the Nth) and ask again; or the last answer",
        handlers.edit,
        (("answer", "the last answer"),),
    ),
    Command("editor", "", "write the prompt in $VISUAL or $EDITOR", handlers.editor, key="f6"),
    _shared("delete", run=handlers.delete),
    Command("fork", "[N]", "continue in a copy of this conversation (up to turn N)", handlers.fork),
    _shared("skip", "ctrl+g"),
    _shared("think"),
    _shared("system"),
    Command(
        "set",
        "NAME VALUE",
        "set a parameter; alone: a form with all of them",
        handlers.set_value,
        texts.COMMANDS["set"].values,
        "f4",
    ),
    _shared("schema"),
    _shared("tools"),
    Command("mcp", "", "MCP servers: their state and tools, on and off", handlers.mcp),
    _shared("raw"),
    Command("copy", "[answer|code [N]|all]", "copy to the clipboard", handlers.copy, COPY, key="ctrl+o"),
    _shared("save"),
    _shared("import", run=handlers.import_chats),
    Command("stats", "", "figures of the last answer", handlers.stats),
    Command("bench", "[N]", "measure this model over N tokens", handlers.bench),
    Command("profile", "[N]", "where the time goes, over N tokens", handlers.profile),
    Command("inspect", "", "the exact prompt, its tokens and their probabilities", handlers.inspect, key="f8"),
    Command("panel", "", "engine panel: short, inner figures, hidden", handlers.panel, key="f9"),
    Command(
        "experts",
        "on|off",
        "which experts of a mixture are chosen, layer by layer",
        handlers.experts,
        texts.ON_OFF,
        key="f7",
    ),
    Command("settings", "", "edit the settings file", handlers.settings_file),
    Command("theme", "[NAME]", "choose the colours", handlers.theme),
    Command("help", "", "keys and commands", handlers.help_screen, key="f1"),
    Command("quit", "", "quit", handlers.leave, key="ctrl+q", aliases=("exit", "bye")),
)


def find(name: str) -> Command:
    """The command `name` (or alias, or the only one it begins). Raises TinychatError that names the nearest."""
    return texts.find(name, COMMANDS)


def matching(typed: str) -> list[Command]:
    """The commands that `typed` may mean, best first; all for an empty text."""
    if not typed:
        return list(COMMANDS)
    matcher = Matcher(typed)
    scores = {c: max(matcher.match(n) + 10 * n.startswith(typed) for n in (c.name, *c.aliases)) for c in COMMANDS}
    return sorted((c for c in COMMANDS if scores[c] > 0), key=lambda c: -scores[c])


def complete(text: str) -> Sequence[Choice]:
    """Completions of a prompt that begins with /: commands, then what may stand behind one."""
    name, blank, rest = text[1:].partition(" ")
    if "/" in name:  # //text, or a path
        return ()
    if not blank:
        found = matching(name.lower())
        return [Choice(f"/{c.name}" + " " * bool(c.arguments), c.usage, c.help, final=not c.arguments) for c in found]
    try:
        command = find(name)
    except TinychatError:
        return ()
    if " " in rest:
        return ()
    more = command.name == "set"
    return [
        Choice(f"/{command.name} {value}" + " " * more, value, help, final=not more)
        for value, help in command.values
        if value.startswith(rest.lower())
    ]
