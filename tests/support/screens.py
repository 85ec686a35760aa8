"""A tiny app around one dialog, and what the tests of dialogs share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from textual.app import App
from textual.pilot import Pilot
from textual.screen import Screen

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
    """Waits for `condition` to be true and returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "waited in vain"
        await pilot.pause()
        await asyncio.sleep(0.01)
    return value


def text_of(app: App[Any]) -> str:
    """The characters on the screen, line by line."""
    width, height = app.size
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.ljust(width) for strip in strips[:height])
