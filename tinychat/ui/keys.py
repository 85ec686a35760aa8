"""The last line of every screen: the keys that work now and what they do.

Textual's Footer mounts a new widget per key whenever anything changes and keeps all of the old ones alive.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from textual import events
from textual.binding import ActiveBinding, Binding, BindingsMap
from textual.content import Content
from textual.screen import Screen
from textual.style import Style
from textual.widgets import Static

GAP = "  "
_NAMES = {"escape": "esc", "question_mark": "?", "slash": "/", "pageup": "page up", "pagedown": "page down"}


def key_name(key: str) -> str:
    """A key as every screen writes it: ctrl+r, esc, f2, page up."""
    *modifiers, last = key.split("+")
    return "+".join([*modifiers, _NAMES.get(last, last)])


def in_order(screen: Screen[object]) -> list[ActiveBinding]:
    """What keys do on `screen` now: those of the focused widget, the screen's, the app's, each as its class lists
    them."""

    def place(active: ActiveBinding) -> tuple[int, int]:
        order = 2 if active.node is screen.app else int(active.node is screen)
        return order, _places(type(active.node)).get(active.binding.key, 0) if order < 2 else 0

    return sorted(screen.active_bindings.values(), key=place)


@cache
def _places(kind: type) -> dict[str, int]:
    """The place of each key in the bindings of class `kind`; what it inherits comes last."""
    maps = (BindingsMap(cls.__dict__.get("BINDINGS", ())) for cls in kind.__mro__)
    keys = dict.fromkeys(key for bindings in maps for key in bindings.key_to_bindings)
    return {key: i for i, key in enumerate(keys)}


class KeyLine(Static):
    """Keys from the left, as many as there is room for, with the command palette's, if wanted, as the last; on the
    right what `say` was given. A click presses a key."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"key", "does", "spark", "now"}

    def __init__(self, palette: bool = False) -> None:
        super().__init__()
        self._palette = palette
        self._right = Content("")

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def on_resize(self) -> None:
        self._show()

    def say(self, right: Content) -> None:
        """Shows `right` at the right end."""
        if not right.is_same(self._right):
            self._right = right
            self._show()

    def _changed(self, screen: Screen[object]) -> None:
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        if not self.is_attached:
            return
        active = self.screen.active_bindings
        ordered = in_order(self.screen)
        shown: dict[str, Content] = {}  # by what it does: a second key for the same is not shown
        for binding, enabled in ((b.binding, b.enabled) for b in ordered):
            if binding.show and binding.description not in shown:
                shown[binding.description] = self._key(binding, enabled)
        keys = list(shown.values())
        width = self.content_size.width
        room = width - self._right.cell_length - len(GAP) * bool(self._right)
        if self._palette and (found := active.get(self.app.COMMAND_PALETTE_BINDING)):
            keys.append(self._key(found.binding, found.enabled))
        line = Content("")
        for key in keys:
            longer = Content.assemble(line, GAP if line else "", key)
            if longer.cell_length <= room:
                line = longer
        line = Content.assemble(line, " " * max(0, width - line.cell_length - self._right.cell_length), self._right)
        if not isinstance(self.content, Content) or not line.is_same(self.content):
            self.update(line, layout=False)

    def _key(self, binding: Binding, enabled: bool) -> Content:
        text = Content.assemble((key_name(binding.key), ".key"), " ", (binding.description, ".does"))
        return text.stylize(Style.from_meta({"key": binding.key})) if enabled else text.stylize("dim")

    def on_click(self, event: events.Click) -> None:
        if key := event.style.meta.get("key"):  # not "@click", which would take our colours away
            self.app.simulate_key(key)
