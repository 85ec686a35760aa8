"""Loads a model on a thread of its own, after the previous load has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tinychat.backend.protocol import Backend, OldModelLost
from tinychat.backend.stream import EventStream
from tinychat.chat.state import LoadEvent, LoadFailed, Loading, LoadStage, ModelChoice
from tinychat.errors import TinychatError


class OpenBackend(Protocol):
    """Loads a model and returns when it is loaded, as LocalBackend.open does. Raises TinychatError; OldModelLost where
    `replaces` was closed before that."""

    def __call__(
        self, path: Path, *, replaces: Backend | None, progress: Callable[[str, float], None], **options: Any
    ) -> Backend: ...


def start_loading(
    open_backend: OpenBackend, choice: ModelChoice, kept: ModelChoice | None, before: Future[Backend | None]
) -> Loading:
    """Begins to load `choice`. `kept` answers meanwhile; `before` is what is loaded when everything that loads now is
    done."""
    events: EventStream[LoadEvent] = EventStream()
    outcome: Future[Backend | None] = Future()
    job = partial(_load, open_backend, choice, before, events, outcome)
    threading.Thread(target=job, name="loading", daemon=True).start()  # a daemon: the process can exit during a load
    return Loading(LoadStage("opening", 0.0), choice, kept, events, outcome)


def _load(
    open_backend: OpenBackend,
    choice: ModelChoice,
    before: Future[Backend | None],
    events: EventStream[LoadEvent],
    outcome: Future[Backend | None],
) -> None:
    context = {"max_context": choice.context} if choice.context else {}
    old = before.result()
    try:
        backend = open_backend(
            choice.path,
            replaces=old,
            progress=lambda stage, fraction: events.put(LoadStage(stage, fraction)),
            **{**choice.options, **context},
        )
    except Exception as e:
        kept = None if isinstance(e, OldModelLost) else old
        outcome.set_result(kept)
        message = str(e) if isinstance(e, TinychatError) else f"internal error: {type(e).__name__}: {e}"
        events.put(LoadFailed(message, kept is not None))
    else:
        outcome.set_result(backend)
        events.put(backend)
