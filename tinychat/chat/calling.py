"""Running one call of a tool on a thread of its own, and what is collected of calls while a model writes them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tinychat.backend.protocol import ToolCall
from tinychat.backend.stream import EventStream
from tinychat.chat.conversation import Call
from tinychat.errors import TinychatError
from tinychat.tools.permission import Permissions
from tinychat.tools.protocol import CallContext, CallRefused, CallStopped, PermissionAnswer, Question, Result
from tinychat.tools.toolbox import LIMIT, Toolbox

ROUNDS = 20  # answers in a row that may call tools before the user is asked to go on
LEAST, LETTERS_PER_TOKEN = 1000, 3


@dataclass(frozen=True)
class Asked:
    """The call waits for the user's answer to `question`."""

    question: Question
    answer: Future[PermissionAnswer]


@dataclass(frozen=True)
class Done:
    """The call ended after `seconds`; its result has `tokens` tokens (0: not counted)."""

    result: Result
    seconds: float
    tokens: int = 0


class Run:
    """One call while it runs. `events` are any number of Asked and then one Done; `cancel` ends it."""

    def __init__(
        self,
        toolbox: Toolbox,
        permissions: Permissions,
        call: Call,
        conversation: str,
        limit: int = LIMIT,
        count: Callable[[str], int] | None = None,
    ) -> None:
        """`limit` is the longest result in characters; `count` the tokens of a text."""
        self.call, self.began, self.cancel = call, time.monotonic(), threading.Event()
        self.events: EventStream[Asked | Done] = EventStream()
        self._asked: Future[PermissionAnswer] | None = None
        context = CallContext(partial(self._ask, permissions, conversation), self.cancel)
        job = partial(self._run, toolbox, context, limit, count)
        threading.Thread(target=job, name=f"tool {call.name}", daemon=True).start()

    @property
    def seconds(self) -> float:
        """Seconds that the call has run, without the time in which it waited for the user."""
        return time.monotonic() - self.began

    def stop(self) -> None:
        """Cancels the call; its result is discarded."""
        self.cancel.set()
        if (asked := self._asked) is not None and not asked.done():
            asked.cancel()

    def _ask(self, permissions: Permissions, conversation: str, question: Question) -> None:
        if permissions.allows(question, conversation):
            return
        answer: Future[PermissionAnswer] = Future()
        self._asked = answer
        if self.cancel.is_set():
            raise CallStopped("stopped")
        asked = time.monotonic()
        self.events.put(Asked(question, answer))
        try:
            given = answer.result()
        except CancelledError:
            raise CallStopped("stopped") from None
        self.began += time.monotonic() - asked
        if given == "no":
            raise CallRefused("the user refused this")
        permissions.remember(question, given, conversation)

    def _run(self, toolbox: Toolbox, context: CallContext, limit: int, count: Callable[[str], int] | None) -> None:
        result = toolbox.call(self.call.name, self.call.arguments, context, limit)
        seconds, tokens = self.seconds, 0
        with suppress(TinychatError):
            tokens = count(result.text) if count and not self.cancel.is_set() else 0
        self.events.put(Done(result, seconds, tokens))
        self.events.end()


@dataclass
class Written:
    """The calls of an answer while it is generated; `note` says why a call could not be parsed."""

    calls: dict[int, list[str]] = field(default_factory=dict)  # id, name, and the pieces of the arguments
    note: str = ""

    def take(self, event: ToolCall) -> None:
        if event.note:
            self.calls.pop(event.index, None)
            self.note = event.note
        else:
            call = self.calls.setdefault(event.index, [event.id, event.name])
            call.append(event.arguments)

    @property
    def progress(self) -> str:
        """The call that is being generated, in words; "" before the first call."""
        if not self.calls:
            return ""
        _, name, *arguments = self.calls[max(self.calls)]
        return f"calling {name}: {sum(map(len, arguments)):,} characters"

    def made(self) -> tuple[Call, ...]:
        """The calls, each with a unique id. A call whose arguments are not a JSON object is left out, with a note."""
        out: list[Call] = []
        for index, (id, name, *arguments) in sorted(self.calls.items()):
            text, known = "".join(arguments) or "{}", {call.id for call in out}
            if is_object(text):
                out.append(Call(id if id and id not in known else f"call{index}", name, text))
            else:
                self.note = f"the arguments of {name} are no JSON object"
        return tuple(out)


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def room_for(free: int) -> int:
    """The longest result in characters where `free` tokens of the context are left: half of them at most."""
    return max(LEAST, min(LIMIT, free * LETTERS_PER_TOKEN // 2))
