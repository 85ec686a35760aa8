"""Events on their way from the thread that makes them to whoever wants them: a loop that waits, or a screen that
looks."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class EventStream(Generic[T], Iterator[T]):
    """One producer `put`s and `end`s. The consumer either iterates (and waits) or takes what is there with `poll`.

    `wake` is called by the producer's thread after every put and at the end, so that an event loop need not look.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._events: deque[T] = deque()
        self._ready = threading.Condition()
        self._ended = False
        self._wake = wake

    def put(self, event: T) -> None:
        with self._ready:
            self._events.append(event)
            self._ready.notify()
        if self._wake:
            self._wake()

    def end(self) -> None:
        """No event will come any more."""
        with self._ready:
            self._ended = True
            self._ready.notify_all()
        if self._wake:
            self._wake()

    def on_event(self, wake: Callable[[], None]) -> None:
        """Sets `wake`; it is called at once where something is there already."""
        with self._ready:
            self._wake = wake
            waiting = bool(self._events) or self._ended
        if waiting:
            wake()

    @property
    def ended(self) -> bool:
        """Whether everything was taken and nothing will come."""
        with self._ready:
            return self._ended and not self._events

    def poll(self) -> list[T]:
        """All events that are there, without waiting."""
        with self._ready:
            found = list(self._events)
            self._events.clear()
            return found

    def __next__(self) -> T:
        with self._ready:
            self._ready.wait_for(lambda: self._events or self._ended)
            if self._events:
                return self._events.popleft()
            raise StopIteration
