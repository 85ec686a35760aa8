"""Finds a C compiler and builds the CPU library for this host: once, then from the user's cache directory.

clang on the PATH comes first, then the one inside the PyPI package `ziglang`, then `cc`.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from platformdirs import user_cache_dir

from tinychat.errors import TinychatError
from tinychat.files import replace_file

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wall")


def cache_dir() -> Path:
    """Where compiled libraries and the compiler wrapper live; made if missing."""
    path = Path(user_cache_dir("tinychat"))
    path.mkdir(parents=True, exist_ok=True)
    return path


def zig() -> str | None:
    """The zig executable of the `ziglang` package, or None."""
    spec = importlib.util.find_spec("ziglang")
    exe = Path(spec.origin).parent / "zig" if spec and spec.origin else None
    return str(exe) if exe and exe.exists() else None


def compiler() -> list[str] | None:
    """Command line of a hosted C compiler for this machine, or None."""
    if clang := shutil.which("clang"):
        return [clang]
    if exe := zig():
        return [exe, "cc", *(_zig_linux(Path(exe), platform.machine()) if sys.platform == "linux" else ())]
    return [cc] if (cc := shutil.which("cc")) else None


def _zig_linux(exe: Path, machine: str) -> list[str]:
    """Flags for Linux: the bundled C headers, but no C library to link.

    Its symbols are in the running process, and building zig's own runtime would cost four seconds of the first start.
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

    `notice` is called with one line before a compilation starts. Raises TinychatError where no compiler works.
    """
    command = compiler()
    if command is None:
        raise TinychatError("no C compiler: install clang, or `pip install ziglang`")
    files = sorted(p for p in SOURCES.iterdir() if p.suffix in (".c", ".h"))
    if platform.machine() in ("arm64", "aarch64"):
        flags = [f.replace("-march=native", "-mcpu=native") for f in flags]
    args = [*command, *FLAGS, *flags]
    key = hashlib.sha256("\0".join([*args, host_cpu()]).encode())
    for p in files:
        key.update(p.read_bytes())
    path = cache_dir() / f"cpu-{key.hexdigest()[:20]}.so"
    if path.exists():
        return path
    if notice:
        notice("compiling the CPU kernels for this machine (once)")
    with tempfile.TemporaryDirectory() as tmp:
        out = Path(tmp) / "out.so"
        done = subprocess.run([*args, str(SOURCES / "step.c"), "-o", str(out)], capture_output=True, text=True)
        if done.returncode:
            line = next((ln for ln in done.stderr.splitlines() if "error" in ln), done.stderr[:200])
            raise TinychatError(f"{Path(command[0]).name} cannot compile the CPU kernels: {line}")
        replace_file(path, out.read_bytes(), mode=0o755)
    return path


def load(flags: Sequence[str] = ("-march=native",), notice: Callable[[str], None] | None = None) -> ctypes.CDLL:
    """The library of `build`, loaded."""
    path = build(flags, notice)
    try:
        return ctypes.CDLL(str(path))
    except OSError as e:
        raise TinychatError(f"cannot load the compiled CPU kernels {path}: {e}; remove that file and try again") from e


_WRAPPER = """#!/bin/sh
# tinygrad calls clang; this turns that call into one of zig's clang. Written by tinychat.
for a in "$@"; do
  shift
  case "$a" in
    --target=x86_64-*) set -- "$@" -target x86_64-freestanding-none ;;
    --target=arm64-*) set -- "$@" -target aarch64-freestanding-none ;;
    *) set -- "$@" "$a" ;;
  esac
done
exec "{zig}" cc -g0 -fno-asynchronous-unwind-tables "$@"
"""


def tinygrad_cc() -> str | None:
    """Gives tinygrad's CPU device a compiler; call it before tinygrad is used. Returns its name, or None where there is
    none.

    An own `CC` or a clang on the PATH stays as it is; otherwise `CC` is set to a small wrapper around zig's clang.
    """
    if os.environ.get("CC"):
        return os.environ["CC"]
    if clang := shutil.which("clang"):
        return clang
    if (exe := zig()) is None:
        return None
    text = _WRAPPER.replace("{zig}", exe).encode()
    path = cache_dir() / f"clang-{hashlib.sha256(text).hexdigest()[:12]}"
    if not path.exists():
        replace_file(path, text, mode=0o755)
    os.environ["CC"] = str(path)
    return str(path)
