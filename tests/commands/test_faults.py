"""Machines that are not ours, with real processes: no home, streams that are closed, disks that are full, terminals
that are small or dumb, no compiler. One clear line or no fault at all, and nothing is lost."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter

from tests.support import tiny
from tests.support.shapes import Shape
from tests.support.terminal import TINYCHAT, terminal
from tinychat.chat.history import History
from tinychat.measure import log
from tinychat.measure.profiles import profiles_dir


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0", seed=1))


def ran(*argv: str, shell: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """tinychat as a process; `shell` redirects its streams."""
    command = ["sh", "-c", f'exec "$@" {shell}', "sh", *TINYCHAT, *argv]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=300, **options)
    assert "Traceback" not in done.stderr and "not expected" not in done.stderr, done.stderr
    return done


def file_limit(nbytes: int) -> Callable[[], None]:
    """Ends every write to a file behind `nbytes`, as a quota does."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def may_not_override() -> None:
    """Takes from root, in the process that is executed next, the right to write where the mode forbids it."""
    if os.getuid() == 0:
        for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def only_processes(number: int) -> None:
    """Makes the process, root's, that of a user who may have so many, threads counted, and who opens all files."""
    prctl, libc = (lambda *args: ctypes.CDLL(None).prctl(*args, 0)), ctypes.CDLL(None)
    header, data = (ctypes.c_uint * 2)(0x20080522, 0), (ctypes.c_uint * 6)(2, 2, 2)  # CAP_DAC_OVERRIDE
    prctl(8, 1, 0, 0)  # PR_SET_KEEPCAPS
    os.setuid(64_998)
    assert libc.capset(header, data) == 0 and prctl(47, 2, 1, 0) == 0  # PR_CAP_AMBIENT_RAISE
    resource.setrlimit(resource.RLIMIT_NPROC, (number, number))


@pytest.fixture
def read_only(tmp_path: Path) -> dict[str, str]:
    """The environment of a user whose home cannot be written."""
    (tmp_path / "home").mkdir(mode=0o555)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "ZIG_"))}
    return {**kept, "HOME": str(tmp_path / "home"), "TERM": "xterm-256color"}


# limits


@pytest.mark.skipif(os.getuid() != 0, reason="needs a user without any other process")
def test_no_thread_or_process_can_be_started(model: str) -> None:
    """At the import of NumPy's BLAS, and where Textual starts its two threads."""
    line = "no thread can be started: this user has too many processes (ulimit -u), or there is no memory"
    done = ran("run", model, "hi", "--device", "cpu", preexec_fn=partial(only_processes, 1))
    assert (done.returncode, done.stderr) == (1, f"tinychat: {line}\n")
    for processes in (2, 3, 5):
        with terminal(model, prepare=partial(only_processes, processes)) as t:
            t.read(None)
            assert t.process.returncode == 1 and t.restored
            assert line in str(t.seen) and not re.search("error|crash|expected|BLAS", str(t.seen))


# streams


