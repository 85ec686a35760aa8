"""Counts what plain tinygrad looks up before it can run a step: schedules, programs, compiled binaries.

Tinygrad has no such counts. Schedules are taken from its profile events; programs are counted by a wrapper around the
function that makes them, partly in other processes; binaries are the rows added to its disk cache.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tinygrad import Device
from tinygrad.codegen import to_program_cache
from tinygrad.engine import realize
from tinygrad.helpers import CACHEDB, CACHELEVEL, VERSION, Context, cpu_events
from tinygrad.uop.ops import Ops, UOp

from tinychat.kernels.profile import CacheUse


class Caches:
    """Use of tinygrad's caches on one device, summed over everything that ran under `counted`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._schedules, self._scheduled, self._schedule_s = 0, 0, 0.0  # looked up, made, seconds of both
        self._programs, self._made, self._program_s = 0, 0, 0.0
        self._compiled: int | None = 0  # None: there is no disk cache

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what runs inside."""
        events, made, rows, lower = len(cpu_events), len(to_program_cache), self._rows(), realize.lower_and_compile

        def timed(linear: UOp) -> UOp:
            self._programs += sum(
                c.op is Ops.CALL and realize._get_call_to_compile(c) is not None for c in linear.toposort()
            )
            start = time.perf_counter()
            out = lower(linear)
            self._program_s += time.perf_counter() - start
            return out

        realize.lower_and_compile = timed
        try:
            with Context(PROFILE=1):
                yield
        finally:
            realize.lower_and_compile = lower
        for event in cpu_events[events:]:
            name: Any = getattr(event, "name", "")
            if name == "create_linear_with_vars":
                self._schedules += 1
                self._schedule_s += float(event.en - event.st) * 1e-6  # type: ignore[attr-defined]
            self._scheduled += (
                getattr(name, "display_name", "") == "toposort sched_sink"
            )  # only for what is not in the cache
        del cpu_events[events:]
        made = len(to_program_cache) - made
        self._made += made
        after = self._rows()
        self._compiled = None if None in (self._compiled, rows, after) else self._compiled + min(made, after - rows)  # type: ignore[operator]

    def used(self) -> tuple[CacheUse, ...]:
        """What was counted so far."""
        compiled = self._compiled
        return (
            CacheUse("schedules", self._schedules - self._scheduled, self._scheduled, self._schedule_s),
            CacheUse("programs, in memory", self._programs - self._made, self._made, self._program_s),
            CacheUse(
                "binaries, on disk",
                None if compiled is None else self._made - compiled,
                compiled,
                None,
                "" if compiled is None else CACHEDB,
            ),
        )

    def _rows(self) -> int | None:
        """The number of the compiler's binaries in the disk cache; None where that is not used."""
        table = getattr(Device[self._device].renderer.compiler, "cachekey", None)
        if table is None or CACHELEVEL < 1:
            return None
        try:  # a new connection, because tinygrad's belongs to one thread
            with contextlib.closing(sqlite3.connect(f"{Path(CACHEDB).as_uri()}?mode=ro", uri=True)) as db:
                return int(db.execute(f"SELECT count(*) FROM '{table}_{VERSION}'").fetchone()[0])
        except sqlite3.OperationalError:
            return 0  # no such file or table yet
