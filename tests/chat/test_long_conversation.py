"""What a very long conversation costs the screen's thread: CPU time of every call of the controller."""

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny
from tinychat import process
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.local import LocalBackend
from tinychat.chat.changes import Change, Overflow
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.chat.parameters import Parameters, set_parameter

TOKENS = 300_000
FRAME_S = 0.016  # of a screen that paints 60 times a second


class Timed:
    """Calls functions and keeps the longest CPU time that one took of this thread, in seconds, and which it was."""

    def __init__(self) -> None:
        self.longest, self.which = 0.0, ""

    def __call__(self, call: Callable[..., Any], *args: Any) -> Any:
        started = time.thread_time()
        try:
            return call(*args)
        finally:
            took = time.thread_time() - started
            if took > self.longest:
                self.longest, self.which = took, call.__name__


@pytest.fixture
def frozen() -> Iterator[None]:
    """As in the app: garbage is not looked for among what was there before, here the objects of other tests."""
    gc.collect()
    process.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def conversation() -> Conversation:
    """700 turns of 450 tokens or so (the tiny vocabulary has a token for nearly every byte), some with thinking."""
    text = "The harbour master climbed the tower and wrote the hour into the book. " * 7
    turns = []
    for i in range(350):
        turns.append(Turn("user", f"{i}: {text}"))
        thought = text[:200] if i % 3 == 0 else ""
        turns.append(Turn("assistant", f"{text} {i}.", thought, stop_reason="eos"))
    return Conversation(tuple(turns), model="m")


def test_no_call_takes_a_frame(conversation: Conversation, frozen: None, tmp_path: Path) -> None:
    path, timed = tiny.write(tmp_path / "m.gguf", "llama", "Q8_0"), Timed()
    history = History(tmp_path / "h.db")
    history.save(conversation)
    conversation = history.load(conversation.id)
    parameters = set_parameter(Parameters(), "max_tokens", "20")
    controller = Controller(
        partial(LocalBackend.open, thread=EngineThread(), device="cpu"),
        Conversation(parameters=parameters),
        history.save,
    )
    changes: list[Change] = []

    def until(condition: Callable[[], Any]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, changes
            changes.extend(timed(controller.poll))
            time.sleep(0.002)

    def overflow() -> Overflow | None:
        return next((c for c in reversed(changes) if isinstance(c, Overflow)), None)

    controller.load("m", path)
    until(lambda: controller.ready)
    timed(controller.open, conversation)
    until(lambda: not controller.measuring)
    assert controller.usage.history > TOKENS
    timed(controller.set_parameters, Parameters(system="Be brief.", max_tokens=20))
    until(lambda: not controller.measuring)
    timed(controller.ask, Turn("user", "and now?"))
    until(overflow)
    timed(controller.resolve, overflow(), "turns")
    until(lambda: not controller.busy)
    assert controller.conversation.first > 500 and controller.conversation.turns[-1].stop_reason
    timed(controller.regenerate)
    timed(controller.stop)
    until(lambda: not controller.busy)
    timed(controller.rename, "long")
    timed(controller.fork)
    timed(controller.new)
    timed(controller.open, conversation)
    timed(controller.leave)
    assert timed.longest < FRAME_S, f"{timed.which} took {1e3 * timed.longest:.1f} ms"
