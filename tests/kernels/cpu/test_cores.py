"""How many threads, and where: on made-up trees of /proc and /sys."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from tinychat.kernels.cpu.cores import default_threads, nodes, start_threads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/sys is Linux's")


def machine(root: Path, monkeypatch: pytest.MonkeyPatch, siblings: list[str], **files: str) -> Path:
    """A machine under `root` with the hardware threads of each core ("0,8"), and more files of /sys/devices (a
    folder's end is __)."""
    topology = root / "sys/devices/system/cpu"
    cpus = [int(cpu) for core in siblings for cpu in core.split(",")]
    for core in siblings:
        for cpu in core.split(","):
            path = topology / f"cpu{cpu}/topology/thread_siblings_list"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(core + "\n")
    for name, text in files.items():
        path = root / "sys/devices" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))
    return root


def test_threads_follow_affinity_and_cgroup_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, monkeypatch, ["0,1", "2,3", "4,5", "6,7"])  # two hardware threads per core

    def limited(cgroup: str, files: dict[str, str]) -> int:
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
        shutil.rmtree(tmp_path / "sys/fs", ignore_errors=True)
        for name, text in files.items():
            path = tmp_path / "sys/fs/cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return default_threads(tmp_path)

    assert limited("", {}) == 4
    assert limited("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}) == 4
    assert limited("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}) == 2
    assert limited("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 100000"}) == 1  # the group above
    assert limited("0::/a/b\n", {"cpu.max": "50000 100000\n"}) == 1  # the path is the host's; less than a core is one
    v1 = "5:memory:/m\n4:cpu,cpuacct:/a\n0::/\n"
    assert limited(v1, {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}) == 3
    assert limited(v1, {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}) == 4


def test_efficiency_cores_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    intel = machine(
        tmp_path / "intel", monkeypatch, ["0,1", "2,3", *"4567"], cpu_atom__cpus="4-7", cpu_core__cpus="0-3"
    )
    assert default_threads(intel) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 5, 6})
    assert default_threads(intel) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 6})  # no others are allowed
    assert default_threads(intel) == 2
    sizes = {
        f"system__cpu__cpu{cpu}__cpu_capacity": str(n)
        for cpu, n in enumerate([300, 300, 300, 300, 870, 870, 870, 1024])
    }
    assert default_threads(machine(tmp_path / "arm", monkeypatch, list("01234567"), **sizes)) == 4
    assert default_threads(machine(tmp_path / "plain", monkeypatch, list("01234567"), cpu_atom__cpus="")) == 8


def test_two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [f"{core},{core + 8}" for core in range(8)]  # 0 to 3 and their siblings on the first
    lists = {"system__node__node0__cpulist": "0-3,8-11", "system__node__node1__cpulist": "4-7,12-15"}
    root = machine(tmp_path, monkeypatch, cores, **lists, system__node__node2__cpulist="")  # memory alone
    assert default_threads(root) == 8
    assert nodes(root) == [{0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 9})
    assert default_threads(root) == 2 and nodes(root) == [{1, 2, 9}]
    assert nodes(tmp_path / "elsewhere") == []


def test_threads_start_on_their_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, there = list[object](), 0

    def start(n: int) -> int:
        nonlocal there
        there = min(n, 7)  # the system refuses more
        calls.append(n)
        return there

    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: calls.append(sorted(cpus)))
    lists = {"system__node__node0__cpulist": "0-3", "system__node__node1__cpulist": "4-7"}
    root = machine(tmp_path, monkeypatch, list("01234567"), **lists)
    assert start_threads(start, 6, root) == 6
    assert calls == [[0, 1, 2, 3], 3, [4, 5, 6, 7], 6, list(range(8))]  # then the caller is as free as it was
    calls.clear()
    assert start_threads(start, 1, root) == 1 and start_threads(start, 8, root) == 7
    calls.clear()

    def forbidden(pid: int, cpus: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    assert start_threads(start, 6, root) == 6 and calls == [6]  # a sandbox: its threads run anywhere
    calls.clear()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    assert start_threads(start, 2, root) == 2 and calls == [2]  # one node: no thread is bound
