"""kill -9 at random moments of a process that chats, switches models, downloads and saves, and what is left then.

    python -m scripts.kill --kills 500 [--variant qwen35]

The process runs the controller, a small random model on the CPU with saved KV caches, the history, the settings and
downloads from a server of this script. It writes what it shows, and when, into a journal that a kill does not touch.
After each kill:

- every conversation is as it was shown before the end, or later: LOST seconds before it while an answer grew, COPIED
  seconds otherwise; and nothing else is in it;
- no KV block and no model file under its final name is damaged, and the settings can be read;
- the next process opens the last conversation and goes on with it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support import tiny
from tests.support.server import File, Server, make_gguf
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.local import LocalBackend
from tinychat.chat import settings
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.chat.parameters import Parameters
from tinychat.engine.kvstore import KVStore, _look, _read
from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.registry import Model

LOST = 1.0  # seconds of the process's own time
COPIED = 0.3  # seconds that the copy of a fork may take; all else is stored before it is shown
TICK = 0.02  # seconds between two looks at the controller; the screen takes 0.05
LIFE = 60  # seconds after which a process ends itself
MODELS = ("a.gguf", "b.gguf")
FILES = 2  # to download
Shown = list[list[str]]  # role, text and thinking of each turn


class Broken(AssertionError):
    """What was found after a kill."""


# the process that is killed


def shown(c: Conversation) -> Shown:
    return [[t.role, t.text, t.thinking] for t in c.turns]


class Life:
    """One process: it does things at random until it is killed."""

    def __init__(self, folder: Path, seed: int, url: str) -> None:
        self.folder, self.url, self.rng = folder, url, random.Random(seed)
        self.journal = os.open(folder / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.written: tuple[str, Shown] = ("", [])

    def note(self, **facts: Any) -> None:
        os.write(self.journal, json.dumps({"t": time.monotonic(), **facts}).encode() + b"\n")

    def run(self) -> None:
        history = History()
        if history.problem:
            self.note(problem=history.problem)
        found = history.find()
        conversation = history.load(found[0].id) if found else Conversation()
        conversation = replace(conversation, parameters=Parameters(max_tokens=900))
        opened = partial(LocalBackend.open, thread=EngineThread(), device="cpu", store_bytes=1 << 26)
        self.chat = c = Controller(opened, conversation, save=history.save)
        self.switch()
        threading.Thread(target=self.download, daemon=True).start()
        actions: dict[Callable[[], object], int] = {self.ask: 8, self.regenerate: 2, c.new: 2, c.fork: 1}
        actions |= {self.switch: 1, self.set: 2, c.go_on: 1, self.rename: 1}
        self.note(started=len(found))
        while True:
            self.tell(c.poll())
            if c.ready and (not c.busy or self.rng.random() < 0.01):
                (action,) = self.rng.choices(list(actions), list(actions.values()))
                try:
                    action()
                except TinychatError:  # not while an answer is written; nothing to answer again
                    c.stop()
            time.sleep(TICK)

    def tell(self, changes: Sequence[object]) -> None:
        """The journal gets the conversation when it changed, else that the process lives; and lines of red."""
        c = self.chat.conversation
        for change in changes:
            if getattr(change, "error", False):
                self.note(error=str(change))
        now = c.id, shown(c)
        self.note(**({"id": c.id, "turns": now[1], "live": self.chat.busy} if now != self.written else {}))
        self.written = now

    def ask(self) -> None:
        self.chat.ask(Turn("user", f"question {self.rng.random()}"))

    def regenerate(self) -> None:
        """What takes the place of an answer is noted before: it is stored before it is shown."""
        c = self.chat.conversation
        self.note(id=c.id, turns=shown(c.regenerate()), live=True)
        self.written = "", []
        self.chat.regenerate()

    def switch(self) -> None:
        name = self.rng.choice(MODELS)
        self.chat.load(name, self.folder / name, max_context=1024)

    def set(self) -> None:
        settings.update(threads=self.rng.randint(1, 4))

    def rename(self) -> None:
        self.chat.rename(f"name {self.rng.random()}")

    def download(self) -> None:
        """Again and again: a file that is there is deleted first."""
        while True:
            model = Model("m", (f"{self.url}/{self.rng.randrange(FILES)}",))
            if path := cache.path_of(model):
                path.unlink()
            try:
                cache.pull(model)
            except TinychatError as e:
                self.note(error=str(e))


def forker(folder: Path, url: str) -> None:
    """Forks a life for each seed on its input and says its process id, so that a life costs no start of Python."""
    importlib.import_module("httpx")  # what a life would import after it began
    pid = 0
    for line in sys.stdin:
        if pid:
            os.waitpid(pid, 0)
        if not (pid := os.fork()):
            signal.alarm(LIFE)
            try:
                Life(folder, int(line), url).run()
            finally:
                os._exit(1)
        print(pid, flush=True)
        print(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status, flush=True)  # type: ignore[union-attr]


# what is left


def check(folder: Path, files: Sequence[bytes], url: str) -> Counter[str]:
    """Looks at everything in `folder`; returns what was there. Raises Broken."""
    lines = [json.loads(line) for line in (folder / "journal").read_bytes().split(b"\n") if line.endswith(b"}")]
    if said := [line for line in lines if "error" in line or "problem" in line]:
        raise Broken(f"the process said {said}")
    counts = Counter(lives=1, started=any("started" in line for line in lines))
    history = History()
    if history.problem:
        raise Broken(history.problem)
    for id in {line["id"] for line in lines if "id" in line}:
        entries = [line for line in lines if line.get("id") == id]
        compare(id, entries, lines[-1]["t"], history)
        counts["conversations"] += 1
    counts["in an answer"] += [line["live"] for line in lines if "live" in line][-1:] == [True]
    for summary in history.find():
        history.load(summary.id)
    history.close()
    if problems := settings.load().problems:
        raise Broken(f"settings: {problems}")
    for path in KVStore(0).folder.glob("*.kv"):
        block = _look(path)
        if block is None or _read(block) is None:
            raise Broken(f"{path.name} is damaged")
        counts["blocks"] += 1
    counts["half written"] += len(list(KVStore(0).folder.glob("tmp-*")))
    for n, data in enumerate(files):
        final = cache.downloads_dir() / cache.key_of(f"{url}/{n}")
        if final.exists() and final.read_bytes() != data:
            raise Broken(f"{final} is not the file of the server")
        counts["files"] += final.exists()
        counts["partial"] += final.with_name(final.name + ".part").exists()
    return counts


def compare(id: str, entries: Sequence[dict[str, Any]], end: float, history: History) -> None:
    """The conversation `id` as saved is one of the last `entries` of a process that ended at `end`, or grew from it."""
    due = [i for i, e in enumerate(entries) if e["turns"] and e["t"] <= end - (LOST if e["live"] else COPIED)]
    late = [e["turns"] for e in entries[due[-1] if due else 0 :]]
    try:
        saved = shown(history.load(id))
    except TinychatError:
        if due:
            raise Broken(f"{id} is lost; shown was {late[0]}") from None
        return
    if not (due and grew(late[0], saved)) and not any(same(turns, saved) for turns in late[bool(due) :]):
        raise Broken(f"{id} is {saved}; shown was, in the last second, {late}")


def grew(before: Shown, after: Shown) -> bool:
    """Whether `after` has all of `before`, whose last turn may have been growing."""
    n = len(before)
    if len(after) < n or after[: n - 1] != before[:-1] or after[n - 1][0] != before[-1][0]:
        return False
    return all(new.startswith(old) for old, new in zip(before[-1], after[n - 1]))


def same(a: Shown, b: Shown) -> bool:
    """Whether one is the other at an earlier moment."""
    return not a or not b or grew(a, b) or grew(b, a)


def kill(kills: int, seed: int, folder: Path, longest: float = 2.0, variant: str = "llama") -> Counter[str]:
    """Kills as many processes; returns what was found. The folders of the environment are the processes' too; the
    models are of the `variant` (tests/support/tiny.py)."""
    rng, counts = random.Random(seed), Counter[str]()
    for name in MODELS:
        tiny.write(folder / name, variant, "Q8_0", seed=ord(name[0]))
    LocalBackend.open(folder / MODELS[0], device="cpu").close()  # compiles the kernels, once
    files = [make_gguf(folder / f"{n}.served", size=400_000, seed=n) for n in range(FILES)]
    with Server() as server:
        for n, data in enumerate(files):
            server.files[f"/{n}"] = File(data, etag=f'"{n}"', pace=lambda sent: time.sleep(0.002))
        url = server.url("")
        command = [sys.executable, "-m", "scripts.kill", "--forker", str(folder), url]
        with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as p:
            assert p.stdin and p.stdout
            for n in range(kills):
                (folder / "journal").unlink(missing_ok=True)
                print(rng.randrange(1 << 30), file=p.stdin, flush=True)
                pid = int(p.stdout.readline())
                time.sleep(rng.uniform(0.0, longest))
                os.kill(pid, signal.SIGKILL)
                if int(p.stdout.readline()) != signal.SIGKILL:
                    raise Broken(f"process {n} ended by itself: {(folder / 'journal').read_text()[-2000:]}")
                try:
                    counts += check(folder, files, url) if (folder / "journal").exists() else Counter(lives=1)
                except Broken as e:
                    raise Broken(f"after {n + 1} kills: {e}") from None
                if (n + 1) % 50 == 0:
                    print(n + 1, dict(counts), flush=True)
            p.stdin.close()
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.kill", description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=500, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variant", choices=tiny.VARIANTS, default="llama", metavar="VARIANT")
    parser.add_argument("--forker", nargs=2, metavar=("FOLDER", "URL"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.forker:
        forker(Path(options.forker[0]), options.forker[1])
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kind in ("STATE", "CONFIG", "DATA", "CACHE"):
            os.environ[f"XDG_{kind}_HOME"] = name
        try:
            print(dict(kill(options.kills, options.seed, folder, variant=options.variant)))
        except Broken as e:
            print(e)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
