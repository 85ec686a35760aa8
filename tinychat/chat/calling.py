"""Running one call of a tool on a thread of its own, and what is collected of calls while a model writes them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from tinychat.backend.protocol import ToolCall
from tinychat.backend.stream import EventStream
from tinychat.chat.conversation import Call, Conversation, Turn
from tinychat.errors import TinychatError
from tinychat.tools.permission import Permissions
from tinychat.tools.protocol import CallContext, CallRefused, CallStopped, PermissionAnswer, Question, Result
from tinychat.tools.toolbox import LIMIT, Toolbox

ROUNDS = 20  # answers in a row that may call tools before the user is asked to go on
REPEATS = 3  # answers in a row that make one and the same call; the next one is asked for without tools
ALREADY = "Already called; this is its result:\n{}\nAnswer the user's question with it now."
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


def result_of(call: Call, before: Sequence[Turn], toolbox: Toolbox, context: CallContext, limit: int = LIMIT) -> Result:
    """Runs `call`, unless it could not be read, or `before`, the results of the same call in the answers before it, has
    its result already."""
    if call.note:
        return Result(f"error: this call could not be read: {call.note}. It was not run. Write it again.", "failed")
    if before and before[0].stop_reason == "done":
        return Result(ALREADY.format(before[0].text))
    return toolbox.call(call.name, call.arguments, context, limit)


def stuck(conversation: Conversation) -> str:
    """One line where the last answer makes the same call as REPEATS - 1 answers before it: the next one gets no tools,
    or it would do so as well. "" where it does not."""
    last = conversation.last_answer
    calls = () if last is None else conversation.turns[last].calls
    name = next((call.name for call in calls if len(conversation.repeats(call)) >= REPEATS - 1), "")
    return (
        f"{REPEATS} answers in a row made the same call of {name}; the next one is given without tools" if name else ""
    )


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
        before: Sequence[Turn] = (),
    ) -> None:
        """`limit` is the longest result in characters; `count` the tokens of a text; `before` as of `result_of`."""
        self.call, self.began, self.cancel = call, time.monotonic(), threading.Event()
        self.events: EventStream[Asked | Done] = EventStream()
        self._asked: Future[PermissionAnswer] | None = None
        context = CallContext(partial(self._ask, permissions, conversation), self.cancel)
        job = partial(self._run, partial(result_of, call, before, toolbox, context, limit), count)
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

    def _run(self, job: Callable[[], Result], count: Callable[[str], int] | None) -> None:
        result = job()
        seconds, tokens = self.seconds, 0
        with suppress(TinychatError):
            tokens = count(result.text) if count and not self.cancel.is_set() else 0
        self.events.put(Done(result, seconds, tokens))
        self.events.end()


@dataclass
class Written:
    """The calls of an answer while it is generated; `note` says why one could not be read."""

    calls: dict[int, list[str]] = field(default_factory=dict)  # id, name, and the pieces of the arguments
    unread: list[Call] = field(default_factory=list)
    note: str = ""

    def take(self, event: ToolCall) -> None:
        if event.note:
            _, name, *arguments = self.calls.pop(event.index, ("", event.name or "unknown"))
            self.unread.append(Call(f"unread{len(self.unread)}", name, "".join(arguments), event.note))
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

    def made(self, reason: str) -> tuple[Call, ...]:
        """The calls of an answer that ended for `reason`, each with a unique id; those that could not be read, with a
        note, where the model had ended the answer."""
        out: list[Call] = []
        for index, (id, name, *arguments) in sorted(self.calls.items()):
            text, known = "".join(arguments) or "{}", {call.id for call in out}
            note = "" if is_object(text) else "its arguments are no JSON object"
            self.note = note or self.note
            out.append(Call(id if id and id not in known else f"call{index}", name, text, note))
        return tuple(call for call in (*out, *self.unread) if not call.note or reason in ("eos", "tool_calls"))


def is_object(text: str) -> bool:
    """Whether `text` is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def room_for(free: int) -> int:
    """The longest result in characters where `free` tokens of the context are left: half of them at most."""
    return max(LEAST, min(LIMIT, free * LETTERS_PER_TOKEN // 2))
