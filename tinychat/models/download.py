"""Downloads one file over HTTP. The result is the expected file, or an error of one line.

`fetch` writes a partial file and, beside it, a small JSON file (`Notes`), and can be killed at any byte. The next call
resumes the download if the server proves that the file has not changed, and starts over otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from email.utils import parsedate_to_datetime
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.filesize import decimal

from tinychat.errors import TinychatError, printable
from tinychat.files import replace_file
from tinychat.models.hosts import authorization, host_of, mirrored, shown

if TYPE_CHECKING:
    import httpx  # imported where it is used: it takes 0.1 s

    from tinychat.engine.gguf import GGUF  # likewise, for NumPy

# bytes done, total bytes if known, bytes per second, what the download is doing, in words
OnDownload = Callable[[int, int | None, float, str], None]

RETRIES = 6  # in a row, without one new byte
BACKOFF = 1.0  # seconds, doubled each time
PATIENCE = 300.0  # seconds; a server that asks for a longer wait is an error
TIMEOUT = 30.0  # seconds without a byte
_TRY_LATER = {408, 425, 429, 500, 502, 503, 504}


class DownloadStopped(TinychatError):
    """The caller asked to stop; the partial file is kept for the next call."""


class _Retry(Exception):
    """This attempt failed, and another may succeed. `after`: seconds that the server asks to wait."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


@dataclass
class Notes:
    """What is known about a file in the cache: stored as `<key>.json` beside it, from the first byte on."""

    url: str
    size: int | None = None  # bytes of the complete file
    validator: str | None = None  # a strong ETag or a date, for If-Range
    sha256: str | None = None  # as its publisher states it, or as measured when it is complete
    pieces: list[int] = field(default_factory=list)  # bytes of each whole piece of a partial file made of several

    @classmethod
    def load(cls, path: Path) -> Notes | None:
        """The notes at `path`; None when there are none or they are damaged."""
        try:
            data = json.loads(path.read_text())
            return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})
        except (OSError, ValueError, RecursionError, AttributeError, TypeError):
            return None

    def save(self, path: Path) -> None:
        """Replaces `path`: a reader sees the old notes or the new ones."""
        replace_file(path, json.dumps(asdict(self)).encode())  # private: a URL may have a token in it


class Meter:
    """Calls `progress` at most ten times a second, with the speed over the last three seconds."""

    def __init__(self, progress: OnDownload | None, stage: str, total: int | None) -> None:
        self.progress, self.stage, self.total = progress, stage, total
        self.seen: deque[tuple[float, int]] = deque()
        self.last = 0.0

    def __call__(self, done: int, stage: str | None = None) -> None:
        now = time.monotonic()
        if self.progress is None or (stage is None and now - self.last < 0.1 and done != self.total):
            return
        self.last = now
        self.seen.append((now, done))
        while now - self.seen[0][0] > 3:
            self.seen.popleft()
        before, span = self.seen[0][1], now - self.seen[0][0]
        self.progress(done, self.total, (done - before) / span if span and done > before else 0.0, stage or self.stage)


def hash_file(path: Path, stage: str, progress: OnDownload | None = None, stop: Event | None = None) -> hashlib._Hash:
    """A SHA-256 object that has read all bytes of `path`. Raises DownloadStopped."""
    digest, done, size = hashlib.sha256(), 0, path.stat().st_size
    meter = Meter(progress, stage, size)
    with open(path, "rb") as f:
        while block := f.read(1 << 22):
            digest.update(block)
            done += len(block)
            meter(done)
            check_stop(stop)
    return digest


def check_space(folder: Path, needed: int) -> None:
    """Raises TinychatError unless `needed` bytes are free in `folder`."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise TinychatError(
            f"{decimal(needed)} needed, {decimal(free)} free in {folder}: free {decimal(needed - free)}, "
            "or point XDG_CACHE_HOME at a larger disk"
        )


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns an OSError of the file system (full, read-only, no permission) into a TinychatError of one line."""
    try:
        yield
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise TinychatError(
                f"no space left in {folder}: free some and pull again, the download resumes; or delete the "
                "partial file with `tinychat cache rm`"
            ) from None
        raise TinychatError(f"{printable(str(e.filename or folder))}: {(e.strerror or str(e)).lower()}") from None


