"""Downloads that run in the background: one daemon thread each, whose state screens read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.download import DownloadStopped
from tinychat.models.registry import Model


@dataclass
class Download:
    """One download. Sizes in bytes, `speed` in bytes per second; written by its thread, read by any."""

    model: Model
    state: Literal["running", "paused", "failed", "done"] = "running"
    done: int = 0
    total: int | None = None
    speed: float = 0.0
    stage: str = "connecting"
    error: str = ""
    path: Path | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def fraction(self) -> float:
        """How much is here, 0..1."""
        return min(1.0, self.done / self.total) if self.total else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds that are left at the present speed."""
        return (self.total - self.done) / self.speed if self.total and self.speed else None


class Downloads:
    """The downloads of an app, by model name; closing the picker does not stop them. `pull` is `cache.pull`."""

    def __init__(self, pull: Callable[..., Path] = cache.pull) -> None:
        self._pull = pull
        self._jobs: dict[str, Download] = {}

    def get(self, model: Model) -> Download | None:
        """The running, paused, failed or finished download of `model` in this process."""
        return self._jobs.get(model.name)

    def start(self, model: Model) -> Download:
        """Begins, or goes on with, the download of `model`."""
        job = self._jobs.get(model.name)
        if job and job.state == "running" and not job.stop.is_set():
            return job
        fresh = Download(model, done=job.done if job else 0, total=job.total if job else model.size or None)
        self._jobs[model.name] = fresh
        threading.Thread(target=self._run, args=(fresh,), name="download", daemon=True).start()
        return fresh

    def pause(self, model: Model) -> None:
        """Stops the download of `model`; what has arrived stays."""
        if (job := self._jobs.get(model.name)) and job.state == "running":
            job.stop.set()
            job.state = "paused"

    def discard(self, model: Model) -> None:
        """Stops the download of `model` and deletes what the cache holds of it; waits for its thread. Raises
        TinychatError."""
        self.pause(model)
        if job := self._jobs.pop(model.name, None):
            job.ended.wait(60)
        for entry in cache.find(model):
            cache.remove(entry)

    def _run(self, job: Download) -> None:
        def progress(done: int, total: int | None, speed: float, stage: str) -> None:
            job.done, job.total, job.speed, job.stage = done, total or job.total, speed, stage

        outcome: dict[str, Any]
        try:
            outcome = {"path": self._pull(job.model, progress, job.stop), "state": "done"}
        except DownloadStopped:
            outcome = {"state": "paused"}
        except TinychatError as e:
            outcome = {"error": str(e), "state": "failed"}
        except Exception as e:  # a thread that dies silently would look like a download that hangs
            outcome = {"error": f"internal error: {type(e).__name__}: {e}", "state": "failed"}
        for name, value in outcome.items():  # state last: it says that the rest is there
            setattr(job, name, value)
        job.ended.set()
