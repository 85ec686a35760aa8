"""The screen's boundary: an exception in a handler, a worker or a timer is one line on the screen and a crash report,
and the app lives on.

Textual ends the app on every exception, after the message loop of the widget has ended. Neither has a public hook, so
this overrides three private methods of App: _handle_exception, to which all exceptions come; _dispatch_message, which
runs the app's own handlers; _register_child, where each widget's _dispatch_message is wrapped before its loop begins.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from contextlib import suppress
from functools import partial
from typing import Any

import textual
from textual._context import active_message_pump
from textual.app import App, ScreenStackError
from textual.await_complete import AwaitComplete
from textual.css.query import NoMatches
from textual.dom import DOMNode
from textual.errors import NoWidget
from textual.events import InputEvent, MouseEvent
from textual.message import Message
from textual.screen import Screen
from textual.widget import Widget
from textual.worker import WorkerFailed

from tinychat import crash

TEXTUAL = textual.__path__[0]
AGAIN = 30.0  # seconds after which the same fault is said again; a timer may meet it 20 times a second


class LastingApp(App[None]):
    """An app that continues after exceptions. `say_fault` shows one line; `home` is the screen that stays when a
    sheet whose widgets cannot be made is closed. An exception before `home` is shown ends the app with that line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._said: dict[tuple[object, ...], float] = {}  # when, by where the exception was raised

    @property
    def home(self) -> Screen[Any]:
        raise NotImplementedError

    def say_fault(self, line: str) -> None:
        raise NotImplementedError

    def pop_screen(self) -> AwaitComplete:
        """Without `home`: Textual's palette closes the next screen too where two keys of one burst choose a row."""
        return AwaitComplete.nothing() if self.screen is self.home else super().pop_screen()

    def _register_child(self, parent: DOMNode, child: Widget, before: int | None, after: int | None) -> None:
        dispatch = partial(type(child)._dispatch_message, child)
        child._dispatch_message = partial(self._guarded, dispatch)  # type: ignore[method-assign]
        super()._register_child(parent, child, before, after)

    async def _dispatch_message(self, message: Message) -> None:
        if isinstance(message, MouseEvent) and self._hits_a_removed_widget(message):
            return
        await self._guarded(super()._dispatch_message, message)

    async def _guarded(self, dispatch: Any, message: Message) -> None:
        try:
            await dispatch(message)
        except Exception as e:
            if not (isinstance(message, InputEvent) and _came_too_late(e)):
                self._handle_exception(e)
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this loop was cancelled, but what a handler awaited: Textual would take it for the end of the loop.
            fault = RuntimeError(f"what the handler of {type(message).__name__} waited for was cancelled")
            fault.__cause__ = e
            self._handle_exception(fault)

    def _hits_a_removed_widget(self, event: MouseEvent) -> bool:
        """Whether the mouse is on a widget that is still painted and has no parent any more, which Textual asks for."""
        with suppress(NoWidget, ScreenStackError):
            return not self.screen.get_widget_at(event.x, event.y)[0].is_attached
        return False

    def _handle_exception(self, error: Exception) -> None:
        if isinstance(error, WorkerFailed):
            error = error.error if isinstance(error.error, Exception) else error
        pump = active_message_pump.get(None)
        node = pump if isinstance(pump, DOMNode) and pump is not self else None
        if isinstance(error, NoMatches) and any(_gone(n) for n in (node, _asked(error)) if n is not None):
            return  # a late callback of a sheet that is gone: its widgets are, too
        if isinstance(error, NoMatches) and node is None and not self.screen._is_mounted:
            return  # a key that came before the widgets of a sheet
        if not self.home.is_mounted:
            if self._exception is None:  # Textual's tests raise it again
                self._exception, self._return_code = error, 1
                self._exception_event.set()
                self.panic(crash.report(error))
            return
        if node is not None and not node._is_mounted and (sheet := _sheet_of(node)) not in (None, self.home):
            self.call_later(self._close_sheet, sheet)
        frames = traceback.extract_tb(error.__traceback__)
        where = (type(error), *((f.filename, f.lineno) for f in frames[-1:]))
        now = time.monotonic()
        if where not in self._said or now - self._said[where] >= AGAIN:
            self._said[where] = now
            self.say_fault(crash.report(error))

    def _close_sheet(self, sheet: Screen[Any]) -> None:
        if self.screen is sheet:
            sheet.dismiss(None)


def _sheet_of(node: DOMNode) -> Screen[Any] | None:
    return next((n for n in node.ancestors_with_self if isinstance(n, Screen)), None)


def _came_too_late(error: Exception) -> bool:
    """Whether Textual alone raised a LookupError: its lists do on a click or key that was meant for the rows of a
    moment ago."""
    inner = traceback.walk_tb(error.__traceback__ and error.__traceback__.tb_next)
    return isinstance(error, LookupError) and all(f.f_code.co_filename.startswith(TEXTUAL) for f, _ in inner)


def _asked(error: NoMatches) -> DOMNode | None:
    """The node whose query failed: in a worker of a sheet, the pump that is active may be the app."""
    *_, (frame, _line) = traceback.walk_tb(error.__traceback__)
    found = frame.f_locals.get("self")
    return found if isinstance(found, DOMNode) else None


def _gone(node: DOMNode) -> bool:
    sheet = _sheet_of(node)
    return node._closing or not node.is_attached or (sheet is not None and sheet not in node.app.screen_stack)