def fetch(
    url: str,
    part: Path,
    notes: Path,
    *,
    sha256: str | None = None,
    size: int = 0,
    check: Callable[[Path], object],
    progress: OnDownload | None = None,
    stop: Event | None = None,
) -> Notes:
    """Downloads the file `url` to `part`, flushed to the disk and verified; returns what is known about it.

    `sha256`: the expected digest; without it, the one that the host states. `size` is not used: the server states it.
    `check(path)` raises TinychatError for a file that is not the expected kind. Raises TinychatError, or
    DownloadStopped; the partial file is then kept for the next call.
    """
    refuse_split(url)
    with disk_errors(part.parent):
        return _Download(url, part, notes, sha256, check, progress, stop).run()


class _Download:
    """The download of one file, in one or more requests."""

    def __init__(
        self,
        url: str,
        part: Path,
        notes: Path,
        sha256: str | None,
        check: Callable[[Path], object],
        progress: OnDownload | None,
        stop: Event | None,
    ) -> None:
        self.url, self.part, self.notes_path, self.sha256, self.check = url, part, notes, sha256, check
        self.progress, self.stop = progress, stop
        self.where = shown(mirrored(url))
        self.notes = Notes(url)
        self.done = 0  # good bytes in the partial file
        self.resumed = False  # the partial file holds bytes of more than one response
        self.digest = hashlib.sha256()

    def run(self) -> Notes:
        import httpx

        found = Notes.load(self.notes_path)
        known = found and found.url == self.url and (found.validator or found.sha256 or self.sha256)
        if found and known and self.part.is_file() and self.part.stat().st_size:
            self.digest = hash_file(self.part, "checking what is there", self.progress, self.stop)
            self.notes, self.done, self.resumed = found, self.part.stat().st_size, True
        else:
            self.part.unlink(missing_ok=True)
        failures, best = 0, self.done
        with client() as http:
            while True:
                check_stop(self.stop)
                try:
                    self.attempt(http)
                    return self.finish()
                except _Retry as e:
                    failures = 0 if self.done > best else failures + 1
                    best = max(best, self.done)
                    if failures >= RETRIES:
                        raise TinychatError(f"{self.where}: {e}, {failures} times in a row; pull again later") from None
                    delay = min(BACKOFF * 2**failures, 30.0) if e.after is None else e.after
                    if delay > PATIENCE:
                        raise TinychatError(
                            f"{self.where}: {e}; it asks to come back in {delay / 60:.0f} minutes"
                        ) from None
                    self.meter(f"{e}; trying again")
                    (self.stop or Event()).wait(delay)
                except (
                    httpx.InvalidURL,
                    httpx.UnsupportedProtocol,
                    httpx.TooManyRedirects,
                    ValueError,
                    ImportError,
                ) as e:
                    raise TinychatError(f"{self.where}: {printable(str(e), newlines=False)}") from None

    @property
    def expected(self) -> str | None:
        return self.sha256 or self.notes.sha256

    def meter(self, stage: str) -> None:
        Meter(self.progress, stage, self.notes.size)(self.done, stage)

    def start_over(self) -> None:
        self.part.unlink(missing_ok=True)
        self.notes, self.done, self.resumed, self.digest = Notes(self.url), 0, False, hashlib.sha256()

    def attempt(self, http: httpx.Client) -> None:
        """One request for the bytes after `done`. Returns at the end of the response. Raises _Retry or
        TinychatError."""
        import httpx

        headers = {"Range": f"bytes={self.done}-"} if self.done else {}
        if (
            self.done and self.notes.validator and not self.expected
        ):  # a known hash proves more than an ETag, on any mirror
            headers["If-Range"] = self.notes.validator
        if self.done and self.done == self.notes.size:
            return
        self.meter("connecting")
        try:
            with http.stream("GET", mirrored(self.url), headers=headers | authorization(self.url)) as response:
                if self.accept(response):
                    self.receive(response)
        except httpx.UnsupportedProtocol:
            raise  # another attempt would fail as well
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
            if not self.done:  # probably no network or no such host: report it at once
                host = host_of(self.url)
                mirror = f", or set {host.mirror} to a mirror of {host.name}" if host and host.mirror else ""
                raise TinychatError(
                    f"{self.where}: cannot connect ({printable(str(e), newlines=False)}); check the network{mirror}"
                ) from None
            raise _Retry("connection lost") from None
        except httpx.TimeoutException:
            raise _Retry("the server went silent") from None
        except (httpx.ProxyError, httpx.LocalProtocolError) as e:
            raise TinychatError(f"{self.where}: {printable(str(e), newlines=False)}") from None
        except httpx.TransportError:
            raise _Retry("the connection broke before the end of the file") from None

    def accept(self, r: httpx.Response) -> bool:
        """Decides how this response continues the partial file. False: the file is complete. Raises _Retry or
        TinychatError."""
        if r.status_code in _TRY_LATER:
            raise _Retry(f"the server answers {r.status_code} {printable(r.reason_phrase)}", _retry_after(r))
        if r.status_code == 416 and self.done:
            if (total := re.fullmatch(r"bytes \*/(\d+)", r.headers.get("Content-Range", ""))) and int(
                total[1]
            ) == self.done:
                self.notes.size = self.done
                return False
            self.start_over()
            raise _Retry("the file has changed on the server")
        if r.status_code not in (200, 206):
            raise TinychatError(f"{self.where}: {_refusal(r, self.url)}")
        if r.headers.get("Content-Encoding", "identity") != "identity":
            raise TinychatError(
                f"{self.where}: the server sends the file {printable(r.headers['Content-Encoding'])}-encoded; "
                "use another source"
            )
        told = _told(r, self.url)
        if self.sha256 and told.sha256 and told.sha256 != self.sha256:
            raise TinychatError(
                f"{self.where}: the publisher has replaced this file since tinychat learned its SHA-256; update "
                "tinychat, or add the new file to your settings as a model of your own"
            )
        if r.status_code == 206:
            old = self.notes
            changed = (told.size != old.size if told.size and old.size else False) or (
                told.sha256 != old.sha256
                if told.sha256 and old.sha256
                else not self.expected and told.validator is not None and told.validator != old.validator
            )
            start = re.match(r"bytes (\d+)-", r.headers.get("Content-Range", ""))
            if changed or not self.done or not start or int(start[1]) != self.done:
                self.start_over()
                raise _Retry(
                    "the file has changed on the server" if changed else "the server sent another part than asked for"
                )
            self.notes.size = old.size or told.size
            self.resumed = True
        else:
            self.start_over()
            self.notes = told
        if self.notes.size:
            check_space(self.part.parent, self.notes.size - self.done)
        self.notes.save(self.notes_path)
        return True

    def receive(self, r: httpx.Response) -> None:
        meter = Meter(self.progress, "downloading", self.notes.size)
        head = b"GGUF" if self.done else b""
        with open(self.part, "ab", buffering=0) as f:
            for block in r.iter_raw():
                if len(head) < 4:
                    head = (head + block)[:4]
                    if head != b"GGUF"[: len(head)]:
                        self.discard()
                        raise TinychatError(f"{self.where}: not a GGUF file (it begins with {head!r})")
                view = memoryview(block)
                while view:  # on a nearly full disk a write may be partial
                    n = f.write(view)
                    self.digest.update(view[:n])
                    self.done += n
                    view = view[n:]
                meter(self.done)
                check_stop(self.stop)
        if self.notes.size and self.done < self.notes.size:
            raise _Retry("the connection broke before the end of the file")

    def finish(self) -> Notes:
        """Flushes and verifies the file. A bad file that was put together from several responses is fetched once more
        in one request; a bad file of one response is an error."""
        self.meter("verifying")
        try:
            if self.notes.size is not None and self.done != self.notes.size:
                raise TinychatError(
                    f"{self.where}: {self.done:,} bytes came, the server had announced {self.notes.size:,}"
                )
            if self.expected and self.digest.hexdigest() != self.expected:
                raise TinychatError(
                    f"{self.where}: damaged or not the expected file (its SHA-256 is {self.digest.hexdigest()}, "
                    f"not {self.expected}); nothing was kept"
                )
            if not self.done:
                raise TinychatError(f"{self.where}: the server sent an empty file")
            self.check(self.part)
        except TinychatError as e:
            again = self.resumed
            self.discard()
            if again:
                self.start_over()
                raise _Retry("the pieces do not fit together") from None
            raise TinychatError(str(e).replace(str(self.part), self.where)) from None
        sync(self.part)
        self.notes.size, self.notes.sha256 = self.done, self.digest.hexdigest()
        self.notes.save(self.notes_path)
        return self.notes

    def discard(self) -> None:
        self.part.unlink(missing_ok=True)
        self.notes_path.unlink(missing_ok=True)


