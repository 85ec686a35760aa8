"""What only a backend on this machine can do: run jobs on its engine, and report its tokens and its choices of
experts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tinychat.backend.protocol import Backend, Failed
from tinychat.backend.stream import EventStream

if TYPE_CHECKING:  # a chat reads this module before its first screen, and loads the engine behind that
    import numpy as np

    from tinychat.engine.devices import OnProgress as OnProgress
    from tinychat.engine.engine import Engine

EngineJob = Callable[["Engine", "OnProgress", threading.Event], Any]
"""`job(engine, report, cancel)`: it looks at `cancel` now and then, and raises TinychatError when it is set."""


@dataclass(frozen=True)
class JobProgress:
    """A job reports: any text and a fraction (0..1)."""

    text: str
    fraction: float


@dataclass(frozen=True)
class JobDone:
    """A job ended with `result`."""

    result: Any


JobEvent = JobProgress | JobDone | Failed
"""The events of one job; exactly one JobDone or Failed, and it is the last."""


@dataclass(frozen=True)
class TokenText:
    """A token of the vocabulary: `special` is markup that no text contains."""

    id: int
    text: str
    special: bool
    data: bytes


@dataclass(frozen=True)
class ExpertCounts:
    """How often each expert was chosen for the last `tokens` decoded tokens: int64 `counts` (layers, experts).

    `layers` are the numbers of the layers with experts, of which a token uses `used` each. `known` is False where the
    device does not tell.
    """

    layers: tuple[int, ...]
    experts: int
    used: int
    tokens: int
    counts: np.ndarray
    known: bool = True


class Instrumented(Backend, Protocol):
    """A backend whose ModelInfo says `can.instruments`. Any thread may call any method."""

    def run_job(self, job: EngineJob, cancel: threading.Event) -> EventStream[JobEvent]:
        """Runs `job` between requests and returns at once. A `cancel` that is set before the job begins ends it too."""
        ...

    def last_prompt(self) -> tuple[int, ...]:
        """The ids of the prompt that was made last."""
        ...

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        """What the vocabulary says of `ids`. Takes microseconds for each: not for a screen's thread."""
        ...

    def forget(self, conversation: str) -> None:
        """Deletes the saved KV cache of a conversation and saves no more of it. Returns at once."""
        ...

    def watch_experts(self, on: bool) -> None:
        """Whether the choices of experts are counted while tokens are decoded."""
        ...

    def experts(self) -> ExpertCounts | None:
        """The counts of this moment; None for a model without experts."""
        ...
