"""Makes docs/chat.svg and docs/screens/*.svg: a real chat with SmolLM2, decoded while the pictures are taken.

    python scripts/screenshot.py [MODEL]

The user's own conversations, settings and benchmarks are neither shown nor changed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tinychat.chat.history import History
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.kernels.sampling import Sampling
from tinychat.models.cache import path_of
from tinychat.models.registry import resolve
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.prompt import PromptEditor
from tinychat.ui.screens.bench import BenchScreen

DOCS = Path(__file__).parent.parent / "docs"
EARLIER = ("Give me three names for a cat.", "What is a prime number?")
QUESTIONS = ("What is the capital of France?", "Write a Python function that reverses a list, and say how it works.")
SIZE, LARGER = (110, 34), (120, 36)


async def until(pilot: Pilot[Any], condition: Callable[[], bool]) -> None:
    while not condition():
        await pilot.pause(0.1)
    await pilot.pause(0.5)


async def ask(app: TinychatApp, pilot: Pilot[Any], question: str) -> None:
    app.screen.query_one(PromptEditor).text = question
    await pilot.press("enter")
    await until(pilot, lambda: bool(app.controller.conversation.turns) and not app.controller.busy)


async def measured(pilot: Pilot[Any], screen: BenchScreen) -> None:
    await until(pilot, lambda: not screen.running)


def take(app: TinychatApp, path: str) -> None:
    (DOCS / path).write_text(app.export_screenshot(title="tinychat"))


async def main(name: str, folder: Path) -> None:
    model = resolve(name, {})
    path = path_of(model)
    assert path is not None, f"{name} is not here: tinychat cache pull {name}"
    own = Settings(parameters=Parameters(sampling=Sampling(temperature=0.0)))
    app = TinychatApp(model.name, path, own=own, history=History(folder / "history.db"))
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.controller.ready)
        for question in EARLIER:
            await ask(app, pilot, question)
            await app.chat.run_command("new")
        for question in QUESTIONS:
            await ask(app, pilot, question)
        take(app, "chat.svg")
        await pilot.resize_terminal(*LARGER)
        for command, picture in (
            ("model", "picker"),
            ("conversations", "conversations"),
            ("set", "parameters"),
            ("inspect", "inspector"),
            ("bench 20", "benchmark"),
        ):
            await app.chat.run_command(command)
            await until(pilot, lambda: app.screen is not app.chat)
            if picture == "inspector":
                await pilot.press("a", "n")
            if isinstance(screen := app.screen, BenchScreen):
                await measured(pilot, screen)
                await pilot.press("r")  # again, so that there is something to compare with
                await measured(pilot, screen)
            await pilot.pause(1.0)
            take(app, f"screens/{picture}.svg")
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)


with tempfile.TemporaryDirectory() as temporary:
    os.environ["XDG_DATA_HOME"] = os.environ["XDG_CONFIG_HOME"] = temporary
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2:135m", Path(temporary)))
