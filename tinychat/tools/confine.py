"""Runs one command without network and with write access to one folder only. A program of its own, without imports
from tinychat.

Linux: namespaces (user, network, process, mount) remove the network and end every process that the command leaves
behind; Landlock (landlock(7)) allows writing below the given folders and reading these and the system's. A kernel may
lack either; `shell.confinement` tells which are available before a command runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from typing import NoReturn

CANNOT = 120  # exit code: the confinement failed, and the command was not run
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/proc", "/sys", "/nix", "/dev")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_NEWNS, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x10000000, 0x20000000, 0x40000000
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # system calls of Landlock
_EXECUTE, _WRITE, _READ, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_ACCESS = {1: 13, 2: 14, 3: 15, 5: 16}  # Landlock's version: how many kinds of access to files it knows


def main(job: str) -> NoReturn:
    """`job` is JSON: probe, command, writable (folders), readable (folders), files and network (whether they
    must be confined)."""
    todo = json.loads(job)
    if todo.get("probe"):
        print(json.dumps({"files": _version() > 0, "network": _isolate()}))
        sys.exit(0)
    isolated = _isolate()
    if (todo["network"] and not isolated) or (todo["files"] and _version() <= 0):
        sys.exit(CANNOT)
    if isolated:
        _become_first()
    if todo["files"] and not _restrict(todo["writable"], [*todo["readable"], *SYSTEM]):
        os._exit(CANNOT)
    os.execv("/bin/sh", ["sh", "-c", todo["command"]])


def _isolate() -> bool:
    """Enters new namespaces: only a loopback interface, no processes of others, an empty /run."""
    if not sys.platform.startswith("linux"):
        return False
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET | _NEWPID | _NEWNS) != 0:
        return False
    try:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{file}", "w") as f:
                f.write(text)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # brings up lo, which tests of servers need
            fcntl.ioctl(s, 0x8914, struct.pack("16sH14x", b"lo", 1))
    except OSError:
        pass
    private, tmpfs = 0x44000, 0xE  # MS_REC | MS_PRIVATE; MS_NOSUID | MS_NODEV | MS_NOEXEC
    if libc.mount(None, b"/", None, private, None) == 0:
        libc.mount(b"none", b"/run", b"tmpfs", tmpfs, None)  # hides sockets of services; Docker's gives root access
    return True


def _become_first() -> None:
    """Continues as a child of the new process namespace's first process, whose end ends all processes in it."""
    libc = ctypes.CDLL(None)
    for _ in range(2):
        if child := os.fork():
            status = 0
            while True:
                pid, status = os.waitpid(-1, 0)
                if pid == child:
                    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _version() -> int:
    if not sys.platform.startswith("linux"):
        return 0
    return int(ctypes.CDLL(None).syscall(_CREATE, None, 0, 1))


def _restrict(writable: list[str], readable: list[str]) -> bool:
    """Limits this process and its children to these folders. Returns whether the kernel did so."""
    libc, version = ctypes.CDLL(None, use_errno=True), _version()
    every = (1 << max(n for v, n in _ACCESS.items() if v <= version)) - 1
    scoped = struct.pack("QQQ", every, 0, 3)  # no abstract sockets of others, no signals to others
    attributes = scoped if version >= 6 else scoped[:8]
    rules = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        return False
    read = _EXECUTE | _READ | _READ_DIR
    wanted = [(path, every) for path in writable] + [(path, read) for path in readable]
    wanted += [(path, _READ | _WRITE | (_TRUNCATE & every)) for path in DEVICES]
    for path, access in wanted:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            if libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", access, fd), 0) < 0:
                return False
            os.close(fd)
    return libc.prctl(38, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT, rules, 0) == 0  # PR_SET_NO_NEW_PRIVS


if __name__ == "__main__":
    main(sys.argv[1])
