"""kill -9 while an answer is written: what is in the history then."""

import os
import signal
import sys
import time
from pathlib import Path

from scripts import kill
from tests.support.terminal import started
from tinychat.chat import saving
from tinychat.chat.history import History

CHAT = """
import asyncio, sys
from pathlib import Path
from tests.support.scripted import INFO, Script, ScriptedBackend
from tinychat.chat.history import History
from tinychat.ui.app import TinychatApp

async def main():
    script = Script(answers=("word " * 100_000,), rate=200)
    history = History(Path(sys.argv[1]))
    app = TinychatApp("m", INFO.path, open_backend=lambda path, **options: ScriptedBackend(script), history=history)
    async with app.run_test() as pilot:
        while not app.controller.ready:
            await asyncio.sleep(0.01)
        app.chat.prompt.insert("go")
        await pilot.press("enter")
        await asyncio.sleep(600)

asyncio.run(main())
"""


def answer_in(history):
    """The words of the answer that the file holds by now."""
    found = history.find()
    turns = history.load(found[0].id).turns if found else ()
    return turns[1].text.split() if len(turns) > 1 else []


def test_kill_9_loses_at_most_the_last_second(tmp_path):
    """What one save stored survives, saves follow one another while the answer grows, and less than a second lies
    between two."""
    assert saving.SAVE_EVERY < 1
    for saves in (1, 3):  # killed after as many
        file = tmp_path / f"{saves}.db"
        with started([sys.executable, "-c", CHAT, str(file)]) as p:
            sizes = {0}
            while len(sizes) <= saves:
                assert p.poll() is None
                if file.exists():
                    reader = History(file)
                    sizes.add(len(answer_in(reader)))
                    reader.close()
                time.sleep(0.02)
            os.kill(p.pid, signal.SIGKILL)
        history = History(file)
        assert not history.problem
        question, answer = history.load(history.find()[0].id).turns
        assert question.text == "go" and len(answer_in(history)) >= max(sizes)
        assert answer.text == ("word " * 100_000)[: len(answer.text)]
        history.close()


def test_six_kills_at_random_moments(tmp_path, monkeypatch):
    """Of a process that chats, switches models, downloads and saves; `python -m scripts.kill` does more of them."""
    compiled = [p for p in (Path(os.environ["XDG_CACHE_HOME"]) / "tinychat").iterdir() if p.is_file()]
    (tmp_path / "tinychat").mkdir()
    for path in compiled:
        (tmp_path / "tinychat" / path.name).symlink_to(path.resolve())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    counts = kill.kill(6, 3, tmp_path)
    assert counts["lives"] == 6 and counts["conversations"] > 0 and counts["blocks"] > 0, counts
