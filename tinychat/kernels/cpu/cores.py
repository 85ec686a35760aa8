"""The cores that this process computes on: how many threads, and on which memory node each of them runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path("/")


def default_threads(root: Path = ROOT) -> int:
    """Physical cores this process may use, without efficiency cores where there are others, at most as many as its
    cgroups' CPU quotas pay for. `root`: where /proc and /sys are."""
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "hw.perflevel0.physicalcpu"], capture_output=True, text=True)
        return int(done.stdout) if done.returncode == 0 else os.cpu_count() or 1
    if sys.platform != "linux":
        return os.cpu_count() or 1
    cores = set()
    for cpu in _fast(os.sched_getaffinity(0), root):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return max(1, int(min(len(cores), _cpu_quota(root))))


def nodes(root: Path = ROOT) -> list[set[int]]:
    """The CPUs of each memory node (NUMA) that this process may use, without nodes of which it may use none; an empty
    list where the system does not tell.

    https://docs.kernel.org/admin-guide/mm/numaperf.html
    """
    if sys.platform != "linux":
        return []
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda p: int(p.name[4:]))
    allowed = os.sched_getaffinity(0)
    return [cpus for folder in folders if (cpus := _cpus(folder / "cpulist") & allowed)]


def start_threads(start: Callable[[int], int], threads: int, root: Path = ROOT) -> int:
    """Starts `threads` threads by start(n), which starts some until there are n and returns how many there are (the
    caller is the first). Where there are several memory nodes each gets a share, in their order, and its threads stay
    there: so a weight's rows, which a thread packs and reads, lie where it runs."""
    if len(groups := nodes(root)) < 2:
        return start(threads)
    allowed, started, cores, seen = os.sched_getaffinity(0), 0, sum(map(len, groups)), 0
    try:
        for cpus in groups:
            seen += len(cpus)
            os.sched_setaffinity(0, cpus)  # of this thread; those that it starts inherit it
            started = start(max(1, threads * seen // cores))
        return started
    except OSError:  # some sandboxes forbid it
        return start(threads)
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, allowed)


def _fast(cpus: set[int], root: Path) -> set[int]:
    """`cpus` without those that Linux calls slow ones: Intel's Atom cores (Documentation/ABI, /sys/devices/cpu_atom),
    and where a capacity is given (ARM) those with less than half of the largest."""
    fast = cpus - _cpus(root / "sys/devices/cpu_atom/cpus") or cpus
    capacity = dict[int, int]()
    for cpu in fast:
        try:
            capacity[cpu] = int((root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity").read_text())
        except (OSError, ValueError):
            return fast
    return {cpu for cpu in fast if 2 * capacity[cpu] >= max(capacity.values())}


def _cpus(path: Path) -> set[int]:
    """The CPUs of a list like "0-3,8"; none where the file is missing or empty."""
    try:
        parts = [part.split("-") for part in path.read_text().strip().split(",")]
        return {cpu for part in parts for cpu in range(int(part[0]), int(part[-1]) + 1)}
    except (OSError, ValueError):
        return set()


def _cpu_quota(root: Path) -> float:
    """CPU seconds per second that this process's cgroups allow, of version 1 or 2; infinity without a quota.

    https://docs.kernel.org/admin-guide/cgroup-v2.html (cpu.max), https://docs.kernel.org/scheduler/sched-bwc.html
    """
    least = float("inf")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return least
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # quotas of parent groups count too; the path may be the host's, of which a container sees only the top
        for folder in (top / group.lstrip("/"), *(top / p for p in Path(group.lstrip("/")).parents)):
            try:
                if controllers:
                    quota = (folder / "cpu.cfs_quota_us").read_text()
                    period = (folder / "cpu.cfs_period_us").read_text()
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if float(quota) > 0:
                    least = min(least, float(quota) / float(period))
            except (OSError, ValueError, ZeroDivisionError):  # "max": no quota
                continue
    return least
