"""A conversation as values: turns, what is sent to the model, and the changes a user can make. No Textual, no engine.

Every change returns a new Conversation, so that a view, a saved copy and a running request never see half of one.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from tinychat.chat.parameters import Parameters
from tinychat.errors import TinychatError

Role = Literal["user", "assistant"]
FORMAT = 1  # of the JSON form
ENDINGS = {  # Turn.stop_reason, in words; "eos" needs none
    "length": "stopped at max_tokens",
    "stopped": "stopped",
    "context": "the context is full",
    "failed": "failed",
}


@dataclass(frozen=True)
class Attachment:
    """A text file that the user attached, as it was then."""

    name: str
    text: str


@dataclass(frozen=True)
class Turn:
    """One message. Of an answer: `thinking` is what came before `text`, for `thinking_s` seconds; `thinking_open` says
    it was cut before the model closed it; `stop_reason` is eos, length, stopped, context, failed, or "" while it runs;
    `stats` is those figures of the engine's Stats that say something about it; `prefix` counts the characters of `text`
    that the user wrote; `raw` marks a prompt sent without the chat template and its answer, shown as they are; `files`
    go to the model after the text."""

    role: Role
    text: str
    thinking: str = ""
    thinking_open: bool = False
    thinking_s: float = 0.0
    thinking_tokens: int = 0
    stop_reason: str = ""
    stats: Mapping[str, Any] = field(default_factory=dict)
    prefix: int = 0
    raw: bool = False
    files: tuple[Attachment, ...] = ()
    created: float = field(default_factory=time.time)

    @property
    def content(self) -> str:
        """What the model reads: the text, then each file in a code fence that nothing in it can close."""
        parts = [self.text] if self.text else []
        for file in self.files:
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", file.text)), default=0))
            parts.append(f"{file.name}:\n{fence}\n{file.text.rstrip()}\n{fence}")
        return "\n\n".join(parts)

    @property
    def complete(self) -> bool:
        """Whether the model ended this answer by itself."""
        return self.role == "user" or self.stop_reason == "eos"


@dataclass(frozen=True)
class Conversation:
    """Turns and what they are answered with. `model` is a registry name or a path. `first` is the first turn that is
    still sent (older ones stay readable); `send_thinking` False leaves all thinking out of the prompt."""

    turns: tuple[Turn, ...] = ()
    model: str = ""
    parameters: Parameters = field(default_factory=Parameters)
    name: str = ""  # given by the user
    first: int = 0
    send_thinking: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)

    @property
    def title(self) -> str:
        """The user's name for it, or the start of the first message."""
        if self.name:
            return self.name
        first = next((t.text for t in self.turns if t.role == "user" and t.text.strip()), "")
        line = " ".join(first.split(maxsplit=61)[:61])  # of a text of any length, no more than can be shown
        return line if len(line) <= 60 else line[:59] + "…"

    @property
    def last_answer(self) -> int | None:
        """Index of the last answer, None when there is none."""
        return next((i for i in reversed(range(len(self.turns))) if self.turns[i].role == "assistant"), None)

    @property
    def last_prompt(self) -> int | None:
        """Index of the user's last turn, None when there is none."""
        return next((i for i in reversed(range(len(self.turns))) if self.turns[i].role == "user"), None)

    @property
    def sent(self) -> tuple[Turn, ...]:
        """The turns the model sees."""
        return self.turns[self.first :]

    # changes

    def add(self, turn: Turn) -> Conversation:
        return replace(self, turns=(*self.turns, turn))

    def with_last(self, turn: Turn) -> Conversation:
        """The last turn replaced: an answer that grows."""
        return replace(self, turns=(*self.turns[:-1], turn))

    def rename(self, name: str) -> Conversation:
        return replace(self, name=" ".join(name.split()))

    def cut(self, index: int) -> Conversation:
        """Only the turns before `index`."""
        return replace(self, turns=self.turns[:index], first=min(self.first, index))

    def regenerate(self) -> Conversation:
        """Without the last answer (and what follows it), ready to be answered again. Raises TinychatError if nothing
        was asked.

        The start of an answer that the user wrote stays.
        """
        asked = self.last_prompt
        if asked is None:
            raise TinychatError("there is nothing to answer again yet")
        rest = self.cut(asked + 1)
        answer = self.turns[asked + 1] if asked + 1 < len(self.turns) else None
        return rest.prefill(answer.text[: answer.prefix]) if answer and answer.prefix else rest

    def edit(self, index: int, text: str, files: tuple[Attachment, ...] = ()) -> Conversation:
        """The user's turn `index` with another text and files, everything after it gone, ready to be answered."""
        old = self._user_turn(index)
        return self.cut(index).add(replace(old, text=text, files=files, created=time.time()))

    def fork(self, index: int | None = None) -> Conversation:
        """A new conversation with the turns up to and including `index` (all by default); this one stays as it is."""
        turns = self.turns if index is None else self.turns[: index + 1]
        if not turns:
            raise TinychatError("there is nothing to fork yet")
        name = f"{self.title} (fork)" if self.title else ""
        first = min(self.first, len(turns) - 1)
        return replace(self, turns=turns, first=first, name=name, id=uuid.uuid4().hex, created=time.time())

    def prefill(self, text: str) -> Conversation:
        """With the start of an answer that the model shall go on with."""
        return self.add(Turn("assistant", text, prefix=len(text)))

    def can_continue(self) -> bool:
        """Whether the last turn is an answer that can be gone on with."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    def close_thinking(self) -> Conversation:
        """The last answer's thinking declared over: continuing it goes straight to the answer."""
        return self.with_last(replace(self.turns[-1], thinking_open=False))

    def drop_oldest(self) -> Conversation:
        """One exchange less in the prompt; the transcript keeps it. Unchanged when only the last exchange is left."""
        later = [i for i in range(self.first + 1, len(self.turns)) if self.turns[i].role == "user"]
        return replace(self, first=later[0]) if later else self

    def drop_thinking(self) -> Conversation:
        """All thinking left out of the prompt from now on; the transcript keeps it."""
        return replace(self, send_thinking=False)

    def _user_turn(self, index: int) -> Turn:
        if not 0 <= index < len(self.turns) or self.turns[index].role != "user":
            raise TinychatError("only your own messages can be edited")
        return self.turns[index]

    # forms

    def messages(self) -> list[dict[str, str]]:
        """What `chat.render` takes: role, content, and reasoning_content where an answer has thinking."""
        out = [{"role": "system", "content": self.parameters.system}] if self.parameters.system.strip() else []
        for turn in self.sent:
            message = {"role": turn.role, "content": turn.content}
            if turn.thinking and (self.send_thinking or turn is self.turns[-1]):
                message["reasoning_content"] = turn.thinking
            out.append(message)
        return out

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: plain values only; `from_dict` reads it back."""
        return {"format": FORMAT, **asdict(self), "parameters": self.parameters.as_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conversation:
        """Raises TinychatError when `data` is not a conversation of this or an earlier format."""
        try:
            if data.get("format", FORMAT) > FORMAT:
                raise TinychatError("this conversation was written by a newer tinychat; update to read it")
            known = {f.name for f in fields(cls)} - {"turns", "parameters"}
            turns = tuple(_turn(t) for t in data["turns"])
            rest = {k: v for k, v in data.items() if k in known}
            return cls(turns=turns, parameters=Parameters.from_dict(data.get("parameters", {})), **rest)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise TinychatError(f"this is not a tinychat conversation ({type(e).__name__}: {e})") from None


def _turn(data: Mapping[str, Any]) -> Turn:
    known = {f.name for f in fields(Turn)}
    values = {k: v for k, v in data.items() if k in known}
    if values["role"] not in ("user", "assistant") or not isinstance(values["text"], str):
        raise ValueError(f"bad turn role {values['role']!r}")
    files = tuple(Attachment(f["name"], f["text"]) for f in values.get("files", ()))
    return Turn(**{**values, "files": files})


def to_markdown(conversation: Conversation) -> str:
    """The conversation as Markdown that reads well anywhere; thinking goes into a folded <details>."""
    c = conversation
    lines = [f"# {c.title or 'Conversation'}", ""]
    if c.model:
        lines += [f"Model: `{c.model}`", ""]
    if c.parameters.system.strip():
        lines += ["## System", "", c.parameters.system.strip(), ""]
    for turn in c.turns:
        lines += ["## You" if turn.role == "user" else f"## {c.model or 'Assistant'}", ""]
        if turn.thinking.strip():
            lines += ["<details><summary>Thinking</summary>", "", turn.thinking.strip(), "", "</details>", ""]
        lines += [_close_fence(turn.content.strip()), ""]
        if turn.stop_reason not in ("", "eos"):
            lines += [f"*({ENDINGS.get(turn.stop_reason, turn.stop_reason)})*", ""]
    return "\n".join(lines).rstrip() + "\n"


def _close_fence(text: str) -> str:
    """`text` with a code fence closed that its end left open, so that the rest of a document is not swallowed."""
    fence = ""
    for line in text.splitlines():
        start = line.lstrip()[:3]
        if not fence and start in ("```", "~~~"):
            fence = start
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
    return f"{text}\n{fence}" if fence else text
