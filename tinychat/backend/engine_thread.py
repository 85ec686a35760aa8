"""The thread that owns a device: all native work of a process's models runs on it, one job after the other."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Task = Callable[[], None]


class EngineThread:
    """A daemon thread with a queue of jobs; a job must not raise. It ends when this object is garbage-collected.

    Models that replace each other share one: a CUDA context and tinygrad's compile cache (SQLite) belong to the thread
    that opened them. A daemon, because quitting waits neither for a load nor for a kernel.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._jobs,), name="engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._jobs.put, None)

    @property
    def ident(self) -> int:
        """The thread's identifier, as threading.get_ident() gives it."""
        assert self._thread.ident is not None
        return self._thread.ident

    def submit(self, job: Task) -> None:
        """Runs `job` when those before it are done. Returns at once."""
        self._jobs.put(job)

    def call(self, job: Callable[[], T]) -> T:
        """Runs `job` like `submit`, waits for it, and returns its value or raises its exception."""
        done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def guarded() -> None:
            try:
                done.put((job(), None))
            except BaseException as e:
                done.put((None, e))

        self.submit(guarded)
        value, error = done.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]


def _run(jobs: queue.SimpleQueue[Task | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # what it holds may be a whole model
