"""The chat as a dialogue of lines: for a dumb terminal, a screen reader, a pipe, a very slow link."""

from __future__ import annotations

import re
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tinychat import crash
from tinychat.chat import mcp
from tinychat.chat.attach import attachments
from tinychat.chat.changes import Asks, Change, Ended, Grew, ModelChanged, Notice, Overflow, Reset, SentBack
from tinychat.chat.commands import COMMANDS, Commanded, TextCommand, find
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Attachment, Turn, footer_text
from tinychat.chat.find import find as find_text
from tinychat.chat.history import History
from tinychat.chat.questions import explain, overflow_label, permission_label
from tinychat.errors import TinychatError
from tinychat.plain.printer import Printer
from tinychat.plain.reading import LineReader
from tinychat.tools.builtin import tools_of
from tinychat.tools.folder import Folder
from tinychat.tools.mcp import McpServers
from tinychat.tools.toolbox import Toolbox

EVERY = 0.05  # seconds between two looks at what the backend says
SILENCE = 10.0  # seconds after which a long prefill says how far it is
SHOWN = 6  # turns of a conversation that is opened
LISTED = 20  # conversations
_COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # /etc/hosts and //text are messages


class PlainChat:
    """`load` loads the model of a name, for /model; without a name it returns the names of what is here."""

    def __init__(
        self,
        controller: Controller,
        reader: LineReader,
        load: Callable[[str], str],
        history: History | None = None,
        servers: McpServers | None = None,
        printer: Printer | None = None,
    ) -> None:
        self.controller = controller
        self._reader, self._load, self.history, self._mcp = reader, load, history, servers or McpServers(())
        self._out = printer or Printer()
        self._leaving, self._filled, self._stage, self._spoke = False, "", "", 0.0
        self._listed: list[str] = []  # ids of the conversations that /conversations has numbered
        self.commands: tuple[TextCommand, ...] = (
            TextCommand("model", "[NAME]", "load a model; alone: those that are here", lambda s, t: self._load(t)),
            *COMMANDS.values(),
            TextCommand("edit", "[N]", "edit your last message (or turn N) and ask again", self._edit),
            TextCommand("fork", "[N]", "continue in a copy of this conversation (up to turn N)", self._fork),
            TextCommand("conversations", "[WORDS]", "earlier conversations, or those with these words", self._list),
            TextCommand("open", "N", "open conversation N of that list", self._open),
            TextCommand("show", "[N]", "the last N turns, or all", self._show),
            TextCommand("find", "TEXT", "where this conversation has TEXT", self._find),
            TextCommand("mcp", "", "MCP servers: their state, tools, prompts and resources", self._servers),
            TextCommand("stats", "", "figures of the last answer and of the context", self._stats),
            TextCommand("help", "", "these commands", self._help),
            TextCommand("quit", "", "quit", self._quit, aliases=("exit", "bye")),
        )
        self.use_folder(None)

    def use_folder(self, folder: Path | None) -> None:
        """Offers the built-in tools of `folder`, and those of MCP servers. Raises TinychatError."""
        own = () if folder is None else tools_of(Folder(folder))
        self.controller.use_tools(Toolbox(own, more=lambda: self._mcp.tools))

    def run(self) -> None:
        """Until the user leaves: ctrl+d, ctrl+c twice, /quit, or the end of the input."""
        if self._reader.terminal:
            self._out.note("plain chat: /help lists the commands, ctrl+c stops an answer, ctrl+d leaves")
        self._print(max(0, len(self.controller.conversation.turns) - SHOWN))
        try:
            self._print(max(0, len(self.controller.conversation.turns) - SHOWN))
            self._settle()
            while not self._leaving:
                self._one()
        finally:
            self.controller.leave()

    def _one(self) -> None:
        """Reads one message or command, and shows everything that comes of it."""
        filled, self._filled = self._filled, ""
        try:
            text = self._reader.read("> ", filled)
        except KeyboardInterrupt:
            self._leaving = self._reader.interrupts > 1
            self._out.note("" if self._leaving else "\nctrl+c again or ctrl+d leaves")
            return
        self._reader.interrupts = 0
        if text is None:
            self._leaving = True
            self._out.note("" if self._reader.terminal else "end of the input")
        elif text.strip():
            self._guarded(lambda: self._take(text))
            self._settle()

    def _guarded(self, act: Callable[[], object]) -> None:
        """Whatever goes wrong is one line."""
        try:
            act()
        except TinychatError as e:
            self._out.note(str(e), error=True)
        except Exception as e:
            self._out.note(crash.report(e), error=True)

    def _take(self, text: str) -> None:
        self._reader.remember(text)
        if self.history is not None:
            with suppress(TinychatError):
                self.history.add_prompt(text)
        stripped, c = text.strip(), self.controller
        if _COMMAND.match(stripped) and "\n" not in stripped and self._means_command(stripped):
            name, _, rest = stripped[1:].partition(" ")
            if (prompt := mcp.find_prompt(self._mcp, name)) is not None:
                message = self._mcp.prompt(prompt, mcp.arguments_of(prompt, rest))
                self._out.note(message)
                c.ask(Turn("user", message))
            elif line := find(name, self.commands).run(self, rest):
                self._out.note(line)
            return
        message = text if c.raw else stripped.removeprefix("/") if stripped.startswith("//") else stripped
        c.ask(Turn("user", message, files=() if c.raw else self._attached(message)))

    def _attached(self, text: str) -> tuple[Attachment, ...]:
        """The files and MCP resources that `text` names with @. Raises TinychatError."""
        notes: list[str] = []
        known = mcp.read(self._mcp, mcp.resources_in(self._mcp, text))
        files = attachments(text, known=known, notes=notes)
        for note in notes:
            self._out.note(note)
        return files

    def _means_command(self, text: str) -> bool:
        """A raw prompt may begin with / and is no command then, unless there is one of exactly this name."""
        return not self.controller.raw or text[1:].partition(" ")[0] in {c.name for c in self.commands}

    # what runs

    def _settle(self) -> None:
        """Shows what happens until nothing runs any more."""
        c, self._reader.interrupts, self._spoke = self.controller, 0, time.monotonic()
        stopped = 0
        while True:
            for change in c.poll():
                self._apply(change)
            if not (c.busy or c.loading or (c.queue and c.ready)):
                break
            if self._reader.interrupts > stopped:
                stopped = self._reader.interrupts
                self._leaving = stopped > 1 or not c.busy
                if self._leaving:
                    return
                c.stop()
            self._waiting()
            time.sleep(EVERY)
        self._out.end_line()

    def _waiting(self) -> None:
        """Says what is awaited, where that takes long."""
        c = self.controller
        if (stage := c.loading.stage if c.loading else "") != self._stage:
            self._stage = stage
            if stage:
                self._out.note(f"[{stage}]")
        prefill = c.running.prefill if c.running and not c.running.tokens else None
        if prefill is not None and time.monotonic() - self._spoke > SILENCE:
            self._spoke = time.monotonic()
            self._out.note(f"[reading the prompt: {prefill.done:,} of {prefill.total:,} tokens]")

    def _apply(self, change: Change) -> None:
        match change:
            case Reset():
                self._reset(change)
            case Grew():
                self._out.grew(change)
            case Ended():
                conversation = self.controller.conversation
                self._out.ended(change.turn, conversation.call_of(change.index).name)
            case ModelChanged():
                if (info := self.controller.info) is not None:
                    self._out.note(f"[{self.controller.conversation.model} is loaded, {info.max_context:,} tokens]")
            case Notice():
                self._out.note(change.text, change.error)
            case SentBack():
                self._out.note("not sent; it is in the line again" if self._reader.terminal else "not sent")
                self._filled = change.turn.text
            case Asks():
                q = change.question
                self._out.note(f"{q.title}\n{q.detail}")
                options = [(o, permission_label(o, q)) for o in q.options]
                self.controller.permit(q, self._choose(options, "no"))  # type: ignore[arg-type]
            case Overflow():
                self._out.note(f"The context is full. {explain(change)}")
                choice = self._choose([(o, overflow_label(o, change)) for o in change.options], "stop")
                self._guarded(lambda: self.controller.resolve(change, choice))  # type: ignore[arg-type]

    def _reset(self, change: Reset) -> None:
        turns = change.conversation.turns
        self._out.begin()
        if not change.live:
            self._print(max(change.start, len(turns) - SHOWN))
        elif turns[-1].role == "tool":
            call = change.conversation.call_of(len(turns) - 1)
            self._out.note(f"[calls {call.name} {call.arguments}]")

    def _choose(self, options: Sequence[tuple[str, str]], default: str) -> str:
        """One of `options`, by its number; `default` for anything else, and where there is no terminal."""
        for number, (_, label) in enumerate(options, 1):
            self._out.note(f"{number}. {label}")
        if not self._reader.terminal:
            return default
        try:
            answer = (self._reader.line(f"1 to {len(options)}: ") or "").strip()
        except KeyboardInterrupt:
            answer = ""
        valid = answer.isdecimal() and 1 <= int(answer) <= len(options)
        return options[int(answer) - 1][0] if valid else default

    # commands

    def _print(self, start: int) -> None:
        c = self.controller.conversation
        if 0 < start < len(c.turns):
            self._out.note(f"[{start} earlier turn{'s' * (start > 1)}; /show shows all]")
        for index in range(start, len(c.turns)):
            self._out.turn(c, index)

    def _edit(self, session: Commanded, text: str) -> str:
        turns = self.controller.conversation.turns
        index = self._number(text) - 1 if text.strip() else self.controller.conversation.last_prompt
        if index is None or turns[index].role != "user":
            raise TinychatError("there is no message of yours to edit there")
        self._out.note("edit the message; an empty line leaves it as it is")
        try:
            changed = self._reader.read("edit> ", turns[index].text)
        except KeyboardInterrupt:
            changed = None
        if changed is None or not changed.strip():
            return "the message is as it was"
        self.controller.edit(index, changed, self._attached(changed))
        return ""

    def _fork(self, session: Commanded, text: str) -> str:
        self.controller.fork(self._number(text) - 1 if text.strip() else None)
        return "this is a copy; the original is in /conversations"

    def _number(self, text: str) -> int:
        turns = len(self.controller.conversation.turns)
        if not text.strip().isdecimal() or not 1 <= int(text) <= turns:
            raise TinychatError(f"the turns are numbered from 1 to {turns}; /show shows them")
        return int(text)

    def _list(self, session: Commanded, text: str) -> str:
        if self.history is None:
            raise TinychatError("conversations are not being saved")
        found = self.history.find(text, LISTED)
        self._listed = [s.id for s in found]
        lines = [f"{n}. {s.title or 'untitled'} ({s.turns} turns, {s.model})" for n, s in enumerate(found, 1)]
        return "\n".join(lines) or "no conversation matches"

    def _open(self, session: Commanded, text: str) -> str:
        if self.history is None or not text.strip().isdecimal() or not 1 <= int(text) <= len(self._listed):
            raise TinychatError("/open N: N is a number of the list that /conversations shows")
        self.controller.interrupt()
        conversation, present = self.history.load(self._listed[int(text) - 1]), self.controller.conversation.model
        self.controller.open(conversation)
        return self._load(conversation.model) if conversation.model not in ("", present) else ""

    def _show(self, session: Commanded, text: str) -> str:
        turns = len(self.controller.conversation.turns)
        self._print(max(0, turns - self._number(text)) if text.strip() else 0)
        return "" if turns else "nothing has been said yet"

    def _find(self, session: Commanded, text: str) -> str:
        hits = find_text(self.controller.conversation, text)
        return "\n".join(f"turn {h.index + 1}: {h.line.strip()}" for h in hits) or "not found"

    def _servers(self, session: Commanded, text: str) -> str:
        shown = [f"{s.config.name}: {s.stage}\n{mcp.details(s)}".strip() for s in self._mcp.status]
        return "\n".join(shown) or "there are no MCP servers; `tinychat --mcp FILE` names some"

    def _stats(self, session: Commanded, text: str) -> str:
        c, u = self.controller.conversation, self.controller.usage
        answer = footer_text(c.turns[c.last_answer]) if c.last_answer is not None else "no answer yet"
        return f"{answer}\ncontext: {u.used:,} of {u.limit:,} tokens"

    def _help(self, session: Commanded, text: str) -> str:
        width = max(len(c.usage) for c in self.commands) + 2
        keys = (
            'ctrl+c stops an answer; \\ at the end of a line, or """ around lines, for several; @file attaches a file'
        )
        room, indent = max(shutil.get_terminal_size().columns, width + 20), " " * width
        lines = [textwrap.fill(f"{c.usage:{width}}{c.help}", room, subsequent_indent=indent) for c in self.commands]
        return "\n".join([*lines, textwrap.fill(keys, room)])

    def _quit(self, session: Commanded, text: str) -> str:
        self._leaving = True
        return ""
