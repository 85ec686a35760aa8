"""Measures the read bandwidth of this machine's memory, which limits decode on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from pathlib import Path

from tinychat.errors import TinychatError
from tinychat.kernels.cpu.cores import start_threads
from tinychat.kernels.cpu.library import Library

SMALLEST = 256 << 20


def read_bandwidth(threads: Sequence[int], rounds: int = 1) -> dict[int, float]:
    """{n: GB/s that n threads read}, the best of 3 * `rounds` passes over a block of several times the caches.

    About 0.15 s for one entry, mostly to fill the block. Raises TinychatError without a compiler or memory.
    """
    library, size = Library(), block_bytes()
    lib = library.lib
    context, block = lib.tc_alloc(library.context_bytes), lib.tc_alloc(size)
    if not block:
        raise TinychatError(f"not enough memory to measure its bandwidth: {size / 1e9:.1f} GB are needed")
    try:
        ctypes.memset(block, 1, size)
        found = dict[int, float]()
        for n in threads:
            if start_threads(lambda n: lib.tc_open(context, n), n) == n:  # the system may refuse some
                found[n] = max(lib.tc_bandwidth(context, block, size) for _ in range(rounds))
            lib.tc_close(context)
        return found
    finally:
        lib.tc_free(block, size)


def block_bytes() -> int:
    """Bytes that are read: several times the size of the caches."""
    return max(SMALLEST, 4 * cache_bytes())


def cache_bytes() -> int:
    """Bytes of all last-level caches together (0 where the system does not tell)."""
    found = dict[str, int]()
    with contextlib.suppress(OSError, ValueError):
        for cpu in Path("/sys/devices/system/cpu").glob("cpu[0-9]*"):
            last = max((cpu / "cache").glob("index*"), key=lambda p: int((p / "level").read_text()))
            found[(last / "shared_cpu_list").read_text()] = int((last / "size").read_text().rstrip("K\n")) << 10
    return sum(found.values())
