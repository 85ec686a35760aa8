"""The chat without a screen: one conversation, one worker; commands in, changes out.

The screen calls the methods and `poll`s at a fixed rate; what happened comes back as changes, in order. It is the only
place that turns a conversation into a prompt and the worker's events into turns.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tinychat.backend.worker import Failed, Finished, Generated, Loaded, Loading, Prefilling, Worker
from tinychat.chat.changes import Change, Ended, Grew, ModelChanged, Note, Refused, Reset
from tinychat.chat.context import Room, Usage, measure, prompt_of, room_for
from tinychat.chat.conversation import Attachment, Conversation, Turn
from tinychat.chat.parameters import Parameters
from tinychat.chat.running import Running
from tinychat.engine.engine import Engine, Token
from tinychat.errors import TinychatError

LoadEngine = Callable[..., Engine]
SAVE_EVERY = 0.8  # seconds, while an answer grows: with a slow paint on top, a kill still loses less than a second
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


@dataclass
class Trace:
    """What the inspector shows of the last request: the prompt and every token with its log-probability."""

    prompt_ids: list[int] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)


class Controller:
    """`save` is called with the conversation whenever it changed, at most once a second while an answer grows."""

    def __init__(
        self,
        worker: Worker,
        conversation: Conversation | None = None,
        save: Callable[[Conversation], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = worker
        self.conversation = conversation or Conversation()
        self.loading: Loading | None = None
        self.running: Running | None = None
        self.queue: list[Turn] = []  # typed while something else ran, sent in order
        self.usage = Usage()
        self.trace = Trace()
        self.raw = False
        self._save, self._clock = save, clock
        self._saved_at = 0.0
        self._changes: list[Change] = []
        self._load: tuple[str, Path, dict[str, Any]] | None = None
        self._abandoned: set[int] = set()  # requests nobody waits for that still have to end

    # state

    @property
    def engine(self) -> Engine | None:
        return self.worker.engine

    @property
    def ready(self) -> bool:
        """Whether a model is loaded."""
        return self.worker.engine is not None and self.loading is None

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self._abandoned)

    # models

    def load(self, name: str, path: Path, **options: Any) -> None:
        """Loads `path` and calls it `name`; a running answer stops and stays. What is typed meanwhile waits."""
        self._load = (name, path, options)
        self.stop()
        self.loading = Loading("opening", 0.0)
        self.conversation = replace(self.conversation, model=name)
        context = self.conversation.parameters.context
        self.worker.load(path, **{**options, **({"max_context": context} if context else {})})

    def set_parameters(self, parameters: Parameters) -> None:
        """Uses `parameters` from the next answer on; another context length loads the model again."""
        old = self.conversation.parameters
        self._set(replace(self.conversation, parameters=parameters))
        if parameters.context != old.context and self._load is not None:
            name, path, options = self._load
            self.load(name, path, **options)
        elif parameters.system != old.system:
            self._measure()

    # conversations

    def open(self, conversation: Conversation) -> None:
        """Shows another conversation; a running answer of the present one stops and is saved."""
        self._interrupt()
        self.queue.clear()
        self.conversation = conversation
        self._changes.append(Reset(0, conversation))
        self._measure()

    def new(self) -> None:
        """An empty conversation with the same model and parameters."""
        c = self.conversation
        self.open(Conversation(model=c.model, parameters=c.parameters))

    def fork(self, index: int | None = None) -> None:
        forked = self.conversation.fork(index)
        self.open(forked)
        self._store()

    def rename(self, name: str) -> None:
        self._set(self.conversation.rename(name))

    # asking

    def ask(self, turn: Turn) -> None:
        """Sends a message now, or when what runs is done."""
        if self.busy or not self.ready:
            self.queue.append(turn)
            if self.loading is None and not self.busy:
                self._changes.append(
                    Note("no model is loaded; choose one with /model and this will be sent", error=True)
                )
            return
        conversation = self.conversation.add(replace(turn, raw=self.raw))
        self._start(conversation, len(self.conversation.turns))

    def regenerate(self) -> None:
        self._idle("regenerate")
        conversation = self.conversation.regenerate()
        self._start(conversation, len(conversation.turns), go_on=conversation.can_continue())

    def edit(self, index: int, text: str, files: tuple[Attachment, ...] = ()) -> None:
        self._idle("edit")
        self._start(self.conversation.edit(index, text, files), index)

    def go_on(self) -> None:
        """Continues the last answer where it ends."""
        self._idle("continue")
        if not self.conversation.can_continue():
            raise TinychatError("there is no answer to continue; ask something first")
        self._start(self.conversation, len(self.conversation.turns) - 1, go_on=True)

    def prefill(self, text: str) -> None:
        """Lets the model go on from `text` as the start of its answer to the last message."""
        self._idle("start an answer")
        c = self.conversation
        if c.last_prompt is None:
            raise TinychatError("ask something first; then /start TEXT answers it beginning with TEXT")
        c = c.cut(c.last_prompt + 1)
        self._start(c.prefill(text), len(c.turns), go_on=True)

    def stop(self) -> None:
        """Ends the running answer; what there is of it stays."""
        if self.running is not None:
            self.running.stopping, self.running.skip = True, False
            self.worker.stop()

    def skip_thinking(self) -> None:
        """Ends the thinking and goes on with the answer. Raises TinychatError when nothing thinks."""
        if self.running is None or self.running.kind != "thinking" or self.running.tokens == 0:
            raise TinychatError("the model is not thinking now")
        self.running.stopping = self.running.skip = True
        self.worker.stop()

    def take_back_queue(self) -> list[Turn]:
        """The messages that were waiting, now no longer."""
        taken, self.queue = self.queue, []
        return taken

    def resolve(self, room: Room, choice: Literal["turns", "thinking", "stop"]) -> None:
        """Answers a Room: leave out the oldest turns or all thinking, or stop."""
        conversation = room.conversation
        if choice == "stop":
            if room.typed is not None:
                self._changes.append(Refused(room.typed))
            return
        if self.engine is None:
            raise TinychatError("no model is loaded; choose one with /model")
        if choice == "thinking":
            conversation = conversation.drop_thinking()
        else:
            while (less := conversation.drop_oldest()) is not conversation:
                conversation = less
                if (
                    len(prompt_of(self.engine, conversation, room.go_on)) <= room.limit * 3 // 4
                ):  # what is left out makes the
                    # prompt new for the KV cache: so enough at once that nobody is asked again with the next message
                    break
        self._start(conversation, room.start, room.go_on)

    def leave(self) -> None:
        """The user goes: what there is of a running answer is saved, the worker stops as soon as it can."""
        if self.running is not None:
            self.poll()
            self._store()
        self.worker.close()

    # what the worker says

    def poll(self) -> list[Change]:
        """What changed since the last call."""
        grown = Grew("", "", 0)
        if self._abandoned or (self.running and self.running.stopping):
            self.worker.stop()  # again: a stop before the worker has begun a request is forgotten
        for event in self.worker.events():
            match event:
                case Finished() | Failed() if event.request in self._abandoned:
                    self._abandoned.remove(event.request)
                case Generated() if self.running and event.request == self.running.request:
                    grown = self._grow(event.token, grown)
                case Prefilling() if self.running and event.request == self.running.request:
                    self.running.prefill = event
                case Finished() if self.running and event.request == self.running.request:
                    grown = self._flush(grown)
                    self._finish(event.stop_reason, event.stats)
                case Failed() if event.request == 0:
                    self.loading = None
                    self._changes += [ModelChanged(), Note(event.message, error=True)]
                case Failed() if self.running and event.request == self.running.request:
                    grown = self._flush(grown)
                    self._finish("failed", {})
                    self._changes.append(Note(event.message, error=True))
                case Loading():
                    self.loading = event
                case Loaded():
                    self.loading = None
                    self._changes.append(ModelChanged())
                    self._changes += [Note(line) for line in getattr(event.engine, "notes", ())]
                    self._measure()
        self._flush(grown)
        if self.running and self._save and self._clock() - self._saved_at >= SAVE_EVERY:
            self._store()
        if self.queue and self.ready and not self.busy and not any(isinstance(c, Room) for c in self._changes):
            self.ask(self.queue.pop(0))
        changes, self._changes = self._changes, []
        return changes

    def elapsed_thinking(self) -> float:
        """Seconds the running answer has thought so far."""
        return self.running.thinking_s(self._clock()) if self.running else 0.0

    def _grow(self, token: Token, grown: Grew) -> Grew:
        assert self.running is not None
        self.running.take(token, self._clock())
        if token.id is not None:
            self.trace.tokens.append(token)
        thinking, answer = (token.text, "") if token.kind == "thinking" else ("", token.text)
        return Grew(grown.thinking + thinking, grown.answer + answer, grown.tokens + (token.id is not None))

    def _flush(self, grown: Grew) -> Grew:
        r = self.running
        if r is not None and grown != Grew("", "", 0):
            turn = self.conversation.turns[-1]
            self.conversation = self.conversation.with_last(
                replace(
                    turn,
                    text=turn.text + grown.answer,
                    thinking=turn.thinking + grown.thinking,
                    thinking_open=r.kind == "thinking",
                    thinking_s=self.elapsed_thinking(),
                    thinking_tokens=turn.thinking_tokens,
                )
            )
            self.usage = self.usage.with_answer(r.before + r.tokens)
            self._changes.append(grown)
        return Grew("", "", 0)

    def _finish(self, reason: str, stats: dict[str, Any]) -> None:
        r = self.running
        assert r is not None
        turn = self.conversation.turns[-1]
        stats = {
            **{k: stats[k] for k in KEPT_STATS if k in stats},
            "generated_tokens": r.before + r.tokens,
            "seed": r.seed,
        }
        turn = replace(
            turn,
            stop_reason=reason,
            stats=stats,
            thinking_s=self.elapsed_thinking(),
            thinking_tokens=turn.thinking_tokens + r.thinking_tokens,
        )
        self.conversation = self.conversation.with_last(turn)
        self.running = None
        index = len(self.conversation.turns) - 1
        if r.skip and reason == "stopped":
            self._start(self.conversation.close_thinking(), index, go_on=True)
            return
        self._changes.append(Ended(index, turn))
        self._store()
        if reason == "context" and self.engine is not None:
            room = room_for(self.engine, self.conversation, go_on=True, always=True)
            assert room is not None
            self._changes.append(replace(room, start=index))

    # helpers

    def _start(self, conversation: Conversation, start: int, go_on: bool = False) -> None:
        """Runs `conversation`, whose turns differ from the shown ones from `start` on, unless it does not fit."""
        engine = self.engine
        if engine is None or self.loading is not None:
            raise TinychatError("no model is loaded yet; wait for it or choose one with /model")
        try:
            usage, prompt = measure(engine, conversation, go_on)
            room = room_for(engine, conversation, go_on, prompt_tokens=len(prompt))
        except TinychatError as e:
            self._changes.append(Note(str(e), error=True))
            if not go_on:
                self._changes.append(Refused(conversation.turns[-1]))
            return
        if room is not None:
            self._changes.append(replace(room, start=start, typed=None if go_on else conversation.turns[-1]))
            return
        parameters = conversation.parameters
        seed = random.getrandbits(32) if parameters.seed is None else parameters.seed
        raw = conversation.turns[-1].raw
        running = Running(0, seed)
        if go_on:
            turn = conversation.turns[-1]
            running.before, running.thought_s = int(turn.stats.get("generated_tokens", 0)), turn.thinking_s
            conversation = conversation.with_last(replace(turn, stop_reason=""))
        else:
            conversation = conversation.add(Turn("assistant", "", raw=raw))
        self.conversation, self.usage = conversation, usage
        self.trace = Trace(prompt)
        running.request = self.worker.generate(
            prompt, replace(parameters.sampling, seed=seed), parameters.max_tokens, raw=raw
        )
        self.running = running
        self._changes.append(Reset(start, conversation, live=True))
        self._store()

    def _interrupt(self) -> None:
        """Ends the running answer now, keeping what arrived; its later events are ignored."""
        if self.running is not None:
            self.poll()
        if self.running is not None:
            self._abandoned.add(self.running.request)
            self.running.skip = False
            self.worker.stop()
            self._finish("stopped", {})

    def _idle(self, what: str) -> None:
        if self.busy:
            raise TinychatError(f"an answer is being written; stop it with esc, then {what}")

    def _set(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._store()

    def _measure(self) -> None:
        if self.engine is not None and self.conversation.turns and self.loading is None:
            try:
                self.usage, _ = measure(self.engine, self.conversation, False, closed=True)
                return
            except TinychatError as e:
                self._changes.append(Note(str(e), error=True))
        self.usage = Usage(limit=self.engine.info.max_context if self.engine else 0)

    def _store(self) -> None:
        self._saved_at = self._clock()
        if self._save is None or not self.conversation.turns:
            return
        try:
            self._save(self.conversation)
        except TinychatError as e:
            self._save = None
            self._changes.append(Note(f"{e}; this conversation is not being saved", error=True))
