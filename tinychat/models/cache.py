"""Where model files live. The layout is tinygrad's own, so that a file fetched by either serves both:

downloads/<md5 of the URL>         the file; it gets this name only when it is complete and verified
downloads/<md5 of the URL>.part    what has arrived so far
downloads/<md5 of the URL>.json    Notes: URL, size, validator, SHA-256
downloads/<md5 of the URL>.lock    held (flock) by the process that writes any of these
downloads/mtp-<md5 of the URL>     a link to the side file of that model, if there is one (Model.mtp_of)
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Literal

from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.models.download import (
    DownloadStopped,
    Meter,
    Notes,
    OnDownload,
    check_space,
    check_stop,
    disk_errors,
    hash_file,
    read_header,
    sync,
)
from tinychat.models.hosts import shown
from tinychat.models.registry import MODELS, Model
from tinychat.models.sources import fetch

_FICLONE = 0x40049409  # Linux: share the blocks of another file, copy on write


@dataclass(frozen=True)
class CachedFile:
    """One file of the cache, complete or partial. `total` is the size of the complete file in bytes, where known."""

    key: str
    path: Path
    size: int
    total: int | None
    partial: bool
    model: Model | None  # where the registry or the settings know the file
    url: str | None

    @property
    def name(self) -> str:
        return self.model.name if self.model else shown(self.url) if self.url else self.key


def downloads_dir() -> Path:
    """The folder where tinygrad's `fetch` looks, by tinygrad's own rules (which are not quite those of
    platformdirs)."""
    if Path("/etc/tinybox-release").is_file():
        return Path("/raid/downloads")
    default = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser(default)) / "tinygrad" / "downloads"


def free_bytes() -> int:
    """Free space on the disk of the cache."""
    folder = downloads_dir()
    return shutil.disk_usage(next(f for f in (folder, *folder.parents) if f.is_dir())).free


def key_of(source: str) -> str:
    """The name under which `source` is cached."""
    return hashlib.md5(source.encode()).hexdigest()


def path_of(model: Model) -> Path | None:
    """The path of the file of `model`, or None when it is missing or incomplete."""
    if model.path:
        return model.path
    return next((path for s in model.sources if (path := downloads_dir() / key_of(s)).is_file()), None)


def pull(model: Model, progress: OnDownload | None = None, stop: Event | None = None) -> Path:
    """Downloads `model` unless the cache has it, and returns its path. Its sources are tried in turn.

    A second process that wants the same file waits for the first one and then uses its file.
    Raises TinychatError, or DownloadStopped when `stop` is set: the partial file is kept, and the next pull resumes.
    """
    if path := path_of(model):
        return path
    if reason := model.why_not:
        raise TinychatError(reason)
    folder, failures = downloads_dir(), []
    for source in sorted(model.sources, key=lambda s: not (folder / f"{key_of(s)}.part").exists()):
        try:
            return _linked(model, _pull(model, source, folder, progress, stop))
        except DownloadStopped:
            raise
        except TinychatError as e:
            failures.append(str(e))
    raise TinychatError("; ".join(failures))


def _side_names(model: Model) -> list[Path]:
    """Where the engine looks for what `model` is a side file of: beside each of those models."""
    return [downloads_dir() / f"mtp-{key_of(source)}" for source in model.mtp_of]


def _linked(model: Model, path: Path) -> Path:
    """`path`, the file of `model`, found from the models that it is a side file of."""
    for link in _side_names(model):
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
    return path


def _pull(model: Model, source: str, folder: Path, progress: OnDownload | None, stop: Event | None) -> Path:
    key = key_of(source)
    final, part, notes_path = folder / key, folder / f"{key}.part", folder / f"{key}.json"
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        meter = Meter(progress, "another tinychat is downloading it", model.size or None)

        def wait() -> None:
            check_stop(stop)
            with contextlib.suppress(FileNotFoundError):
                meter(part.stat().st_size)

        with _lock(folder, key, wait):
            if final.is_file():
                return final
            try:
                notes = fetch(
                    source,
                    part,
                    notes_path,
                    sha256=model.sha256,
                    size=model.size,
                    check=read_header,
                    progress=progress,
                    stop=stop,
                )
                notes.save(notes_path)
                _give_name(part, final)
            finally:
                if not final.exists() and not (part.exists() and part.stat().st_size):
                    part.unlink(missing_ok=True)
                    notes_path.unlink(missing_ok=True)
    return final


def add(
    file: Path,
    model: Model,
    mode: Literal["link", "copy", "move"] = "link",
    progress: OnDownload | None = None,
    stop: Event | None = None,
) -> Path:
    """Puts `file` into the cache as the file of `model` (a registry entry, or `resolve` of a URL) and returns its
    place.

    'link' shares the disk blocks (a copy-on-write clone, or else a hard link). Raises TinychatError when no link can be
    made, when the file is damaged, or when its SHA-256 is not the registry's.
    """
    if not model.sources:
        raise TinychatError(
            f"{printable(model.name)}: a file of your own needs no place in the cache; open it by its path"
        )
    file, folder = expand(str(file)).resolve(), downloads_dir()
    header = read_header(file)
    if header.parts > 1:
        raise TinychatError(
            f"{printable(str(file))}: a model in {header.parts} parts; open it by the path of the first one"
        )
    architecture = str(header.metadata.get("general.architecture", ""))
    if model.architecture and architecture != model.architecture:
        raise TinychatError(
            f"{printable(str(file))}: its architecture is {printable(architecture)}, {model.name} is "
            f"{model.architecture}; add it with --url instead"
        )
    with disk_errors(folder):
        digest = hash_file(file, "hashing", progress, stop).hexdigest()
        if model.sha256 and digest != model.sha256:
            raise TinychatError(
                f"{printable(str(file))}: not the file the registry knows as {model.name} (SHA-256 {digest}, "
                f"expected {model.sha256})"
            )
        folder.mkdir(parents=True, exist_ok=True)
        key, size = key_of(model.sources[0]), file.stat().st_size
        final, part = folder / key, folder / f"{key}.part"
        with _lock(folder, key):
            if final.exists():
                if final.stat().st_size != size:
                    raise TinychatError(
                        f"{model.name} is in the cache already; `tinychat cache rm {model.name}` removes it"
                    )
                return final
            part.unlink(missing_ok=True)
            try:
                _place(file, part, size, mode, progress, stop)
                Notes(model.sources[0], size, None, digest).save(folder / f"{key}.json")
                _give_name(part, final)
            finally:
                part.unlink(missing_ok=True)
            if mode == "move":
                file.unlink(missing_ok=True)
    return _linked(model, final)


def _place(file: Path, to: Path, size: int, mode: str, progress: OnDownload | None, stop: Event | None) -> None:
    if mode != "copy":  # a moved file has both names until the end, when the old one is removed
        try:
            return os.link(file, to) if mode == "move" else _share(file, to)
        except OSError as e:
            if mode == "link":
                raise TinychatError(
                    f"{printable(str(file))}: cannot share its disk blocks with {to.parent} "
                    f"({(e.strerror or str(e)).lower()}); use --copy or --move"
                ) from None
    check_space(to.parent, size)
    meter, done = Meter(progress, "copying", size), 0
    with open(file, "rb") as source, open(to, "wb") as target:
        while block := source.read(1 << 22):
            done += target.write(block)
            meter(done)
            check_stop(stop)
    sync(to)


def _share(file: Path, to: Path) -> None:
    try:
        with open(file, "rb") as source, open(to, "wb") as target:
            fcntl.ioctl(target, _FICLONE, source.fileno())
    except OSError:
        to.unlink(missing_ok=True)
        os.link(file, to)


def entries(extra: Iterable[Model] = ()) -> list[CachedFile]:
    """Every model file in the cache, complete and partial, by name. `extra` names the user's own models.

    Other files that tinygrad keeps in the same folder are neither listed nor changed.
    """
    known = {key_of(s): m for m in (*MODELS, *extra) for s in m.sources}
    found = []
    for path in sorted(downloads_dir().glob("*")):
        if not (match := re.fullmatch(r"([0-9a-f]{32})(\.part)?", path.name)) or not path.is_file():
            continue
        key, partial = match[1], bool(match[2])
        notes = Notes.load(path.with_name(f"{key}.json"))
        if not (partial or key in known or notes):
            with open(path, "rb") as f:
                if f.read(4) != b"GGUF":
                    continue
        model, size = known.get(key), path.stat().st_size
        total = notes.size if notes and notes.size else model.size if partial and model else None if partial else size
        url = notes.url if notes else model.sources[0] if model else None
        found.append(CachedFile(key, path, size, total, partial, model, url))
    return sorted(found, key=lambda e: (e.name, e.partial))


def find(model: Model) -> list[CachedFile]:
    """The cache's entries of `model`: its file, its partial file, or none."""
    keys = {key_of(s) for s in model.sources}
    return [e for e in entries([model]) if e.key in keys]


