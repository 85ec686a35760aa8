"""Where the user types: Enter sends, history with the arrows, completion of commands and files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.document._document import EditResult, Location
from textual.message import Message
from textual.widgets import OptionList, Static, TextArea
from textual.widgets.option_list import Option

from tinychat.errors import printable
from tinychat.ui.chat.folds import Folds
from tinychat.ui.editor import Editor

PROMPT_KEYS = (  # for the help
    ("enter", "send"),
    ("shift+enter, ctrl+j", "new line"),
    ("/", "list of commands; tab completes"),
    ("@", "attach text files: letters of the path find them, folder/ takes all in it"),
    ("up, down", "earlier messages, from the first and last line"),
    ("tab", "unfold a long paste; so does deleting into it"),
    ("ctrl+c", "clear; ctrl+z brings it back"),
    ("ctrl+d", "leave, when nothing is typed; ctrl+c twice too"),
)
_FILE = re.compile(r'(?:^|\s)@(?:"([^"\n]*)|(\S*))$')


@dataclass(frozen=True)
class Choice:
    """A completion: what is inserted, how it reads, and whether choosing it with Enter also sends it."""

    insert: str
    label: str
    help: str = ""
    final: bool = False


class Completions(Protocol):
    """What an open list can do for the prompt. `send` is False when it has nothing to say to the text."""

    def move(self, step: int) -> None: ...
    def take(self) -> None: ...
    def send(self) -> bool: ...


class PromptEditor(Editor):
    """A multi-line field that grows. Posts Submitted; `past` is walked with up and down at its edges."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"paste"}
    # in place of TextArea's; without priority, so that it does not overtake characters
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("f6", "screen.command('editor')", "write the prompt in $VISUAL or $EDITOR", show=False)
    ]

    class Submitted(Message):
        """Enter was pressed on `text`, which was removed from the prompt; a receiver that cannot use it restores it."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        self.folds = Folds()
        super().__init__(
            id="prompt",
            compact=True,
            highlight_cursor_line=False,
            show_line_numbers=False,
            soft_wrap=True,
            placeholder="ask, or / for commands",
        )
        self.past: list[str] = []
        self.completions: Completions | None = None  # set by the box while a list is open
        self._place: int | None = None  # in the history; None = the draft
        self._draft = ""
        self._asides: list[str] = []  # the draft that makes room for an edit, and that for a command

    @property
    def walking(self) -> bool:
        """Whether the text comes from the history: no completions then, the arrows go on walking."""
        return self._place is not None

    @property
    def text(self) -> str:
        """The whole text, long pastes included; only the screen shows their labels."""
        return self.folds.whole(self.document.text)

    @text.setter
    def text(self, value: str) -> None:
        self.load_text(self.folds.fold(value))

    @property
    def selected_text(self) -> str:
        return self.folds.whole(super().selected_text)

    def put(self, text: str) -> None:
        """Replaces the text; the cursor goes to its end."""
        self.text = text
        self.move_cursor(self.document.end)

    @property
    def draft(self) -> str:
        """What the user was writing, wherever it is now."""
        return self._asides[0] if self._asides else self._own()

    def _own(self) -> str:
        """What was written in the place of the present text, with what was made of a text of the history."""
        if self._place is None:
            return self.text
        changed = self.text if self.text != self.past[self._place] else ""
        return "\n".join(filter(None, (changed, self._draft)))

    @property
    def asides(self) -> int:
        """How many texts make room for the present one."""
        return len(self._asides)

    def set_aside(self, text: str) -> None:
        """Puts `text` in place of the present one, until it is sent or `bring_back` is called."""
        self._asides.append(self._own())
        self._place = None
        self.put(text)

    def bring_back(self) -> None:
        """Puts back what was set aside last; a draft that stood before a walk through the history, likewise."""
        before = self._asides.pop() if self._asides else self._draft if self.walking else ""
        self._place = None
        self.put(before)

    def start_over(self, draft: str, pastes: Sequence[str]) -> None:
        """Shows the draft of another conversation, its long `pastes` as labels."""
        for pasted in pastes:
            self.folds.add(pasted)
        self._asides.clear()
        self._place = None
        self.put(draft)

    def give_back(self, text: str) -> None:
        """Puts `text` before the draft."""
        draft = "\n".join(filter(None, (text, self.draft)))
        if self._asides:
            self._asides[0] = draft
        else:
            self._place = None
            self.put(draft)

    def remember(self, text: str) -> None:
        """Appends to the history."""
        if text.strip():
            self.past = [*(t for t in self.past if t != text), text]
        self._place = None

    async def _on_key(self, event: events.Key) -> None:
        # Not bindings: those with priority overtake characters that are still on their way, and a fast typist's Enter
        # comes before the end of the line.
        if event.key == "enter":
            act: Callable[[], object] = self.submit
        elif event.key in ("shift+enter", "ctrl+j", "alt+enter"):
            act = partial(self.insert, "\n")
        elif event.key == "ctrl+d" and not self.text:
            act = self.app.exit
        elif event.key == "ctrl+home":
            act = partial(self.move_cursor, (0, 0))
        elif event.key == "ctrl+end":
            act = partial(self.move_cursor, self.document.end)
        elif event.key == "tab" and self.completions is not None:
            act = self.completions.take
        elif event.key == "tab" and self.folded:
            act = self.unfold
        else:
            return
        event.stop()
        event.prevent_default()
        act()

    def submit(self) -> None:
        """Sends the text, or what the open list completes it to."""
        if self.completions is not None and self.completions.send():
            return
        if self.text.strip():
            self.send(self.text)

    def send(self, text: str) -> None:
        """Posts `text` and empties the prompt at once, so that what is typed next is not lost."""
        self.bring_back()
        self.post_message(self.Submitted(text))

    def action_cursor_up(self, select: bool = False) -> None:
        if self.completions is not None:
            self.completions.move(-1)
        elif select or not self.cursor_at_first_line or not self._walk(-1):
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        if self.completions is not None:
            self.completions.move(1)
        elif select or not self.cursor_at_last_line or not self._walk(1):
            super().action_cursor_down(select)

    def _walk(self, step: int) -> bool:
        """Goes through the history; the unsent draft is its end."""
        if self._place is None:
            if step > 0 or not self.past:
                return False
            self._draft, place = self.text, len(self.past) - 1
        else:
            place = self._place + step
            if place < 0:
                return True
            if self.text != self.past[self._place]:
                self.past.append(self.text)  # what was made of it is the latest
                place += place == len(self.past) - 1  # down from the last one is the draft
        self._place = None if place >= len(self.past) else place
        self.put(self._draft if self._place is None else self.past[place])
        return True

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()  # TextArea's own would insert it a second time
        pasted = self.folds.add(event.text.replace("\r\n", "\n").replace("\r", "\n"))
        if result := self._replace_via_keyboard(pasted, *self.selection):
            self.move_cursor(result.end_location)

    # long pastes

    @property
    def folded(self) -> list[tuple[Location, Location, str]]:
        """The labels in the prompt: start, end, label."""
        lines = enumerate(self.document.lines)
        return [((y, start), (y, end), label) for y, line in lines for start, end, label in self.folds.spans(line)]

    def unfold(self) -> None:
        """Puts the texts in place of their labels; undo folds them again."""
        for start, end, label in reversed(self.folded):
            self.replace(self.folds.text(label), start, end)
        self.scroll_cursor_visible()

    def relabel(self, label: str, tokens: str) -> None:
        """Says the tokens of a paste in its label."""
        counted = self.folds.counted(label, tokens)
        for start, end, found in reversed(self.folded):
            if found == label:
                self.replace(counted, start, end)

    def clamp_visitable(self, location: Location) -> Location:
        """A cursor goes over a label as over one character."""
        row, column = super().clamp_visitable(location)
        for start, end, _ in self.folds.spans(self.document.get_line(row)):
            if start < column < end:
                from_left = self.selection.end[0] == row and self.selection.end[1] <= start
                return row, end if from_left else start
        return row, column

    def _delete_via_keyboard(self, start: Location, end: Location) -> EditResult | None:
        start, end = sorted((start, end))
        for left, right, label in self.folded:
            if left < start < right or left < end < right:
                self.replace(self.folds.text(label), left, right, maintain_selection_offset=False)
                return None
        result = super()._delete_via_keyboard(start, end)
        return result and replace(result, replaced_text=self.folds.whole(result.replaced_text))

    def get_line(self, line_index: int) -> Text:
        line = super().get_line(line_index)
        for start, end, _ in self.folds.spans(line.plain):
            line.stylize(self.get_component_rich_style("paste"), start, end)
        return line


class PromptBox(Vertical):
    """The prompt with what belongs to it: completions above, waiting messages, the mark in front."""

    def __init__(self, commands: Callable[[str], Sequence[Choice]], files: Callable[[str], Sequence[Choice]]) -> None:
        super().__init__(id="prompt-box")
        self._commands, self._files = commands, files
        self._choices: list[Choice] = []

    def compose(self) -> ComposeResult:
        yield OptionList(id="completions", markup=False, compact=True)
        yield Static(id="waiting")
        with Horizontal(id="prompt-line"):
            yield Static("›", id="prompt-mark")
            yield PromptEditor()

    def on_mount(self) -> None:
        self.list.can_focus = False
        self.list.display = self.query_one("#waiting").display = False

    @property
    def prompt(self) -> PromptEditor:
        return self.query_one(PromptEditor)

    @property
    def list(self) -> OptionList:
        return self.query_one("#completions", OptionList)

    def show_waiting(self, texts: Sequence[str]) -> None:
        """The messages that are sent when the running answer is done."""
        waiting = self.query_one("#waiting", Static)
        waiting.display = bool(texts)
        first = printable(" ".join(texts[0].split())) if texts else ""
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        waiting.update(
            Content.assemble(("waiting ", "$accent"), first[:200], more, ("  esc unqueues it", "$foreground 60%"))
        )

    def show_count(self, text: str, too_long: bool = False) -> None:
        """The tokens of the draft, in the border; a low screen has none."""
        hint = "tab unfolds · " if self.prompt.folded and self.prompt.completions is None else ""
        self.border_subtitle = Content.styled(hint + text, "$text-error" if too_long else "") if text else ""

    def close(self) -> bool:
        """Closes the completions; False when none were open."""
        was = self.prompt.completions is not None
        self.prompt.completions = None
        self.list.display = False
        return was

    @on(TextArea.Changed)
    def find(self) -> None:
        """Shows what completes the text."""
        self._choices = list(self._find())
        self.prompt.completions = self if self._choices else None
        self.list.display = bool(self._choices)
        if self._choices:
            width = max(len(c.label) for c in self._choices)
            rows = [
                Content.assemble(printable(c.label).ljust(width + 2), (c.help, "$foreground 60%"))
                for c in self._choices
            ]
            self.list.set_options([Option(row) for row in rows])
            self.list.highlighted = 0

    def _find(self) -> Sequence[Choice]:
        prompt = self.prompt
        text = prompt.text
        if prompt.walking:
            return ()
        if text.startswith("/") and "\n" not in text:
            return self._commands(text)
        row, column = prompt.cursor_location
        match = _FILE.search(prompt.document.get_line(row)[:column])
        return self._files(match[1] if match[1] is not None else match[2]) if match else ()

    # Completions

    def move(self, step: int) -> None:
        self.list.action_cursor_down() if step > 0 else self.list.action_cursor_up()

    def take(self) -> None:
        if choice := self._choice():
            self._insert(choice)

    def send(self) -> bool:
        choice, text = self._choice(), self.prompt.text
        if choice is None:
            return False
        if text.startswith("/") and (choice.final or text.strip() == choice.insert.strip()):
            self.close()
            self.prompt.send(choice.insert.strip())
        elif choice.insert.startswith("@") and self._typed() == choice.insert.strip():
            return False
        else:
            self._insert(choice)
        return True

    def _typed(self) -> str:
        """The @path before the cursor."""
        row, column = self.prompt.cursor_location
        line = self.prompt.document.get_line(row)[:column]
        return line[line.rindex("@") :]

    def _choice(self) -> Choice | None:
        """The highlighted completion of the text as it is now, which the list may not show yet."""
        fresh = list(self._find())
        if fresh != self._choices:
            return fresh[0] if fresh else None
        return fresh[self.list.highlighted] if self.list.highlighted is not None else None

    def _insert(self, choice: Choice) -> None:
        prompt = self.prompt
        if prompt.text.startswith("/") and "\n" not in prompt.text:
            prompt.put(choice.insert)
            return
        row, column = prompt.cursor_location
        line = prompt.document.get_line(row)
        insert = choice.insert.rstrip() if line[column : column + 1].isspace() else choice.insert
        prompt.replace(insert, (row, line[:column].rindex("@")), (row, column))

    @on(OptionList.OptionSelected, "#completions")
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.list.highlighted = event.option_index
        self.prompt.submit()
        self.prompt.focus()
