"""The parameters of a conversation as a form, and presets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Checkbox, Input, Select, Static, TextArea

from tinychat.chat import settings
from tinychat.chat.parameters import DEFAULT, PARAMETERS, SAMPLING_PARAMETERS, Parameters, set_parameter, shown
from tinychat.errors import TinychatError, printable
from tinychat.ui.screens.dialogs import AskScreen, ConfirmScreen
from tinychat.ui.screens.sheet import Sheet

NAMES = (
    ("preset", "preset", 2),
    ("system", "system prompt", 6),
    ("thinking", "thinking", 1),
    ("drop_oldest", "full context", 1),
    *((name, name.replace("_", " "), 1) for name in PARAMETERS),
)
"""Of each field: its id, its name, and the lines from its first to that of the next field."""


class Tick(Checkbox):
    """A checkbox whose state is a sign, not a colour."""

    @property
    def _button(self) -> Content:
        return Content(f"[{'✓' if self.value else ' '}]")


class Field(Input):
    """A field of one line. What it has at first is no change, and none is judged by itself."""

    def __init__(self, value: str, placeholder: str, id: str) -> None:
        super().__init__(placeholder=placeholder, id=id, validate_on=())
        with self.prevent(Input.Changed):
            self.value = value


class SystemPrompt(TextArea):
    """The arrows go on to the next field from the last line, and back from the first."""

    def action_cursor_down(self, select: bool = False) -> None:
        if select or not self.cursor_at_last_line:
            super().action_cursor_down(select)
        else:
            self.screen.focus_next()

    def action_cursor_up(self, select: bool = False) -> None:
        if select or not self.cursor_at_first_line:
            super().action_cursor_up(select)
        else:
            self.screen.focus_previous()


class Form(VerticalScroll, can_focus=False, inherit_bindings=False):
    """Scrolls to the focused field; the arrow keys are the screen's."""


