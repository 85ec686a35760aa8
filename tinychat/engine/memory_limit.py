"""The memory limit: the rate in GB/s at which a device reads its memory, measured once and stored. Every "share of the
limit" is relative to this rate.

Decode reads all active weights for each token, so tokens per second times bytes per token cannot exceed it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from tinychat.engine.stats import available_memory
from tinychat.errors import TinychatError
from tinychat.files import replace_file
from tinychat.kernels.executor import MeasurableExecutor


@dataclass(frozen=True)
class Bandwidth:
    """Measured read bandwidth of one device. `gb_s` by number of threads; a GPU has one entry, 0."""

    device: str
    gb_s: dict[int, float]
    quick: bool  # measured at a load, in one round, perhaps while other programs read memory
    date: str  # ISO 8601, UTC
    noise: str = field(default="", compare=False)  # one line about other programs; not stored

    def of(self, threads: int) -> float:
        """GB/s of `threads` threads: measured, or of the largest measured number below (0.0: none)."""
        fitting = [n for n in self.gb_s if n <= threads]
        return self.gb_s[max(fitting)] if fitting else 0.0


UNREADABLE = (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError)  # of a file that is damaged


def store_path() -> Path:
    """One JSON object: machine and device -> Bandwidth."""
    return Path(user_cache_dir("tinychat", appauthor=False)) / "limits.json"


def stored(device: str) -> Bandwidth | None:
    """The stored limit of `device` on this machine; None if it was not measured or the file cannot be read."""
    with contextlib.suppress(*UNREADABLE):
        found = json.loads(store_path().read_text())[_key(device)]
        return Bandwidth(
            str(found["device"]),
            {int(n): float(v) for n, v in found["gb_s"].items()},
            bool(found["quick"]),
            str(found["date"]),
        )
    return None


def keep(limit: Bandwidth) -> None:
    """Stores `limit`. Ignores errors: without the file the limit is measured again."""
    path, everything = store_path(), dict[str, Any]()
    with contextlib.suppress(*UNREADABLE):
        everything = dict(json.loads(path.read_text()))
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {k: v for k, v in asdict(limit).items() if k != "noise"}
        replace_file(path, json.dumps(everything | {_key(limit.device): kept}, indent=1).encode())


def measure(threads: list[int] | None = None, rounds: int = 10) -> Bandwidth:
    """Measures the CPU with each number of threads (default: 1, 2, 4, ... and all physical cores) and stores it.

    Other programs can only lower the measured rate, so the highest one is kept. Raises TinychatError without a compiler
    or memory.
    """
    from tinychat.kernels.cpu.bandwidth import block_bytes, read_bandwidth
    from tinychat.kernels.cpu.cores import default_threads

    if (free := available_memory()) and free < 2 * block_bytes():
        raise TinychatError(
            f"measuring the memory needs {2 * block_bytes() / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )
    cores = default_threads()
    threads = threads or sorted({2**i for i in range(cores.bit_length())} | {cores})
    before = known.gb_s if (known := stored("CPU")) else {}
    now = read_bandwidth(threads, rounds)
    best = {n: max(v, before.get(n, 0.0)) for n, v in now.items()}
    limit = Bandwidth("CPU", before | best, rounds < 10, _now(), _noise(now, before, cores))
    keep(limit)
    return limit


def _noise(now: dict[int, float], before: dict[int, float], cores: int) -> str:
    """One line that names the sign of other programs on the machine during the measurement; "" if there is none."""
    lost = max((1 - v / before[n] for n, v in now.items() if before.get(n)), default=0.0)
    if lost > 0.1:
        return f"up to {lost:.0%} less than was measured before: other programs use the memory; the best value is kept"
    if (load := os.getloadavg()[0]) > 0.5 + cores / 2:
        return f"the load average is {load:.1f}: other programs run; measure again when the machine is quiet"
    return ""


def measure_gpu() -> Bandwidth:
    """Measures the GPU and stores it. Raises TinychatError where there is none that works."""
    from tinychat.kernels.cuda.device import GPU
    from tinychat.kernels.cuda.profile import read_bandwidth

    gpu = GPU()
    try:
        limit = Bandwidth(f"CUDA · {gpu.name}", {0: read_bandwidth(gpu)}, False, _now())
    finally:
        gpu.close()
    keep(limit)
    return limit


def limit_of(executor: MeasurableExecutor, thorough: bool = False) -> float:
    """GB/s of `executor`'s device, 0.0 where it cannot be measured.

    Where nothing is stored it is measured now, by reading the executor's weights in some hundredths of a second where
    they are larger than the caches; with `thorough` (for benchmarks, which own the machine) a value that was measured
    in passing is measured again, in about 0.5 s.
    """
    cpu = executor.kind == "cpu"
    device, n = ("CPU", executor.threads) if cpu else (executor.device, 0)
    before = stored(device)
    known = before if before and n in before.gb_s else None
    try:
        if cpu and thorough and (known is None or known.quick):
            known = measure()
        elif known is None and (gb_s := executor.read_bandwidth()):
            keep(known := Bandwidth(device, (before.gb_s if before else {}) | {n: gb_s}, cpu, _now()))
        elif known is None and cpu:
            known = measure([n], 1)
    except TinychatError:
        return 0.0
    return known.of(n) if known else 0.0


def usual(threads: int | None = None) -> float:
    """GB/s of the device that a model gets without being told: of a GPU as stored, where there is a driver; else of
    the CPU with `threads` (default: its physical cores), measured now where nothing is stored. 0.0 where it is not
    known."""
    from tinychat.engine.devices import has_cuda
    from tinychat.kernels.cpu.cores import default_threads

    if has_cuda():
        with contextlib.suppress(*UNREADABLE):
            everything = json.loads(store_path().read_text())
            return max(
                (max(v["gb_s"].values()) for k, v in everything.items() if k.startswith(_key("CUDA"))), default=0.0
            )
        return 0.0
    threads, known = threads or default_threads(), stored("CPU")
    if known is None or not known.of(threads):
        try:
            known = measure([threads], 1)
        except TinychatError:
            return 0.0
    return known.of(threads)


def _key(device: str) -> str:
    return f"{platform.node()} · {os.cpu_count()} CPUs · {device}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