def verify(entry: CachedFile, progress: OnDownload | None = None, stop: Event | None = None) -> str:
    """Reads the whole file and returns, in words, what was verified. Raises TinychatError for a damaged file."""
    notes = Notes.load(entry.path.with_name(f"{entry.key}.json"))
    way_out = f"`tinychat cache rm {entry.model.name if entry.model else entry.key}` and download it again"
    read_header(entry.path)
    published = entry.model.sha256 if entry.model else None
    expected = published or (notes.sha256 if notes else None)
    if expected is None:
        return "structure good (its SHA-256 is not known)"
    digest = hash_file(entry.path, "verifying", progress, stop).hexdigest()
    if digest != expected:
        raise TinychatError(f"{entry.name}: damaged (its SHA-256 is {digest}, not {expected}); {way_out}")
    return "as published (SHA-256)" if published else "unchanged since it came (SHA-256)"


def remove(entry: CachedFile) -> None:
    """Deletes the file and all that belongs to it. Raises TinychatError when another process is writing it."""
    folder = entry.path.parent
    with disk_errors(folder), _lock(folder, entry.key):
        for suffix in ("", ".part", ".json"):
            (folder / f"{entry.key}{suffix}").unlink(missing_ok=True)
        for link in _side_names(entry.model) if entry.model else ():
            link.unlink(missing_ok=True)


