"""Titles of conversations, made by the model itself while nothing else runs.

The request is the conversation with one more message, so that it finds the conversation's rows in the KV cache and
leaves them there: only the rows of that message and of the title are new, and the next question takes their place.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, cast

from tinychat.backend.protocol import Backend, Finished, Request, Sampling, Stats, Tokenizing, text_of
from tinychat.chat.background import settle
from tinychat.chat.conversation import Conversation
from tinychat.errors import TinychatError

ASKED = "Give this conversation a title of two to six words, in its language. Answer with the title and nothing else."
IDLE_S = 1.0  # seconds without an answer before a title is asked for
TOKENS = 24
LONGEST = 60  # characters; a longer answer is no title


class Titles:
    """One title at a time, while `on`; a new answer, or another conversation, cancels it."""

    def __init__(self, on: bool, clock: Callable[[], float]) -> None:
        self.on, self._clock = on, clock
        self._cancel = threading.Event()
        self._title: Future[str] | None = None
        self._asked: set[str] = set()  # ids of conversations
        self._since: float | None = None  # when the present one came to rest
        self.stats: Stats | None = None  # of the answer before, while the backend's are those of a title

    def wanted(self, conversation: Conversation) -> bool:
        """Whether to ask for the title of `conversation`, which is at rest: its first answer is complete, for
        IDLE_S, and the user has not named it."""
        c, turns = conversation, conversation.turns
        if not self.on or self._title is not None or c.name or c.model_title or c.id in self._asked or not turns:
            return False
        first = sum(t.role == "user" for t in turns) == 1 and turns[-1].role == "assistant" and turns[-1].complete
        if not first or turns[-1].raw:
            return False
        self._since = self._clock() if self._since is None else self._since
        return self._clock() - self._since >= IDLE_S

    def ask(self, backend: Backend, conversation: Conversation, tools: tuple[Mapping[str, Any], ...]) -> None:
        self._asked.add(conversation.id)
        self._cancel, self._title, self.stats = threading.Event(), Future(), backend.snapshot()
        request = Request(
            messages=(*conversation.messages(), {"role": "user", "content": ASKED}),
            sampling=Sampling(temperature=0),
            max_tokens=TOKENS,
            thinking=conversation.parameters.thinking,
            tools=tools,
            conversation=conversation.id,
            cancel=self._cancel,
        )
        job = partial(settle, self._title, partial(_title, backend, request))
        threading.Thread(target=job, name="title", daemon=True).start()

    def cancel(self) -> None:
        """Called when something else begins: what runs ends within a token, and is never asked for again."""
        self._cancel.set()
        self._title = self._since = self.stats = None

    def poll(self) -> str:
        """The title, "" while there is none."""
        if self._title is None or not self._title.done():
            return ""
        title, self._title = self._title, None
        return "" if title.exception() else title.result()


def _title(backend: Backend, request: Request) -> str:
    """Asks without thinking where that changes nothing of the prompt before the question. Raises TinychatError."""
    texts, quick = cast(Tokenizing, backend), replace(request, thinking=False, cancel=request.cancel)
    before, _, _ = texts.prompt_text(request).rpartition(ASKED)
    if texts.prompt_text(quick).startswith(before):
        request = quick
    if request.cancel.is_set():
        raise TinychatError("cancelled")
    events = list(backend.answer(request))
    ended = isinstance(events[-1], Finished) and events[-1].reason == "eos"
    return clean(text_of(events)) if ended else ""


def clean(text: str) -> str:
    """The title in what a model said; "" where it said something else."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = re.sub(r"^(\W*title\W*:)", "", lines[0], flags=re.I) if len(lines) == 1 else ""
    line = re.sub(r"[*_`#]+", "", line).strip().strip("\"'“”«»„").strip().removesuffix(".")
    return line if len(line) <= LONGEST and any(c.isalnum() for c in line) else ""
