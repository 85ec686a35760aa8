"""What the file system and other processes do to conversations and settings: nothing is lost that was saved, and what
cannot be saved is one line."""

import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from tests.support.scripted import INFO, Script, scripted
from tinychat.chat import settings
from tinychat.chat.changes import Notice
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.errors import TinychatError


def talk(*texts):
    return Conversation(tuple(Turn(("user", "assistant")[i % 2], t) for i, t in enumerate(texts)))


def chatting(history, conversation=None, answers=("fine",)):
    controller = Controller(scripted(Script(list(answers))), conversation, save=history.save)
    controller.load("m", INFO.path)
    settle(controller, lambda: controller.ready)
    return controller


def settle(controller, done):
    """The changes until `done`."""
    changes, end = [], time.monotonic() + 120
    while not done():
        assert time.monotonic() < end, "waited in vain"
        changes += controller.poll()
        time.sleep(0.002)
    return changes + controller.poll()


def ask(controller, text):
    controller.ask(Turn("user", text))
    return settle(controller, lambda: not controller.busy)


def notices(changes):
    return [c.text for c in changes if isinstance(c, Notice)]


def test_two_chats_on_one_conversation_lose_no_turn(tmp_path):
    first, second = History(tmp_path / "h.db"), History(tmp_path / "h.db")
    one = chatting(first)
    ask(one, "begun in the first")
    two = chatting(second, second.load(one.conversation.id))
    ask(two, "asked in the second")
    said = notices(ask(one, "asked in the first"))
    assert len(said) == 1 and "another tinychat" in said[0] and "copy" in said[0] and "\n" not in said[0]
    reader = History(tmp_path / "h.db")
    assert [t.text for t in reader.load(two.conversation.id).turns if t.role == "user"] == [
        "begun in the first",
        "asked in the second",
    ]
    assert [t.text for t in reader.load(one.conversation.id).turns if t.role == "user"] == [
        "begun in the first",
        "asked in the first",
    ]
    assert notices(ask(one, "and on")) == [] == notices(ask(two, "and on"))
    assert len(reader.find()) == 2


# a full disk: RLIMIT_FSIZE ends writes as a quota does (EFBIG), in a child, since a limit cannot be raised again

LIMITED = """
import resource, signal, sys
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from tinychat.chat import settings
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.errors import TinychatError
folder = Path(sys.argv[1])
c = Conversation((Turn("user", "kept"), Turn("assistant", "too")), id="c")
history = History(folder / "history.db")
history.save(c)
settings.update(folder / "settings.toml", theme="nord")
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
saved = 0
for n in range(200):
    c = c.add(Turn("user", "x" * 5000))
    try:
        history.save(c)
        saved = len(c.turns)
    except TinychatError as e:
        assert "\\n" not in str(e), e
        print("history:", e)
        break
try:
    settings.write_text("theme = 'nord' # " + "x" * 2_000_000, folder / "settings.toml")
except TinychatError as e:
    print("settings:", e)
print(saved)
"""


@pytest.mark.parametrize("limit", [150_000, 200_000, 333_333])
def test_a_quota_is_one_line_and_what_was_saved_stays(tmp_path, limit):
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(limit)], capture_output=True, text=True, check=True
    )
    *lines, saved = run.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["history", "settings"] and run.stderr == ""
    history = History(tmp_path / "history.db")
    assert not history.problem
    turns = history.load("c").turns
    assert len(turns) >= max(2, int(saved)) and [t.text for t in turns[:2]] == ["kept", "too"]
    history.save(history.load("c").add(Turn("assistant", "there is room again")))
    assert settings.load(tmp_path / "settings.toml").theme == "nord"
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


