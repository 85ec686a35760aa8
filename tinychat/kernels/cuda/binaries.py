"""Compiled kernels, kept in the user's cache directory: a file each, named by its source and the GPU's architecture. A
binary stands behind its own digest, so that a damaged one is compiled again and never given to the driver."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from platformdirs import user_cache_dir

from tinychat.files import replace_file

UNUSED = 30 * 86400.0  # seconds since its last load, after which a binary is deleted
THREADS = 8  # that compile
DIGEST = 16  # bytes


def folder() -> Path:
    return Path(user_cache_dir("tinychat", appauthor=False)) / "cuda"


def find(source: str, arch: str) -> bytes | None:
    """The binary of a source, if it is kept."""
    with contextlib.suppress(OSError):
        path = _path(source, arch)
        found = path.read_bytes()
        os.utime(path)  # used now: see _prune
        if found[:DIGEST] == _digest(found[DIGEST:]):
            return found[DIGEST:]
    return None


def compile_all(sources: Iterable[str], arch: str) -> list[bytes]:
    """Compiles the sources with NVRTC and keeps the binaries, where the cache can be written."""
    compiled = _compiler(arch)
    with ThreadPoolExecutor(THREADS) as pool:
        made = []
        for source, binary in zip(sources, pool.map(compiled, sources)):
            with contextlib.suppress(OSError):
                folder().mkdir(parents=True, exist_ok=True)
                replace_file(_path(source, arch), _digest(binary) + binary)
            made.append(binary)
    _prune(time.time() - UNUSED)
    return made


def _compiler(arch: str) -> Callable[[str], bytes]:
    from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler  # 0.1 s and NVRTC's library

    compile: Callable[[str], bytes] = NVRTCCompiler(arch, ptx=False).compile
    return compile


def _path(source: str, arch: str) -> Path:
    return folder() / f"{_digest(f'{arch} {source}'.encode()).hex()}.cubin"


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


def _prune(before: float) -> None:
    """Deletes binaries that were last used before the time `before`."""
    for path in folder().glob("*.cubin*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < before:
                path.unlink()
