"""The chat without a screen: one conversation and one backend, driven by method calls, which it answers with changes.

The screen calls the methods, and `poll` at a fixed rate; `poll` returns the changes in order. No method blocks, and
none does work that grows with the conversation: the backend renders and counts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from tinychat.backend.instruments import Instrumented
from tinychat.backend.protocol import (
    Backend,
    DoesNotFit,
    Failed,
    Finished,
    ModelInfo,
    Piece,
    Prefilling,
    Prompted,
    Request,
    Stats,
    Tokenizing,
    TokenPiece,
    ToolCall,
    Usage,
    reserve_for,
)
from tinychat.chat.calling import ROUNDS, Asked, Done, Run, is_object, room_for, stuck
from tinychat.chat.changes import Asks, Change, Ended, Grew, ModelChanged, Notice, Overflow, Reset, SentBack
from tinychat.chat.compacting import Summarising
from tinychat.chat.conversation import KEPT_STATS, Attachment, Conversation, Removed, Turn, summary_line
from tinychat.chat.loading import OpenBackend, start_loading
from tinychat.chat.parameters import Parameters
from tinychat.chat.repetition import Repetition
from tinychat.chat.replay import Replay
from tinychat.chat.request import request_for
from tinychat.chat.saving import Saver
from tinychat.chat.state import (
    Answering,
    Calling,
    Compacting,
    Idle,
    LoadFailed,
    Loading,
    LoadStage,
    ModelChoice,
    State,
    Stopping,
)
from tinychat.chat.titles import Titles
from tinychat.chat.usage_count import UsageCount
from tinychat.errors import SLOW, TinychatError
from tinychat.models import registry
from tinychat.tools.permission import Permissions
from tinychat.tools.protocol import PermissionAnswer, Question, Result
from tinychat.tools.toolbox import LIMIT, Toolbox

NOTHING = Grew("", "", 0)
REPEATED = (
    "the answer repeated itself and was stopped: ctrl+r asks again, f5 continues it all the same; "
    "stop_repetition = false in /settings never stops one"
)
COUNTED = (
    400_000  # characters: of a longer text, which takes the tokenizer more than a second, the tokens are estimated
)
ESTIMATED = 40_000  # characters, from which


@dataclass(frozen=True)
class Trace:
    """What the inspector shows of the last request: the prompt and every token with its log-probability."""

    prompt_ids: tuple[int, ...] = ()
    tokens: list[TokenPiece] = field(default_factory=list)


class Controller:
    """`save` is called with the conversation whenever it changed, at most once a second while an answer grows.
    `toolbox` has what the model may call (nothing at first), `permissions` what the user has allowed of it.
    `stop_repetition`: an answer that repeats itself without end is stopped. `titles`: a model on this computer gives a
    conversation a title after its first answer."""

    def __init__(
        self,
        open_backend: OpenBackend,
        conversation: Conversation | None = None,
        save: Callable[[Conversation], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        permissions: Permissions | None = None,
        stop_repetition: bool = False,
        titles: bool = False,
    ) -> None:
        self.state: State = Idle()
        self.backend: Backend | None = None  # that answers, while nothing is being loaded
        self.conversation = conversation or Conversation()
        self.queue: list[Turn] = []  # typed while something else ran, sent in order
        self.usage = Usage()
        self.trace = Trace()
        self.raw = False
        self._unresolved: Overflow | None = None  # the queue waits for the user's choice
        self._held: Overflow | None = None  # asks again when the model is loaded with a larger context
        self.toolbox, self.permissions = Toolbox(), permissions or Permissions()
        self._left: list[int | Removed] = []  # for undo: last turns (ids) of paths that were left, and what was deleted
        self._open_backend, self._clock, self.stop_repetition = open_backend, clock, stop_repetition
        self._saver = Saver(save, clock)
        self._changes: list[Change] = []
        self._choice: ModelChoice | None = None  # the model that was asked for last
        self._count, self.titles = UsageCount(), Titles(titles, clock)
        self.replaying: Replay | None = None

    # state

    @property
    def ready(self) -> bool:
        """Whether a model is loaded."""
        return self.backend is not None and not isinstance(self.state, Loading)

    @property
    def busy(self) -> bool:
        """Whether an answer or a summary is being written, or a tool that an answer called runs."""
        return isinstance(self.state, Answering | Stopping | Calling | Compacting)

    @property
    def calling(self) -> Calling | None:
        """The call that runs."""
        return self.state if isinstance(self.state, Calling) else None

    @property
    def running(self) -> Answering | None:
        """The answer that is being written."""
        match self.state:
            case Answering():
                return self.state
            case Stopping():
                return self.state.answer
        return None

    @property
    def loading(self) -> LoadStage | None:
        return self.state.stage if isinstance(self.state, Loading) else None

    @property
    def measuring(self) -> bool:
        """Whether `usage` is being counted."""
        return self._count.running

    @property
    def info(self) -> ModelInfo | None:
        """What is loaded; None while nothing is."""
        return self.backend.info if self.backend is not None and self.ready else None

    @property
    def sampling_defaults(self) -> Mapping[str, float]:
        """What the model's file, the registry or a tinychat server says about sampling, by field of Sampling."""
        if (info := self.info) is None:
            return {}
        return info.sampling or (registry.sampling_of(self.conversation.model) if info.can.instruments else {})

    @property
    def loaded(self) -> Path | None:
        """The file of the model that answers, or of the one being loaded."""
        return self._choice.path if self._choice is not None and (self.backend or self.loading) else None

    @property
    def choice(self) -> ModelChoice | None:
        """The model that answers, as it was asked for; None while nothing is loaded."""
        return self._choice if self.ready else None

    @property
    def stats(self) -> Stats | None:
        """The figures of this moment, but for those of a title that is being made."""
        if self.titles.stats is not None:
            return self.titles.stats
        return self.backend.snapshot() if self.backend is not None and self.ready else None

    @property
    def instruments(self) -> Instrumented | None:
        """The backend, where it runs on this machine and can be measured."""
        if (info := self.info) is not None and info.can.instruments:
            return cast(Instrumented, self.backend)
        return None

    # models

    def load(self, name: str, path: Path, **options: Any) -> None:
        """Loads `path` and calls it `name`; a running answer stops and stays. What is typed meanwhile waits."""
        self.interrupt()
        choice = ModelChoice(name, path, options, self.conversation.parameters.context)
        kept, before = self._choice if self.backend is not None else None, self._loaded_afterwards()
        if isinstance(self.state, Loading):
            kept = self.state.kept
        self._choice, self._held = choice, None
        self.conversation = replace(self.conversation, model=name)
        self.state = start_loading(self._open_backend, choice, kept, before)

    def _loaded_afterwards(self) -> Future[Backend | None]:
        """The backend that is loaded after all present loads have ended."""
        if isinstance(self.state, Loading):
            return self.state.outcome
        now: Future[Backend | None] = Future()
        now.set_result(self.backend)
        return now

    def set_parameters(self, parameters: Parameters) -> None:
        """Uses `parameters` from the next answer on; another context length loads the model again."""
        old = self.conversation.parameters
        self._set(replace(self.conversation, parameters=parameters))
        if parameters.context != old.context and self._choice is not None:
            self.load(self._choice.name, self._choice.path, **self._choice.options)
        elif parameters.system != old.system and not self.busy:
            self._measure()

    # conversations

    def open(self, conversation: Conversation) -> None:
        """Shows another conversation; a running answer of the present one stops and is saved."""
        self.interrupt()
        self._changes += map(SentBack, self.take_back_queue())  # part of the draft of the conversation that is left
        self._left.clear()
        self._let_go()
        self._unresolved = None
        self.conversation = conversation
        self._changes.append(Reset(0, conversation))
        self.usage = Usage()
        self._measure()

    def new(self) -> None:
        """An empty conversation with the same model and parameters."""
        c = self.conversation
        self.open(Conversation(model=c.model, parameters=c.parameters))

    def fork(self, index: int | None = None) -> None:
        """Goes on in a copy, which is written on a thread of its own: all its turns are new to the history. A running
        answer stops first, and is in both."""
        self.interrupt()
        forked = self.conversation.fork(index)
        self.open(forked)
        self._saver.copy(forked)

    def forget(self, id: str) -> None:
        """Deletes what a deleted conversation left in the KV caches, token ids included."""
        if (instruments := self.instruments) is not None:
            instruments.forget(id)
        else:
            from tinychat.backend import saved  # NumPy, which a chat does without before its first screen

            saved.forget(id)

    def rename(self, name: str) -> None:
        self._set(self.conversation.rename(name))

    def move(self, project: str) -> None:
        """Puts the conversation into a project; "" takes it out."""
        self._set(self.conversation.move(project))

    # asking

    def ask(self, turn: Turn) -> None:
        """Sends a message now, or when what runs is done."""
        if self.busy or not self.ready or self.replaying is not None:
            self.queue.append(turn)
            if self.loading is None and not self.busy and self.replaying is None:
                self._changes.append(
                    Notice("no model is loaded; choose one with /model and this will be sent", error=True)
                )
            return
        conversation = self.conversation.settled().add(replace(turn, raw=self.raw))
        self._start(conversation, len(self.conversation.turns))

    def regenerate(self, index: int | None = None) -> None:
        """Answers again: turn `index`, or the last answer. The present one stays as a version."""
        self._idle("regenerate")
        conversation = self.conversation.regenerate(index)
        begun = conversation.can_continue()  # with the user's start of the answer
        self._start(conversation, len(conversation.turns) - begun, go_on=begun)

    def replay(self, model: ModelChoice) -> None:
        """Asks `model` all questions again, and loads it where it is not. The answers so far stay, as the other version
        of the first one and what follows it."""
        self._idle("replay")
        questions = tuple(turn for turn in self.conversation.turns if turn.role == "user")
        if not questions:
            raise TinychatError("there is no question to ask again yet")
        if not (self.ready and self.loaded == model.path):
            self.load(model.name, model.path, **model.options)
        self.titles.cancel()
        self.replaying = Replay(questions, model.name)

    def edit(self, index: int, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Asks with another text and files in place of the user's turn `index`, or puts `text` in place of answer
        `index`. The present one stays as a version."""
        self._idle("edit")
        if index >= len(self.conversation.turns):
            raise TinychatError("the message that was being edited is not there any more; nothing was sent")
        if self.conversation.turns[index].role == "user":
            self._start(self.conversation.edit(index, text, files), index)
            return
        left = self.conversation.turns[-1].id
        if self._show(self.conversation.edit_answer(index, text)):
            self._left.append(left)

    def delete(self, index: int) -> str:
        """Deletes turn `index`, as Conversation.remove says; returns what that was, in words."""
        self._idle("delete")
        conversation, removed = self.conversation.remove(index)
        self._show(conversation)
        self._left.append(removed)
        question = any(turn.role == "user" for turn in removed.turns)
        return "the question and its answer" if question else "this version of the answer"

    def switch(self, index: int, step: int) -> None:
        """Shows the next or previous version of turn `index`."""
        self._idle("switch versions")
        left = self.conversation.turns[-1].id
        if self._show(self.conversation.switch(index, step)):
            self._left.append(left)

    def show(self, id: int) -> None:
        """Shows turn `id`, a version that is beside the path, and what followed it."""
        self._idle("show another version")
        left = self.conversation.turns[-1].id
        if self._show(self.conversation.show(id)):
            self._left.append(left)

    def undo(self) -> None:
        """Shows the turns again that were shown before the last edit, new answer, switch or delete."""
        self._idle("undo")
        if not self._left:
            raise TinychatError("there is no edit, new answer, switch, summary or delete to undo")
        left, c = self._left.pop(), self.conversation
        if isinstance(left, Removed):
            self._show(c.put_back(left))
        else:
            place = next((i for i, turn in enumerate(c.turns) if turn.id == left), None)
            self._show(c.show(left) if place is None else c.cut(place + 1))  # a summary came right after what was left

    def _show(self, conversation: Conversation) -> bool:
        """Shows another path of the conversation; False when it is the present one."""
        if conversation is self.conversation:
            return False
        self._unresolved = None
        self._end_replay()
        start = _first_other(self.conversation, conversation)
        self._set(conversation)
        self._changes.append(Reset(start, conversation))
        self._measure()
        return True

    def go_on(self) -> None:
        """Continues the last answer where it ends."""
        self._idle("continue")
        if not self.conversation.can_continue():
            raise TinychatError("there is no answer to continue; ask something first")
        if self.conversation.pending or self.conversation.turns[-1].role == "tool":
            self._call_next(0, {})
            return
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
        """Ends the running answer or call; the text so far stays. A summary is given up."""
        if isinstance(self.state, Compacting):
            self.state.job.stop()
        elif (calling := self.calling) is not None:
            calling.run.stop()
            self._called(Done(Result("the user stopped this call", "stopped"), calling.run.seconds), calling)
            self._measure()
        elif (r := self.running) is not None:
            r.cancel.set()
            self.state = Stopping(r)

    def skip_thinking(self) -> None:
        """Ends the thinking, also that of an answer that was stopped in it, and goes on with the answer. Raises
        TinychatError when nothing thinks."""
        r, turns = self.running, self.conversation.turns
        if not self.busy and turns and turns[-1].thinking_open:
            self._start(self.conversation.close_thinking(), len(turns) - 1, go_on=True)
            return
        if r is None or r.kind != "thinking" or r.tokens == 0:
            raise TinychatError("the model is not thinking now")
        r.cancel.set()
        self.state = Stopping(r, skip=True)

    def take_back_queue(self) -> list[Turn]:
        """The messages that were waiting, now no longer."""
        taken, self.queue = self.queue, []
        return taken

    def resolve(self, overflow: Overflow, choice: Literal["context", "compact", "turns", "thinking", "stop"]) -> None:
        """Answers an Overflow: load with a larger context, let the model summarise the oldest turns, leave them out
        (from now on, without asking again), leave out all thinking, or stop. Where the chat has gone on since, it
        stops."""
        conversation, go_on = overflow.conversation, overflow.go_on
        if self._unresolved is not overflow:
            choice = "stop"
        self._unresolved = None
        if choice == "stop":
            if overflow.typed is not None:
                self._changes.append(SentBack(overflow.typed))
        elif choice == "thinking":
            self._start(conversation.drop_thinking(), overflow.start, go_on)
        elif choice == "context":
            self.set_parameters(replace(self.conversation.parameters, context=overflow.larger))
            self._held = overflow
        elif choice == "compact":
            self._summarise(conversation, conversation.questions[-1], overflow)
        else:
            parameters = replace(self.conversation.parameters, drop_oldest=True)
            self._set(replace(self.conversation, parameters=parameters))
            self._start(replace(conversation, parameters=parameters), overflow.start, go_on)

    def _let_go(self) -> None:
        """What waited for a larger context goes back to where it was typed."""
        held, self._held = self._held, None
        if held is not None and held.typed is not None:
            self._changes.append(SentBack(held.typed))

    def compact(self, keep: int = 1) -> None:
        """Lets the model summarise all but the last `keep` exchanges; the summary is sent in their place."""
        self._idle("summarise")
        questions = self.conversation.questions
        if len(questions) <= keep:
            raise TinychatError(f"there is nothing to summarise before the last {keep} of your messages")
        self._summarise(self.conversation, questions[-keep], None)

    def _summarise(self, conversation: Conversation, end: int, overflow: Overflow | None) -> None:
        if self.backend is None or not self.ready:
            raise TinychatError("no model is loaded yet; wait for it or choose one with /model")
        self._count.forget()
        self.titles.cancel()
        self.state = Compacting(Summarising(self.backend, conversation, end), conversation, overflow)
        self._changes.append(Notice("the model summarises the oldest turns"))

    def _poll_summary(self, compacting: Compacting) -> None:
        if not compacting.job.outcome.done():
            return
        self.state, overflow = Idle(), compacting.overflow
        try:
            summary = compacting.job.result()
        except TinychatError as e:
            self._changes.append(Notice(str(e), error=True))
            self._measure()
            if overflow is not None and overflow.typed is not None:
                self._changes.append(SentBack(overflow.typed))
            return
        c, asked = self.conversation, compacting.conversation
        if overflow is None:
            asked = c
        typed = () if {t.id for t in (*c.turns, *c.others)} >= {asked.turns[-1].id} else asked.turns[-1:]
        rest = asked.turns[: len(asked.turns) - len(typed)]
        now = replace(asked, parameters=c.parameters, name=c.name, model_title=c.model_title, project=c.project)
        compacted = replace(now, turns=rest).compact(summary.end, summary.turn)
        self._left.append(c.turns[-1].id)
        start = min(summary.end, _first_other(c, compacted))
        self._set(compacted)
        self._changes += [Reset(start, compacted), Notice(f"{summary_line(summary.turn)}; /undo takes it back")]
        if overflow is None:
            self._measure()
        else:
            again = replace(compacted, turns=(*compacted.turns, *(replace(t, id=0) for t in typed)))
            self._start(again, len(compacted.turns) - (not typed), overflow.go_on)

    def leave(self) -> None:
        """Called when the user quits: saves the running answer as it is and stops the backend as soon as possible."""
        if self.calling is not None or isinstance(self.state, Compacting):
            self.stop()
        elif self.running is not None:
            self.poll()
            self._store()
        self._saver.finish()
        if self.backend is not None:
            self.backend.close()

    # what the backend says

    def poll(self) -> list[Change]:
        """The changes since the last call, in order."""
        if isinstance(self.state, Loading):
            self._poll_loading(self.state)
        elif isinstance(self.state, Calling):
            self._poll_call(self.state)
        elif isinstance(self.state, Compacting):
            self._poll_summary(self.state)
        elif (r := self.running) is not None:
            self._poll_answer(r)
        self._poll_count()
        self._poll_title()
        if self._saver.due(growing=self.running is not None):
            self._store()
        self._changes += self._saver.poll()
        if self.ready and not self.busy and self._unresolved is None:
            if self.replaying is not None:
                self._go_on_replaying(self.replaying)
            elif self.queue:
                self.ask(self.queue.pop(0))
        changes, self._changes = self._changes, []
        return changes

    def _go_on_replaying(self, replay: Replay) -> None:
        """Asks the next question, unless the last answer was cut short."""
        c = self.conversation
        cut_short = replay.asked and c.turns[-1].stop_reason in ("stopped", "failed", "context")
        if cut_short or replay.asked == len(replay.questions):
            self._end_replay()
            return
        question = replay.questions[replay.asked]
        self.replaying = replace(replay, asked=replay.asked + 1)
        if replay.asked:
            self._start(c.settled().add(replace(question, id=0, created=time.time())), len(c.turns))
        else:
            first = next(i for i, turn in enumerate(c.turns) if turn.id == question.id) + 1
            self._start(c.cut(first), first)

    def _end_replay(self) -> None:
        if (replay := self.replaying) is not None:
            self.replaying = None
            self._changes.append(Notice(replay.ended))

    def _poll_title(self) -> None:
        if title := self.titles.poll():
            self._set(replace(self.conversation, model_title=title))
        rests = not self.busy and not self.queue and not self.measuring
        if rests and (instruments := self.instruments) is not None and self.titles.wanted(self.conversation):
            self.titles.ask(instruments, self.conversation, self._offered())

    def elapsed_thinking(self) -> float:
        """Seconds of thinking in the running answer."""
        return self.running.thinking_s(self._clock()) if self.running else 0.0

    def _poll_loading(self, loading: Loading) -> None:
        for event in loading.events.poll():
            match event:
                case LoadStage():
                    self.state = replace(loading, stage=event)
                case LoadFailed():
                    self.state = Idle()
                    self._end_replay()
                    self._let_go()
                    self._changes += [ModelChanged(), Notice(event.message, error=True)]
                    if event.kept and loading.kept is not None:
                        self._back_to(loading.kept)
                    else:
                        self.backend = None
                case _:
                    self.state, self.backend, self.usage = Idle(), event, Usage()
                    self.trace = Trace()  # its ids were another tokenizer's
                    self._changes += [ModelChanged(), *map(_noted, event.info.notes)]
                    self._measure()
                    if (held := self._held) is not None:
                        self._held, c = None, self.conversation
                        again = replace(held.conversation, model=c.model, parameters=c.parameters)
                        self._start(again, held.start, held.go_on)

    def _poll_count(self) -> None:
        try:
            self.usage = self._count.poll() or self.usage
        except TinychatError as e:
            self._changes.append(Notice(str(e), error=True))

    def _back_to(self, choice: ModelChoice) -> None:
        """The model that was loaded before goes on; what was typed for another one goes back."""
        c, self._choice = self.conversation, choice
        parameters = replace(c.parameters, context=choice.context)
        self.conversation = replace(c, model=choice.name, parameters=parameters)
        self._changes += map(SentBack, self.take_back_queue())

    def _poll_answer(self, r: Answering) -> None:
        grown = NOTHING
        for event in r.events.poll():
            match event:
                case Piece():
                    grown = self._take(event, grown)
                case ToolCall():
                    r.written.take(event)
                case Prompted():
                    self._prompted(event)
                case Prefilling():
                    self._update(prefill=event)
                case Finished():
                    self._flush(grown)
                    grown = NOTHING
                    self._finish(event.reason, event.stats, event.usage)
                case Failed():
                    self._flush(grown)
                    grown = NOTHING
                    self._failed(event)
                case DoesNotFit():
                    self._does_not_fit(event)
        self._flush(grown)

    def _update(self, **changes: Any) -> Answering:
        """Changes fields of the running answer."""
        r = self.running
        assert r is not None
        return self._hold(replace(r, **changes))

    def _hold(self, r: Answering) -> Answering:
        self.state = replace(self.state, answer=r) if isinstance(self.state, Stopping) else r
        return r

    def _prompted(self, event: Prompted) -> None:
        r = self._update(usage=event.usage)
        self.usage = event.usage
        if (instruments := self.instruments) is not None:
            self.trace = Trace(instruments.last_prompt())
        if event.note:
            self._changes.append(_noted(event.note))
        if event.dropped:
            self._update(left_out=event.dropped)
            self.conversation = replace(self.conversation, first=self.conversation.sent_from + event.dropped)
            self._changes.append(Reset(r.start, self.conversation, live=True))
        self._store()

    def _take(self, piece: Piece, grown: Grew) -> Grew:
        r = self.running
        assert r is not None
        r = self._hold(r.take(piece, self._clock()))
        if r.repetition is not None and r.repetition.feed(piece.text) and not r.cancel.is_set():
            r.cancel.set()
            self.state = Stopping(r, repeats=True)
        self.trace.tokens.extend(piece.tokens)
        thinking, answer = (piece.text, "") if piece.kind == "thinking" else ("", piece.text)
        return Grew(grown.thinking + thinking, grown.answer + answer, grown.tokens + len(piece.tokens))

    def _flush(self, grown: Grew) -> None:
        """Puts what came into the conversation."""
        r = self.running
        if r is None or grown == NOTHING:
            return
        turn = self.conversation.turns[-1]
        self.conversation = self.conversation.with_last(
            replace(
                turn,
                text=turn.text + grown.answer,
                thinking=turn.thinking + grown.thinking,
                thinking_open=r.kind == "thinking",
                thinking_s=self.elapsed_thinking(),
            )
        )
        if r.usage is not None:
            self.usage = replace(r.usage, answer=r.usage.answer + r.tokens)
        self._changes.append(grown)

    def _finish(self, reason: str, stats: Stats | None, usage: Usage | None = None) -> None:
        r, skip = self.running, isinstance(self.state, Stopping) and self.state.skip
        if reason == "stopped" and isinstance(self.state, Stopping) and self.state.repeats:
            reason = "repeated"
        assert r is not None
        turn, calls, tokens = self.conversation.turns[-1], r.written.made(reason), r.tokens
        if calls and stats is not None and usage is not None:  # their tokens come as no Piece
            tokens, self.usage = stats.generated_tokens, usage
        if reason in ("eos", "tool_calls"):
            reason = "tool_calls" if calls else "eos"
        kept = {k: getattr(stats, k) for k in KEPT_STATS} if stats is not None else {}
        turn = replace(
            turn,
            stop_reason=reason,
            stats={**kept, "generated_tokens": r.before_tokens + tokens, "seed": r.seed}
            | ({"left_out": r.left_out} if r.left_out else {}),
            calls=calls,
            note=r.written.note,
            thinking_s=self.elapsed_thinking(),
            thinking_tokens=turn.thinking_tokens + r.thinking_tokens,
        )
        self.conversation = self.conversation.with_last(turn)
        self.state = Idle()
        index = len(self.conversation.turns) - 1
        if skip and reason == "stopped":
            self._start(self.conversation.close_thinking(), index, go_on=True)
            return
        self._changes.append(Ended(index, turn))
        self._store()
        if reason == "repeated":
            self._changes.append(Notice(REPEATED))
        if reason == "tool_calls":
            self._call_next(r.round, {})
        elif reason == "context":
            c = self.conversation
            reserve = reserve_for(c.parameters.max_tokens, self.usage.limit)
            self._overflows(
                Overflow(c, True, self.usage, reserve, _droppable(c), None, index, self._larger(self.usage, reserve))
            )

    # tools

    def use_tools(self, toolbox: Toolbox) -> None:
        """Offers these tools from the next answer on."""
        self.toolbox = toolbox
        if not self.busy:
            self._measure()

    def permit(self, question: Question, answer: PermissionAnswer) -> None:
        """Answers the question of the call that runs; one of an earlier call is answered too late and counts for
        nothing."""
        if (calling := self.calling) is not None and calling.asked and calling.asked.question is question:
            calling.asked.answer.set_result(answer)
            self.state = replace(calling, asked=None)

    def call_again(self, index: int, arguments: str | None = None) -> None:
        """Runs the call whose result is turn `index` again, perhaps with other arguments (JSON text), and answers
        again; what there is stays as a version."""
        self._idle("run a call again")
        if arguments is not None and not is_object(arguments):
            raise TinychatError("the arguments of a call are a JSON object; nothing was run")
        conversation, kept = self.conversation.call_again(index, arguments)
        self._left.append(self.conversation.turns[-1].id)
        start = _first_other(self.conversation, conversation)
        self.conversation = conversation
        self._changes.append(Reset(start, conversation))
        self._call_next(0, {turn.call_id: turn for turn in kept})

    def _call_next(self, round: int, kept: Mapping[str, Turn]) -> None:
        """Runs the next call of the last answer that has no result; asks for an answer when all have one."""
        while (pending := self.conversation.pending) and pending[0].id in kept:
            self.conversation = self.conversation.add(replace(kept[pending[0].id], id=0))
            self._changes.append(Reset(len(self.conversation.turns) - 1, self.conversation))
        index = len(self.conversation.turns)
        if pending:
            self._count.forget()
            c, call = self.conversation, pending[0]
            before = c.repeats(call) if round else ()  # in round 0 the user wants it run
            run = Run(self.toolbox, self.permissions, call, c.id, self._room(), self._tokens, before)
            self.conversation = c.add(Turn("tool", "", call_id=call.id))
            self.state = Calling(run, index, round, kept)
            self._changes.append(Reset(index, self.conversation, live=True))
        elif round >= ROUNDS:
            self._changes.append(Notice(f"{ROUNDS} answers in a row called tools; /continue lets it go on", error=True))
            self._measure()
        else:
            if line := stuck(self.conversation):
                self._changes.append(Notice(line))
            self._start(self.conversation, index, round=round + 1, tool_choice="none" if line else "auto")

    def _poll_call(self, calling: Calling) -> None:
        for event in calling.run.events.poll():
            match event:
                case Asked():
                    self.state = replace(calling, asked=event)
                    self._changes.append(Asks(event.question))
                case Done():
                    self._called(event, calling)
                    self._call_next(calling.round, calling.kept)

    def _called(self, done: Done, calling: Calling) -> None:
        """Puts the result of a call into the conversation."""
        result, stats = done.result, {"seconds": done.seconds, "tokens": done.tokens}
        turn = replace(self.conversation.turns[-1], text=result.text, stop_reason=result.state, stats=stats)
        self.conversation = self.conversation.with_last(turn)
        self.state = Idle()
        self._changes.append(Ended(calling.index, turn))
        self._store()

    def _offered(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that an answer may call."""
        return self.toolbox.definitions if self.info is not None and self.info.can.tools else ()

    def _room(self) -> int:
        """The longest result, in characters."""
        return room_for(self.usage.free) if self.usage.limit else LIMIT

    def count(self, text: str) -> tuple[int, bool]:
        """The tokens of `text`, on a thread of the caller's, and whether they are counted; otherwise estimated. A local
        model's tokenizer is asked, which waits for nothing: the engine's thread may be saving the KV cache. A server
        is not: what is not sent does not leave this computer. Raises TinychatError."""
        if (backend := self.backend) is None:
            return 0, False
        if self.instruments is not None and len(text) <= COUNTED:
            return len(cast(Tokenizing, backend).tokenize(text, special=False, whole=False)), True
        if self.instruments is not None:  # as many as in its first part
            start = len(cast(Tokenizing, backend).tokenize(text[:ESTIMATED], special=False, whole=False))
            return start * len(text) // ESTIMATED, False
        return backend.measure(Request(raw=text)).prompt, False

    def _tokens(self, text: str) -> int:
        """Of a result, on the thread of its call."""
        return self.count(text)[0]

    def _failed(self, event: Failed) -> None:
        r = self.running
        assert r is not None
        if r.usage is not None:
            self._finish("failed", None)
        else:
            self._withdraw(r)
        self._changes.append(Notice(event.message, error=True))
        if r.usage is None and r.typed is not None:
            self._changes.append(SentBack(r.typed))

    def _does_not_fit(self, event: DoesNotFit) -> None:
        r = self.running
        assert r is not None
        self._withdraw(r)
        self._overflows(
            Overflow(
                r.asked,
                r.goes_on,
                event.usage,
                event.reserve,
                event.droppable,
                r.typed,
                r.start,
                self._larger(event.usage, event.reserve),
            )
        )

    def _overflows(self, overflow: Overflow) -> None:
        self._unresolved = overflow
        self._changes.append(overflow)

    def _larger(self, usage: Usage, reserve: int) -> int:
        """A context length that has room for four times the answer, a power of two where the model can hold that; 0
        where it cannot hold what is asked."""
        info = self.info
        if info is None or self._choice is None or info.trained_context <= usage.limit:
            return 0
        wanted = 1 << (usage.used + 4 * reserve - 1).bit_length()
        most = info.trained_context
        return min(max(wanted, 2 * usage.limit), most) if usage.used + reserve <= most else 0

    def _withdraw(self, r: Answering) -> None:
        """Restores the conversation as it was before a request that was refused."""
        self._end_replay()
        before = r.before
        self.conversation = replace(
            self.conversation,
            turns=before.turns,
            others=before.others,
            first=before.first,
            send_thinking=before.send_thinking,
        )
        if self._left and before.turns and self._left[-1] == before.turns[-1].id:
            self._left.pop()
        self.state = Idle()
        self._changes.append(Reset(r.start, self.conversation))
        if r.goes_on and r.before.turns:
            self._changes.append(Ended(len(r.before.turns) - 1, r.before.turns[-1]))
            self._store()

    # helpers

    def _start(
        self,
        conversation: Conversation,
        start: int,
        go_on: bool = False,
        round: int = 1,
        tool_choice: Literal["auto", "none"] = "auto",
    ) -> None:
        """Asks for the answer of `conversation`, whose turns differ from the shown ones from `start` on."""
        if self.backend is None or not self.ready:
            raise TinychatError("no model is loaded yet; wait for it or choose one with /model")
        p, last = conversation.parameters, conversation.turns[-1]
        seed = random.getrandbits(32) if p.seed is None else p.seed
        request = request_for(
            conversation,
            go_on=go_on,
            seed=seed,
            overflow="oldest" if p.drop_oldest else "refuse",
            tools=self._offered(),
            tool_choice=tool_choice,
            defaults=self.sampling_defaults,
        )
        watch = self.stop_repetition and not (go_on and last.stop_reason == "repeated")
        self._unresolved = None
        self._count.forget()
        self.titles.cancel()
        if len(conversation.others) > len(self.conversation.others):
            self._left.append(self.conversation.turns[-1].id)
        self.state = Answering(
            events=self.backend.answer(request),
            cancel=request.cancel,
            start=start,
            before=self.conversation,
            asked=conversation,
            typed=last if last.role == "user" and last not in self.conversation.turns else None,
            goes_on=go_on,
            seed=seed,
            round=round,
            before_tokens=int(last.stats.get("generated_tokens", 0)) if go_on else 0,
            thought_s=last.thinking_s if go_on else 0.0,
            repetition=Repetition(code=p.schema is not None) if watch else None,
        )
        if go_on:
            self.conversation = conversation.with_last(replace(last, stop_reason=""))
        else:
            self.conversation = conversation.add(Turn("assistant", "", raw=last.raw, model=conversation.model))
        self.trace = Trace()
        self._changes.append(Reset(start, self.conversation, live=True))

    def interrupt(self) -> None:
        """Ends the running answer or call now and keeps the text so far; later events of it are ignored."""
        self.titles.cancel()
        self._end_replay()
        if self.calling is not None:
            self.stop()
        if isinstance(self.state, Compacting):
            self.state.job.stop()
            if (overflow := self.state.overflow) is not None and overflow.typed is not None:
                self._changes.append(SentBack(overflow.typed))
            self.state = Idle()
        if self.running is not None:
            self._poll_answer(self.running)
        if (r := self.running) is not None:
            r.cancel.set()
            self.state = Stopping(r)
            self._finish("stopped", None)

    def _idle(self, what: str) -> None:
        if self.busy:
            raise TinychatError(f"an answer is being written; stop it with esc, then {what}")

    def _set(self, conversation: Conversation) -> None:
        self.conversation = conversation
        self._store()

    def _measure(self) -> None:
        """Counts the conversation at rest, on another thread; `poll` takes the result."""
        self._count.forget()
        limit = self.info.max_context if self.info else 0
        self.usage = replace(self.usage, limit=limit) if self.conversation.turns else Usage(limit=limit)
        if self.backend is not None and self.ready and self.conversation.sent:
            self._count.start(self.backend, request_for(self.conversation, tools=self._offered()))

    def _store(self) -> None:
        self.conversation = self._saver.save(self.conversation)


def _first_other(old: Conversation, new: Conversation) -> int:
    """The first turn in which two conversations differ."""
    both = zip(old.turns, new.turns)
    return next((i for i, (a, b) in enumerate(both) if a is not b), min(len(old.turns), len(new.turns)))


def _noted(note: str) -> Notice:
    return Notice(note, error=note.startswith(SLOW))


def _droppable(conversation: Conversation) -> int:
    """How many of the turns that are sent can be left out."""
    return max(0, len(conversation.questions) - 1)
