"""Saves a conversation: decides how often while an answer grows, and reports failures to the user."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from tinychat.chat.background import settle
from tinychat.chat.changes import Notice
from tinychat.chat.conversation import Conversation
from tinychat.chat.history import ChangedElsewhere, Locked
from tinychat.errors import TinychatError

T = TypeVar("T")
SAVE_EVERY = 0.8  # seconds, while an answer grows; a kill then loses less than 1 s, including the time of a slow paint
LOCKED_EVERY = 0.2  # seconds, while another process holds the file
PATIENCE = 5.0  # seconds that another process may hold the file before the user is told
RETRY_EVERY = 10.0  # seconds, after a save that failed


class Saver:
    """Saves conversations with `write` (None: nothing is saved). While another process holds the file, they wait."""

    def __init__(self, write: Callable[[Conversation], None] | None, clock: Callable[[], float]) -> None:
        self._write, self._clock = write, clock
        self._at = 0.0
        self._waiting: dict[str, Conversation] = {}  # by id, the latest of each
        self._since = 0.0  # when the first of them began to wait
        self._failing = False  # the last save failed, and the user knows
        self._copying: Future[None] | None = None
        self._notices: list[Notice] = []

    def due(self, growing: bool) -> bool:
        """Whether a conversation has to be saved now: one that waits, or a `growing` answer."""
        every = RETRY_EVERY if self._failing else LOCKED_EVERY if self._waiting else SAVE_EVERY
        return bool(growing or self._waiting) and self._write is not None and self._clock() - self._at >= every

    def save(self, conversation: Conversation) -> Conversation:
        """Returns the conversation to continue with: a copy if another process has changed this one."""
        if self._write is None or not (conversation.turns or self._waiting):
            return conversation
        self._at = self._clock()
        self._since = self._since if self._waiting else self._at
        if conversation.turns:
            self._waiting[conversation.id] = conversation
        if self._copying is None or self._copying.done():
            self._finish_copy()
            for waits in list(self._waiting.values()):
                goes_on = self._save(self._write, waits)
                conversation = goes_on if waits is conversation else conversation
        return conversation

    def _save(self, write: Callable[[Conversation], None], conversation: Conversation) -> Conversation:
        del self._waiting[conversation.id]
        try:
            try:
                write(conversation)
            except ChangedElsewhere as e:
                conversation = conversation.fork()
                self._notices.append(Notice(f"{e}; this one goes on as a copy, {conversation.title!r}"))
                write(conversation)
            if self._failing:
                self._failing = False
                self._notices.append(Notice("this conversation is saved again"))
        except Locked as e:
            self._waiting[conversation.id] = conversation
            if self._clock() - self._since >= PATIENCE:
                self._failed(e)
        except TinychatError as e:
            self._failed(e)
        return conversation

    def finish(self) -> None:
        """Writes what waits, for at most PATIENCE."""
        end = time.monotonic() + PATIENCE
        while self._waiting and time.monotonic() < end:
            self.save(next(iter(self._waiting.values())))
            time.sleep(0.02 if self._waiting else 0)

    def copy(self, conversation: Conversation) -> None:
        """Saves a fork on a thread of its own: all its turns are new to the history. Behind the copy before it, over
        whose conversation a newer version would else be written first."""
        if (write := self._write) is not None:
            before, self._copying = self._copying, Future()

            def job() -> None:
                if before is not None:
                    before.exception()  # waits for it
                patiently(partial(write, conversation))

            threading.Thread(target=settle, args=(self._copying, job), name="copying").start()

    def poll(self) -> list[Notice]:
        """What the user has to know since the last call."""
        if self._copying is not None and self._copying.done():
            self._finish_copy()
        notices, self._notices = self._notices, []
        return notices

    def _finish_copy(self) -> None:
        """Takes the result of saving a fork; newer versions are saved only afterwards."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            if isinstance(e := copying.exception(), TinychatError):
                self._failed(e)

    def _failed(self, e: TinychatError) -> None:
        if not self._failing:
            self._notices.append(Notice(f"{e}; this conversation is not being saved", error=True))
        self._failing = True


def patiently(job: Callable[[], T]) -> T:
    """The value of `job`, tried again for PATIENCE while another process holds the file; then raises Locked."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return job()
        except Locked:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
