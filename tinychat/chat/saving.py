"""Saves a conversation: how often while an answer grows, and what the user is told when it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tinychat.chat.background import settle
from tinychat.chat.changes import Notice
from tinychat.chat.conversation import Conversation
from tinychat.chat.history import ChangedElsewhere
from tinychat.errors import TinychatError

SAVE_EVERY = 0.8  # seconds, while an answer grows: with a slow paint on top, a kill still loses less than a second
RETRY_EVERY = 10.0  # seconds, after a save that failed: where a file is locked, each try takes seconds


class Saver:
    """Calls `write` with conversations; None: nothing is saved."""

    def __init__(self, write: Callable[[Conversation], None] | None, clock: Callable[[], float]) -> None:
        self._write, self._clock = write, clock
        self._at = 0.0
        self._failing = False  # the last save failed, and the user knows
        self._copying: Future[None] | None = None
        self._notices: list[Notice] = []

    def due(self) -> bool:
        """Whether a growing answer has to be saved now."""
        every = RETRY_EVERY if self._failing else SAVE_EVERY
        return self._write is not None and self._clock() - self._at >= every

    def save(self, conversation: Conversation) -> Conversation:
        """Returns the conversation that goes on: a copy, where another program has changed this one."""
        self._finish_copy()
        if self._write is None or not conversation.turns:
            return conversation
        try:
            try:
                self._write(conversation)
            except ChangedElsewhere as e:
                conversation = conversation.fork()
                self._write(conversation)
                self._notices.append(Notice(f"{e}; this one goes on as a copy, {conversation.title!r}"))
            if self._failing:
                self._failing = False
                self._notices.append(Notice("this conversation is saved again"))
        except TinychatError as e:
            self._failed(e)
        self._at = self._clock()
        return conversation

    def copy(self, conversation: Conversation) -> None:
        """Saves a fork on a thread of its own: all its turns are new to the history."""
        if self._write is not None:
            self._copying = Future()
            job = partial(settle, self._copying, partial(self._write, conversation))
            threading.Thread(target=job, name="copying").start()

    def poll(self) -> list[Notice]:
        """What the user has to know since the last call."""
        if self._copying is not None and self._copying.done():
            self._finish_copy()
        notices, self._notices = self._notices, []
        return notices

    def _finish_copy(self) -> None:
        """Waits for the copy of a fork, so that what is saved next is newer."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            if isinstance(e := copying.exception(), TinychatError):
                self._failed(e)

    def _failed(self, e: TinychatError) -> None:
        if not self._failing:
            self._notices.append(Notice(f"{e}; this conversation is not being saved", error=True))
        self._failing = True
