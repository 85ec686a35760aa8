"""A conversation as values: turns, what is sent to the model, and the changes a user can make. No Textual, no engine.

Every change returns a new Conversation, so that a view, a saved copy and a running request never see half of one.
"""

from __future__ import annotations

import html
import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from tinychat.chat.parameters import Parameters
from tinychat.errors import TinychatError, encodable, printable
from tinychat.units import speed

Role = Literal["user", "assistant", "tool", "summary"]
# Of the JSON form; 3 had no summaries; 2 had no tools; 1 had no versions: no `others`, and turns without `id` and
# `parent`.
FORMAT = 4
_ANSWERS = ("assistant", "tool")  # roles of what belongs to the question before it
ENDINGS = {  # Turn.stop_reason, in words; "eos" needs none
    "length": "stopped at max_tokens",
    "stopped": "stopped",
    "repeated": "stopped: it repeated itself",
    "context": "the context is full",
    "failed": "failed",
}
NOT_RUN = "this call was not run"
SUMMARY_HEAD = "Summary of the conversation so far:"

KEPT_STATS = (
    "prompt_tokens",
    "reused_tokens",
    "prefilled_tokens",
    "prefill_s",
    "prefill_tok_s",
    "ttft_s",
    "decode_s",
    "decode_tok_s",
)  # of Stats, with an answer


@dataclass(frozen=True)
class Attachment:
    """A text file that the user attached, with its content at that time."""

    name: str
    text: str


@dataclass(frozen=True)
class Call:
    """A call of a tool that the model made; `arguments` is JSON text as it was written. `note` says why it could not be
    read; it is not run then."""

    id: str
    name: str
    arguments: str
    note: str = ""

    def same(self, other: Call) -> bool:
        """Whether both call the same with the same arguments, or neither could be read."""
        if self.note or other.note:
            return bool(self.note and other.note)
        return self.name == other.name and _parsed(self.arguments) == _parsed(other.arguments)


@dataclass(frozen=True)
class Turn:
    """One message. Of an answer: `thinking` is what came before `text`, for `thinking_s` seconds; `thinking_open` says
    it was cut before the model closed it; `stop_reason` is eos, length, stopped, repeated, context, failed,
    tool_calls, or "" while it runs; `stats` is those figures of the engine's Stats that say something about it;
    `prefix` counts the characters of `text` that the user wrote; `raw` marks a prompt sent without the chat template
    and its answer, shown as they are; `files` go to the model after the text; `calls` are the tools that it calls, and
    `note` says why a call in it could not be read; `model` is what answered, and `edited` says that the user has
    changed `text` since.

    Of the role tool: the result of the call `call_id` of the answer before it. `stop_reason` is done, failed, refused,
    stopped, or "" while it runs; `stats` are its seconds and tokens.

    Of the role summary: what the model wrote of the turns before it, sent in their place. `stats` are replaced_turns,
    replaced_tokens and generated_tokens.

    `id` (0: not given yet) is the turn's number in its conversation, `parent` that of the turn it answers or follows
    (0: none); neither says anything about the message itself."""

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
    calls: tuple[Call, ...] = ()
    call_id: str = ""
    note: str = ""
    model: str = ""
    edited: bool = False
    created: float = field(default_factory=time.time)
    id: int = field(default=0, compare=False)
    parent: int = field(default=0, compare=False)

    @property
    def content(self) -> str:
        """The text that the model reads: `text`, then each file in a code fence longer than any fence in the file."""
        parts = [self.text] if self.text else []
        parts += [f"{file.name}:\n{fenced(file.text)}" for file in self.files]
        return "\n\n".join(parts)

    @property
    def complete(self) -> bool:
        """Whether the model ended this answer by itself."""
        return self.role in ("user", "summary") or self.stop_reason == "eos"


@dataclass(frozen=True)
class Removed:
    """What `Conversation.remove` took out: `turns`; by id, the former parents of the turns that got another one; and
    the id of the last turn that was shown."""

    turns: tuple[Turn, ...]
    parents: Mapping[int, int]
    shown: int