def client() -> httpx.Client:
    """An HTTP client that follows redirects; proxies and certificates come from the usual variables of the
    environment."""
    import httpx

    return httpx.Client(
        follow_redirects=True,
        timeout=httpx.Timeout(TIMEOUT, connect=min(TIMEOUT, 15.0)),
        headers={"Accept-Encoding": "identity", "User-Agent": "tinychat"},
    )


def refuse_split(url: str) -> None:
    """Raises TinychatError for one part of a split model: the cache holds files, and the parts must lie side by
    side."""
    if part := re.search(r"-(\d{5})-of-(\d{5})\.gguf$", urlsplit(url).path):
        raise TinychatError(
            f"{shown(mirrored(url))}: part {int(part[1])} of {int(part[2])}; download all parts into one folder and "
            "open the first one"
        )


@contextlib.contextmanager
def remote_header(url: str) -> Iterator[Path]:
    """The header of a model that is not here, as a file whose tensor data is a hole.

    Range requests for 1 MB and more until the header is complete; the rest of the file is a hole. Raises TinychatError.
    """
    refuse_split(url)
    with tempfile.TemporaryDirectory(prefix="tinychat-") as folder:
        path = Path(folder) / "header.gguf"
        with disk_errors(Path(folder)):
            _fetch_header(url, path)
        yield path  # outside of disk_errors: the caller's own OSErrors are not of this file


