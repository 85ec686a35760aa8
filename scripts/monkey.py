"""Random keys, pastes, commands, resizes, model switches and stops against the app, to find what breaks it.

    python -m scripts.monkey --events 10000 --seed 1          against a scripted engine
    python -m scripts.monkey --events 2000 --real FILE.gguf   against a model of this machine

The same seed gives the same events. Fails on a crash report, on an answer that does not end, on an app that answers no
question any more, and where the history is not what was shown.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from textual import events
from textual.pilot import Pilot

from tests.support.scripted import Script, scripted
from tinychat import crash
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.local import LocalBackend
from tinychat.chat.history import History
from tinychat.chat.loading import OpenBackend
from tinychat.errors import printable
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.commands import COMMANDS
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.message import AnswerMessage
from tinychat.ui.screens.dialogs import ConfirmScreen

T = TypeVar("T")
KEYS = (
    *"abcxyz/@~#`*_|<>{}[]()\\\"'.,:;!?- 0129éß日🙂",
    *("enter", "escape", "tab", "shift+tab", "backspace", "delete", "up", "down", "left", "right", "home", "end"),
    *("pageup", "pagedown", "ctrl+up", "ctrl+down", "ctrl+home", "ctrl+end", "shift+enter", "ctrl+j", "ctrl+z"),
    *(
        "ctrl+a",
        "ctrl+k",
        "ctrl+u",
        "ctrl+w",
        "ctrl+n",
        "ctrl+r",
        "ctrl+g",
        "ctrl+t",
        "ctrl+o",
        "ctrl+c",
        "ctrl+s",
        "ctrl+p",
    ),
    *("f1", "f2", "f3", "f4", "f5", "f7", "f8", "f9", "e", "c", "y", "n", "r", "d", "k", "space"),
)
ARGUMENTS = (
    *("", "1", "0", "-1", "99999999999999999999", "on", "off", "md", "json", "all", "code 2", "answer", "temperature"),
    *("temperature 0.5", "temperature hot", "top_k 5", "context 64", "context 4096", "max_tokens 3", "seed x", "\x00"),
    *(
        "~nosuchuser/x",
        "/",
        "..",
        "x" * 300,
        "a b c d",
        "日本語 🙂",
        "[bold]",
        "\ud800",
        "http://[::1/",
        "%s{}",
        "Well,",
    ),
)
WORDS = ("hello", "@~nosuchuser/", "@" + "x" * 300, "//etc", "```", "[red]x[/]", "@.", "a\nb", "<think>", "🙂" * 50)
LEFT_OUT = {"bench", "profile"}  # these measure for long; `save` writes into a scratch folder
ANSWERS = (
    "Yes.",
    "word " * 300,
    "<think>\nlet me see " + "hm " * 100 + "\n</think>\n\nSo **it** is:\n\n```py\nx = 1\n```\n",
    "<think>\nnever ends",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- x\n  - y\n\n> z",
    "日本語 🙂 [link](https://example.com) \\( x^2 \\)",
)
SIZES = {(80, 24): 8, (20, 5): 8, (40, 10): 4, (100, 30): 4, (140, 40): 1, (200, 60): 1, (1, 1): 1}  # how often each
SETTLES = 30.0  # seconds within which an answer must end after it was stopped


class Broken(AssertionError):
    """What the monkey found."""


class Monkey:
    """One app and what is done to it."""

    def __init__(self, app: TinychatApp, pilot: Pilot[None], rng: random.Random, history: Path) -> None:
        self.app, self.pilot, self.rng, self.history = app, pilot, rng, history
        self.counts: Counter[str] = Counter()
        self.last: list[str] = []  # what was done before it broke

    async def run(self, number: int, check_every: int = 250) -> None:
        kinds = {self.key: 50, self.type: 12, self.command: 14, self.paste: 6, self.stop: 8, self.wait: 6}
        kinds |= {self.resize: 2, self.switch: 1, self.click: 4}
        for n in range(1, number + 1):
            (kind,) = self.rng.choices(list(kinds), list(kinds.values()))
            self.counts[kind.__name__] += 1
            self.last = [*self.last[-30:], f"{kind.__name__} {await kind()!r}"]
            await self.taken()
            if reports := crash.reports():
                raise Broken(f"after {n} events: {reports[-1].read_text()}\nthe last events: {self.last}")
            if not self.app.is_running or not self.app.chat.is_running:
                pumps = [f"{pump}: {pump._closing=} {pump._task=}" for pump in (self.app, self.app.chat)]
                raise Broken(f"the app ended after {n} events: {pumps}; {self.last}") from self.app._exception
            if n % check_every == 0 or n == number:
                await self.check(n)

    async def taken(self) -> None:
        """Lets the app take what was posted, so that it does not run far behind."""
        for _ in range(100):
            await asyncio.sleep(0)
            pumps = self.app, self.app.screen, self.app.screen.focused
            if not any(pump.message_queue_size for pump in pumps if pump is not None):
                return

    # events

    def _post(self, event: events.Event) -> None:
        self.app.post_message(event)

    def key(self) -> Awaitable[str]:
        key = self.rng.choice(KEYS)
        character = key if len(key) == 1 else {"space": " ", "enter": "\r", "tab": "\t"}.get(key)
        self._post(events.Key(key, character))
        return _done(key)

    async def type(self) -> str:
        text = self.rng.choice(WORDS)
        sent = self.rng.random() < 0.7
        for character in text[:12]:
            self._post(events.Key(character, character))
        self._post(events.Paste(text[12:]))
        await self.taken()
        if sent:
            self._post(events.Key("enter", "\r"))
        return text

    def command(self) -> Awaitable[str]:
        names = [c.name for c in COMMANDS if c.name not in LEFT_OUT]
        text = f"/{self.rng.choice([*names, 'nonsense'])} {self.rng.choice(ARGUMENTS)}"
        if self.app.screen is self.app.chat:
            self.app.chat.prompt.put(text)
            self.app.chat.prompt.submit()
        return _done(text)

    def paste(self) -> Awaitable[int]:
        size = self.rng.choices((1, 100, 5000), (10, 10, 1))[0]
        self._post(events.Paste("".join(self.rng.choices("ab \n\r\t\x1b\x00é日🙂", k=size))))
        return _done(size)

    def stop(self) -> Awaitable[str]:
        key = self.rng.choice(("escape", "ctrl+c", "ctrl+g"))
        self._post(events.Key(key, None))
        return _done(key)

    async def wait(self) -> float:
        seconds = self.rng.choice((0.0, 0.001, 0.01, 0.05))
        await asyncio.sleep(seconds)
        return seconds

    async def resize(self) -> tuple[int, int]:
        (size,) = self.rng.choices(list(SIZES), list(SIZES.values()))
        await self.pilot.resize_terminal(*size)
        return size

    async def switch(self) -> None:
        c, number = self.app.controller, self.rng.randrange(3)
        if c._choice is not None:
            c.load(f"model {number}", c._choice.path, **c._choice.options)

    def click(self) -> Awaitable[tuple[int, int]]:
        (x, y), (width, height) = (self.rng.random(), self.rng.random()), self.app.size
        at = int(x * width), int(y * height)
        for kind in (events.MouseMove, events.MouseDown, events.MouseUp):
            self._post(kind(None, *at, 0, 0, 1, False, False, False, *at))
        return _done(at)

    # what must hold

    async def settle(self) -> None:
        """Everything that runs is stopped and ends; sheets are closed."""
        c, end = self.app.controller, time.monotonic() + SETTLES
        while c.busy or c.queue or c.loading is not None or self.app.screen is not self.app.chat:
            if time.monotonic() > end:
                raise Broken(f"stuck: {c.state}, {len(c.queue)} wait, on {self.app.screen_stack}; {self.last}")
            if isinstance(self.app.screen, ConfirmScreen):  # esc keeps changed settings open, which would ask again
                self._post(events.Key("y", "y"))
            elif self.app.screen is not self.app.chat:
                self._post(events.Key("escape", None))
            c.take_back_queue()
            c.stop()
            await self.taken()
            await asyncio.sleep(0.005)
        await self.app.chat.apply()

    async def check(self, n: int) -> None:
        """What is shown is in the history, and the app answers a question."""
        await self.pilot.resize_terminal(60, 20)
        await self.settle()
        self.compare(n)
        app, c = self.app, self.app.controller
        c.new()
        c.raw = False
        app.chat.editing = None
        await app.chat.apply()
        app.chat.prompt.put(f"question {n}")
        app.chat.prompt.submit()
        end = time.monotonic() + SETTLES
        while (len(c.conversation.turns) < 2 or c.busy) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        await self.settle()
        turns = c.conversation.turns
        if len(turns) != 2 or turns[0].text != f"question {n}" or not turns[1].stop_reason:
            raise Broken(f"no answer after {n} events: {turns}; {self.last}")
        self.compare(n)

    def compare(self, n: int) -> None:
        """The turns of the conversation, the messages on the screen, and what another process reads."""
        turns = self.app.controller.conversation.turns
        shown = {}
        for message in self.app.chat.transcript.messages():
            view = message.view if isinstance(message, AnswerMessage) else message.query_one(MarkdownView)
            shown[message.index] = view.source
        texts = {i: printable(turn.text) for i, turn in enumerate(turns)}
        if shown != dict([*texts.items()][-len(shown) :] if shown else ()) or bool(shown) != bool(turns):
            raise Broken(f"of the turns {texts}, {shown} are shown after {n} events: {self.last}")
        if any(not turn.stop_reason for turn in turns if turn.role == "assistant"):
            raise Broken(f"an answer has not ended after {n} events: {turns}; {self.last}")
        if turns:
            reader = History(self.history)
            saved = reader.load(self.app.controller.conversation.id).turns
            reader.close()
            if saved != turns:
                raise Broken(f"the history has {saved}, shown is {turns} after {n} events: {self.last}")


async def _done(value: T) -> T:
    return value


async def monkey(
    number: int,
    seed: int,
    folder: Path,
    open_backend: OpenBackend | None = None,
    path: Path = Path("/nowhere/scripted.gguf"),
) -> Counter[str]:
    """Does `number` events; returns how many of which kind. Raises Broken. `folder` becomes the working folder."""
    said = random.Random(seed)  # of the engine's thread: it must not take from the numbers of the events
    script = Script(answers=lambda prompt: said.choice(ANSWERS), rate=3000, load_s=0.01)
    history = History(folder / "history.db")
    os.chdir(folder)
    app = TinychatApp("model", path, open_backend=open_backend or scripted(script), history=history)
    left: list[tuple[Any, ...]] = []
    app.exit = lambda *args, **kwargs: left.append(args)  # type: ignore[method-assign]
    async with app.run_test(size=(60, 20)) as pilot:
        end = time.monotonic() + 120
        while not (app.controller.ready and app.chat.is_mounted):
            if time.monotonic() > end:
                raise Broken("the model was not loaded")
            await asyncio.sleep(0.01)
        await pilot.pause()
        one = Monkey(app, pilot, random.Random(seed), history.file)
        await one.run(number)
    history.close()
    return one.counts + Counter(leave=len(left))


def sealed(folder: Path, cache: Path) -> dict[str, str]:
    """The environment of a run: folders of its own, and no way to the network for the downloads that it starts."""
    own = {f"XDG_{kind}_HOME": str(folder) for kind in ("STATE", "CONFIG", "DATA")}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    return {**own, **proxies, "XDG_CACHE_HOME": str(cache), "XDG_DOWNLOAD_DIR": str(folder)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.monkey", description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="apps, with seeds counting up")
    parser.add_argument("--real", type=Path, metavar="FILE", help="a GGUF file, in place of the scripted engine")
    options = parser.parse_args(argv)
    total: Counter[str] = Counter()
    real = [options.real] if options.real else []
    with tempfile.TemporaryDirectory() as cache:
        for seed in range(options.seed, options.seed + options.slices):
            with tempfile.TemporaryDirectory() as folder:
                os.environ |= sealed(Path(folder), Path(cache))
                opened = partial(LocalBackend.open, thread=EngineThread(), store_bytes=10**9) if options.real else None
                started = time.monotonic()
                try:
                    total += asyncio.run(monkey(options.events, seed, Path(folder), opened, *real))
                except Broken as e:
                    print(f"seed {seed}: {e}", flush=True)
                    if e.__cause__:
                        traceback.print_exception(e.__cause__)
                    return 1
                finally:
                    os.chdir("/")
            print(f"seed {seed}: {options.events} events in {time.monotonic() - started:.0f} s", flush=True)
    print(dict(total))
    return 0


if __name__ == "__main__":
    sys.exit(main())