@dataclass(frozen=True)
class Conversation:
    """Turns and what they are answered with. `model` is a registry name or a path. `first` is the first turn that is
    still sent, unless a summary comes after it (older ones stay readable); `send_thinking` False leaves all thinking
    out of the prompt.

    All turns ever made form a tree: each names its `parent`, and turns with the same parent are versions of one
    another (an edited question, another answer). `turns` is the one path that is shown and sent; `others` are all
    turns beside it, those left last at the end. Editing and regenerating move turns from the path to `others`, and
    `show` chooses another path, so nothing is lost and any version can come back with what followed it.
    """

    turns: tuple[Turn, ...] = ()
    model: str = ""
    parameters: Parameters = field(default_factory=Parameters)
    name: str = ""  # given by the user
    first: int = 0
    send_thinking: bool = True
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: float = field(default_factory=time.time)
    others: tuple[Turn, ...] = ()
    model_title: str = ""  # that the model gave; a name goes before it
    project: str = ""  # a folder's name, given by the user
    made: int = field(default=0, compare=False)  # the highest id that a turn has had: none is given twice

    def __post_init__(self) -> None:
        """Gives new turns of the path their id and parent."""
        if not self.turns or self.turns[-1].id:  # new turns come at the end
            return
        number = max(self.made, max((t.id for t in (*self.turns, *self.others)), default=0))
        path: list[Turn] = []
        for turn in self.turns:
            if not turn.id:
                number += 1
                turn = replace(turn, id=number, parent=path[-1].id if path else 0)
            path.append(turn)
        object.__setattr__(self, "turns", tuple(path))
        object.__setattr__(self, "made", number)

    @property
    def title(self) -> str:
        """The name that the user gave the conversation, or the model's title, or the start of the first message."""
        if self.name or self.model_title:
            return self.name or self.model_title
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
    def summary(self) -> int | None:
        """Index of the summary that is sent in place of the turns before it."""
        return next((i for i in reversed(range(len(self.turns))) if self.turns[i].role == "summary"), None)

    @property
    def sent_from(self) -> int:
        """Index of the first turn that is sent as it is."""
        return self.first if self.summary is None else max(self.first, self.summary + 1)

    @property
    def sent(self) -> tuple[Turn, ...]:
        """The turns the model sees as they are."""
        return self.turns[self.sent_from :]

    @property
    def questions(self) -> list[int]:
        """Indexes of the sent turns that begin an exchange."""
        return [i for i in range(self.sent_from, len(self.turns)) if self.turns[i].role == "user"]

    @property
    def pending(self) -> tuple[Call, ...]:
        """The calls of the last answer without a result, if only results follow that answer."""
        last = self.last_answer
        if last is None or any(turn.role != "tool" for turn in self.turns[last + 1 :]):
            return ()
        given = {turn.call_id for turn in self.turns[last + 1 :]}
        return tuple(call for call in self.turns[last].calls if call.id not in given)

    def call_of(self, index: int) -> Call:
        """The call whose result turn `index` is."""
        turn = self.turns[index]
        answers = (t for t in reversed(self.turns[:index]) if t.role == "assistant")
        made = {call.id: call for call in next(answers, turn).calls}
        return made.get(turn.call_id, Call(turn.call_id, "", ""))

    def repeats(self, call: Call) -> tuple[Turn, ...]:
        """The results that earlier answers to the same message got for the same as `call`, one of the last answer's,
        with nothing else called since the first of them; oldest first."""
        found: list[Turn] = []
        start = -1 if self.last_prompt is None else self.last_prompt
        for index in reversed(range(start + 1, self.last_answer or 0)):
            if self.turns[index].role == "tool":
                if not self.call_of(index).same(call):
                    break
                found.insert(0, self.turns[index])
        return tuple(found)

    # changes

    def add(self, turn: Turn) -> Conversation:
        return replace(self, turns=(*self.turns, turn))

    def with_last(self, turn: Turn) -> Conversation:
        """The last turn replaced: an answer that grows."""
        return replace(self, turns=(*self.turns[:-1], turn))

    def settled(self) -> Conversation:
        """With a result for every call; templates require one before another message."""
        missing = (Turn("tool", NOT_RUN, call_id=call.id, stop_reason="stopped") for call in self.pending)
        return replace(self, turns=(*self.turns, *missing))

    def call_again(self, index: int, arguments: str | None = None) -> tuple[Conversation, tuple[Turn, ...]]:
        """A version in which the call whose result is turn `index` has no result yet, or has other `arguments`, and the
        results of the calls beside it, which can be kept. Raises TinychatError."""
        if not 0 <= index < len(self.turns) or self.turns[index].role != "tool":
            raise TinychatError("only calls of tools can be run again")
        at = next(i for i in reversed(range(index)) if self.turns[i].role == "assistant")
        end = next((i for i in range(index, len(self.turns)) if self.turns[i].role != "tool"), len(self.turns))
        answer, call = self.turns[at], self.call_of(index)
        if arguments is None or arguments == call.arguments:
            return self.cut(index), self.turns[index + 1 : end]
        calls = tuple(replace(c, arguments=arguments, note="") if c.id == call.id else c for c in answer.calls)
        changed = replace(answer, id=0, calls=calls, created=time.time())
        return self.cut(at).add(changed), self.turns[at + 1 : index] + self.turns[index + 1 : end]

    def compact(self, index: int, summary: Turn) -> Conversation:
        """A version in which `summary` is sent in place of the turns before `index`. Copies of the others follow it:
        their parent is another one."""
        copies = tuple(replace(turn, id=0) for turn in self.turns[index:])
        compacted = self.cut(index)
        return replace(compacted, turns=(*compacted.turns, summary, *copies))

    def rename(self, name: str) -> Conversation:
        return replace(self, name=" ".join(name.split()))

    def move(self, project: str) -> Conversation:
        """In another project; "" for none."""
        return replace(self, project=encodable(" ".join(project.split())))

    def cut(self, index: int) -> Conversation:
        """The path up to the turn before `index`; the rest goes to `others`."""
        others = (*self.others, *self.turns[index:])
        return replace(self, turns=self.turns[:index], others=others, first=min(self.first, index))

    def regenerate(self, index: int | None = None) -> Conversation:
        """Ready to give answer `index` (the last by default) again; the present one, and what follows it, becomes
        another version. Raises TinychatError if nothing was asked.

        The start of an answer that the user wrote stays.
        """
        end = len(self.turns) if index is None else index
        asked = next((i for i in reversed(range(end)) if self.turns[i].role == "user"), None)
        if asked is None:
            raise TinychatError("there is nothing to answer again yet")
        rest = self.cut(asked + 1)
        answer = self.turns[asked + 1] if asked + 1 < len(self.turns) else None
        return rest.prefill(answer.text[: answer.prefix]) if answer and answer.prefix else rest

    def edit_answer(self, index: int, text: str) -> Conversation:
        """A version of answer `index` with the user's `text`; the present one keeps what follows it. Unchanged where
        the text is the same. Raises TinychatError."""
        old = self.turns[index]
        if old.role != "assistant":
            raise TinychatError("only messages and answers can be edited")
        if old.calls:
            raise TinychatError("this answer calls tools: edit the arguments of a call below it instead")
        if not text.strip():
            raise TinychatError("an answer cannot be empty; d deletes it")
        if text == old.text:
            return self
        changed = replace(old, id=0, text=text, edited=True, prefix=0, stop_reason="eos", stats={}, created=time.time())
        return self.cut(index).add(replace(changed, thinking_open=False, note=""))

    def remove(self, index: int) -> tuple[Conversation, Removed]:
        """Without the question `index` and its answers, or without answer `index` where it has other versions; an
        answer without any goes with its question. Calls of tools go with their answer.

        What followed a removed question follows what was before it; what followed a removed version follows the one
        that takes its place, the version before or behind it. So no other turn is lost and none changes its role."""
        if not 0 <= index < len(self.turns) or self.turns[index].role in ("tool", "summary"):
            raise TinychatError("only messages and answers can be deleted")
        versions = self.versions(index)
        if self.turns[index].role == "assistant" and len(versions) == 1:
            asked = next((i for i in reversed(range(index)) if self.turns[i].role == "user"), index)
            return self.remove(asked) if asked != index else self._remove(index, versions)
        return self._remove(index, versions)

    def _remove(self, index: int, versions: tuple[Turn, ...]) -> tuple[Conversation, Removed]:
        turn, every = self.turns[index], (*self.turns, *self.others)
        gone = {turn.id}
        while more := {t.id for t in every if t.parent in gone and t.role in _ANSWERS} - gone:
            gone |= more
        place = versions.index(turn)
        beside = versions[place - 1] if place else versions[1] if len(versions) > 1 else None
        follows = turn.parent
        if turn.role == "assistant" and beside is not None:
            latest = {t.parent: t for t in every if t.role in _ANSWERS}
            while (follows := beside.id) in latest:
                beside = latest[follows]
        parents = {t.id: t.parent for t in every if t.role not in _ANSWERS and t.parent in gone}
        after = next((t.id for t in self.turns[index:] if t.id in parents), 0)
        kept = [replace(t, parent=follows) if t.id in parents else t for t in self.others if t.id not in gone]
        end = next((i for i, t in enumerate(self.turns) if t.id == after), len(self.turns))
        kept += [replace(t, parent=follows) if t.id in parents else t for t in self.turns[end:]]
        first = next((t.id for t in self.turns[self.first :] if t.id not in gone), 0)  # that is sent
        rest = replace(self, turns=self.turns[:index], others=tuple(kept), first=0)
        rest = rest.show(after or (beside.id if beside else max(parents, default=follows)))
        if not rest.turns:
            raise TinychatError("this is all of the conversation; delete it in the list (f3, then ctrl+d)")
        place = next((i for i, t in enumerate(rest.turns) if t.id == first), min(self.first, len(rest.turns)))
        removed = tuple(t for t in every if t.id in gone)
        return replace(rest, first=place), Removed(removed, parents, self.turns[-1].id)

    def put_back(self, removed: Removed) -> Conversation:
        """With what `remove` took out where it was, and shown as before."""

        def back(turn: Turn) -> Turn:
            return replace(turn, parent=removed.parents[turn.id]) if turn.id in removed.parents else turn

        every = (*self.others, *self.turns, *removed.turns)
        return replace(self, turns=(), others=tuple(map(back, every))).show(removed.shown)

    def edit(self, index: int, text: str, files: tuple[Attachment, ...] = ()) -> Conversation:
        """A version of the user's turn `index` with another text and files, ready to be answered; the present one
        keeps what follows it. Without a change it is answered again."""
        old = self._user_turn(index)
        if (text, files) == (old.text, old.files):
            return self.cut(index + 1)
        return self.cut(index).add(replace(old, id=0, text=text, files=files, created=time.time()))

    def versions(self, index: int) -> tuple[Turn, ...]:
        """The versions of turn `index`, oldest first; one of them is the turn itself."""
        turn = self.turns[index]
        return tuple(sorted((turn, *(t for t in self.others if t.parent == turn.parent)), key=lambda t: t.id))

    def version(self, index: int) -> str:
        """Which version turn `index` is, in words; "" where it has no other."""
        versions = self.versions(index)
        return f"version {versions.index(self.turns[index]) + 1} of {len(versions)}" * (len(versions) > 1)

    def switch(self, index: int, step: int) -> Conversation:
        """With the next (`step` 1) or previous (-1) version of turn `index`, and what followed it, on the path.
        Unchanged at either end."""
        versions = self.versions(index)
        place = versions.index(self.turns[index]) + step
        return self.show(versions[place].id) if 0 <= place < len(versions) else self

    def show(self, id: int) -> Conversation:
        """With turn `id` on the path, and after it what was shown there last. Unchanged when there is no such turn."""
        every = {t.id: t for t in (*self.turns, *self.others)}
        if id not in every:
            return self
        path = [every[id]]
        while parent := every.get(path[0].parent):
            path.insert(0, parent)
        latest = {t.parent: t for t in (*self.others, *self.turns)}
        while child := latest.get(path[-1].id):
            path.append(child)
        shown = {t.id for t in path}
        same = next(
            (i for i, (a, b) in enumerate(zip(self.turns, path)) if a is not b), min(len(self.turns), len(path))
        )
        others = (*self.others, *self.turns[same:])
        return replace(
            self,
            turns=tuple(path),
            others=tuple(t for t in others if t.id not in shown),
            first=min(self.first, same),
        )

    def fork(self, index: int | None = None) -> Conversation:
        """A new conversation with the turns up to and including `index`, or with all and their versions; this one stays
        as it is."""
        turns = self.turns if index is None else self.turns[: index + 1]
        if not turns:
            raise TinychatError("there is nothing to fork yet")
        title, number = re.fullmatch(r"(.*?)(?: \(fork(?: (\d+))?\))?", self.title, re.S).groups()  # type: ignore[union-attr]
        again = f" {int(number or 1) + 1}" if title != self.title else ""
        return replace(
            self,
            turns=turns,
            others=self.others if index is None else (),
            first=min(self.first, len(turns) - 1),
            name=f"{title} (fork{again})" if title else "",
            id=uuid.uuid4().hex,
            created=time.time(),
        )

    def prefill(self, text: str) -> Conversation:
        """With the start of an answer that the model shall go on with."""
        return self.add(Turn("assistant", text, prefix=len(text)))

    def can_continue(self) -> bool:
        """Whether the last turn is an answer that can be gone on with, or a call's result."""
        return bool(self.turns) and self.turns[-1].role in ("assistant", "tool")

    def close_thinking(self) -> Conversation:
        """With the last answer's thinking marked as complete, so that continuing it starts the answer's text."""
        return self.with_last(replace(self.turns[-1], thinking_open=False))

    def drop_thinking(self) -> Conversation:
        """All thinking left out of the prompt from now on; the transcript keeps it."""
        return replace(self, send_thinking=False)

    def _user_turn(self, index: int) -> Turn:
        if not 0 <= index < len(self.turns) or self.turns[index].role != "user":
            raise TinychatError("only your own messages can be edited")
        return self.turns[index]

    # forms

    def messages(self) -> list[dict[str, Any]]:
        """What `chat.render` takes: role, content, reasoning_content where an answer has thinking, and calls; one
        message for each turn that is sent."""
        out: list[dict[str, Any]] = []
        system = self.parameters.system if self.parameters.system.strip() else ""
        if self.summary is not None:  # in the system prompt: between two turns, many templates refuse it
            system = f"{system}\n\n{SUMMARY_HEAD}\n{self.turns[self.summary].text}".lstrip()
        if system:
            out.append({"role": "system", "content": system})
        for turn in self.sent:
            message: dict[str, Any] = {"role": turn.role, "content": turn.content}
            if turn.calls:
                message["tool_calls"] = [
                    {
                        "id": c.id,
                        "type": "function",
                        "function": {"name": c.name, "arguments": "{}" if c.note else c.arguments or "{}"},
                    }
                    for c in turn.calls
                ]
            if turn.role == "tool":
                message["tool_call_id"] = turn.call_id
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
            known = {f.name for f in fields(cls)} - {"turns", "others", "parameters"}
            turns = tuple(_turn(t) for t in data["turns"])
            others = tuple(_turn(t) for t in data.get("others", ()))
            rest = {k: v for k, v in data.items() if k in known}
            parameters = Parameters.from_dict(data.get("parameters", {}))
            return cls(turns=turns, others=others, parameters=parameters, **rest)
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise TinychatError(f"this is not a tinychat conversation ({type(e).__name__}: {e})") from None


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _turn(data: Mapping[str, Any]) -> Turn:
    known = {f.name for f in fields(Turn)}
    values = {k: v for k, v in data.items() if k in known}
    if values["role"] not in get_args(Role) or not isinstance(values["text"], str):
        raise ValueError(f"bad turn role {values['role']!r}")
    files = tuple(Attachment(f["name"], f["text"]) for f in values.get("files", ()))
    if values["role"] == "tool" and not values.get("stop_reason"):  # tinychat was killed while it ran
        values |= {"text": NOT_RUN, "stop_reason": "stopped"}
    calls = tuple(Call(c["id"], c["name"], c["arguments"], c.get("note", "")) for c in values.get("calls", ()))
    return Turn(**{**values, "files": files, "calls": calls})


