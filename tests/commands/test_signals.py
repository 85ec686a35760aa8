"""What ends a process from outside: Ctrl-C, `kill`, a terminal that is closed. Nothing is lost, the terminal is as it
was, the exit code says which."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support import tiny
from tests.support.server import File, Server, make_gguf
from tests.support.terminal import TINYCHAT, Terminal, started, terminal
from tinychat.chat.history import History
from tinychat.measure.lock import machine_lock
from tinychat.models import cache
from tinychat.models.registry import resolve

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
STORY = "Write a long story about a lighthouse and its keeper."
by_signal = pytest.mark.parametrize("number", CODES)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        yield found


def answering(t: Terminal, model: Path) -> None:
    """The app of `t`, in the middle of an answer of the real model, with a message typed and not sent."""
    t.read("for commands")
    t.write(STORY.encode() + b"\r")
    t.read("lighthouse")
    history = History()
    while not any(len(history.load(s.id).turns) == 2 for s in history.find()):
        t.read("")
    t.write(b"not sent yet")
    t.read("not sent yet")
    history.close()


def kept() -> None:
    """All that was there by then is in the history."""
    history = History()
    assert not history.problem
    (only,) = history.find()
    question, answer = history.load(only.id).turns
    assert (question.text, answer.role) == (STORY, "assistant") and history.draft(only.id).text == "not sent yet"
    history.close()


@by_signal
def test_the_app(smollm2_path: Path, number: signal.Signals) -> None:
    with terminal(str(smollm2_path), "--threads", "1") as t:
        answering(t, smollm2_path)
        t.process.send_signal(number)
        t.process.send_signal(number)  # who is not patient
        seen = t.read(None)
        assert t.process.returncode == CODES[number] and "Traceback" not in seen and t.restored
    kept()


@pytest.mark.parametrize("heard", [True, False])
def test_the_window_of_the_app_is_closed(smollm2_path: Path, heard: bool) -> None:
    """A process that nobody sees must not stay, holding a model: not even one that was told to ignore SIGHUP."""
    ignore = None if heard else (lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    with terminal(str(smollm2_path), "--threads", "1", prepare=ignore) as t:
        answering(t, smollm2_path)
        t.hang_up()
    assert t.process.returncode == 129
    kept()


@by_signal
def test_an_answer_on_the_command_line(smollm2_path: Path, number: signal.Signals) -> None:
    argv = [*TINYCHAT, "run", str(smollm2_path), STORY, "--max-tokens", "3000", "--threads", "1"]
    with started(argv, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1) as p:
        assert p.stdout and p.stderr and p.stdout.read(1)
        for _ in range(1 + (number == signal.SIGINT)):
            p.send_signal(number)
        p.stdout.read()
        err = p.stderr.read().decode()
    # the second one may come when Python, at its end, has given signals back to the system
    assert p.returncode in (CODES[number], -number) and "Traceback" not in err and "Error" not in err


def test_a_benchmark(smollm2_path: Path) -> None:
    with terminal("bench", str(smollm2_path), "-n", "1000", "-p", "1500", "--threads", "1") as t:
        t.read("warming up")
        t.process.send_signal(signal.SIGTERM)
        seen = t.read(None)
        assert t.process.returncode == 143 and "Traceback" not in seen and t.restored
    with machine_lock(wait=False):
        pass


@by_signal
def test_a_server(tmp_path: Path, number: signal.Signals) -> None:
    model = tiny.write(tmp_path / "m.gguf", "llama", "F16", seed=1)
    argv = [*TINYCHAT, "serve", str(model), "--port", "0", "--device", "cpu"]
    with started(argv, stderr=subprocess.PIPE, text=True) as p:
        assert p.stderr
        found = next((m for line in p.stderr if (m := re.search(r"http://127\.0\.0\.1:(\d+)", line))), None)
        body = {"model": "m", "prompt": "ab", "max_tokens": 3, "temperature": 0}
        assert found
        assert httpx.post(f"{found[0]}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        with socket.create_connection(("127.0.0.1", int(found[1]))):  # who says nothing holds nothing up
            for _ in range(2):
                p.send_signal(number)
            err = p.stderr.read()
    assert p.returncode == CODES[number] and "Traceback" not in err


@by_signal
def test_a_download(server: Server, tmp_path: Path, number: signal.Signals) -> None:
    data, killed = make_gguf(tmp_path / "m.gguf"), threading.Event()
    server.files["/m.gguf"] = File(data, block=4096, pace=lambda sent: sent < 200_000 or killed.wait(120))
    with terminal("cache", "pull", server.url("/m.gguf")) as t:
        while not any(e.partial and e.size for e in cache.entries()):  # until the first bytes are on the disk
            assert t.process.poll() is None, t.seen
        t.process.send_signal(number)
        seen = t.read(None)
        killed.set()
        assert t.process.returncode == CODES[number] and "Traceback" not in seen and t.restored
    (entry,) = cache.entries()
    assert entry.partial and entry.size
    server.files["/m.gguf"].pace = lambda sent: None
    assert cache.pull(resolve(server.url("/m.gguf"))).read_bytes() == data
    assert server.ranges[-1] == f"bytes={entry.size}-"


def test_nohup_is_obeyed(smollm2_path: Path) -> None:
    argv = ["nohup", *TINYCHAT, "run", str(smollm2_path), STORY, "--max-tokens", "40", "--threads", "1"]
    with started(argv, stdin=subprocess.DEVNULL, stdout=-1, stderr=-1) as p:
        assert p.stdout and p.stdout.read(1)
        p.send_signal(signal.SIGHUP)
        assert len(p.stdout.read()) > 20 and p.wait() == 0


@pytest.mark.parametrize("last", [0.1, 1000])
def test_an_end_that_hangs_has_a_limit(last: float) -> None:
    """As where a compile process of tinygrad ended by the same signal held a lock that Python waits for: `last` seconds
    or a second signal. A compile process that is still at work, and has the process's output too, ends with it."""
    code = f"""
import atexit, time
from tinychat import process
process.LAST = {last}
process.prepare()
from tinygrad.engine.worker import get_worker_pool
pool = get_worker_pool()
ready = pool.apply(len, ("ready",))
pool.apply_async(time.sleep, (1000,))
def wait():  # a signal just before a wait without an end would be seen behind it only
    while True:
        time.sleep(0.1)
atexit.register(lambda: (print("ending", flush=True), wait()))
print(ready, flush=True)
wait()
"""
    with started([sys.executable, "-c", code], stdout=-1, env={**os.environ, "PARALLEL": "1"}) as p:
        assert p.stdout and p.stdout.readline() == b"5\n"
        p.send_signal(signal.SIGTERM)
        if last > 1:
            assert p.stdout.readline() == b"ending\n"
            p.send_signal(signal.SIGTERM)
        assert p.wait(120) == 143
        ended = threading.Thread(target=p.stdout.read, daemon=True)
        ended.start()
        ended.join(120)
        assert not ended.is_alive(), "another process has the output open"


