"""A backend on this machine: an engine on a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from tinychat.backend import saved
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.instruments import EngineJob, ExpertCounts, JobDone, JobEvent, JobProgress, TokenText
from tinychat.backend.prompting import PromptMaker, RenderedPrompt, offered
from tinychat.backend.protocol import (
    Backend,
    Capabilities,
    DoesNotFit,
    Event,
    Failed,
    Finished,
    ModelInfo,
    OldModelLost,
    Piece,
    Prefilling,
    Prompted,
    Queued,
    Request,
    StopReason,
    TokenPiece,
    ToolCall,
    Usage,
)
from tinychat.backend.stops import StopStrings
from tinychat.backend.stream import EventStream
from tinychat.engine.devices import OnProgress
from tinychat.engine.engine import Engine, prepare
from tinychat.engine.grammar import Grammar, Matcher
from tinychat.engine.kvstore import LEAST, KVStore
from tinychat.engine.speculation import Speculate
from tinychat.engine.stats import Stats
from tinychat.errors import TinychatError, shortage

T = TypeVar("T")
SWITCH_SAVE_S = 0.5  # seconds that another conversation waits while the rows of the one before are saved
EXIT_SAVE_S = 3.0


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A request or job that has not begun. If `cancel` is set before it begins, `stopped` is its only event."""

    cancel: threading.Event
    stream: EventStream[Any]
    stopped: Event