def to_markdown(conversation: Conversation) -> str:
    """The conversation as Markdown that reads well anywhere; thinking goes into a folded <details>."""
    c = conversation
    lines = [f"# {c.title or 'Conversation'}", ""]
    if c.model:
        lines += [f"Model: `{c.model}`", ""]
    if c.parameters.system.strip():
        lines += ["## System", "", c.parameters.system.strip(), ""]
    children: dict[int, list[Turn]] = {}
    for turn in sorted(c.others, key=lambda t: t.id):
        children.setdefault(turn.parent, []).append(turn)
    for turn in c.turns:
        lines += _turn_markdown(c, turn)
        for other in children.get(turn.parent, ()):
            lines += ["<details><summary>Another version</summary>", ""]
            below = [other]
            while below:
                each = below.pop()
                lines += _turn_markdown(c, each)
                below += reversed(children.get(each.id, ()))
            lines += ["</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def _turn_markdown(c: Conversation, turn: Turn) -> list[str]:
    above = {t.id: t for t in (*c.turns, *c.others)}
    if turn.role == "tool":
        answer = turn
        while answer.role == "tool" and answer.parent in above:
            answer = above[answer.parent]
        call = next((call for call in answer.calls if call.id == turn.call_id), Call("", "a tool", ""))
        head = f"<details><summary>Called {html.escape(call.name)}: {turn.stop_reason}</summary>"
        return [head, "", fenced(call.arguments), "", fenced(turn.text), "", "</details>", ""]
    if turn.role == "summary":
        head = f"<details><summary>{summary_line(turn)}</summary>"
        return [head, "", turn.text.strip(), "", "</details>", ""]
    goes_on = turn.parent in above and above[turn.parent].role == "tool"
    lines = [] if goes_on else ["## You" if turn.role == "user" else f"## {c.model or 'Assistant'}", ""]
    if turn.thinking.strip():
        lines += ["<details><summary>Thinking</summary>", "", turn.thinking.strip(), "", "</details>", ""]
    if turn.content.strip() or not turn.calls:
        lines += [_close_fence(turn.content.strip()), ""]
    if turn.edited:
        lines += ["*(edited)*", ""]
    if turn.stop_reason not in ("", "eos", "tool_calls"):
        lines += [f"*({ENDINGS.get(turn.stop_reason, turn.stop_reason)})*", ""]
    return lines


def summary_line(turn: Turn) -> str:
    """What a summary stands for, and what it saves."""
    s = turn.stats
    turns, tokens = int(s.get("replaced_turns", 0)), int(s.get("replaced_tokens", 0))
    saves = f" · {tokens:,} → {int(s.get('generated_tokens', 0)):,} tokens" if tokens else ""
    return f"summary of {turns} earlier turn{'s' * (turns != 1)}, sent in their place{saves}"


def footer_text(turn: Turn) -> str:
    """412 tokens · 72.4 tok/s · reused 1,812 · prefilled 43."""
    s = turn.stats
    tokens, left_out = int(s.get("generated_tokens", 0)), int(s.get("left_out", 0))
    parts = ["edited" * turn.edited, ENDINGS.get(turn.stop_reason, "")]
    nothing = turn.stop_reason == "eos" and not (turn.text.strip() or turn.thinking or turn.calls)
    parts.append("the model wrote nothing" if nothing else "")
    parts.append(f"left out the oldest {left_out} turn{'s' * (left_out != 1)}" if left_out else "")
    parts.append(f"a call could not be read: {printable(turn.note, newlines=False)}" if turn.note else "")
    parts.append(f"{tokens:,} token{'s' * (tokens != 1)}" if tokens else "")
    parts.append(f"{speed(s['decode_tok_s'])} tok/s" if s.get("decode_tok_s") else "")
    parts.append(f"reused {s['reused_tokens']:,}" if s.get("reused_tokens") else "")
    parts.append(f"prefilled {s['prefilled_tokens']:,}" if s.get("prefilled_tokens") else "")
    return " · ".join(filter(None, parts))


def fenced(text: str) -> str:
    """`text` in a code fence longer than any fence in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{text.rstrip()}\n{fence}"


def _close_fence(text: str) -> str:
    """`text`, with a code fence that is still open at its end closed, so that it does not extend over later text."""
    fence = ""
    for line in text.splitlines():
        start = line.lstrip()[:3]
        if not fence and start in ("```", "~~~"):
            fence = start
        elif fence and line.strip().startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
    return f"{text}\n{fence}" if fence else text
