"""kill -9 while an answer is written: what is in the history then."""

import os
import signal
import subprocess
import sys
import time

from tinychat.chat.history import History

CHAT = """
import asyncio, sys, time
from pathlib import Path
from tests.support.scripted import INFO, Script, ScriptedBackend
from tinychat.backend.protocol import Piece
from tinychat.chat.history import History
from tinychat.ui.app import TinychatApp

class Telling(ScriptedBackend):
    def told(self, event):
        if isinstance(event, Piece) and event.text:
            print(time.time(), file=sys.__stdout__, flush=True)

async def main():
    script = Script(answers=("word " * 4000,), rate=200)
    history = History(Path(sys.argv[1]))
    app = TinychatApp("m", INFO.path, open_backend=lambda path, **options: Telling(script), history=history)
    async with app.run_test() as pilot:
        while not app.controller.ready:
            await asyncio.sleep(0.01)
        app.chat.prompt.insert("go")
        await pilot.press("enter")
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_kill_9_loses_at_most_the_last_second(tmp_path):
    file = tmp_path / "history.db"
    for tokens in (250, 610):  # killed at different moments between two saves
        with subprocess.Popen([sys.executable, "-c", CHAT, str(file)], stdout=subprocess.PIPE, text=True) as p:
            said = [float(p.stdout.readline()) for _ in range(tokens)]
            os.kill(p.pid, signal.SIGKILL)
            killed = time.time()
            said += [float(line) for line in p.stdout.read().splitlines() if line.endswith(tuple("0123456789"))]
        history = History(file)
        assert not history.problem
        question, answer = history.load(history.find()[0].id).turns
        saved = len(answer.text.split())
        lost = killed - said[saved] if saved < len(said) else 0.0
        assert question.text == "go"
        assert lost < 1.0 + 1.0, (
            f"{lost:.2f} s lost"
        )  # a machine with other work may be late; alone it is 0.9 s at most
        history.close()