def prune() -> list[tuple[Path, int]]:
    """Deletes the remains of unfinished downloads, and notes without a file. Returns paths and sizes in bytes.

    Complete files and those that another process is writing stay.
    """
    gone: list[tuple[Path, int]] = []
    folder = downloads_dir()
    pattern = re.compile(r"([0-9a-f]{32})\.(part|part-pip-.*|json|json\.tmp.*|lock)")
    keys = {m[1] for p in folder.glob("*") if (m := pattern.fullmatch(p.name))}
    with disk_errors(folder):
        for key in sorted(keys):
            with contextlib.suppress(_Busy), _lock(folder, key):
                for path in sorted(folder.glob(f"{key}.*")):
                    if path.suffix == ".lock" or (path.suffix == ".json" and (folder / key).exists()):
                        continue
                    size = sum(f.stat().st_size for f in (path.rglob("*") if path.is_dir() else [path]) if f.is_file())
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    gone.append((path, size))
    return gone


class _Busy(TinychatError):
    pass


@contextlib.contextmanager
def _lock(folder: Path, key: str, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds the lock of `key`, calling `wait` while another process (or thread) has it; without `wait`, raises
    _Busy."""
    path = folder / f"{key}.lock"
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), path.stat()):  # else its last holder has deleted it
                break
        os.close(fd)
        if wait is None:
            raise _Busy(f"{key}: another tinychat is downloading this file; stop it there first")
        wait()
        time.sleep(0.1)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _give_name(part: Path, final: Path) -> None:
    os.replace(part, final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name survives a power cut too
    finally:
        os.close(folder)