def read_header(path: Path) -> GGUF:
    """Of a model's file, or of the beginning of one. Raises TinychatError."""
    from tinychat.engine.gguf import GGUF

    return GGUF.open(path)


def _fetch_header(url: str, path: Path) -> None:
    import httpx

    have, name = 0, shown(mirrored(url))
    with client() as http:
        for want in (1 << 20, 1 << 22, 1 << 24, 1 << 26):
            headers = {"Range": f"bytes={have}-{want - 1}"} | authorization(url)
            try:
                with http.stream("GET", mirrored(url), headers=headers) as r:
                    if r.status_code not in (200, 206):
                        raise TinychatError(f"{name}: {_refusal(r, url)}")
                    have = have if r.status_code == 206 else 0  # 200: the server sends all from byte 0
                    size = _told(r, url).size or want
                    with open(path, "r+b" if path.exists() else "wb") as f:
                        f.seek(have)
                        for block in r.iter_raw():
                            have += f.write(block)
                            if have >= want:
                                break
                        f.truncate(max(size, have))
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                raise TinychatError(f"{name}: {printable(str(e), newlines=False)}") from None
            try:
                header = read_header(path)
                if min((t.offset for t in header.tensors.values()), default=0) <= have:
                    return
            except TinychatError as e:  # the header may reach into the hole, whose bytes read as zeros: fetch more
                if have < 4 or have >= size or "not a GGUF" in str(e):
                    raise TinychatError(str(e).replace(str(path), name)) from None
    raise TinychatError(f"{name}: its header does not end within {decimal(want)}")


def _told(r: httpx.Response, url: str) -> Notes:
    """What the response says about the complete file. The hub states SHA-256 and size in the response that redirects to
    its storage."""
    total = re.fullmatch(r"bytes \d+-\d+/(\d+)", r.headers.get("Content-Range", ""))
    length = r.headers.get("Content-Length", "")
    size = int(total[1]) if total else int(length) if r.status_code == 200 and length.isdecimal() else None
    etag = r.headers.get("ETag", "")
    validator = etag if etag.startswith('"') else r.headers.get("Last-Modified")  # If-Range takes no weak ETag
    told = Notes(url, size, validator)
    if (host := host_of(url)) and host.digest:
        for step in [*r.history, r]:
            linked = step.headers.get(host.digest, "").strip('"').lower()
            if re.fullmatch(r"[0-9a-f]{64}", linked):
                told.sha256 = linked
    return told


def _refusal(r: httpx.Response, url: str) -> str:
    host = host_of(url)
    match r.status_code:
        case 401 | 403 if host and host.token:
            why = f"no such file, or a gated one (accept its licence and set {host.token})"
            return f"{host.name} refuses ({r.status_code}): {why}"
        case 401 | 403:
            return f"the server refuses access ({r.status_code})"
        case 404 | 410:
            return f"not found ({r.status_code}); check the name or the URL"
    return f"the server answers {r.status_code} {printable(r.reason_phrase)}".rstrip()


def _retry_after(r: httpx.Response) -> float | None:
    """Seconds of the Retry-After header, which is a number or a date."""
    text = r.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def sync(path: Path) -> None:
    with open(path, "rb") as f:
        os.fsync(f.fileno())


def check_stop(stop: Event | None) -> None:
    if stop is not None and stop.is_set():
        raise DownloadStopped("stopped; the partial file is kept, pull again to resume")
