"""Finding text in the conversation: a line above the prompt, with the number of hits."""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.message import Message
from textual.widgets import Input, Static

from tinychat.chat.controller import Controller
from tinychat.chat.find import Hit, find, pattern_of
from tinychat.ui.chat.transcript import Transcript


class FindField(Input):
    """Enter and down go to the next hit, shift+enter and up to the one before; esc closes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "go('enter')", "next"),
        Binding("up", "go('up')", "previous"),
        Binding("escape", "go('escape')", "close"),
    ]

    class KeyPressed(Message):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.key = key

    def action_go(self, key: str) -> None:
        self.post_message(self.KeyPressed(key))

    async def _on_key(self, event: events.Key) -> None:
        # not left to the bindings: those overtake characters that are still on their way
        if event.key in ("enter", "shift+enter", "down", "up", "escape"):
            event.stop()
            event.prevent_default()
            self.action_go(event.key)
        else:
            await super()._on_key(event)


class FindBar(Horizontal):
    """Hidden until `open`. Marks what it finds in the transcript, whose turns need not be mounted."""

    class Closed(Message):
        """The user has found it, or given up."""

    def __init__(self, controller: Controller) -> None:
        super().__init__(id="find")
        self._controller = controller
        self._hits: list[Hit] = []
        self._at = -1

    def compose(self) -> ComposeResult:
        yield Static("find", classes="does")
        yield FindField(compact=True, select_on_focus=True)
        yield Static(classes="count")

    def on_mount(self) -> None:
        self.display = False

    @property
    def field(self) -> FindField:
        return self.query_one(FindField)

    async def open(self, text: str = "") -> None:
        """Shows the bar; `text` is looked for at once."""
        self.display = True
        if text:
            with self.prevent(Input.Changed):
                self.field.value = text
            await self._search()
        self.field.focus()

    @on(Input.Changed)
    async def _search(self) -> None:
        """Begins again: with the first hit that is not above the screen, else the first of all."""
        self._find()
        top = self._transcript.first_shown
        self._at = next((i for i, hit in enumerate(self._hits) if hit.index >= top), 0)
        await self._show()

    @on(FindField.KeyPressed)
    async def _pressed(self, event: FindField.KeyPressed) -> None:
        if event.key == "escape":
            self.display = False
            self._transcript.mark(None)
            self.post_message(self.Closed())
            return
        self._find()  # the conversation may have grown
        if self._hits:
            self._at = (self._at + (1 if event.key in ("enter", "down") else -1)) % len(self._hits)
        await self._show()

    def _find(self) -> None:
        self._hits = find(self._controller.conversation, self.field.value)

    @property
    def _transcript(self) -> Transcript:
        return self.screen.query_one(Transcript)

    async def _show(self) -> None:
        search = self.field.value
        count = f"{self._at + 1} of {len(self._hits)}" if self._hits else "nothing found" if search.split() else ""
        self.query_one(".count", Static).update(count)
        if not self._hits:
            self._transcript.mark(None)
            return
        turns = self._controller.conversation.turns
        pattern = pattern_of(search, (text for turn in turns for text in (turn.thinking, turn.text)))
        await self._transcript.show_hit(self._hits[self._at], pattern)
