"""The saved conversations: search, open, rename, delete; by day, and by project where there are any."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Input, Static
from textual.widgets.option_list import Option

from tinychat.chat.days import by_day
from tinychat.chat.history import LISTED, History, Summary
from tinychat.errors import TinychatError, printable
from tinychat.ui.screens.dialogs import AskScreen, ConfirmScreen
from tinychat.ui.screens.sheet import Rows, SearchField, Sheet, ago, cell

TYPED = 0.05  # seconds in which what is typed becomes one search


class ConversationsScreen(Sheet[str]):
    """Dismisses with the id of the conversation to open. `present` is the id of the open one; `rename` and `delete` are
    History's, or what does the same and tells the chat."""

    TITLE = "Conversations"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "open"),
        Binding("f2", "rename", "rename", priority=True),
        Binding("ctrl+d", "delete", "delete", priority=True),
        Binding("tab", "project", "next project", priority=True, tooltip="only those of one project, or all again"),
    ]

    def __init__(
        self,
        history: History,
        present: str = "",
        rename: Callable[[str, str], None] | None = None,
        delete: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__()
        self._history, self._present = history, present
        self._rename, self._delete = rename or history.rename, delete or history.delete
        self._found: dict[str, Summary] = {}
        self._project, self._projects = "", list[str]()
        self._due: Timer | None = None  # a search for what was typed

    def body(self) -> ComposeResult:
        with Horizontal(classes="search-line"):
            yield Static("›", classes="prompt-mark")
            yield SearchField("", "search all conversations")
        rows = Rows(markup=False)
        rows.can_focus = False
        yield rows

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_resize(self) -> None:  # also the first time there is a size
        self.call_after_refresh(lambda: self._show(self._highlighted))

    @property
    def search(self) -> str:
        """What is searched for."""
        return self.query_one(Input).value

    @property
    def _highlighted(self) -> str | None:
        option = self.query_one(Rows).highlighted_option
        return option.id if option else None

    @property
    def _chosen(self) -> Summary | None:
        return self._found.get(self._highlighted or "")

    def _show(self, keep: str | None) -> None:
        search, rows = self.query_one(Input).value, self.query_one(Rows)
        message = (
            "no conversation matches" if search.split() else "no conversations yet; each one is saved automatically"
        )
        try:
            self._found = {s.id: s for s in self._history.find(search, project=self._project)}
            self._projects = self._history.projects()
        except TinychatError as e:
            self._found, message = {}, str(e)
        width = max(30, rows.size.width - 2)
        options = []
        for day, group in by_day(self._found.values()):
            options.append(Option(Content(day), disabled=True))
            options += [Option(_line(s, width, s.id == self._present), id=s.id) for s in group]
        if len(self._found) == LISTED:
            message = (
                f"these are the latest {LISTED}; {'more words find' if search.split() else 'a search finds'} others"
            )
        elif self._found:
            message = ""
        if message:
            options.append(Option(Content.styled(printable(message), "$foreground-muted not bold"), disabled=True))
        rows.show(options, keep)
        self.set_title(self.TITLE or "", f"project {self._project}" if self._project else "")
        self.refresh_bindings()

    @on(Input.Changed)
    def _searched(self) -> None:
        if self._due is None:
            self._due = self.set_timer(TYPED, self._search)

    def _search(self) -> None:
        """Shows what is found for all that has been typed."""
        if self._due is not None:
            self._due.stop()
            self._due = None
            self._show(self._highlighted)

    @on(Rows.OptionSelected)
    def _selected(self) -> None:
        self.action_open()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "project":
            return bool(self._projects)
        return action not in ("open", "rename", "delete") or (self.is_mounted and self._chosen is not None)

    def action_project(self) -> None:
        """The next project, and behind the last one all again."""
        names = ["", *self._projects]
        place = names.index(self._project) if self._project in names else -1
        self._project = names[(place + 1) % len(names)]
        self._show(self._highlighted)

    def action_open(self) -> None:
        if self._chosen:
            self.dismiss(self._chosen.id)

    def action_rename(self) -> None:
        self._search()
        if (s := self._chosen) is None:
            return

        def named(name: str | None) -> None:
            if name is not None:
                self._try(lambda: self._rename(s.id, name))

        self.app.push_screen(AskScreen("Name of this conversation (empty: its first words)", s.title), named)

    def action_delete(self) -> None:
        self._search()
        if (s := self._chosen) is None:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self._try(lambda: self._delete(s.id))

        self.app.push_screen(
            ConfirmScreen(f"Delete “{s.title}” ({_turns(s)})? This cannot be undone.", "Delete"), answered
        )

    def _try(self, change: object) -> None:
        try:
            change()  # type: ignore[operator]
        except TinychatError as e:
            self.notify(printable(str(e)), severity="error", markup=False)
        self._show(self._highlighted)

    @on(SearchField.Pressed)
    def _pressed(self, event: SearchField.Pressed) -> None:
        self._search()
        if event.key == "enter":
            self.action_open()
        else:
            self.query_one(Rows).walk(event.key)


def _turns(s: Summary) -> str:
    return f"{s.turns} turn{'s' * (s.turns != 1)}"


def _line(s: Summary, width: int, present: bool) -> Content:
    """Title, model, size and age; below it the project and what the search found, or the last turn's beginning."""
    model = min(24, width // 4) if width >= 70 else 0
    age = "open now" if present else ago(s.updated)
    tail = f"{cell(s.model, model)}  " * bool(model) + cell(_turns(s), 10, True) + cell(age, 13, True)
    title = cell(s.title or "untitled", width - len(tail) - 3)
    line = Content(f" {title}  {tail}").stylize("$foreground-muted", len(title) + 1)
    below = " · ".join(filter(None, (s.project, s.snippet or s.preview)))
    return line + Content.styled(f"\n   {cell(below, width - 4)}", "$foreground-muted") if below else line
