"""A tiny app around one dialog, and what the tests of dialogs share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual._context import visible_screen_stack
from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget

UNSET = object()


class Host(App[None]):
    """Shows `screen`; `result` is what it was dismissed with."""

    def __init__(self, screen: Screen[Any]) -> None:
        super().__init__()
        self._dialog, self.result = screen, UNSET

    def on_mount(self) -> None:
        self.push_screen(self._dialog, self._dismissed)

    def _dismissed(self, result: Any) -> None:
        self.result = result


async def until(pilot: Pilot[Any], condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    """Waits for `condition` to be true, and for the screen to be as whole as it makes it; returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.02)
    await painted(pilot)
    return value


async def painted(pilot: Pilot[Any]) -> None:
    """Waits until nothing waits to be handled, laid out or painted, or something moves for long. Pilot.pause waits for
    an idle processor, and on a busy machine for nothing."""
    for _ in range(50):
        app, screen = pilot.app, pilot.app.screen
        screen._on_timer_update()
        waiting = app.message_queue_size or screen._layout_required or screen._dirty_widgets or screen._callbacks
        if not waiting and not any(map(_changes, (screen, *screen.walk_children(Widget)))):
            return
        await asyncio.sleep(0.002)


def _changes(w: Widget) -> bool:
    wants = w._layout_required or w._repaint_required or w._scroll_required or w._refresh_styles_required
    return bool(wants or not w._is_mounted or w.message_queue_size or w._next_callbacks)


def text_of(app: App[Any]) -> str:
    """The characters on the screen, line by line; behind a dialog, those of the screen below it."""
    width, height = app.size
    visible_screen_stack.set(app._background_screens)  # as Textual does before it paints
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.ljust(width) for strip in strips[:height])
