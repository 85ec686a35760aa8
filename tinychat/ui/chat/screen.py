"""The main screen: it hands keys to the controller and paints its changes."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import TextArea

from tinychat.chat import attach, mcp
from tinychat.chat.changes import Overflow
from tinychat.chat.choosing import remember
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Attachment, Turn
from tinychat.chat.file_finder import Finder
from tinychat.chat.find import find, version_with
from tinychat.chat.history import Draft, History
from tinychat.errors import TinychatError, printable
from tinychat.tools.builtin import tools_of
from tinychat.tools.folder import Folder
from tinychat.tools.mcp import McpServers
from tinychat.tools.mcp_config import config_path
from tinychat.tools.protocol import Question
from tinychat.tools.toolbox import Toolbox
from tinychat.ui import breakpoints, clipboard
from tinychat.ui.chat import commands, models
from tinychat.ui.chat.findbar import FindBar
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.mcp import prompt_choices, resource_choices
from tinychat.ui.chat.message import TurnMessage
from tinychat.ui.chat.overflow import OverflowScreen
from tinychat.ui.chat.painter import Painter
from tinychat.ui.chat.palette import Palette
from tinychat.ui.chat.permission import PermissionScreen
from tinychat.ui.chat.prompt import Choice, PromptBox, PromptEditor
from tinychat.ui.chat.sidebar import Sidebar
from tinychat.ui.chat.status import StatusLine
from tinychat.ui.chat.transcript import Below, Transcript
from tinychat.ui.driver import Link, TerminalDriver
from tinychat.ui.keys import KeyLine
from tinychat.ui.panel import EnginePanel, ExpertsStrip
from tinychat.ui.panel.reading import PaintMeter
from tinychat.ui.screens.dialogs import AskScreen
from tinychat.ui.screens.downloads import Downloads
from tinychat.ui.screens.help import Entry
from tinychat.ui.screens.sheet import in_daemon

LISTED = 160  # columns from which on the conversations are listed at the left
PANELLED = 120  # columns from which on the panel is there without being asked for
PANELS: tuple[Literal["", "short", "inner"], ...] = ("", "short", "inner")  # what F9 goes through
DRAIN_HZ = 20  # how often the backend's events are taken and painted at most
PANEL_HZ = 5
_COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # /etc/hosts and //text are messages
LEAVE_AGAIN = 2.0  # seconds in which a second ctrl+c leaves
DRAFT_EVERY = 2.0  # seconds: what a kill loses of a draft at most
COUNT_AFTER = 0.3  # seconds without a key, after which the tokens of the draft are counted


class ChatScreen(Screen[None]):
    """Composed of the conversations, one column of text from the status line to the keys, and the panel. All state is
    the controller's."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (LISTED, "-wide"), (200, "-vast")]
    VERTICAL_BREAKPOINTS = [(0, "-tiny"), (10, "-short"), (20, "-high")]
    AUTO_FOCUS = "#prompt"
    COMMANDS = {Palette}
    attaches = True  # @ in a message reads a file of this machine
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "stop", tooltip="stop; what is written stays"),
        Binding("escape", "keep", "cancel the edit"),
        Binding("escape", "escape", "back to the prompt; takes a waiting message back, ends an edit", show=False),
        Binding(
            "ctrl+g",
            "command('skip')",
            "skip to the answer",
            priority=True,
            tooltip="stop thinking and go to the answer",
        ),
        Binding("ctrl+t", "toggle_thinking", "thinking", priority=True, tooltip="fold or unfold the last thinking"),
        Binding(
            "ctrl+r", "command('regenerate')", "regenerate", priority=True, tooltip="a new answer; the old one stays"
        ),
        Binding("f5", "command('continue')", "continue", tooltip="continue an answer that was stopped"),
        Binding("ctrl+o", "command('copy')", "copy code", priority=True, tooltip="copy the last block of code"),
        Binding("ctrl+n", "command('new')", "new conversation", show=False, priority=True),
        Binding("ctrl+f", "command('find')", "find in this conversation", show=False, priority=True),
        Binding("end", "to_end", "to the new text below", show=False, priority=True),
        Binding("f2", "choose_model", "choose a model"),
        Binding("f2", "command('model')", "choose, download or load a model", show=False),
        Binding("f3", "command('conversations')", "earlier conversations: search, reopen, rename, delete", show=False),
        Binding("f4", "command('set')", "system prompt, thinking, sampling, presets", show=False),
        Binding("f8", "command('inspect')", "the exact prompt, its tokens and their probabilities", show=False),
        Binding("f7", "command('experts')", "which experts of a mixture are chosen", show=False, priority=True),
        Binding("f6", "command('editor')", "write the prompt in $VISUAL or $EDITOR", show=False),
        Binding("f9", "command('panel')", "engine panel: short, with inner figures, hidden", show=False),
        Binding("f1", "command('help')", "help", tooltip="this help"),
        Binding(
            "ctrl+up", "to_messages", "to the messages above, to copy, edit or fork them", show=False, priority=True
        ),
        Binding("ctrl+down", "to_prompt", "back to the prompt", show=False, priority=True),
        Binding("pageup", "scroll(-1)", "a page up", show=False, priority=True),
        Binding("pagedown", "scroll(1)", "a page down", show=False, priority=True),
        Binding("ctrl+home", "scroll(-1000)", "to the beginning", show=False, priority=True),
        Binding("ctrl+end", "scroll(1000)", "to the end, and follow it", show=False, priority=True),
        Binding(
            "ctrl+c",
            "copy_or_stop",
            "copy what is selected; else stop, clear the draft, or leave",
            show=False,
            priority=True,
        ),
    ]

    def __init__(
        self,
        controller: Controller,
        history: History | None = None,
        experts: bool = False,
        remember: Callable[..., object] | None = None,
        mcp: McpServers | None = None,
        mcp_file: Path | None = None,
    ) -> None:
        super().__init__()
        self.controller, self.history = controller, history
        self.mcp, self.mcp_file = mcp or McpServers(()), mcp_file or config_path()
        self.use_folder(None)
        self.experts = experts  # whether the heat strip is wanted
        self._remember = remember
        self._count_due: Timer | None = None  # for what is typed
        self.downloads, self.finder = Downloads(), Finder()
        self.painter = Painter(self)
        self.editing: int | None = None
        self._drafting = ""  # the conversation whose draft is in the prompt
        self._draft_key, self._draft = "", ""  # what of it is on the disk; all new conversations share the key ""
        self._asked_to_leave = -LEAVE_AGAIN
        self._panel: Literal["", "short", "inner"] | None = None  # what F9 chose
        self._idle = 0  # ticks of the panel since something ran

    def compose(self) -> ComposeResult:
        breakpoints.place(self)
        with Horizontal(id="body"):
            yield Sidebar(self.history)
            with Vertical(id="main"), Vertical(id="column"):
                yield StatusLine(id="status")
                with Container(id="reading"):
                    yield Transcript()
                    yield Below("↓ new text", id="below")
                yield ExpertsStrip(id="experts")
                yield FindBar(self.controller)
                yield PromptBox(self._commands, self._files)
                yield KeyLine(palette=True)
            yield EnginePanel(id="panel")

    async def on_mount(self) -> None:
        if self.history is not None:
            with suppress(TinychatError):  # the history itself says what is wrong with it when a conversation is saved
                self.prompt.past = self.history.prompts()
        self.show_draft()
        self._drain = self.set_interval(1 / DRAIN_HZ, self._tick, pause=True)  # before a key may come
        await self.transcript.reset(self.controller.conversation, 0, False)
        self.set_interval(DRAFT_EVERY, self.keep_draft)
        self._drain.resume()
        self.set_interval(1 / PANEL_HZ, self._panel_tick)
        self.painter.panel()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def box(self) -> PromptBox:
        return self.query_one(PromptBox)

    @property
    def prompt(self) -> PromptEditor:
        return self.query_one(PromptEditor)

    @property
    def meter(self) -> PaintMeter:
        return self.painter.meter

    @property
    def link(self) -> Link | None:
        """To the terminal; None where there is none, as in a browser."""
        driver = self.app._driver
        return driver.link if isinstance(driver, TerminalDriver) else None

    @property
    def panel_shown(self) -> Literal["", "short", "inner"]:
        """Which panel is beside the chat: what the user chose, else the short one where there is room."""
        chosen: Literal["", "short", "inner"] = "short" if self.size.width >= PANELLED else ""
        return chosen if self._panel is None else self._panel

    def next_panel(self) -> None:
        """No panel, the short one, the one with the engine's inner figures, and round again."""
        self._panel = PANELS[(PANELS.index(self.panel_shown) + 1) % len(PANELS)]
        self._place_panel()

    def on_resize(self) -> None:
        self._place_panel()
        self.call_after_refresh(self.list_conversations)

    def list_conversations(self) -> None:
        """Brings the list at the left up to date."""
        for sidebar in self.query(Sidebar):  # none yet, while the screen is being made
            sidebar.show(self.controller.conversation.id)

    @on(Sidebar.Opened)
    def _opened(self, event: Sidebar.Opened) -> None:
        if event.id != self.controller.conversation.id:
            self.run_worker(models.reopen(self, event.id))
        self.prompt.focus()

    def on_screen_resume(self) -> None:
        self.list_conversations()

    def _place_panel(self) -> None:
        self.set_class(bool(self.panel_shown), "-panel")
        self.call_after_refresh(self.paint_panel)

    def paint_panel(self) -> None:
        if self.query(EnginePanel):
            self.painter.panel()

    async def apply(self) -> None:
        """Paints what changed since the last time."""
        self._idle = 0
        self._drain.resume()
        await self.painter.apply()

    async def _tick(self) -> None:
        if self.query_one("#below").display and self.transcript.at_end:
            self.mark_below()
        if self.painter.due:
            await self.painter.apply()

    async def _panel_tick(self) -> None:
        """Once a second, and events are taken here, when nothing has happened for two: an idle app uses next to nothing
        of a core."""
        busy = self.controller.busy or self.controller.loading is not None
        self._idle = 0 if busy else self._idle + 1
        if self._idle < 2 * PANEL_HZ:
            self._drain.resume()
        else:
            self._drain.pause()
            await self._tick()
        late = self.link is not None and self.link.behind
        if not late and (self._idle < 2 * PANEL_HZ or self._idle % PANEL_HZ == 0):
            self.painter.panel()

    def mark_below(self) -> None:
        """Says that there is text below the screen which has come since, unless the end is on the screen."""
        self.query_one("#below").display = not self.transcript.at_end

    @on(Below.Clicked)
    def action_to_end(self) -> None:
        self.transcript.to_end()

    async def find(self, text: str) -> None:
        """Opens the line for finding, with `text`; where only another version has that, shows the version."""
        c = self.controller
        if text.strip() and not find(c.conversation, text) and (turn := version_with(c.conversation, text)):
            c.show(turn.id)
            await self.apply()
        await self.query_one(FindBar).open(text.strip())

    @on(FindBar.Closed)
    def _found(self) -> None:
        self.prompt.focus()

    async def say(self, text: str, error: bool = False) -> None:
        """A line of tinychat's own in the transcript."""
        await self.transcript.say(text, error)

    def ask_about(self, overflow: Overflow) -> None:
        """The context would overflow: the user decides."""
        self.app.push_screen(OverflowScreen(overflow), partial(self._resolve, overflow))

    def use_folder(self, folder: Path | None) -> None:
        """Offers the built-in tools of `folder`, and those of MCP servers. Raises TinychatError."""
        own = () if folder is None else tools_of(Folder(folder))
        self.controller.use_tools(Toolbox(own, more=lambda: self.mcp.tools))

    def ask_permission(self, question: Question) -> None:
        """A tool asks before it acts."""
        self.app.push_screen(PermissionScreen(question, self.prompt), partial(self._permit, question))

    def _permit(self, question: Question, answer: str | None) -> None:
        self.controller.permit(question, answer or "no")  # type: ignore[arg-type]

    def _resolve(self, overflow: Overflow, choice: str | None) -> None:
        try:
            self.controller.resolve(overflow, choice or "stop")  # type: ignore[arg-type]
        except TinychatError as e:
            self.call_later(self.say, str(e), True)

    # commands

    async def run_command(self, text: str) -> None:
        """`text` without its slash. Whatever goes wrong is one line in the transcript."""
        name, _, rest = text.partition(" ")
        try:
            if (found := mcp.find_prompt(self.mcp, name)) is not None:
                arguments = mcp.arguments_of(found, rest)
                self.give_back([Turn("user", await in_daemon(partial(self.mcp.prompt, found, arguments)))])
                return
            try:
                command = commands.find(name)
            except TinychatError:
                self.give_back([Turn("user", f"/{text}")])  # it may be long, and is one letter from right
                raise
            result = command.run(self, rest)
            if result is not None:
                await result
        except TinychatError as e:
            await self.say(str(e), error=True)
        await self.apply()

    async def action_command(self, text: str) -> None:
        await self.run_command(text)

    def offers(self, command: str) -> bool:
        """Whether the palette has the command of this name."""
        return True

    def command_entries(self) -> list[Entry]:
        """The commands of the prompt, with the keys that do the same, for the help."""
        return [(c.usage, c.help + f" ({c.key})" * bool(c.key)) for c in commands.COMMANDS]

    # what the user does

    @on(PromptEditor.Submitted)
    async def _submitted(self, event: PromptEditor.Submitted) -> None:
        text = event.text.strip()
        edited = [] if self.editing is None else self.controller.conversation.turns[self.editing :][:1]
        answer = any(turn.role != "user" for turn in edited)
        command = _is_command(text) and not self.controller.raw and not answer
        if (
            self.controller.raw
            and text.startswith("/")
            and text[1:].partition(" ")[0] in {c.name for c in commands.COMMANDS}
        ):
            command = True
        try:
            if command:
                self._sent(event.text)
                await self.run_command(text[1:])
                return
            if self.editing is not None and answer:
                await self._edit_answer(self.editing, event.text.rstrip())
                return
            text = event.text if self.controller.raw else text.removeprefix("/") if text.startswith("//") else text
            turn = Turn("user", text, files=() if self.controller.raw else await self.attached(text))
            if self.editing is not None:
                self.controller.edit(self.editing, text, turn.files)
                self.editing = None
            else:
                self.controller.ask(turn)
        except TinychatError as e:
            if self.editing is not None:
                self.prompt.set_aside(event.text)
            else:
                self.give_back([Turn("user", event.text)])
            await self.say(str(e), error=True)
            return
        except Exception:  # the app says it
            self.give_back([Turn("user", event.text)])
            raise
        self._sent(event.text)
        self.transcript.to_end()
        await self.apply()

    async def attached(self, text: str) -> tuple[Attachment, ...]:
        """The files and MCP resources that `text` names with @. Raises TinychatError."""
        found = mcp.resources_in(self.mcp, text)
        known = await in_daemon(partial(mcp.read, self.mcp, found)) if found else {}
        if "@" not in text:
            return ()
        notes: list[str] = []
        files = await in_daemon(partial(self.files_in, text, known, notes))
        for note in notes:
            await self.say(note)
        return files

    def files_in(
        self, text: str, known: Mapping[str, Attachment] | None = None, notes: list[str] | None = None
    ) -> tuple[Attachment, ...]:
        """As chat.attach. Not on the screen's thread: it reads them."""
        return attach.attachments(text, known=known, notes=notes)

    def _sent(self, text: str) -> None:
        self.prompt.remember(text)
        if self.history is not None:
            with suppress(TinychatError):
                self.history.add_prompt(text)

    def give_back(self, turns: list[Turn]) -> None:
        """Texts return to the prompt, before what is there."""
        self.prompt.give_back("\n".join(t.text for t in turns))
        self.prompt.focus()

    async def _edit_answer(self, index: int, text: str) -> None:
        """Puts `text` in the place of answer `index`. Raises TinychatError."""
        followed = index + 1 < len(self.controller.conversation.turns)
        self.controller.edit(index, text)
        self.editing = None
        await self.apply()
        if followed and index + 1 == len(self.controller.conversation.turns):
            await self.say("what followed the answer is with its other version; ← and → on the answer switch, or /undo")

    def type_ahead(self, text: str) -> None:
        """What was typed, with an Enter behind it, before this screen was there. One line is sent; several lines may be
        a paste, and a draft of last time was not seen: these wait for an Enter."""
        if "\n" in text or self._draft:
            self.give_back([Turn("user", text)])
        else:
            self.prompt.post_message(PromptEditor.Submitted(text))

    def begin_edit(self, index: int) -> None:
        if self.controller.busy:
            raise TinychatError("an answer is being written; stop it with esc, then edit")
        self.end_edit()
        self.editing = index
        self.prompt.set_aside(self.controller.conversation.turns[index].text)
        self.prompt.focus()

    def end_edit(self) -> None:
        """The message that is being edited stays as it was; the up key finds what was written in its place."""
        if self.editing is not None:
            if text := self._edited():
                self.prompt.remember(text)
            self.editing = None
            self.prompt.bring_back()

    def _edited(self) -> str:
        """What is written in the place of a message and not sent yet; "" for nothing."""
        turns = self.controller.conversation.turns
        if self.editing is None or self.prompt.asides != 1 or self.editing >= len(turns):
            return ""
        return "" if self.prompt.text == turns[self.editing].text else self.prompt.text

    # drafts

    @on(TextArea.Changed, "#prompt")
    def _typed(self) -> None:
        if self._count_due is None:
            self._count_due = self.set_timer(COUNT_AFTER, self._count_now)
        else:
            self._count_due.reset()

    def _count_now(self) -> None:
        self._count_due = None
        count: Callable[[], Awaitable[None]] = self._count_draft  # not begun here: another may cancel it before
        self.run_worker(count, exclusive=True, group="count")

    async def _count_draft(self) -> None:
        """Shows the tokens of the draft, with the files that it names, and of each new paste."""
        text, c = self.prompt.text, self.controller
        if not text.strip() or _is_command(text) or not c.ready:
            self.box.show_count("")
            return
        try:
            for label in {label for *_, label in self.prompt.folded}:
                if not self.prompt.folds.is_counted(label):
                    self.prompt.relabel(
                        label, tokens(*await in_daemon(partial(c.count, self.prompt.folds.text(label))))
                    )
            count, exact = await in_daemon(partial(self._count, text))
        except TinychatError:  # said when it is sent
            self.box.show_count("")
            return
        room = c.usage.free if c.usage.limit else 0
        too_long = f", {room:,} free" if 0 < room < count else ""
        self.box.show_count(tokens(count, exact) + too_long, bool(too_long))

    def _count(self, text: str) -> tuple[int, bool]:
        files: tuple[Attachment, ...] = ()
        if not self.controller.raw:
            with suppress(TinychatError):
                files = self.files_in(text)
        return self.controller.count(Turn("user", text, files=files).content)

    def keep_draft(self) -> None:
        """Writes what is typed and not sent, also what waits for its turn, if that is not what is on the disk."""
        self._write_draft("" if not self.controller.conversation.turns else self.controller.conversation.id)

    def show_draft(self) -> None:
        """Of another conversation than before: keeps the draft of that, and shows its own."""
        c = self.controller.conversation
        if c.id == self._drafting:
            self.keep_draft()  # under its own key, if this was its first turn
            return
        self._write_draft(self._draft_key)
        self.editing, self._drafting, self._draft_key, self._draft = None, c.id, c.id if c.turns else "", ""
        pastes: tuple[str, ...] = ()
        if self.history is not None:
            with suppress(TinychatError):
                self._draft, pastes = self.history.draft(self._draft_key)
        self.prompt.start_over(self._draft, pastes)

    def _write_draft(self, key: str) -> None:
        texts = (*(turn.text for turn in self.controller.queue), self._edited(), self.prompt.draft)
        text = "\n".join(filter(None, texts))
        if self.history is None or (key, text) == (self._draft_key, self._draft):
            return
        with suppress(TinychatError):  # what is wrong with the history is said when a conversation is saved
            if key != self._draft_key:  # a new conversation has begun: its draft is its own now
                self.history.set_draft(self._draft_key, Draft())
            self.history.set_draft(key, Draft(text, self.prompt.folds.within(text)))
            self._draft_key, self._draft = key, text

    async def action_stop(self) -> None:
        self.controller.stop()
        await self.apply()

    async def action_keep(self) -> None:
        if self.prompt.asides > 1:  # a command stands before what is being edited
            self.prompt.bring_back()
        else:
            self.end_edit()
        await self.apply()

    async def action_escape(self) -> None:
        if self.box.close():
            return
        if self.controller.queue:
            self.give_back(self.controller.take_back_queue())
        elif self.prompt.asides:
            self.prompt.bring_back()
        else:
            self.clear_selection()
            self.prompt.focus()
        await self.apply()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        running = self.controller.running
        turns = self.controller.conversation.turns
        if action == "stop":
            return self.controller.busy and not self.controller.queue and self.prompt.completions is None
        if action == "keep":
            return self.editing is not None and not self.controller.busy and self.prompt.completions is None
        if action == "command":
            match parameters[0]:
                case "skip":
                    return running is not None and running.kind == "thinking" and running.tokens > 0
                case "regenerate":
                    return not self.controller.busy and bool(turns)
                case "continue":
                    return not self.controller.busy and bool(turns) and not turns[-1].complete
                case "copy":
                    return any(t.role == "assistant" and "```" in t.text for t in turns[-8:])
        if action == "scroll":  # in a long draft these keys move its cursor
            return not (self.prompt.has_focus and self.prompt.wrapped_document.height > 1)
        if action == "command" and parameters[0] == "experts":  # f7 selects all of a draft
            return not (self.prompt.has_focus and self.prompt.text)
        if action == "to_end":
            return self.query_one("#below").display and not (self.prompt.has_focus and self.prompt.text)
        if action == "choose_model":  # the same key, shown only while it is what a newcomer needs
            return not turns
        if action == "toggle_thinking":
            return any(t.thinking for t in turns[-8:]) or bool(running and running.kind == "thinking")
        return True

    def action_choose_model(self) -> None:
        models.choose_model(self)

    def action_toggle_thinking(self) -> None:
        self.transcript.toggle_thinking()

    def action_scroll(self, pages: int) -> None:
        t = self.transcript
        if abs(pages) > 1:
            t.to_end() if pages > 0 else t.scroll_home(animate=False)
        else:
            t.scroll_relative(y=pages * max(1, t.size.height - 2), animate=False)
        if pages < 0:
            t.release_anchor()

    def action_copy_or_stop(self) -> None:
        selected = self.get_selected_text() or self.prompt.selected_text
        if selected:
            self.copy(selected, "the selection")
        elif self.controller.busy:
            self.controller.stop()
        elif self.prompt.has_focus and self.prompt.text:
            self.prompt.clear()  # ctrl+z brings it back
        elif time.monotonic() - self._asked_to_leave < LEAVE_AGAIN:
            self.app.exit()
        else:
            self._asked_to_leave = time.monotonic()
            self.notify("ctrl+c again leaves", timeout=LEAVE_AGAIN)

    def action_to_messages(self) -> None:
        messages = self.transcript.messages()
        if isinstance(self.focused, TurnMessage):
            self._focus_message(self.focused.index - 1)
        elif messages:
            self._focus_message(messages[-1].index)

    def action_to_prompt(self) -> None:
        self.set_focus(self.prompt)

    def _focus_message(self, index: int) -> None:
        message = self.transcript.message(index)
        if message is not None and not message.display:  # an answer that is nothing but calls
            at = self.focused.index if isinstance(self.focused, TurnMessage) else index + 1
            self._focus_message(index + (1 if index > at else -1))
        elif message is not None:
            self.transcript.release_anchor()
            self.set_focus(message)  # at once: the next key of a burst counts from it
        elif index >= len(self.controller.conversation.turns):
            self.set_focus(self.prompt)

    @on(TurnMessage.Acted)
    async def _acted(self, event: TurnMessage.Acted) -> None:
        index, c = event.index, self.controller
        if index >= len(c.conversation.turns):
            return  # it has gone since the key was pressed, and is painted for a moment longer
        try:
            match event.action:
                case "up" | "down":
                    if isinstance(self.focused, TurnMessage):  # a key before it in the burst may have left them
                        self._focus_message(self.focused.index + (1 if event.action == "down" else -1))
                case "leave":
                    self.set_focus(self.prompt)
                case "edit":
                    self.begin_edit(index)
                case "delete":
                    await self.run_command(f"delete {index + 1}")
                    self.prompt.focus()
                case "copy":
                    self.copy(c.conversation.turns[index].text, "the message")
                case "code":
                    self.copy_code(index)
                case "fork":
                    await self.run_command(f"fork {index + 1}")
                case "regenerate":
                    c.regenerate(index)
                case "retry":
                    c.call_again(index)
                    await self.apply()
                    self._focus_message(index)
                case "edit_call":
                    self._edit_call(index)
                case "previous" | "next":
                    c.switch(index, 1 if event.action == "next" else -1)
                    await self.apply()
                    self._focus_message(index)
        except TinychatError as e:
            await self.say(str(e), error=True)
        await self.apply()

    def _edit_call(self, index: int) -> None:
        def done(arguments: str | None) -> None:
            if arguments is not None:
                try:
                    self.controller.call_again(index, arguments)
                except TinychatError as e:
                    self.call_later(self.say, str(e), True)

        call = self.controller.conversation.call_of(index)
        self.app.push_screen(
            AskScreen(f"The arguments of {call.name}", call.arguments, "enter runs it, esc cancels"), done
        )

    # the clipboard and links

    def copy(self, text: str, what: str) -> None:
        """Gives `text` to the desktop's clipboard or tmux's, and to the terminal, and says which took it."""
        self.app.copy_to_clipboard(text)
        self.run_worker(self._give(text, what), exclusive=True, group="clipboard")

    async def _give(self, text: str, what: str) -> None:
        tool = await in_daemon(partial(clipboard.give, text))
        self.notify(f"copied {what} ({tool})" if tool else f"sent {what} to the terminal", timeout=2)

    def copy_code(self, index: int, number: str = "") -> None:
        """Code block `number` (from 1; the last by default) of answer `index`. Raises TinychatError when there is
        none."""
        blocks = MarkdownView(self.controller.conversation.turns[index].text).code_blocks
        if not blocks:
            raise TinychatError("this answer has no code block; /copy answer takes all of it")
        if number and (not number.isdecimal() or not 1 <= int(number) <= len(blocks)):
            raise TinychatError(f"/copy code N: this answer has {len(blocks)} code block{'s' * (len(blocks) > 1)}")
        self.copy(blocks[int(number) - 1 if number else -1], "the code")

    @on(MarkdownView.CopyRequested)
    def _copy_requested(self, event: MarkdownView.CopyRequested) -> None:
        self.copy(event.code, "the code")

    @on(MarkdownView.LinkClicked)
    def _link(self, event: MarkdownView.LinkClicked) -> None:
        if event.href.lower().startswith(("http://", "https://", "mailto:")):
            self.app.open_url(event.href)
        else:
            self.notify(
                Content(f"not opened: {printable(event.href, newlines=False)[:200]}").markup, severity="warning"
            )

    def model_changed(self) -> None:
        """Another tokenizer counts the draft; which model is loaded is kept for the next start."""
        self._typed()
        if (choice := self.controller.choice) is not None and self._remember is not None:
            self.run_worker(in_daemon(partial(remember, choice, self._remember)), exclusive=True, group="model")

    def show_experts(self, on: bool) -> None:
        """Shows or hides the heat strip, and keeps that. Raises TinychatError when it cannot be kept."""
        self.experts = on
        self.painter.panel()
        if self._remember is not None:
            self._remember(experts=on)

    def _commands(self, text: str) -> list[Choice]:
        return [*commands.complete(text), *prompt_choices(self.mcp, text)]

    def _files(self, typed: str) -> list[Choice]:
        if self.controller.raw:
            return []
        if self.finder.due():
            self.run_worker(self._look())
        files = [file_choice(name, typed) for name in self.finder.find(typed)]
        return [*files, *resource_choices(self.mcp, typed)]

    async def _look(self) -> None:
        self.finder.take(await in_daemon(self.finder.look))
        self.box.find()


def file_choice(name: str, typed: str) -> Choice:
    """The completion of what is `typed` behind @ to the path `name`: a folder can be completed further, and is attached
    where it is all that was typed."""
    written = attach.quoted(name)
    if not name.endswith("/"):
        return Choice(f"{written} ", name)
    if name == typed:
        return Choice(f"{written} ", name, "all text files in it")
    return Choice(written.rstrip('"'), name)


def _is_command(text: str) -> bool:
    return bool(_COMMAND.match(text)) and "\n" not in text


def tokens(count: int, exact: bool) -> str:
    """4,700 tokens, or ~4,700 tokens."""
    return f"{'' if exact else '~'}{count:,} token{'s' * (count != 1)}"
