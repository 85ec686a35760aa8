"""The background thread that owns the engine: commands in, events out.

The UI never waits for it: it drains `events()` at a fixed rate and reads `worker.engine.stats` whenever it paints. The
thread is a daemon, so quitting never waits for a load or a kernel; it survives every error, which arrives as a `Failed`
event.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinychat.engine.engine import Engine, Token
from tinychat.errors import TinychatError
from tinychat.kernels.ops import Sampling

if TYPE_CHECKING:
    from pathlib import Path


# Seconds that the screen's thread may go on computing when the engine's wants the interpreter back, as it does after
# every native call. Python's 5 ms is three tokens of a GPU: with it, painting cost a fifth of the speed at 600 tok/s,
# with this a twentieth.
SWITCH = 0.0005


@dataclass(frozen=True)
class Loading:
    """A model is being loaded: what is happening, and how much of it is done (0..1)."""

    stage: str
    fraction: float


@dataclass(frozen=True)
class Loaded:
    """`worker.engine` is ready."""

    engine: Engine


@dataclass(frozen=True)
class Prefilling:
    """Prefill progress: `done` of `total` new tokens, `reused` came from the KV cache."""

    request: int
    done: int
    total: int
    reused: int


@dataclass(frozen=True)
class Generated:
    """One token (its text may be empty while a character or a tag is incomplete)."""

    request: int
    token: Token


@dataclass(frozen=True)
class Finished:
    """The answer ended: stop_reason is eos, length, stopped or context; `stats` is Stats.as_dict()."""

    request: int
    stop_reason: str
    stats: dict[str, Any]


@dataclass(frozen=True)
class Progress:
    """A `call`ed job reports: any text and a fraction (0..1)."""

    request: int
    text: str
    fraction: float


@dataclass(frozen=True)
class Done:
    """A `call`ed job ended with `result`."""

    request: int
    result: Any


@dataclass(frozen=True)
class Failed:
    """Command `request` (0 = loading) failed; `message` is one line for the user."""

    request: int
    message: str


Event = Loading | Loaded | Prefilling | Generated | Finished | Progress | Done | Failed
Report = Callable[[str, float], None]


class Worker:
    """Owns one engine on its own thread. Every method returns at once; results come as events, in order.

    `load_engine(path, progress=..., **options)` makes the engine (Engine.load; tests pass a scripted one).
    """

    def __init__(self, load_engine: Callable[..., Engine] = Engine.load) -> None:
        self.engine: Engine | None = None
        self._load_engine = load_engine
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._requests = itertools.count(1)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        sys.setswitchinterval(SWITCH)

    def load(self, path: str | Path, **options: Any) -> None:
        """Unloads the present engine and loads `path`; `options` go to Engine.load."""
        self._stop.set()

        def job() -> None:
            self._unload()
            engine = self._load_engine(path, progress=lambda stage, f: self._emit(Loading(stage, f)), **options)
            self.engine = engine
            self._emit(Loaded(engine))

        self._submit(0, job)

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int | None = None, raw: bool = False
    ) -> int:
        """Answers `prompt_ids`; returns the request number its events carry. `raw`: no splitting of thinking."""
        request = next(self._requests)

        def job() -> None:
            engine = self._ready()

            def prefilling(done: int, total: int, reused: int) -> None:
                self._emit(Prefilling(request, done, total, reused))

            for token in engine.generate(
                prompt_ids, sampling, max_tokens, raw=raw, on_prefill=prefilling, stop=self._stop
            ):
                self._emit(Generated(request, token))
            self._emit(Finished(request, engine.stop_reason, engine.stats.as_dict()))
            engine.save_cache()  # after the event: nobody waits for the disk

        self._submit(request, job)
        return request

    def call(self, job: Callable[[Engine, Report, threading.Event], Any]) -> int:
        """Runs `job(engine, report, stop)` between requests (a benchmark, saving the cache); its result comes as
        `Done`."""
        request = next(self._requests)

        def run() -> None:
            result = job(self._ready(), lambda text, f: self._emit(Progress(request, text, f)), self._stop)
            self._emit(Done(request, result))

        self._submit(request, run)
        return request

    def stop(self) -> None:
        """Ends what runs now within one token (or one prefill chunk); what was generated stays."""
        self._stop.set()

    def events(self) -> list[Event]:
        """Takes all events since the last call."""
        with self._lock:
            out, self._events = self._events, []
        return out

    def close(self) -> None:
        """Stops the thread after the running step; does not wait for it."""
        self._stop.set()
        self._commands.put(None)

    def _ready(self) -> Engine:
        if self.engine is None:
            raise TinychatError("no model is loaded; choose one with /model")
        return self.engine

    def _unload(self) -> None:
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.close()

    def _submit(self, request: int, job: Callable[[], None]) -> None:
        def guarded() -> None:
            self._stop.clear()
            try:
                job()
            except TinychatError as e:
                self._emit(Failed(request, str(e)))
            except MemoryError:
                self._emit(Failed(request, "out of memory; try a smaller model or context"))
            except Exception as e:  # the thread must survive whatever a job does
                self._emit(Failed(request, f"internal error: {type(e).__name__}: {e}"))

        self._commands.put(guarded)

    def _emit(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def _run(self) -> None:
        while (job := self._commands.get()) is not None:
            job()
        self._unload()