@pytest.fixture
def full(tmp_path):
    """A file system of 512 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], capture_output=True).returncode:
        pytest.skip("only root can mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk_is_said_once_and_the_chat_goes_on(full):
    history = History(full / "h.db")
    settings.update(full / "s.toml", theme="nord")
    chat = chatting(history, answers=["word " * 300])
    ask(chat, "first")
    with contextlib.suppress(OSError), (full / "filler").open("wb", buffering=0) as f:
        while True:
            f.write(b"x" * 4096)
    said = []
    for _ in range(8):
        said += notices(ask(chat, "more"))
    assert len(said) == 1 and "not being saved" in said[0] and "\n" not in said[0]
    assert len(chat.conversation.turns) == 18 and chat.conversation.turns[-1].stop_reason == "eos"
    (full / "filler").unlink()
    assert notices(ask(chat, "last")) == ["this conversation is saved again"]
    with pytest.raises(TinychatError) as e:
        settings.write_text("# " + "x" * 600_000, full / "s.toml")
    assert "no space left" in str(e.value) and settings.load(full / "s.toml").theme == "nord"
    history.close()
    later = History(full / "h.db")
    assert not later.problem and later.load(chat.conversation.id).turns == chat.conversation.turns


def test_a_disk_that_is_full_from_the_start(full):
    (full / "filler").write_bytes(b"x" * 520_000)
    with pytest.raises(TinychatError) as e:
        History(full / "h.db")
    assert "\n" not in str(e.value)
    with pytest.raises(TinychatError, match="no space left"):
        settings.write_text("theme = 'nord'" + " " * 8000, full / "s.toml")
    assert settings.load(full / "s.toml") == settings.Settings()


# SQLite


def test_a_history_locked_for_long_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tinychat.chat.history._OPENING", 0.05)
    monkeypatch.setattr("tinychat.chat.saving.PATIENCE", 0.0)
    history = History(tmp_path / "h.db")
    chat = chatting(history)
    other = sqlite3.connect(tmp_path / "h.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    said = notices(ask(chat, "first"))
    assert said and "locked" in said[0] and all("\n" not in line for line in said)
    assert chat.conversation.turns[-1].text == "fine"
    with pytest.raises(TinychatError, match="locked"):
        History(tmp_path / "h.db")
    other.execute("COMMIT")
    ask(chat, "second")
    assert len(History(tmp_path / "h.db").load(chat.conversation.id).turns) == 4


def test_a_history_locked_for_a_moment_is_not_said(tmp_path):
    """The screen's thread does not wait for the other process: what it holds up is written when it lets go, also of a
    conversation that was left, and the last at the exit."""
    history = History(tmp_path / "h.db")
    assert history._db.execute("PRAGMA busy_timeout").fetchone()[0] <= 50
    chat = chatting(history)
    other = sqlite3.connect(tmp_path / "h.db", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    said = notices(ask(chat, "first"))
    first = chat.conversation
    chat.new()
    said += notices(ask(chat, "second"))
    second = chat.conversation
    assert not said and not history.find()
    other.execute("COMMIT")
    assert not notices(settle(chat, lambda: len(history.find()) == 2))
    other.execute("BEGIN IMMEDIATE")
    chat.rename("a name")
    threading.Timer(0.2, other.execute, ["COMMIT"]).start()
    chat.leave()
    later = History(tmp_path / "h.db")
    assert [later.load(c.id).turns for c in (first, second)] == [first.turns, second.turns]
    assert later.load(second.id).name == "a name"


def test_a_file_system_without_locks_or_shared_memory(tmp_path):
    """WAL needs shared memory, which network file systems lack: another journal does."""
    db = sqlite3.connect(f"file:{tmp_path / 'h.db'}?vfs=unix-none", uri=True)
    db.execute("PRAGMA journal_mode = DELETE")
    db.close()
    history = History(tmp_path / "h.db")
    history.save(talk("a"))
    assert len(History(tmp_path / "h.db").find()) == 1


@pytest.mark.parametrize("size", [0, 1, 99, 100, 512, 4095, 4096, 5000, 8192])
def test_a_history_cut_short_opens(tmp_path, size):
    file = tmp_path / "h.db"
    history = History(file)
    history.save(talk(*["text " * 500] * 20))
    history.close()
    file.write_bytes(file.read_bytes()[:size])
    for name in ("h.db-wal", "h.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    history = History(file)
    for _ in range(2):  # damage that is found late takes effect with the next call
        try:
            history.find()
            history.save(talk("new"))
        except TinychatError as e:
            assert "\n" not in str(e)
    assert "new" in {s.title for s in History(file).find()}


# settings, clock, read-only


@pytest.mark.parametrize("size", [0, 1, 5, 20, 40, 60])
def test_settings_half_written_are_said_and_never_overwritten(tmp_path, size):
    text = 'theme = "nord"\n[parameters]\ntemperature = 0.25\n[presets.coder]\nsystem = "x"\n'[:size]
    file = tmp_path / "s.toml"
    file.write_text(text)
    own = settings.load(file)
    assert all("\n" not in p for p in own.problems)
    if own.problems:
        try:
            settings.update(file, theme="other")
        except TinychatError as e:
            assert "\n" not in str(e) and file.read_text() == text
    else:
        settings.update(file, theme="other")
        assert settings.load(file).theme == "other"


def test_the_clock_is_set_back(tmp_path, monkeypatch):
    """Nothing is lost or refused; the list is by the times that the clock told."""
    history = History(tmp_path / "h.db")
    chat = chatting(history)
    ask(chat, "before")
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 10**8)
    ask(chat, "after")
    history.save(talk("another"))
    assert len(History(tmp_path / "h.db").load(chat.conversation.id).turns) == 4
    assert {s.title for s in history.find()} == {"before", "another"}


def test_a_read_only_home(tmp_path):
    """As nobody, since root may write anywhere."""
    code = (
        "import os, sys, tomlkit\n"  # before nobody may read where Python is
        "from pathlib import Path\n"
        "from tinychat import crash\n"
        "from tinychat.chat import settings\n"
        "from tinychat.chat.history import History\n"
        "from tinychat.errors import TinychatError\n"
        "folder = Path(sys.argv[1])\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "opens = lambda: History(folder / 'data' / 'h.db')\n"
        "for what in (opens, lambda: settings.update(folder / 's.toml', theme='x')):\n"
        "    try: what()\n"
        "    except TinychatError as e: print(e)\n"
        "print(crash.report(ValueError('x')))\n"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become nobody")
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    env = {**os.environ, "XDG_STATE_HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run([sys.executable, "-c", code, str(home)], capture_output=True, text=True, env=env)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == 3 and all("permission denied" in line.lower() for line in lines), lines
