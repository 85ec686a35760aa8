"""Counts, on a thread of its own, the tokens of the context that an idle conversation uses."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from functools import partial

from tinychat.backend.protocol import Backend, Request, Usage
from tinychat.chat.background import settle


class UsageCount:
    """One count at a time; a new one takes the place of the one before."""

    def __init__(self) -> None:
        self._cancel = threading.Event()
        self._result: Future[Usage] | None = None

    @property
    def running(self) -> bool:
        return self._result is not None

    def start(self, backend: Backend, request: Request) -> None:
        self.forget()
        self._cancel, self._result = request.cancel, Future()
        job = partial(settle, self._result, partial(backend.measure, request))
        threading.Thread(target=job, name="measuring", daemon=True).start()

    def forget(self) -> None:
        """Cancels the count."""
        if self._result is not None:
            self._cancel.set()
            self._result = None

    def poll(self) -> Usage | None:
        """The usage, or None while it is being counted. Raises TinychatError if counting failed."""
        if self._result is None or not self._result.done():
            return None
        result, self._result = self._result, None
        return result.result()
