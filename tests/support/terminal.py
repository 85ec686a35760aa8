"""tinychat as a process in a terminal of its own (a pseudo-terminal)."""

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

TINYCHAT = (sys.executable, "-m", "tinychat")


class Terminal:
    """`seen` is all output so far."""

    def __init__(
        self,
        argv: tuple[str, ...],
        environ: Mapping[str, str] | None = None,
        size: tuple[int, int] = (34, 110),
        prepare: Callable[[], object] | None = None,
        command: tuple[str, ...] = TINYCHAT,
    ) -> None:
        self.ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, size)
        self._attributes = self._settings()
        self.seen = bytearray()
        self._end = time.monotonic() + 300  # a test that waits in vain fails then

        def begin() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # who closes it sends SIGHUP
            if prepare is not None:
                prepare()

        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        env = {**os.environ, "TERM": "xterm-256color"} if environ is None else dict(environ)
        for name in ("LINES", "COLUMNS"):  # set by pytest's readline for its workers; they count more than `size`
            env.pop(name, None)
        self.process = subprocess.Popen([*command, *argv], env=env, start_new_session=True, preexec_fn=begin, **streams)

    def _settings(self) -> Any:
        return termios.tcgetattr(self.theirs)

    @property
    def restored(self) -> bool:
        """Whether the terminal is as it was: cooked, with a cursor, without the alternate screen."""
        modes: tuple[tuple[bytes, bytes], ...] = (
            (b"\x1b[?1049h", b"\x1b[?1049l"),
            (b"\x1b[?25l", b"\x1b[?25h"),
            (b"\x1b[?1000h", b"\x1b[?1000l"),
        )
        modes += ((b"\x1b[22;2t", b"\x1b[23;2t"),)  # the title
        return self._settings() == self._attributes and all(
            self.seen.rfind(on) <= self.seen.rfind(off) for on, off in modes
        )

    def read(self, until: str | None) -> str:
        """What was seen when `until` has been (None: when the process has ended). Always takes what is there: a
        terminal that nobody reads stops the process."""
        while True:
            ended = self.process.poll() is not None
            if select.select([self.ours], [], [], 0 if ended else 0.05)[0]:
                self.seen += os.read(self.ours, 65536)
            elif ended:
                break
            if until is not None and until.encode() in self.seen:
                break
            assert time.monotonic() < self._end, self.seen[-2000:].decode("utf-8", "replace")
        assert until is None or until.encode() in self.seen, self.seen[-2000:].decode("utf-8", "replace")
        return self.seen.decode("utf-8", "replace")

    def write(self, data: bytes) -> None:
        os.write(self.ours, data)

    def hang_up(self) -> None:
        """As when its window is closed."""
        os.close(self.theirs)
        os.close(self.ours)
        self.ours = self.theirs = -1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for fd in (self.ours, self.theirs):
            with suppress(OSError):
                os.close(fd)


@contextmanager
def started(argv: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process, which is killed where the test fails; the `with` of a Popen would wait for it for ever."""
    with subprocess.Popen(argv, **options) as process:
        try:
            yield process
        except BaseException:
            process.kill()
            raise


@contextmanager
def terminal(*argv: str, **options: Any) -> Iterator[Terminal]:
    """tinychat with the arguments `argv` in a Terminal."""
    t = Terminal(argv, **options)
    try:
        yield t
        t.process.wait(120)
    finally:
        t.close()
