"""The oldest turns of a conversation as a summary that its model writes, on a thread of its own."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from tinychat.backend.protocol import Backend, DoesNotFit, Failed, Finished, Piece, Request
from tinychat.chat.background import settle
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.request import request_for
from tinychat.errors import TinychatError

INSTRUCTION = (
    "Summarise our conversation so far. The summary will stand in its place, so keep every fact, name, number, "
    "decision, open question and wish of mine that later answers may need. Write the summary only, in the language "
    "of the conversation, as short as these allow."
)
STOPPED = "stopped; nothing was summarised"
LONGEST = 1024  # tokens of a summary; in a small context at most a quarter of it


@dataclass(frozen=True)
class WrittenSummary:
    """`turn` stands for the sent turns before turn `end`."""

    turn: Turn
    end: int


class Summarising:
    """The summary of the turns of `conversation` that are sent and come before turn `end`. Where not all of them fit
    into the context with the instruction, the newest exchanges of them stay as they are."""

    def __init__(self, backend: Backend, conversation: Conversation, end: int) -> None:
        self._cancel = threading.Event()
        self.outcome: Future[WrittenSummary] = Future()
        job = partial(settle, self.outcome, partial(self._write, backend, conversation, end))
        threading.Thread(target=job, name="summarising", daemon=True).start()

    def stop(self) -> None:
        """Ends it; the outcome is an error then."""
        self._cancel.set()

    def result(self) -> WrittenSummary:
        """Of a job that is done. Raises TinychatError."""
        written = self.outcome.result()
        if self._cancel.is_set():  # as its last words came
            raise TinychatError(STOPPED)
        return written

    def _write(self, backend: Backend, conversation: Conversation, end: int) -> WrittenSummary:
        limit = backend.info.max_context
        parameters = replace(
            conversation.parameters, thinking=False, schema=None, max_tokens=min(LONGEST, max(1, limit // 4))
        )
        ends = [*(i for i in conversation.questions[1:] if i < end), end]
        while ends:
            end = ends[-1]
            old = replace(conversation, turns=conversation.turns[:end], others=(), parameters=parameters).settled()
            if (turn := self._ask(backend, old)) is not None:
                if not turn.text:
                    raise TinychatError("the model wrote no summary; nothing has changed")
                return WrittenSummary(replace(turn, stats={**turn.stats, "replaced_turns": len(old.sent)}), end)
            ends = ends[: len(ends) * 3 // 4]
        raise TinychatError("even the oldest exchange leaves no room for a summary; load the model with more context")

    def _ask(self, backend: Backend, old: Conversation) -> Turn | None:
        """None where it does not fit. Raises TinychatError."""
        usage = backend.measure(self._stoppable(request_for(old)))
        text, tokens = "", 0
        for event in backend.answer(self._stoppable(request_for(old.add(Turn("user", INSTRUCTION))))):
            match event:
                case Piece() if event.kind == "answer":
                    text, tokens = text + event.text, tokens + len(event.tokens)
                case DoesNotFit():
                    return None
                case Failed():
                    raise TinychatError(event.message)
                case Finished(reason="context"):
                    return None
                case Finished(reason="stopped"):
                    raise TinychatError(STOPPED)
        replaced = usage.history + usage.thinking + usage.tools + usage.answer
        if old.summary is not None:  # it was part of the system prompt
            replaced += int(old.turns[old.summary].stats.get("generated_tokens", 0))
        if tokens >= replaced:
            raise TinychatError(
                f"the summary has {tokens:,} tokens and would stand for {replaced:,}; it saves nothing and is not used"
            )
        return Turn("summary", text.strip(), stats={"replaced_tokens": replaced, "generated_tokens": tokens})

    def _stoppable(self, request: Request) -> Request:
        return replace(request, cancel=self._cancel)
