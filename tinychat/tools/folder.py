"""Access to the files of one folder only: paths are opened component by component, and symbolic links are not followed.

Each open is relative to a descriptor of the parent folder (openat). The kernel refuses a link (O_NOFOLLOW), also one
that replaced a component between two steps; a check before the open could not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tinychat.errors import TinychatError, printable

MAX_BYTES = 8 * 1024 * 1024  # largest file that is read
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)


class Missing(TinychatError):
    """The file does not exist."""


class Folder:
    """The folder at `path`, which is resolved once; its descriptor stays open until `close`."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """`fd`: an open descriptor of the folder, if there is one. Raises TinychatError when `path` is not a folder."""
        if os.open not in os.supports_dir_fd:
            raise TinychatError("tools need a system that opens files relative to a folder (Linux, macOS)")
        try:
            self.path = Path(os.path.realpath(path))
            self.fd = os.open(self.path, _FOLDER) if fd is None else fd
        except ValueError:  # a NUL or a lone surrogate
            raise TinychatError(f"{printable(str(path), newlines=False)!r} can be no path") from None
        except OSError as e:
            why = "is no folder" if e.errno == errno.ENOTDIR else f": {(e.strerror or str(e)).lower()}"
            raise TinychatError(f"{printable(str(path), newlines=False)} {why}".replace(" :", ":")) from None

    def close(self) -> None:
        os.close(self.fd)

    def parts(self, name: str) -> tuple[str, ...]:
        """The components of `name` relative to the folder. `name` may be an absolute path inside the folder. Raises
        TinychatError for a path outside it."""
        try:
            if b"\0" in os.fsencode(name):
                raise ValueError
        except ValueError:
            raise TinychatError(f"{printable(name)!r} can be no path") from None
        relative = name
        if name.startswith("/"):
            try:
                relative = str(Path(name).relative_to(self.path))
            except ValueError:
                raise TinychatError(f"{printable(name)!r} is outside the folder {self.path}") from None
        found = tuple(part for part in relative.split("/") if part not in ("", "."))
        if ".." in found:
            raise TinychatError(f"{printable(name)!r} has a '..'; name paths from the folder down")
        return found

    @contextlib.contextmanager
    def directory(self, parts: tuple[str, ...], create: bool = False) -> Iterator[int]:
        """A descriptor of the directory `parts`. Raises OSError."""
        fd = os.dup(self.fd)
        try:
            for part in parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    def read(self, name: str, most: int = MAX_BYTES) -> bytes:
        """The content of a regular file of at most `most` bytes. Raises TinychatError; Missing if it does not exist."""
        parts = self.parts(name)
        with self._said(name), self.directory(parts[:-1]) as above:
            return _content(above, parts[-1] if parts else ".", name, most)[0]

    def replace(self, name: str, data: bytes, shown: bytes | None) -> None:
        """Replaces file `name` by `data` if its content is still `shown` (None: if it does not exist); creates missing
        directories. Raises TinychatError."""
        parts = self.parts(name)
        if not parts:
            raise TinychatError("a path is needed")
        temporary = f".{parts[-1][:80]}.tmp-{secrets.token_hex(6)}"
        with self._said(name), self.directory(parts[:-1], create=True) as above:
            now, mode = None, None
            with contextlib.suppress(FileNotFoundError):
                now, mode = _content(above, parts[-1], name, MAX_BYTES)
            if now != shown:
                raise TinychatError(f"{printable(name)!r} has changed since it was shown; nothing was written")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
            out = os.open(temporary, flags, 0o666, dir_fd=above)
            try:
                with open(out, "wb") as f:
                    if mode is not None:
                        os.fchmod(f.fileno(), mode)
                    f.write(data)
                os.replace(temporary, parts[-1], src_dir_fd=above, dst_dir_fd=above)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=above)
                raise

    def entries(self, name: str) -> list[tuple[str, str, int]]:
        """(name, kind, bytes) of each entry of directory `name`; kind is folder, file, link or other. Raises
        TinychatError."""
        with self._said(name), self.directory(self.parts(name)) as fd:
            return _entries(fd)

    def walk(self, name: str = "") -> Iterator[tuple[str, str]]:
        """(path, kind) of everything below directory `name`, sorted, a directory before its entries. Hidden directories
        are listed and not entered. A directory that cannot be read is skipped. Raises TinychatError when `name` itself
        cannot be read."""
        waiting = [self.parts(name)]
        with self._said(name), self.directory(waiting[0]):
            pass
        while waiting:
            parts = waiting.pop()
            try:
                with self.directory(parts) as fd:
                    found = _entries(fd)
            except OSError:
                continue
            below = []
            for entry, kind, _ in found:
                yield "/".join((*parts, entry)), kind
                if kind == "folder" and not entry.startswith("."):
                    below.append((*parts, entry))
            waiting += reversed(below)

    @contextlib.contextmanager
    def _said(self, name: str) -> Iterator[None]:
        """Turns an OSError into a TinychatError of one line, for the model and the user."""
        try:
            yield
        except FileNotFoundError:
            raise Missing(f"{printable(name)!r}: no such file or directory") from None
        except OSError as e:
            link = e.errno in (errno.ELOOP, errno.EMLINK) or (e.errno == errno.ENOTDIR and self._has_link(name))
            why = "symbolic links are not followed" if link else (e.strerror or str(e)).lower()
            raise TinychatError(f"{printable(name)!r}: {why}") from None

    def _has_link(self, name: str) -> bool:
        path = Path(self.path, *self.parts(name))
        return any(p.is_symlink() for p in (path, *path.parents) if p.is_relative_to(self.path))


def _entries(fd: int) -> list[tuple[str, str, int]]:
    out = []
    with os.scandir(fd) as found:
        for entry in found:
            kind, size = "other", 0
            if entry.is_symlink():
                kind = "link"
            elif entry.is_dir(follow_symlinks=False):
                kind = "folder"
            elif entry.is_file(follow_symlinks=False):
                kind = "file"
                with contextlib.suppress(FileNotFoundError):
                    size = entry.stat(follow_symlinks=False).st_size
            out.append((entry.name, kind, size))
    return sorted(out)


def _content(above: int, entry: str, name: str, most: int) -> tuple[bytes, int]:
    """Content and mode of file `entry` in the directory with descriptor `above`. `name`: the file's name in errors."""
    fd = os.open(entry, _FILE, dir_fd=above)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise TinychatError(f"{printable(name)!r} is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}")
        data = bytearray()
        while chunk := os.read(fd, 1 << 20):
            data += chunk
            if len(data) > most:
                raise TinychatError(f"{printable(name)!r} has more than {most:,} bytes")
        return bytes(data), stat.S_IMODE(mode)
    finally:
        os.close(fd)
