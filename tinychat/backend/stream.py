"""Events passed from the thread that makes them to a consumer: a loop that waits for them, or a screen that polls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class EventStream(Generic[T], Iterator[T]):
    """One producer `put`s and `end`s. One consumer either iterates (and waits) or takes what is there with `poll`.

    `wake` is called by the producer's thread after every put and at the end, so that an event loop need not look.
    Putting takes no lock while nobody waits: an append to a deque and a read of an attribute are each atomic.
    """

    def __init__(self, wake: Callable[[], None] | None = None) -> None:
        self._events: deque[T] = deque()
        self._ready = threading.Condition()
        self._waits = False  # set before the consumer looks for the last time and waits
        self._ended = False
        self._wake = wake

    def put(self, *events: T) -> None:
        """Several at once wake the consumer once."""
        if events:
            self._events.extend(events)
            self._tell()

    def end(self) -> None:
        """No event will come any more."""
        self._ended = True
        self._tell()

    def _tell(self) -> None:
        if self._waits:
            with self._ready:
                self._ready.notify()
        if self._wake:
            self._wake()

    def on_event(self, wake: Callable[[], None]) -> None:
        """Sets `wake`; it is called at once where something is there already."""
        self._wake = wake
        if self._events or self._ended:
            wake()

    @property
    def ended(self) -> bool:
        """Whether everything was taken and nothing will come."""
        return self._ended and not self._events  # in this order: what was put before the end is seen

    @property
    def complete(self) -> bool:
        """Whether nothing will come any more."""
        return self._ended

    @property
    def waiting(self) -> bool:
        """Whether something is there to be taken."""
        return bool(self._events)

    def poll(self) -> list[T]:
        """All events that are there, without waiting."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def __next__(self) -> T:
        if self._events:
            return self._events.popleft()
        with self._ready:
            self._waits = True
            self._ready.wait_for(lambda: self._ended or self._events)
            self._waits = False
        if self._events:
            return self._events.popleft()
        raise StopIteration