class LocalBackend:
    """Answers requests one at a time, in the order of the calls. `open` makes one.

    Only the engine's thread touches the engine; other threads get values. What is written by one thread and read by
    others without the lock is replaced by a new value, never changed in place.
    """

    def __init__(self, engine: Engine, thread: EngineThread) -> None:
        self._engine: Engine | None = engine
        self._thread = thread
        self._prompts = PromptMaker(engine)
        self._prompt: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._running: _Waiting | None = None  # what the engine's thread does now
        self._closed = False
        self._conversation = ""  # whose rows the KV cache holds
        self._forgotten = set[str]()
        self._saved = True  # whether all of those rows are on the disk
        self._wanted = threading.Event()  # set while a request waits: saving then ends between two blocks
        self._info, self._stats = _describe(engine), _copy(engine.stats)
        self._noted = {engine.chat.fallback}  # what was said of the template

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        replaces: Backend | None = None,
        thread: EngineThread | None = None,
        max_context: int | None = None,
        preset: str | None = None,
        device: str | None = None,
        threads: int | None = None,
        store_bytes: int = 0,
        speculate: Speculate = "auto",
        progress: OnProgress | None = None,
    ) -> LocalBackend:
        """Loads the GGUF at `path`; returns when it is loaded. `store_bytes` is how much of the disk saved KV
        caches may take, 0 saves none; the other parameters are those of Engine.load.

        Header, plan, tokenizer, template and memory are checked first; only then is `replaces` closed and its memory
        freed. `progress` is called on the engine's thread, which is `thread`, that of `replaces`, or a new one. Raises
        TinychatError.
        """
        old = replaces if isinstance(replaces, LocalBackend) else None
        thread = thread or (old._thread if old else EngineThread())

        def load() -> LocalBackend:
            store = KVStore(store_bytes) if store_bytes else None
            prepared = prepare(path, max_context=max_context, preset=preset, speculate=speculate, progress=progress)
            prepared.check_memory(device, freed=old._bytes() if old else 0)
            if replaces is not None:
                replaces.close()
            if old is not None:
                old._unload()
            try:
                engine = _in_one_line(
                    lambda: prepared.load(device=device, threads=threads, store=store, progress=progress)
                )
            except TinychatError as e:
                raise (e if replaces is None else OldModelLost(str(e))) from None
            return cls(engine, thread)

        return thread.call(lambda: _in_one_line(load))

    @property
    def info(self) -> ModelInfo:
        return self._info

    def answer(self, request: Request) -> EventStream[Event]:
        stream: EventStream[Event] = EventStream()
        stopped = Finished("stopped", Usage(limit=self._info.max_context), self.snapshot().of_model())
        asked = time.perf_counter()
        self._submit(
            _Waiting(request.cancel, stream, stopped), lambda: self._answer(request, stream, asked), self._save
        )
        return stream

    def measure(self, request: Request) -> Usage:
        def job() -> Usage:
            if self._closed or request.cancel.is_set():
                raise TinychatError("the measuring was cancelled")
            return self._prompts.measure(request)

        return self._thread.call(lambda: _in_one_line(job))

    def snapshot(self) -> Stats:
        engine = self._engine
        return _copy(engine.stats) if engine else self._stats

    def close(self) -> None:
        with self._lock:
            self._closed = True
            asked = [*self._waiting, *([self._running] if self._running else [])]
        for one in asked:
            one.cancel.set()
        self._thread.submit(self._unload)

    # Instrumented

    def run_job(self, job: EngineJob, cancel: threading.Event) -> EventStream[JobEvent]:
        stream: EventStream[JobEvent] = EventStream()

        def report(text: str, fraction: float) -> None:
            self._end_cancelled()
            stream.put(JobProgress(text, fraction))

        stopped = Failed("stopped before it began; nothing was measured")
        run = _Waiting(cancel, stream, stopped)
        self._submit(run, lambda: stream.put(JobDone(job(self._loaded(), report, cancel))))
        return stream

    def last_prompt(self) -> tuple[int, ...]:
        return self._prompt

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        t = self._loaded().tokenizer
        return [TokenText(i, t.token_text(i), t.is_special(i), t.token_bytes(i)) for i in ids]

    def forget(self, conversation: str) -> None:
        self._forgotten.add(conversation)
        saved.forget(conversation)

        def again() -> None:
            saved.forget(conversation)  # blocks that were being written

        self._thread.submit(again)

    def watch_experts(self, on: bool) -> None:
        if self._engine is not None:
            self._engine.watch_experts = on

    def experts(self) -> ExpertCounts | None:
        e = self._engine.experts if self._engine is not None else None
        return ExpertCounts(e.layers, e.experts, e.used, e.tokens, e.counts(), e.known) if e else None

    # Tokenizing

    def tokenize(self, text: str, *, special: bool, whole: bool) -> list[int]:
        t = self._loaded().tokenizer
        return t.encode_prompt(text) if whole and special else t.encode(text, special)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._loaded().tokenizer.decode(ids, special=True)

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [*map(self._loaded().tokenizer.token_bytes, ids)]

    def prompt_text(self, request: Request) -> str:
        return self._thread.call(lambda: _in_one_line(lambda: self._prompts.text(request)))

    # any thread

    def _submit(self, one: _Waiting, job: Callable[[], None], afterwards: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._wanted.set()
            closed, ahead = self._closed, len(self._waiting) + (self._running is not None)
            if not closed:
                if ahead and isinstance(one.stopped, Finished):
                    one.stream.put(Queued(ahead))
                self._waiting.append(one)
        if closed:
            one.stream.put(Failed("the model was unloaded", "invalid"))
            one.stream.end()
            return
        self._thread.submit(lambda: self._run(one, job, afterwards))

    def _bytes(self) -> int:
        return self._stats.weight_bytes + self._stats.kv_bytes

    def _loaded(self) -> Engine:
        if self._engine is None:
            raise TinychatError("the model was unloaded")
        return self._engine

    # the engine's thread

    def _run(self, one: _Waiting, job: Callable[[], None], afterwards: Callable[[], None] | None) -> None:
        with self._lock:
            if one not in self._waiting:
                return  # it was cancelled while it waited, and its stream has ended
            self._waiting.remove(one)
            self._running = one
            if not self._waiting:
                self._wanted.clear()
        try:
            one.stream.put(one.stopped) if one.cancel.is_set() else _in_one_line(job)
        except TinychatError as e:
            one.stream.put(Failed(str(e)))
        finally:
            with self._lock:
                self._running = None
            one.stream.end()
        if afterwards:
            with suppress(TinychatError):
                _in_one_line(afterwards)

    def _end_cancelled(self) -> None:
        """Ends the streams of requests that were cancelled while they waited. Called with every token, prefill chunk
        and report of a job."""
        if not self._waiting:
            return
        with self._lock:
            cancelled = [one for one in self._waiting if one.cancel.is_set()]
            self._waiting = [one for one in self._waiting if one not in cancelled]
        for one in cancelled:
            one.stream.put(one.stopped)
            one.stream.end()

    def _answer(self, request: Request, stream: EventStream[Event], asked: float) -> None:
        if (refusal := _refusal(request, self._loaded().plan.vocab)) is not None:
            stream.put(refusal)
            return
        try:
            prompt = self._prompts.make(request)
            grammar = None if isinstance(prompt, DoesNotFit) else _grammar(self._loaded(), request, prompt.ids)
        except TinychatError as e:
            stream.put(Failed(str(e), "invalid"))
            return
        self._end_cancelled()
        if isinstance(prompt, DoesNotFit):
            stream.put(prompt)
            return
        if not self._saved and self._switches(request.conversation, prompt.ids):
            self._save("switch", SWITCH_SAVE_S)
        self._prompt, self._conversation, self._saved = tuple(prompt.ids), request.conversation, False
        note = "" if (fallback := self._loaded().chat.fallback) in self._noted else fallback
        self._noted.add(fallback)
        stream.put(Prompted(prompt.usage, prompt.dropped, note))
        if request.cancel.is_set():
            stream.put(Finished("stopped", prompt.usage, self.snapshot().of_model()))
            return
        self._generate(request, prompt, grammar, stream, asked)

    def _switches(self, conversation: str, prompt: Sequence[int]) -> bool:
        """Whether the KV cache holds another conversation. One without a name, as a client of the server has it, is
        another when it does not go on from what is held."""
        if conversation or self._conversation:
            return conversation != self._conversation
        return self._loaded().overwritten(prompt) >= LEAST

    def _generate(
        self,
        request: Request,
        prompt: RenderedPrompt,
        grammar: Grammar | None,
        stream: EventStream[Event],
        asked: float,
    ) -> None:
        engine, stops, count, calls = self._loaded(), StopStrings(request.stop), 0, set[int]()

        def prefilling(done: int, total: int, reused: int) -> None:
            self._end_cancelled()
            stream.put(Prefilling(done, total, reused))

        with closing(
            engine.generate(
                prompt.ids,
                request.sampling,
                request.max_tokens,
                raw=request.raw is not None,
                tools=offered(request),
                grammar=grammar,
                on_prefill=prefilling,
                stop=request.cancel,
                asked=asked,
                rendering=(self._prompts.template_s, self._prompts.tokenise_s),
            )
        ) as tokens:
            for token in tokens:
                count += token.id is not None
                if token.kind == "call":
                    if piece := token.call:
                        calls.discard(piece.index) if piece.note else calls.add(piece.index)
                        stream.put(ToolCall(piece.index, piece.text, piece.id, piece.name, piece.note))
                    self._end_cancelled()
                    continue
                text = stops.feed(token.text) if token.kind == "answer" else token.text
                if token.id is not None:
                    chosen = TokenPiece(token.id, text, token.logprob, source=token.source)
                    stream.put(Piece(token.kind, text, (chosen,)))
                elif text:
                    stream.put(Piece(token.kind, text))
                if stops.found:
                    break
                self._end_cancelled()
        reason: StopReason = "stop" if stops.found else engine.stop_reason
        if calls and reason == "eos":
            reason = "tool_calls"
        if rest := stops.flush():
            stream.put(Piece("answer", rest))
        stats = self.snapshot()
        usage = replace(prompt.usage, answer=prompt.usage.answer + count, cached=stats.reused_tokens)
        stream.put(Finished(reason, usage, stats, stops.found))

    def _save(self, reason: Literal["idle", "switch", "exit"] = "idle", seconds: float = math.inf) -> None:
        """Saves what is new in the KV cache, until another request waits: "idle" runs after an answer's last event."""
        if self._engine is not None and self._conversation not in self._forgotten:
            stop = self._wanted if reason == "idle" else None
            self._saved = self._engine.save_cache(self._conversation, reason, seconds, stop)

    def _unload(self) -> None:
        if self._engine is not None:
            if not self._saved:
                with suppress(TinychatError):
                    _in_one_line(lambda: self._save("exit", EXIT_SAVE_S))
            self._stats = _copy(self._engine.stats)
            engine, self._engine = self._engine, None
            engine.close()


def _in_one_line(job: Callable[[], T]) -> T:
    """The value of `job`. Raises TinychatError, of one line, for every exception in it."""
    try:
        return job()
    except TinychatError:
        raise
    except Exception as e:  # an exception in a job must not end the engine's thread
        if short := shortage(e):
            raise TinychatError(short) from None
        raise TinychatError(f"internal error: {type(e).__name__}: {e}") from e


def _refusal(request: Request, vocab: int) -> Failed | None:
    """What the request asks for and this backend cannot do, with a vocabulary of `vocab` tokens; None when it can do
    all of it."""
    kind, field, why = (request.response_format or {}).get("type", "text"), "", ""
    if kind not in ("text", "json_object", "json_schema", "grammar"):
        field, why = "response_format", "has an unknown type; text, json_object, json_schema and grammar are known"
    elif kind != "text" and request.continue_final and request.messages[-1].get("content"):
        field, why = "response_format", "cannot be held by an answer that goes on; ask for it again"
    elif any(not 0 <= i < vocab for i, _ in request.sampling.logit_bias):
        field, why = "logit_bias", f"has an id outside the vocabulary of {vocab:,} tokens"
    elif request.logprobs:
        field, why = "top_logprobs", "other tokens than the chosen ones are not told by this engine; 0 is possible"
    elif request.template_kwargs:
        field = f"chat_template_kwargs.{next(iter(request.template_kwargs))}"
        why = "is not supported by this engine"
    return Failed(f"{field}: {why}", "invalid", field=field) if field else None


def _grammar(engine: Engine, request: Request, prompt: Sequence[int]) -> Grammar | None:
    """What the answer has to be: calls, where the request demands some; or its response format. Raises
    TinychatError."""
    tools, wanted, grammar = offered(request), request.response_format or {}, None
    if tools and request.tool_choice != "auto":
        grammar = engine.calls_grammar(tools, prompt)
    elif wanted.get("type") == "json_object":
        grammar = engine.schema_grammar({"type": "object"}, prompt)
    elif wanted.get("type") == "json_schema":
        grammar = engine.schema_grammar((wanted.get("json_schema") or {}).get("schema"), prompt)
    elif wanted.get("type") == "grammar":
        grammar = engine.text_grammar(wanted["grammar"], prompt)
    if grammar:
        Matcher(engine.vocabulary, grammar)  # raises for what is not supported
    return grammar


def _describe(engine: Engine) -> ModelInfo:
    known = {f.name for f in fields(ModelInfo)}
    can = Capabilities(
        thinking=engine.chat.think_tags is not None,
        tools=True,
        logprobs=True,
        continue_final=True,
        exact_counts=True,
        instruments=True,
    )
    notes = tuple(filter(None, (*engine.notes, engine.chat.fallback)))
    return ModelInfo(**{k: v for k, v in vars(engine.info).items() if k in known}, can=can, notes=notes)


def _copy(stats: Stats) -> Stats:
    """The figures of this moment. One call in C copies them, so that no thread writes between two of them."""
    return Stats(**vars(stats))