@pytest.mark.parametrize("shell", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(model: str, shell: str) -> None:
    assert ran("run", model, "hi", "--max-tokens", "2", shell=shell).returncode == 0


def test_a_closed_stdin_has_no_prompt(model: str) -> None:
    done = ran("run", model, "-", shell="<&-")
    assert (done.returncode, done.stderr) == (1, "tinychat: the prompt is empty\n")


@pytest.mark.parametrize("argv", [("info",), ("run", "hi", "--max-tokens", "2"), ("run", "hi", "--json")])
def test_a_full_disk_behind_stdout(model: str, argv: tuple[str, ...]) -> None:
    done = ran(argv[0], model, *argv[1:], shell=">/dev/full")
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == "tinychat: no space left on device"


@pytest.mark.parametrize("shell", ["<&-", ">/dev/null", "2>/dev/null"])
def test_the_chat_needs_a_terminal(model: str, shell: str) -> None:
    with terminal(model, command=("sh", "-c", f'exec "$@" {shell}', "sh", *TINYCHAT)) as t:
        t.read(None)
        assert t.process.returncode == 1 and (b"needs a terminal" in t.seen or shell.startswith("2"))


def test_a_prompt_in_no_encoding(model: str) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for argument in (b"caf\xc3\xa9", b"\xff\xfe"):
        done = subprocess.run(
            [*TINYCHAT, "tokenize", model, argument, "--json"], capture_output=True, env=env, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("0xC3" in done.stdout or "\\u00c3" in done.stdout or "tokens" in done.stdout) and not done.stderr


# homes


def test_nobody_s_home(model: str) -> None:
    """Neither HOME nor a line in passwd, as under a number of its own in a container."""
    code = (
        "import os, pwd, sys\n"
        "def none(*_): raise KeyError('no such user')\n"
        "pwd.getpwuid = pwd.getpwnam = none\n"
        "os.environ.pop('HOME', None)\n"
        "from tinychat.cli import main\n"
        "sys.exit(main())\n"
    )
    for argv in (["info", model], ["cache", "list"], ["bench", "--history"], []):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
        assert done.returncode == 1 and done.stderr.startswith("tinychat: this user has no home folder; set HOME")
        assert done.stderr.count("\n") == 1


def test_a_read_only_home(model: str, read_only: dict[str, str]) -> None:
    """What would be kept is one line. (The chat in a read-only home compiles what it needs; here it is there.)"""
    options: Any = {"env": read_only, "preexec_fn": may_not_override}
    compiled = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"]}
    done = ran("bench", model, "-n", "3", "-p", "8", **options | {"env": read_only | compiled})
    assert done.returncode == 1 and "tok/s" in done.stdout and "CPU" in done.stdout, done.stderr
    assert done.stderr.splitlines()[-1].endswith("the result cannot be saved: permission denied")
    done = ran("cache", "pull", "http://127.0.0.1:9/m.gguf", **options)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("permission denied")


def test_the_chat_in_a_read_only_home(model: str, read_only: dict[str, str]) -> None:
    with terminal(model, environ=read_only, prepare=may_not_override) as t:
        t.read("permission")
        t.read("for commands")
        t.write(b"hello\r")
        t.read("tok/s")
        t.write(b"\x11")
        t.read(None)
        assert t.process.returncode == 0 and t.restored


# disks


def test_a_measurement_that_cannot_be_kept_is_shown(model: str) -> None:
    done = ran("bench", model, "-n", "3", "-p", "8", preexec_fn=file_limit(100))
    assert done.returncode == 1 and "tok/s" in done.stdout
    assert done.stderr.splitlines()[-1].endswith("benchmarks.jsonl: the result cannot be saved: file too large")
    assert ran("bench", model, "-n", "3", "-p", "8").returncode == 0
    assert len(log.history()) == 1  # what was cut short spoils nothing
    done = ran("profile", model, "-n", "3", preexec_fn=file_limit(100))
    assert done.returncode == 0 and "the raw figures are not kept" in done.stdout and "file too large" in done.stdout
    assert not list(profiles_dir().glob("*test_a_meas*"))  # a profile has the name of its model; others write here too


def test_an_export_to_a_full_disk_leaves_no_half_of_it(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a long path would break the line somewhere
    out = tmp_path / "talk.md"
    with terminal(model) as t:
        t.read("for commands")
        t.write(b"/set max_tokens 40\r")  # a full context would be asked about, and the keys would answer that
        t.read("max_tokens is 40")
        t.write(b"hello " * 30 + b"\r")
        t.read("regenerate")  # the answer has ended
        history = History()
        while not any(history.load(s.id).turns[-1].stop_reason for s in history.find()):
            t.read("")
        history.close()
        resource.prlimit(t.process.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        t.write(b"/save talk.md\r")
        t.read("nothing")  # was saved
        assert not out.exists()
        resource.prlimit(t.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        t.write(b"/save talk.md\r")
        while not out.exists():
            t.read("")
        t.write(b"\x11")
        t.read(None)
        assert t.process.returncode == 0
    assert "hello hello" in out.read_text()


# terminals


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}, (24, 80)),
        ({"TERM": "xterm"}, (5, 20)),
        ({"TERM": "xterm"}, (1, 1)),
    ],
)
def test_odd_terminals(model: str, environ: dict[str, str], size: tuple[int, int]) -> None:
    """The app answers a question in them, whatever of that can be seen."""
    own = {k: v for k, v in os.environ.items() if k not in ("TERM", "COLORTERM")}
    history = History()
    with terminal(model, environ=own | environ, size=size) as t:
        t.read("\x1b[?1049h")
        t.write(b"hello\r")
        while not any(history.load(s.id).turns[-1].stop_reason for s in history.find()):
            t.read("")
            assert t.process.poll() is None
        t.write(b"\x1bOP")  # F1, help
        t.write(b"\x11")
        t.read(None)
        assert t.process.returncode == 0 and t.restored and b"Traceback" not in t.seen
    history.close()


# compilers


def test_a_template_that_fails_in_a_chat_is_said_there_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def metadata(w: GGUFWriter, shape: Shape, name: str) -> None:
        written(w, shape, name)
        w.add_chat_template("{% if messages | length > 2 %}{{ raise_exception('one turn only') }}{% endif %}hi")

    written = tiny.metadata
    monkeypatch.setattr(tiny, "metadata", metadata)
    model = str(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"))
    done = ran("--plain", model, "--device", "cpu", input="/set max_tokens 4\nhi\nagain\nmore\n")
    assert done.returncode == 0 and done.stderr.count("one turn only") == 1
    assert done.stderr.index("tok/s") < done.stderr.index("one turn only; using the llama3 format")


def test_the_slow_path_is_said_in_red(model: str, tmp_path: Path) -> None:
    """No compiler at all: no zig in the package, nothing on the PATH."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang/__init__.py").write_text("")
    env = {k: v for k, v in os.environ.items() if k != "CC"}  # which tests before this one may have set
    env |= {"PATH": "/nonexistent", "PYTHONPATH": str(tmp_path), "TERM": "xterm-256color"}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with terminal("run", model, "hi", "--max-tokens", "1", environ=env) as t:
        t.read("CPU is not used: no C compiler was found")
        t.read("\x1b[31mslow: this runs on plain tinygrad")
        t.read("pip install --force-reinstall ziglang")
        t.process.send_signal(signal.SIGINT)
        t.read(None)
    with terminal(model, environ=env) as t:
        t.read("✗ slow: this runs on plain tinygrad")
        t.process.send_signal(signal.SIGTERM)
        t.read(None)
