"""Makes docs/chat.svg: a real chat with SmolLM2, decoded while the picture is taken.

    python docs/screenshot.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tinychat.cache import path_of
from tinychat.registry import resolve
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.prompt import Prompt

QUESTIONS = ("What is the capital of France?", "Write a Python function that reverses a list, and say how it works.")


async def main(name: str) -> None:
    model = resolve(name, {})
    path = path_of(model)
    assert path is not None, f"{name} is not here: tinychat cache pull {name}"
    app = TinychatApp(model.name, path)
    async with app.run_test(size=(110, 34)) as pilot:
        for question in QUESTIONS:
            while app.controller.engine is None or app.controller.running is not None:
                await pilot.pause(0.1)
            app.screen.query_one(Prompt).text = question
            await pilot.press("enter")
            await pilot.pause(1.0)
        while app.controller.running is not None:
            await pilot.pause(0.1)
        await pilot.pause(0.5)
        Path(__file__).with_name("chat.svg").write_text(app.export_screenshot(title="tinychat"))


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2:135m"))
