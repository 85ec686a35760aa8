"""Builds the CPU library for this host: once, then from the user's cache directory.

The compiler is the clang inside the PyPI package `ziglang`, so that every machine runs the same code. `CC`, clang and
cc on the PATH are tried, in this order, only where that one is missing or fails.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from platformdirs import user_cache_dir

from tinychat.errors import TinychatError, printable
from tinychat.files import replace_file

SOURCES = Path(__file__).parent
UNUSED = 30 * 86400.0  # seconds since its last load, after which a compiled library is deleted
RETRY = 86400.0  # seconds after which a compiler that failed is tried again though another one's library is there
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall")


class NoCompiler(TinychatError):
    """No compiler on this machine builds the CPU library; the text has the error of each."""


def cache_dir() -> Path:
    """Where compiled libraries and the compiler wrapper live."""
    return Path(user_cache_dir("tinychat"))


_elsewhere: dict[Path, Path] = {}  # path in the cache that could not be written -> path in this process's folder


def _keep(path: Path, data: bytes) -> Path:
    """Writes an executable file to `path`, or, where a read-only home or a full disk forbids that, to a temporary
    folder of this process. Returns where it is. Raises OSError where neither is possible."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data, mode=0o755)
        return path
    folder = tempfile.mkdtemp(prefix="tinychat-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    replace_file(Path(folder) / path.name, data, mode=0o755)
    _elsewhere[path] = Path(folder) / path.name
    return _elsewhere[path]


def zig() -> str | None:
    """The zig executable of the `ziglang` package, or None."""
    spec = importlib.util.find_spec("ziglang")
    exe = Path(spec.origin).parent / "zig" if spec and spec.origin else None
    return str(exe) if exe and exe.exists() else None


def compilers() -> list[list[str]]:
    """Command lines of the C compilers of this machine, the one to use first."""
    found = []
    if exe := zig():
        found.append([exe, "cc", *(_zig_linux(Path(exe), platform.machine()) if sys.platform == "linux" else ())])
    return found + [[path] for name in _others() if (path := shutil.which(name))]


def _others() -> list[str]:
    return [name for name in (os.environ.get("CC"), "clang", "cc") if name]


def _zig_linux(exe: Path, machine: str) -> list[str]:
    """Flags for Linux: the bundled C headers, and no C library to link.

    The running process has the library's symbols, and building zig's own runtime would take four seconds.
    """
    include, family = exe.parent / "lib/libc/include", "x86" if machine == "x86_64" else machine
    dirs = (f"{family}-linux-gnu", "generic-glibc", f"{family}-linux-any", "any-linux-any")
    return ["-target", f"{machine}-linux-gnu", "-nostdlib", *(f"-isystem{include / d}" for d in dirs)]


def host_cpu() -> str:
    """What identifies this host's instruction set, as text."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        keys = ("model name", "flags", "Features", "CPU part")
        return "\n".join(next((ln for ln in lines if ln.startswith(key)), "") for key in keys)
    if sys.platform == "darwin":
        return subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True).stdout
    return platform.processor()


def build(flags: Sequence[str] = ("-march=native",), notice: Callable[[str], None] | None = None) -> Path:
    """Path of the shared library made from the C sources beside this file with `flags`; compiled if not in the cache.

    `notice` is called with one line before a compilation starts. Raises NoCompiler where no compiler works.
    """
    if platform.machine() in ("arm64", "aarch64"):
        flags = [f.replace("-march=native", "-mcpu=native") for f in flags]
    commands = [[*command, *FLAGS, *flags] for command in compilers()]
    paths = [_elsewhere.get(path, path) for path in map(_path, commands)]
    if notice and commands and not any(map(_exists, paths)):
        notice("compiling the CPU kernels for this machine (once)")
    failures = dict[Path, str]()
    for i, (args, path) in enumerate(zip(commands, paths)):  # the second one's library is for where the first one fails
        if _exists(path):
            with contextlib.suppress(OSError):
                os.utime(path)  # used now: see _prune
        elif _failed_before(args, path) and any(map(_exists, paths[i + 1 :])):
            continue
        else:
            made = _compile(args, path)
            if isinstance(made, str):
                failures[path] = made
                continue
            if notice and made in _elsewhere.values():
                notice(f"{path.parent} cannot be written: the CPU kernels are compiled anew at every start")
            _prune(path.parent, time.time() - UNUSED)
            path = made
        for failed in failures:
            with contextlib.suppress(OSError):
                _failure(failed).touch()
        return path
    raise NoCompiler("; ".join(failures.values()) or "no C compiler was found")


def _path(args: Sequence[str]) -> Path:
    """Where the library that the command line `args` makes on this host from the present sources is kept."""
    key = hashlib.sha256("\0".join([*args, host_cpu()]).encode())
    for p in sorted(p for p in SOURCES.iterdir() if p.suffix in (".c", ".h")):
        key.update(p.read_bytes())
    return cache_dir() / f"cpu-{key.hexdigest()[:20]}.so"


def _exists(path: Path) -> bool:
    with contextlib.suppress(OSError):  # of a folder that may not be entered
        return path.exists()
    return False


def _failure(path: Path) -> Path:
    """The file whose time is when the library `path` could not be made, though another compiler made one."""
    return path.with_name(f"{path.name}.failed")


def _failed_before(args: Sequence[str], path: Path) -> bool:
    """Whether the compiler of `args`, as it is now, has failed within RETRY."""
    with contextlib.suppress(OSError):
        failed = _failure(path).stat().st_mtime
        return failed > max(Path(args[0]).stat().st_mtime, time.time() - RETRY)
    return False


def _compile(args: Sequence[str], path: Path) -> Path | str:
    """Makes a library with `args` and keeps it as `path`. Returns where it is (see `_keep`), or one line about why
    that failed."""
    name = Path(args[0]).name
    try:
        with tempfile.TemporaryDirectory(prefix="tinychat-") as tmp:
            out = Path(tmp) / "out.so"
            # Zig's own cache gets a temporary folder: it would grow by 1 MB per compilation and is never read again.
            env = {"ZIG_GLOBAL_CACHE_DIR": tmp, "ZIG_LOCAL_CACHE_DIR": tmp, **os.environ}
            command = [*args, str(SOURCES / "step.c"), "-o", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
            if not done.returncode:
                return _keep(path, out.read_bytes())
    except OSError as e:
        where = f": {printable(str(e.filename), newlines=False)}" if e.filename else ""
        return f"{name} does not run: {(e.strerror or str(e)).lower()}{where}"
    line = next((ln for ln in done.stderr.splitlines() if "error" in ln), done.stderr.strip()[:200])
    return f"{name} cannot compile the CPU kernels: {printable(line, newlines=False)}"


def _prune(folder: Path, before: float) -> None:
    """Deletes compiled libraries and compiler wrappers of ours that were last used before the time `before`."""
    for path in (*folder.glob("cpu-*.so*"), *folder.glob("clang-*")):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()


def load(flags: Sequence[str] = ("-march=native",), notice: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The library of `build`, loaded."""
    path = build(flags, notice)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise TinychatError(f"cannot load the compiled CPU kernels {path}: {e}; remove that file and try again") from e


_WRAPPER = """#!/bin/sh
# tinygrad calls clang; this turns that call into one of the clang inside zig. Written by tinychat.
exec "{zig}" clang -fno-asynchronous-unwind-tables "$@"
"""


def tinygrad_cc() -> str | None:
    """Gives tinygrad's CPU device a compiler by setting `CC`; call it before tinygrad is used. Returns its path, or
    None where none works.

    A small wrapper around zig's clang, or else what `CC`, clang or cc on the PATH name.
    """
    wrapper = None
    if exe := zig():
        text = _WRAPPER.replace("{zig}", exe).encode()
        wrapper = cache_dir() / f"clang-{hashlib.sha256(text).hexdigest()[:12]}"
        wrapper = _elsewhere.get(wrapper, wrapper)
        if _exists(wrapper):
            os.environ["CC"] = str(wrapper)
            return str(wrapper)
        try:
            wrapper = _keep(wrapper, text)
        except OSError as e:
            raise TinychatError(f"no file can be written to {wrapper.parent}: {(e.strerror or str(e)).lower()}") from e
    for command in (wrapper and str(wrapper), *map(shutil.which, _others())):
        if command and _compiles(command):
            os.environ["CC"] = command
            return command
        if wrapper and command == str(wrapper):
            wrapper.unlink(missing_ok=True)  # its existence says that it works
    return None


def _compiles(command: str) -> bool:
    """Whether `command` compiles an object file with the arguments that tinygrad uses."""
    machine = "arm64" if platform.machine() in ("arm64", "aarch64") else platform.machine()
    args = [command, "-c", "-x", "c", f"--target={machine}-none-unknown-elf", "-ffreestanding", "-", "-o", "-"]
    try:
        return subprocess.run(args, input=b"int x;", capture_output=True).returncode == 0
    except OSError:
        return False
