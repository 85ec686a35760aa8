"""A long session in fast motion: thousands of turns through the real app, to find what grows. It is not run with the
tests.

    python -m scripts.soak [--turns 10000] [--alone]

prints what the process weighs and what a turn costs, every few hundred turns. `--alone` keeps to one conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from textual.pilot import Pilot
from textual.widget import Widget

from tests.support.screens import text_of, until
from tests.support.scripted import INFO, LONG, Script, scripted
from tinychat import process
from tinychat.chat.history import History
from tinychat.engine.stats import rss_bytes
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.overflow import OverflowScreen

LIST = "\n".join(
    f"{i}. **Item {i}**: `code` and words enough that it wraps somewhere\n   - below {i}" for i in range(1, 13)
)
TABLE = "| a | b | c |\n|---|--:|---|\n" + "\n".join(f"| row {i} | {i * i} | some text here |" for i in range(12))
CODE = (
    "So:\n\n```python\n"
    + "\n".join(f"def f{i}(x: int) -> int:\n    return x * {i}" for i in range(12))
    + "\n```\n\nDone."
)
PROSE = "A paragraph of prose with **marks**, `code` and a [link](https://example.com) that goes on. " * 6
THOUGHT = f"<think>\n{'Let me think about it for a while. ' * 30}\n</think>\n\n{PROSE}"
ANSWERS = (LIST, TABLE, CODE, PROSE, THOUGHT, LONG, "Yes.", "# Heading\n\n> quoted\n\n---\n\n日本語 and 🙂.")
SIZES = ((100, 30), (80, 24), (140, 40))


@dataclass(frozen=True)
class Sample:
    """The state after `turn` turns: medians of milliseconds per turn since the last sample (as a clock and as the
    processor saw them), bytes of the process, and how much there is of everything that must not pile up."""

    turn: int
    wall_ms: float
    cpu_ms: float
    rss: int
    widgets: int  # mounted
    alive: int  # widgets that something still holds, mounted or not
    tasks: int
    threads: int
    objects: int  # that Python's collector looks at

    def __str__(self) -> str:
        return (
            f"{self.turn:6,} {self.wall_ms:8.1f} {self.cpu_ms:8.1f} {self.rss / 1e6:8.1f} "
            f"{self.widgets:8} {self.alive:6} "
            f"{self.tasks:6} {self.threads:8} {self.objects:9,}"
        )


HEADING = "  turn  ms/turn   cpu ms   RSS MB  widgets  alive  tasks  threads   objects"


class Session:
    """The app with somebody in front of it who never tires."""

    def __init__(self, app: TinychatApp, pilot: Pilot[None], script: Script, alone: bool) -> None:
        self.app, self.pilot, self.script, self.alone = app, pilot, script, alone
        self.controller, self.chat = app.controller, app.chat
        self.rng = random.Random(1)

    async def turn(self, number: int) -> None:
        """One question and its answer, or one of the things that people do with them."""
        if number % 500 == 0 and not self.alone:
            await self.key("ctrl+n")
            await self.until(lambda: not self.controller.conversation.turns)
        asked = self.controller.conversation.last_prompt is not None
        match self.rng.randrange(100) if asked else 99:
            case 0 | 1:
                await self.say("/fork")
                await self.ask(number)
            case 2 | 3:
                await self.pilot.resize_terminal(*self.rng.choice(SIZES))
                await self.ask(number)
            case 4 | 5:
                await self.say("/set temperature 0.7")
                await self.ask(number)
            case 6 | 7 | 8:
                await self.key("ctrl+t")
                await self.ask(number)
            case 9 | 10 | 11:
                self.script.rate = 400
                await self.say(f"question {number % 100} that is stopped")
                await self.until(lambda: self.controller.running is None or self.controller.running.tokens > 2)
                await self.key("escape")
                self.script.rate = 0
            case n if n < 18:
                await self.key("ctrl+r")
            case n if n < 22:
                await self.say("/edit")
                await self.say(f" and more of {number % 10}")
            case _:
                await self.ask(number)
        await self.settle()

    async def ask(self, number: int) -> None:
        await self.say(f"question {number % 100}: how does it go on?")

    async def say(self, text: str) -> None:
        self.chat.prompt.insert(text)
        await self.key("enter")

    async def key(self, key: str) -> None:
        await self.pilot.press(key)

    async def settle(self) -> None:
        """Until the answer is whole and on the screen; asked for room, leaves out the oldest turns."""
        c = self.controller
        await self.until(lambda: self.asked_for_room or not (c.busy or c.queue))
        while self.asked_for_room:
            await self.until(lambda: self.app.screen.focused is not None)
            await self.key("enter")
            await self.until(lambda: not self.asked_for_room)
            await self.until(lambda: self.asked_for_room or not (c.busy or c.queue))
        await self.until(lambda: self.app.screen is self.chat)  # a dialog closes some time after its answer
        await self.until(lambda: not (last := self.chat.transcript.last_answer) or not last.live)

    @property
    def asked_for_room(self) -> bool:
        return isinstance(self.app.screen, OverflowScreen)

    async def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"waited in vain before:\n{text_of(self.app)}"
            await asyncio.sleep(0.002)

    def sample(self, turn: int, wall: list[float], cpu: list[float]) -> Sample:
        gc.collect()
        objects, widgets = gc.get_objects(), len(self.chat.query("*"))
        alive = sum(isinstance(o, Widget) for o in objects)
        return Sample(
            turn,
            1e3 * statistics.median(wall),
            1e3 * statistics.median(cpu),
            rss_bytes(),
            widgets,
            alive,
            len(asyncio.all_tasks()),
            threading.active_count(),
            len(objects),
        )


async def soak(turns: int, every: int, folder: Path, alone: bool = False) -> AsyncIterator[Sample]:
    """Runs `turns` turns with a history in `folder`; yields a Sample after each `every` of them."""
    rng = random.Random(0)
    script = Script(
        answers=lambda prompt: rng.choice(ANSWERS),
        info=replace(INFO, max_context=4096),
        prompts=deque(maxlen=1),
        samplings=deque(maxlen=1),
    )
    history = History(folder / "history.db")
    app = TinychatApp("scripted:1b", INFO.path, open_backend=scripted(script), history=history)
    async with app.run_test(size=SIZES[0]) as pilot:
        await until(pilot, lambda: app.controller.ready)
        session = Session(app, pilot, script, alone)
        wall: list[float] = []
        cpu: list[float] = []
        for number in range(1, turns + 1):
            started, spent = time.perf_counter(), time.process_time()
            await session.turn(number)
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - spent)
            if number % every == 0:
                yield session.sample(number, wall, cpu)
                wall, cpu = [], []
    history.close()


async def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500, help="turns from one line of the table to the next")
    parser.add_argument("--alone", action="store_true", help="one conversation that never ends")
    options = parser.parse_args()
    process.prepare_for_screen()  # collects garbage as rarely as the app does while its user never rests
    print(HEADING, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        async for sample in soak(options.turns, options.every, Path(folder), options.alone):
            print(sample, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
