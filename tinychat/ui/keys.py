"""The last line of every screen: the keys that work now and what they do.

Textual's Footer mounts a new widget per key whenever anything changes and keeps all of the old ones alive.
"""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import ActiveBinding, BindingsMap
from textual.content import Content
from textual.screen import Screen
from textual.style import Style
from textual.widgets import Static

GAP = "  "


def in_order(screen: Screen[object]) -> list[ActiveBinding]:
    """What keys do on `screen` now: those of the focused widget, the screen's as its class lists them, the app's."""
    places: dict[str, int] = {}
    for cls in type(screen).__mro__:  # what it inherits comes last
        for key in BindingsMap(cls.__dict__.get("BINDINGS", ())).key_to_bindings:
            places.setdefault(key, len(places))

    def place(active: ActiveBinding) -> tuple[int, int]:
        return (1, places[active.binding.key]) if active.node is screen else (2 * (active.node is screen.app), 0)

    return sorted(screen.active_bindings.values(), key=place)


class KeyLine(Static):
    """Keys from the left, as many as there is room for; the command palette's, if wanted, on the right. A click presses
    one."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"key", "does"}

    def __init__(self, palette: bool = False) -> None:
        super().__init__()
        self._palette = palette

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._changed)

    def on_resize(self) -> None:
        self._show()

    def _changed(self, screen: Screen[object]) -> None:
        self.call_after_refresh(self._show)

    def _show(self) -> None:
        if not self.is_attached:
            return
        active = self.screen.active_bindings
        ordered = in_order(self.screen)
        shown: dict[str, Content] = {}  # by action: a second key for the same one is not shown
        for binding, enabled in ((b.binding, b.enabled) for b in ordered):
            if binding.show and binding.action not in shown:
                shown[binding.action] = self._key(
                    binding.key, self.app.get_key_display(binding), binding.description, enabled
                )
        last = Content("")
        if self._palette and (found := active.get(self.app.COMMAND_PALETTE_BINDING)):
            binding = found.binding
            last = self._key(binding.key, self.app.get_key_display(binding), binding.description, found.enabled)
        width = self.content_size.width
        line, room = Content(""), width - last.cell_length - len(GAP) * bool(last)
        for key in shown.values():
            longer = Content.assemble(line, GAP if line else "", key)
            if longer.cell_length <= room:
                line = longer
        line = Content.assemble(line, " " * max(0, width - line.cell_length - last.cell_length), last)
        if not isinstance(self.content, Content) or not line.is_same(self.content):
            self.update(line, layout=False)

    def _key(self, key: str, display: str, description: str, enabled: bool) -> Content:
        text = Content.assemble((display, ".key"), " ", (description, ".does"))
        return text.stylize(Style.from_meta({"key": key})) if enabled else text.stylize("dim")

    def on_click(self, event: events.Click) -> None:
        if key := event.style.meta.get("key"):  # not "@click", which would take our colours away
            self.app.simulate_key(key)
