"""The classes of a screen's breakpoints, before its widgets are there."""

from __future__ import annotations

from typing import Any

from textual.screen import Screen


def place(screen: Screen[Any]) -> None:
    """Called first in `compose`. Textual gives a screen these classes with its first size, when every widget has its
    styles, and then styles all of them again: a quarter of the time in which a form opens."""
    size = screen.app.size
    for length, points in ((size.width, screen.HORIZONTAL_BREAKPOINTS), (size.height, screen.VERTICAL_BREAKPOINTS)):
        reached = [name for least, name in sorted(points or ()) if length >= least]
        screen.set_class(bool(reached), *reached[-1:], update=False)