def test_what_a_terminal_sends_by_mistake(tmp_path: Path) -> None:
    """Bytes of another encoding, a key that is no character, sizes of nobody's screen, in pasted text too."""
    with terminal(str(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"))) as t:
        t.read("for commands")
        for mistake in (b"caf\xe9\xc3", b"\x1b[999999999999u", b"\x1b[48;30000;30000;0;0t"):
            t.write(mistake + b"\x1b[200~\xff" + mistake + b"\x1b[201~")
        t.write(b" here")
        t.read(" here")
        t.process.send_signal(signal.SIGTERM)
        seen = t.read(None)
        assert t.process.returncode == 143 and "Traceback" not in seen and "caf\ufffd" in seen and t.restored


def test_a_process_that_is_held_and_goes_on(tmp_path: Path) -> None:
    """SIGSTOP is heard by nobody. Behind SIGCONT the terminal is the app's, once."""
    with terminal(str(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"))) as t:
        t.read("for commands")
        for times in (1, 2):
            t.process.send_signal(signal.SIGSTOP)
            os.waitpid(t.process.pid, os.WUNTRACED)
            t.process.send_signal(signal.SIGCONT)
            while t.seen.count(b"\x1b[?1049h") <= times:  # the alternate screen
                t.read("")
        t.write(b"typed once")
        t.read("typed once")
        t.process.send_signal(signal.SIGTERM)
        t.read(None)
        assert t.process.returncode == 143 and t.restored
