"""The commands: one table for the prompt, its completion, the palette and the help."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from textual.fuzzy import Matcher

from tinychat.chat.parameters import PARAMETERS
from tinychat.errors import TinychatError, printable
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


ON_OFF = (("on", ""), ("off", ""))
COPY = (
    ("answer", "the last answer"),
    ("code", "its last code block; code 1 is the first"),
    ("all", "the conversation"),
)
SET = tuple((name, spec.help) for name, spec in PARAMETERS.items())

COMMANDS: tuple[Command, ...] = (
    Command("model", "[NAME]", "choose, download or load a model", handlers.model, key="f2"),
    Command(
        "new",
        "",
        "new conversation; this one is kept",
        handlers.new,
        key="ctrl+n",
        aliases=("clear",),
    ),
    Command(
        "conversations", "", "earlier conversations: search, open, rename, delete", handlers.conversations, key="f3"
    ),
    Command("rename", "NAME", "name this conversation", handlers.rename),
    Command("project", "NAME|off", "put this conversation into a project; /conversations shows one", handlers.project),
    Command(
        "regenerate",
        "",
        "a new answer; the old one stays as a version",
        handlers.regenerate,
        key="ctrl+r",
    ),
    Command("replay", "MODEL", "ask another model the same questions; both stay, as versions", handlers.replay),
    Command("undo", "", "undo the last edit, new answer, switch, summary or delete", handlers.undo),
    Command("compact", "[N]", "summarise all but the last (or last N) of your questions", handlers.compact),
    Command("continue", "", "continue the last answer", handlers.go_on, key="f5"),
    Command("start", "TEXT", "begin the answer with TEXT", handlers.start),
    Command(
        "edit",
        "[N|answer]",
        "edit your last message (or the Nth) and ask again; or the last answer",
        handlers.edit,
        (("answer", "the last answer"),),
    ),
    Command("delete", "[N]", "delete the last question and answer (or turn N); /undo brings it back", handlers.delete),
    Command("fork", "[N]", "continue in a copy of this conversation (up to turn N)", handlers.fork),
    Command("skip", "", "stop thinking, go to the answer", handlers.skip, key="ctrl+g"),
    Command("think", "on|off", "let reasoning models think first", handlers.think, ON_OFF),
    Command("system", "TEXT|off", "the system prompt", handlers.system, (("off", "none"),)),
    Command("set", "NAME VALUE", "set a parameter; alone: a form with all of them", handlers.set_value, SET, key="f4"),
    Command(
        "schema",
        "FILE|off",
        "hold answers to the JSON schema in a file",
        handlers.schema,
        (("off", "free answers"),),
    ),
    Command(
        "tools",
        "DIR|off",
        "let the model read a folder and, when you allow it, change it",
        handlers.tools,
        (("off", "no tools"),),
    ),
    Command("mcp", "", "MCP servers: their state and tools, on and off", handlers.mcp),
    Command("raw", "on|off", "prompts without the chat template, plain output", handlers.raw, ON_OFF),
    Command("copy", "[answer|code [N]|all]", "copy to the clipboard", handlers.copy, COPY, key="ctrl+o"),
    Command(
        "save",
        "md|json [FILE]",
        "save the conversation to a file",
        handlers.save,
        (("md", "Markdown"), ("json", "all details, for programs")),
        aliases=("export",),
    ),
    Command("import", "FILE", "take over conversations of ChatGPT or llama.cpp's web page", handlers.import_chats),
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
        ON_OFF,
        key="f7",
    ),
    Command("settings", "", "edit the settings file", handlers.settings_file),
    Command("theme", "", "choose the colours", handlers.theme),
    Command("help", "", "keys and commands", handlers.help_screen, key="f1"),
    Command("quit", "", "quit", handlers.leave, key="ctrl+q", aliases=("exit", "bye")),
)


def find(name: str) -> Command:
    """The command `name` (or alias, or the only one it begins). Raises TinychatError that names the nearest."""
    name = name.lower()
    for command in COMMANDS:
        if name in (command.name, *command.aliases):
            return command
    begun = [c for c in COMMANDS if name and c.name.startswith(name)]
    if len(begun) == 1:
        return begun[0]
    near = ", ".join(f"/{c.name}" for c in begun or matching(name)[:3]) or "/help"
    raise TinychatError(
        f"there is no command /{printable(name)}; did you mean {near}? (// sends a text that begins with /)"
    )


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
