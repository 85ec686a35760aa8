"""The plain chat as a process, in a dumb terminal and in a pipe, with a scripted backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.support.terminal import terminal
from tinychat.chat.history import History
from tinychat.commands.chat import wants_plain

SCRIPTED = (sys.executable, "-m", "tests.support.scripted")


def test_a_dialogue_in_a_dumb_terminal() -> None:
    """Typed lines, an answer that Ctrl-C stops, commands, Ctrl-D; nothing moves the cursor."""
    with terminal("plain", command=SCRIPTED, environ={**os.environ, "TERM": "dumb"}) as t:
        t.read("is loaded")
        t.read("> ")
        t.write(b"what is\\\n2 + 2?\n")
        t.read("tok/s")
        seen = t.seen.decode()
        assert "[thinking]\r\nLet me see." in seen and "[answer]\r\nIt is \\x1b[31mfour\\x1b[0m." in seen
        t.write(b"a long one\n")
        t.read("word word")
        t.process.send_signal(signal.SIGINT)
        t.read("[stopped ·")
        t.write(b"/find FOUR\n")
        t.read("turn 2: It is")
        t.write(b"/edit 1\n")
        t.read("edit> what is^J2 + 2?")  # its lines stay lines
        t.write(b" Now.\n")
        t.write(b"/undo\n")
        t.write(b"/undoo\n")
        t.read("that begins with /)\r\n> ")  # readline has the terminal
        t.write(b"\x04")
        seen = t.read(None)
        assert t.process.returncode == 0 and "Traceback" not in seen and b"\x1b" not in t.seen
    history = History()
    (only,) = history.find()
    conversation = history.load(only.id)
    question, answer, _, stopped = conversation.turns
    assert question.text == "what is\n2 + 2?" and conversation.others[0].text == "what is\n2 + 2? Now."
    assert answer.thinking == "Let me see." and stopped.stop_reason == "stopped"
    history.close()


def test_a_pipe() -> None:
    """Messages and commands from a file, the conversation on stdout, all else on stderr."""
    lines = 'hello\n"""\nof two\nlines\n"""\n/show 1\n/nothing\n/import /no/such\n/mcp\n'
    lines += "/regenerate\n/version\n/version 1\n/version 3\n"
    done = subprocess.run([*SCRIPTED, "plain"], input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert done.stdout.count("It is \\x1b[31mfour") == 5 and ">" not in done.stdout
    assert "[4 answer]" in done.stdout and "[4 answer, version 1 of 2]" in done.stdout
    for said in ("there is no command /nothing", "/no/such", "no MCP servers", "turn 4: version 2 of 2", "N TURN"):
        assert said in done.stderr, said


def test_who_gets_it() -> None:
    """Beside --plain: TERM=dumb and ACCESSIBLE."""
    assert wants_plain({"TERM": "dumb"}) and wants_plain({"TERM": "xterm", "ACCESSIBLE": "1"})
    assert not wants_plain({"TERM": "xterm-256color"})