class ParametersScreen(Sheet[Parameters]):
    """Dismisses with the parameters as the form has them, None when nothing is to change. Presets are kept in the
    settings. `defaults` are the model's for sampling: an empty field shows them, or tinychat's own."""

    TITLE = "Parameters"
    AUTO_FOCUS = "#system"
    CSS_PATH = ["sheet.tcss", "parameters.tcss"]  # type: ignore[assignment]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "use", "use", priority=True),
        Binding("ctrl+t", "save_preset", "save as preset", priority=True),
        Binding("ctrl+d", "delete_preset", "delete preset", priority=True),
        Binding("ctrl+b", "make_default", "use for new chats", priority=True),
        Binding("down", "app.focus_next", "next", show=False),
        Binding("up", "app.focus_previous", "previous", show=False),
    ]

    def __init__(self, parameters: Parameters, defaults: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self._parameters, self._defaults = parameters, defaults or {}
        self._presets = dict(settings.load().presets)
        self._preset = ""  # the one that was loaded last

    def body(self) -> ComposeResult:
        # One widget has all names and one all helps, and heights are given: with a row and two labels for every field,
        # each row as high as what is in it, the form takes much longer to open.
        with Form(), Horizontal() as lines:
            lines.styles.height = sum(height for _, _, height in NAMES)
            yield Static(self._names(), classes="names")
            with Vertical():
                yield Select[str](self._choices(), prompt="none", id="preset", compact=True)
                yield SystemPrompt(self._parameters.system, id="system", highlight_cursor_line=False)
                yield Tick("if the model supports it", self._parameters.thinking, id="thinking")
                leave_out = "leave out the oldest turns without asking"
                yield Tick(leave_out, self._parameters.drop_oldest, id="drop_oldest")
                with Horizontal() as numbers:
                    numbers.styles.height = len(PARAMETERS)
                    with Vertical(classes="numbers"):
                        for name in PARAMETERS:
                            yield Field(_typed(self._parameters, name), self._default(name), name)
                    yield Static(Content("\n".join(spec.help for spec in PARAMETERS.values())), classes="helps")
        yield Static(classes="detail")

    def _names(self) -> Content:
        """The names of the fields, that of the focused one in bold, each in the first line of its field."""
        focused = {node.id for node in self.focused.ancestors_with_self} if self.focused else set()
        lines = []
        for id, name, height in NAMES:
            lines += [Content.styled(name, "$foreground bold" if id in focused else ""), *[Content("")] * (height - 1)]
        return Content("\n").join(lines)

    @on(events.DescendantFocus)
    @on(events.DescendantBlur)
    def _focus_moved(self) -> None:
        self.query_one(".names", Static).update(self._names(), layout=False)

    def _choices(self) -> list[tuple[Content, str]]:
        return [(Content(printable(name, newlines=False)), name) for name in self._presets]

    def _empty(self, name: str) -> str:
        """What to set where the field of parameter `name` is empty."""
        return DEFAULT if name in SAMPLING_PARAMETERS else ""

    def _default(self, name: str) -> str:
        """What an empty field means."""
        return shown(Parameters(), name, self._defaults).replace(", the model's default", " (model)")

    def _fill(self, p: Parameters) -> None:
        self.query_one("#system", TextArea).text = p.system
        self.query_one("#thinking", Checkbox).value = p.thinking
        self.query_one("#drop_oldest", Checkbox).value = p.drop_oldest
        for name in PARAMETERS:
            self.query_one(f"#{name}", Input).value = _typed(p, name)

    def _read(self) -> Parameters | None:
        """The parameters in the form; None, with the reason shown, when a field is wrong."""
        p = replace(
            self._parameters,
            system=self.query_one("#system", TextArea).text.strip(),
            thinking=self.query_one("#thinking", Checkbox).value,
            drop_oldest=self.query_one("#drop_oldest", Checkbox).value,
        )
        trouble = ""
        for field in self.query(Input):
            name = field.id or ""
            try:
                p, wrong = set_parameter(p, name, field.value or self._empty(name)), ""
            except TinychatError as e:
                wrong = str(e)
            field.set_class(bool(wrong), "-wrong")
            trouble = trouble or wrong
        detail = self.query_one(".detail", Static)
        spec = PARAMETERS.get(self.focused.id or "") if self.focused else None
        detail.update(Content(trouble or (spec.help if spec else "")), layout=False)
        detail.set_class(bool(trouble), "-error")
        return None if trouble else p

    @on(Input.Changed)
    @on(events.DescendantFocus)
    def _changed(self) -> None:
        self._read()

    @on(Input.Submitted)
    def action_use(self) -> None:
        if (p := self._read()) is not None:
            self.dismiss(p)
        else:
            self.query(".-wrong").first().focus()

    @on(Select.Changed)
    def _chosen(self, event: Select.Changed) -> None:
        self._preset = event.value if isinstance(event.value, str) and event.value in self._presets else ""
        if self._preset:
            self._fill(self._presets[self._preset])
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "delete_preset" or bool(self._preset)

    def action_save_preset(self) -> None:
        if (p := self._read()) is None:
            return

        def named(name: str | None) -> None:
            if name and name.strip():
                self._change(lambda: settings.save_preset(name, p), name.strip(), f"saved as preset {name.strip()}")

        self.app.push_screen(AskScreen("Name of the preset", self._preset), named)

    def action_delete_preset(self) -> None:
        name = self._preset

        def answered(yes: bool | None) -> None:
            if yes:
                self._change(lambda: settings.delete_preset(name), "", f"preset {name} is deleted")

        self.app.push_screen(ConfirmScreen(f"Delete the preset “{name}”?", "Delete"), answered)

    def action_make_default(self) -> None:
        if (p := self._read()) is not None:
            self._change(lambda: settings.update(parameters=p), self._preset, "new chats start with these parameters")

    def _change(self, change: object, preset: str, done: str) -> None:
        """Runs `change`, a call into the settings, and shows the presets as they are now."""
        try:
            self._presets = dict(change().presets)  # type: ignore[operator]
        except TinychatError as e:
            self.notify(printable(str(e)), severity="error", markup=False)
            return
        self.notify(printable(done), markup=False)
        select = self.query_one(Select)
        with self.prevent(Select.Changed):
            select.set_options(self._choices())
            if preset in self._presets:
                select.value = preset
        self._preset = preset if preset in self._presets else ""
        self.refresh_bindings()


def _typed(p: Parameters, name: str) -> str:
    """What the field of parameter `name` has; nothing where the user has not set it."""
    return shown(p, name, {}) if name not in SAMPLING_PARAMETERS or name in p.chosen else ""
