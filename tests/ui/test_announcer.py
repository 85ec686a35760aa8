"""What the terminal is told beside the screen."""

import re
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import cast

from textual.events import Key, Paste
from textual.message import Message

from tinychat.ui.announcer import LONG, Announcer, notification
from tinychat.ui.chat.painter import Painter
from tinychat.ui.chat.view import ChatView
from tinychat.ui.driver import ASK, BURST, LOST, SETTLE, Link, TerminalDriver, pasted


def test_the_title_and_the_bell():
    """Only for who does not look, or has waited long; what names say reaches the terminal as text."""
    written: list[str] = []
    announcer = Announcer(written.append, "bell", {})
    announcer.update(False, False, "", True, 0)
    announcer.update(True, False, "primes", True, 0)
    announcer.update(False, False, "primes", True, 2)
    assert written == ["\x1b]2;tinychat\x07", "\x1b]2;primes\x07"], "a short answer that is seen"
    announcer.update(True, True, "primes", False, 3)
    announcer.update(True, True, "primes", False, 4)
    assert written[2:] == ["\x07"], "a tool asks, once"
    announcer.update(False, False, "primes", False, 5)
    assert written[3:] == ["\x07", "\x1b]2;✓ primes\x07"]
    announcer.update(False, False, "primes", True, 6)
    assert written[5:] == ["\x1b]2;primes\x07"], "the mark goes when it is seen"
    announcer.update(True, False, "primes", True, 7)
    announcer.update(False, False, "primes", True, 7 + LONG)
    assert written[6:] == ["\x07"]
    announcer.update(False, False, "a\x07b\x1b]0;c\n" * 20, True, 99)
    assert re.fullmatch(r"\x1b\]2;[ -~…]{1,80}\x07", written[-1])


def test_notifications():
    assert notification("off", "done", {}) == ""
    assert notification("desktop", "4;3;\x1bdone", {"TERM": "xterm"}) == "\x1b]9;tinychat: 4;3;\\x1bdone\x07"
    assert notification("desktop", "a;b", {"TERM": "foot"}) == "\x1b]777;notify;tinychat;a,b\x07"


def test_a_terminal_behind_a_slow_link_is_not_painted_faster_than_it_shows() -> None:
    now, written = 0.0, []
    link = Link(written.append, lambda: now)
    link.ask()
    link.settle()
    assert not written, "a terminal that has never answered is not asked"
    link.answered()  # Textual's own question
    controller = SimpleNamespace(running=object())
    painter = Painter(cast(ChatView, SimpleNamespace(controller=controller, link=link)))
    for waited, frames in ((0.3, 1), (0.3, 2), (0.6, 4), (0.35, 1), (0.3, 2)):  # how many it may be behind
        asked = 0
        while painter.due:
            link.ask()
            asked += 1
        assert asked == frames
        now += waited
        for _ in range(frames):
            link.answered()
    assert 0.6 < link.patience <= SETTLE
    for _ in range(5):  # nothing is on its way any more
        link.ask()
        link.answered()
    assert link.patience < 0.2, "a terminal that has stopped answering is not waited for"
    while painter.due:
        link.ask()
    controller.running = None
    assert painter.due, "the end is always painted"
    now += LOST + 1
    assert not link.behind
    link.answered()
    link.settle()
    assert set(written) == {ASK}


def test_more_text_than_anybody_types_at_once_is_a_paste():
    def keys(text: str) -> list[Message]:
        return [Key({"\r": "enter", "\x03": "ctrl+c"}.get(c, c), c) for c in text]

    def shown(messages: list[Message]) -> list[str]:
        return [m.text if isinstance(m, Paste) else m.key for m in pasted(messages) if isinstance(m, Key | Paste)]

    long = "x" * BURST
    assert shown(keys("one line\rtwo\r")) == ["one line\ntwo\n"]
    assert shown(keys("a script's line\r"))[-1] == "enter" == shown(keys("\r" * 20))[0]
    assert shown(keys("hello\rand\r")) == ["h", "e", "l", "l", "o", "enter", "a", "n", "d", "enter"]
    assert shown(keys(f"{long}\r")) == [long, "enter"]
    assert shown(keys(f"{long}\r\x03")) == [long, "enter", "ctrl+c"]
    assert shown(keys(f"one\r{long}\r")) == [f"one\n{long}\n"]
    held = [Key("down", None)] * BURST
    assert pasted(held) == held, "a key that is held"


def test_a_paste_in_pieces_is_one_and_a_key_is_not_waited_for(monkeypatch):
    pieces = deque([b"first\r", b"second", b"\r", b"e", b"\r", b"aaaaa", *[b"a"] * 40])
    waited = list[float]()

    def ready(fds: object, _: object, __: object, seconds: float) -> tuple[list[object]]:
        waited.append(seconds)
        return ([fds] if pieces[0] != b"e" else [],)  # which is typed later

    monkeypatch.setattr("tinychat.ui.driver.os.read", lambda *_: pieces.popleft())
    monkeypatch.setattr("tinychat.ui.driver.select.select", ready)
    read = partial(TerminalDriver._read, cast(TerminalDriver, SimpleNamespace(fileno=0)))
    assert read() == b"first\rsecond\r" and len(waited) == 3
    assert (read(), read()) == (b"e", b"\r") and len(waited) == 3
    assert len(read()) == 14, "a key that is held is shown meanwhile"
