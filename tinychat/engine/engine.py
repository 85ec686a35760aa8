"""The engine: a GGUF file in, a stream of tokens out."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from tinychat.engine import snapshots
from tinychat.engine.answer import AnswerParser
from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import OnProgress, has_cuda, make_executor
from tinychat.engine.drafts import common_prefix
from tinychat.engine.expert_use import RecentExperts
from tinychat.engine.fit import context_bytes, fit
from tinychat.engine.gguf import GGUF
from tinychat.engine.grammar import Grammar, Matcher, Vocabulary, behind_thinking, calls_grammar
from tinychat.engine.kvstore import LEAST, CacheBlock, KVStore, Reason
from tinychat.engine.memory_limit import limit_of
from tinychat.engine.mtp import with_mtp
from tinychat.engine.plan import build_plan
from tinychat.engine.prompt import Chat
from tinychat.engine.sampling_defaults import sampling_defaults
from tinychat.engine.scanner import MARK, Fragment, TextKind
from tinychat.engine.session import OnPrefill, Session
from tinychat.engine.snapshots import Snapshots
from tinychat.engine.speculation import Source, Speculate
from tinychat.engine.stats import Stats, available_memory, rss_bytes
from tinychat.engine.tokenizer import Tokenizer
from tinychat.engine.tool_calls import ToolSchema
from tinychat.errors import TinychatError
from tinychat.kernels.executor import MeasurableExecutor
from tinychat.kernels.ops import Plan, weights_of
from tinychat.kernels.sampling import Sampling

EngineStopReason = Literal["eos", "length", "stopped", "context"]

DEFAULT_CONTEXT = 4096
_ROWS = struct.Struct("<Q")
DRY_BREAKERS = (b"\n", b":", b'"', b"*")  # as in llama.cpp (common/common.h, dry_sequence_breakers)


class Token(NamedTuple):
    """One generated token. `id` is None for text released without a new token (the end of a held-back piece).

    `text` is what became visible, maybe empty; of a call, more of its arguments, and `call` says of which one.
    `logprob` is under softmax of the model's logits. `source` "text", "mtp": a draft that was accepted; "grammar": the
    only token that was allowed, not chosen by the model.
    """

    id: int | None
    text: str
    kind: TextKind
    logprob: float = 0.0
    call: Fragment | None = None
    source: Source = ""


@dataclass(frozen=True)
class EngineInfo:
    """What is loaded, for people and panels. Sizes in bytes."""

    name: str
    path: Path
    architecture: str
    quant: str  # of most weight bytes: "Q4_K"
    parameters: int
    active_parameters: int
    layers: int
    experts: int
    experts_used: int
    trained_context: int
    max_context: int
    device: str
    threads: int
    weight_bytes: int
    kv_bytes_per_token: int
    file_bytes: int
    fingerprint: str  # GGUF.fingerprint(): keys saved caches and benchmarks
    sampling: Mapping[str, float]  # the file's defaults, by field of Sampling


@dataclass(frozen=True)
class Prepared:
    """A model file that was read and checked, all but its weights: `load` takes the memory."""

    gguf: GGUF
    config: ModelConfig
    plan: Plan
    tokenizer: Tokenizer
    chat: Chat
    max_context: int
    speculate: Speculate
    notes: tuple[str, ...]  # one line each, for the user
    seconds: float  # that preparing took

    def load(
        self,
        *,
        device: str | None = None,
        threads: int | None = None,
        store: KVStore | None = None,
        progress: OnProgress | None = None,
    ) -> Engine:
        """The engine, with its weights where they are needed. Raises TinychatError."""
        started, report = time.perf_counter(), progress or _silent
        report("loading weights", 0.0)
        executor, notes = make_executor(self.plan, self.gguf, self.max_context, device, threads, report)
        info = _describe(self.gguf, self.config, executor, self.max_context)
        load_s = self.seconds + time.perf_counter() - started
        return Engine(info, self.tokenizer, self.chat, executor, [*self.notes, *notes], load_s, store, self.speculate)

    def check_memory(self, device: str | None, freed: int) -> None:
        """Raises TinychatError when weights and KV cache need more than the available memory and `freed` bytes, those
        of a model that is unloaded first. A GPU's memory is checked by its executor, after the unloading."""
        if not (device or "").startswith("cuda") and not has_cuda() and (available := available_memory()):
            rows = context_bytes(self.plan, self.max_context)
            needs = fit(self.plan.nbytes, rows, self.max_context, available + freed)
            if needs.verdict == "does not fit":
                raise TinychatError(f"not enough memory: {needs.explanation}; take a smaller quant or context")


def prepare(
    path: str | Path,
    *,
    max_context: int | None = None,
    preset: str | None = None,
    speculate: Speculate = "auto",
    progress: OnProgress | None = None,
) -> Prepared:
    """Reads and checks header, plan, tokenizer and chat template; the parameters are those of Engine.load. Raises
    TinychatError."""
    started, report = time.perf_counter(), progress or _silent
    report("reading the header", 0.0)
    gguf = GGUF.open(path)
    config = ModelConfig.from_gguf(gguf)
    notes, plan = [], build_plan(gguf, config)
    if speculate:
        try:
            gguf, plan = with_mtp(gguf, config)
        except TinychatError as e:
            notes.append(f"the model's multi-token prediction is not used: {e}")
    if max_context is None:
        max_context = min(DEFAULT_CONTEXT, config.context)
    if max_context > config.context:  # the default of the user's settings may be larger than a small model's context
        notes.append(
            f"the context is {config.context:,} tokens, not {max_context:,}: the model was trained for no more"
        )
        max_context = config.context
    if max_context < 1:
        raise TinychatError(
            f"a context of {max_context:,} tokens is not possible; this model has 1 to {config.context:,}"
        )
    report("building the tokenizer", 0.0)
    tokenizer = Tokenizer(gguf.metadata)
    if tokenizer.n_vocab > config.vocab:
        raise TinychatError(
            f"the tokenizer has {tokenizer.n_vocab:,} tokens, token_embd.weight only {config.vocab:,} rows"
        )
    chat = Chat(gguf.metadata, tokenizer, preset=preset)
    seconds = time.perf_counter() - started
    return Prepared(gguf, config, plan, tokenizer, chat, max_context, speculate, tuple(notes), seconds)


def _silent(stage: str, fraction: float) -> None:
    pass


class Engine:
    """A loaded model. One thread calls it (`backend.local` gives it one of its own)."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer,
        chat: Chat,
        executor: MeasurableExecutor,
        notes: list[str],
        load_s: float,
        store: KVStore | None,
        speculate: Speculate = "auto",
    ) -> None:
        self.info, self.tokenizer, self.chat, self.executor = info, tokenizer, chat, executor
        self.plan = plan = executor.plan
        self.store = store
        self.notes = notes  # one-line remarks for the user: a slower device, a template that failed
        self.stop_reason: EngineStopReason = "stopped"
        self.stats = Stats(
            load_s=load_s,
            weight_bytes=executor.weight_bytes,
            kv_bytes=executor.cache_bytes + snapshots.memory(plan),
            kv_bytes_per_token=plan.kv_bytes_per_token,
            context_max=info.max_context,
            kernels_per_token=executor.kernels_per_token,
            jit_batches=executor.jit_batches,
            jit_state=executor.jit_state,
            bytes_per_token=plan.bytes_per_token(),
            limit_gb_s=limit_of(executor),
            rss_bytes=rss_bytes(),
        )
        self.session = Session(executor, plan, info.max_context, self.stats, speculate)
        self.experts = RecentExperts.of(plan)
        self.watch_experts = False  # any thread may switch it

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        max_context: int | None = None,
        device: str | None = None,
        threads: int | None = None,
        preset: str | None = None,
        store: KVStore | None = None,
        speculate: Speculate = "auto",
        progress: OnProgress | None = None,
    ) -> Engine:
        """Loads a GGUF.

        `max_context` in tokens (default: 4096), at most what the model was trained for; `device`: None (the best
        that works), "cuda" (the fastest GPU with room for it; "cuda:1" is GPU 1), "cpu" or "reference"; `preset` forces
        a chat format; `store` is where saved KV caches are looked for; `speculate`: how many drafts a decode step
        verifies. Unless that is 0, the model's multi-token prediction is loaded too, from its own file or from
        mtp-NAME.gguf beside it. Raises TinychatError.
        """
        prepared = prepare(path, max_context=max_context, preset=preset, speculate=speculate, progress=progress)
        return prepared.load(device=device, threads=threads, store=store, progress=progress)

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        *,
        raw: bool = False,
        tools: Sequence[ToolSchema] = (),
        grammar: Grammar | None = None,
        on_prefill: OnPrefill | None = None,
        stop: threading.Event | None = None,
        asked: float | None = None,
        rendering: tuple[float, float] = (0.0, 0.0),
    ) -> Generator[Token, None, None]:
        """Prefills what the cache does not hold of `prompt_ids`, then yields tokens until `stop_reason` is set.

        eos: the model ended its answer; length: `max_tokens`; context: the cache is full; stopped: `stop` was set or
        the caller closed the iterator. `raw`: special tokens are written out and thinking is not told from the answer.
        `asked` is the time.perf_counter() of the request, from which TTFT counts; by default that of this call.
        `rendering`: seconds that the prompt's template and its tokenisation took since then, for the statistics.
        `tools`: calls of these, which the prompt was rendered with, are told from the answer. `grammar`: the answer is
        held to it. Raises TinychatError for a grammar that is wrong.
        """
        self.stop_reason = "stopped"
        s, started = self.stats, time.perf_counter() if asked is None else asked
        s.generated_tokens = s.decode_steps = s.drafted_tokens = s.accepted_tokens = s.forced_tokens = 0
        s.mtp_drafted_tokens = s.mtp_accepted_tokens = 0
        s.wait_s = s.ttft_s = s.decode_s = s.decode_tok_s = s.last_tok_s = s.gb_s = s.limit_share = 0.0
        s.speculation_gain = 0.0
        s.first_token_s = s.token_s = s.sampling_s = s.detokenise_s = 0.0
        s.template_s, s.tokenise_s = rendering
        if asked is not None:
            s.wait_s = max(0.0, time.perf_counter() - asked - s.template_s - s.tokenise_s)
        try:
            if max_tokens is not None and max_tokens < 1:
                self.stop_reason = "length"
                return
            matcher = Matcher(self.vocabulary, grammar) if grammar else None
            self._restore_cache(prompt_ids)
            if self.session.prefill(prompt_ids, on_prefill, stop):
                yield from self._answer(
                    prompt_ids, sampling or Sampling(), max_tokens, raw, tools, matcher, stop, started
                )
        finally:
            s.phase, s.rss_bytes = "idle", rss_bytes()
            s.kernels_per_token, s.jit_batches = self.executor.kernels_per_token, self.executor.jit_batches

    def _answer(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        max_tokens: int | None,
        raw: bool,
        tools: Sequence[ToolSchema],
        matcher: Matcher | None,
        stop: threading.Event | None,
        started: float,
    ) -> Iterator[Token]:
        parser = AnswerParser() if raw else self.chat.parser(prompt, tools, marked=True)
        text = self.tokenizer.decoder(special=raw, show=self.chat.shown_ids(parser), mark=MARK)
        s = self.stats
        clock = _Clock(s, self.plan, started)
        self.stop_reason = "context"
        if sampling.dry_multiplier > 0 and not sampling.dry_breakers:
            sampling = replace(sampling, dry_breakers=self._dry_breakers)
        steps = self.session.decode(prompt[-1], sampling, prompt, matcher)
        try:
            for token, logprob, source in steps:
                clock.tick(len(self.session.tokens))
                s.jit_state = self.executor.jit_state
                if source != "grammar":
                    if self.watch_experts and self.experts:
                        self.experts.add(self.executor.routes())
                    s.sampling_s += self.executor.sampling_s
                if token in self.tokenizer.stop_ids:
                    self.stop_reason = "eos"
                    if raw:
                        yield Token(token, text.feed(token), "answer", logprob, source=source)
                    break
                came = time.perf_counter()
                made = list(_tokens(token, parser.feed(text.feed(token)), parser, logprob, source))
                s.detokenise_s += time.perf_counter() - came
                yield from made
                if max_tokens is not None and self.stats.generated_tokens >= max_tokens:
                    self.stop_reason = "length"
                    break
                if stop and stop.is_set():
                    self.stop_reason = "stopped"
                    break
        except GeneratorExit:
            self.stop_reason = "stopped"
            raise
        finally:
            steps.close()  # type: ignore[attr-defined]
        # Within a character only the model's own end flushes: a stopped answer may be continued with the missing bytes.
        rest = text.flush() if self.stop_reason == "eos" else ""
        yield from _tokens(None, parser.feed(rest) + parser.flush(), parser)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens as grammars see them; made when the first grammar comes."""
        return Vocabulary(self.tokenizer, self.plan.vocab)

    def schema_grammar(self, schema: object, prompt_ids: Sequence[int]) -> Grammar:
        """The grammar of a JSON schema, behind the thinking where the prompt has opened it. Raises TinychatError."""
        grammar = Grammar.from_schema(schema)
        if not self.chat.opens_thinking(prompt_ids):
            return grammar
        closing = self.tokenizer.token_id(self.chat.think_tags[1]) if self.chat.think_tags else None
        if closing is None:
            raise TinychatError("this model's thinking tags are no tokens; ask it not to think")
        return behind_thinking(grammar, closing)

    def text_grammar(self, text: str, prompt_ids: Sequence[int]) -> Grammar:
        """The grammar that `text` is, in llama.cpp's GBNF or llguidance's Lark. Raises TinychatError."""
        if self.chat.opens_thinking(prompt_ids):
            raise TinychatError("a grammar holds the whole answer, thinking too; ask the model not to think")
        return Grammar.from_lark(text)

    def calls_grammar(self, tools: Sequence[ToolSchema], prompt_ids: Sequence[int], parallel: bool = True) -> Grammar:
        """The grammar under which an answer to the prompt has to call some of `tools`, perhaps behind thinking."""
        chat = self.chat
        tags = chat.think_tags if chat.think_tags and self.tokenizer.token_id(chat.think_tags[1]) is not None else None
        opened = chat.opens_thinking(prompt_ids)
        return calls_grammar(chat.answer_format, tools, self.tokenizer, thinking=tags, opened=opened, parallel=parallel)

    def logits(self, ids: Sequence[int], decode: bool = False) -> np.ndarray:
        """float32 (len(ids), n_vocab) from an empty cache; `decode` goes one token at a time through the decode
        step."""
        return self.session.logits(ids, decode)

    def save_cache(
        self,
        tag: str = "",
        reason: Reason = "idle",
        seconds: float = math.inf,
        stop: threading.Event | None = None,
    ) -> bool:
        """Writes what is new in the KV cache to the store, for `generate` to find when a conversation is reopened.

        `tag` names the conversation (KVStore.forget). True when all of it is saved; else the next call goes on where
        `seconds` or `stop` ended this one.
        """
        if not self.store or not self.session.tokens:
            return False
        self.session.complete()
        cost = self.store.save(
            self.info.fingerprint,
            self._layout,
            self.session.tokens,
            self._read_block,
            tag=tag,
            reason=reason,
            seconds=seconds,
            stop=stop,
            least=1 if self.plan.state_bytes else LEAST,  # the end is what has the last state
        )
        self.stats.save_s, self.stats.saved_rows, self.stats.saved_bytes = cost.seconds, cost.rows, cost.nbytes
        return cost.whole

    def overwritten(self, prompt: Sequence[int]) -> int:
        """How many rows that the KV cache holds are not of `prompt`."""
        return len(self.session.tokens) - common_prefix(self.session.tokens, prompt)

    @contextmanager
    def cache_kept(self) -> Iterator[None]:
        """Restores the KV cache after a block that uses it for other tokens."""
        s, executor = self.session, self.executor
        s.complete()
        kept, state = (s.tokens, s.state_at, s.snapshots), executor.read_state()
        rows = executor.read_cache(0, len(s.tokens)) if s.tokens else b""
        s.tokens, s.state_at, s.snapshots = [], 0, Snapshots(snapshots.kept(self.plan))
        try:
            yield
        finally:
            s.tokens, s.state_at, s.snapshots = kept
            if s.tokens:
                executor.write_cache(rows, 0, len(s.tokens))
            if s.mtp:
                s.mtp.rows = len(s.tokens)
            executor.write_state(state)

    @contextmanager
    def speculating(self, mode: Speculate) -> Iterator[None]:
        """Sets another mode of speculation within a block."""
        own = self.session.speculation
        self.session.speculate(mode)
        try:
            yield
        finally:
            self.session.speculation = own

    @cached_property
    def _dry_breakers(self) -> tuple[int, ...]:
        """The ids of all tokens that contain one of DRY_BREAKERS."""
        t = self.tokenizer
        return tuple(i for i in range(t.n_vocab) if any(b in t.token_bytes(i) for b in DRY_BREAKERS))

    def _restore_cache(self, prompt: Sequence[int]) -> None:
        """Takes the blocks of a saved cache that hold more of `prompt` than the present one."""
        self.stats.restored_rows, self.stats.restore_s = 0, 0.0
        if not self.store:
            return
        started, held = time.perf_counter(), common_prefix(self.session.tokens, prompt)
        if not self.executor.reaches(held):  # rows that layers with a window have lost may be on the disk
            held = 0
        saved = self.store.best(self.info.fingerprint, self._layout, prompt, self.info.max_context)
        if saved and saved.usable > held:
            self.session.cut(held)
            for block, rows in self.store.read(saved, beyond=held):
                self._write_block(block, rows, saved.usable)
            self.session.cut(saved.usable)
            if self.executor.reaches(len(self.session.tokens)):
                self.stats.restored_rows = len(self.session.tokens) - held
        self.stats.restore_s = time.perf_counter() - started

    # A saved block of a plan with a state is the size of its rows (_ROWS), the rows, and the state behind them where
    # that is the last one known or the last snapshot.

    @property
    def _layout(self) -> str:
        return self.executor.cache_layout + (", with states" if self.plan.state_bytes else "")

    def _read_block(self, first: int, rows: int) -> bytes:
        data, end, s = self.executor.read_cache(first, rows), first + rows, self.session
        if not self.plan.state_bytes:
            return data
        state = s.state(end) if end in (len(s.tokens), s.snapshots.newest()) else b""
        return _ROWS.pack(len(data)) + data + state

    def _write_block(self, block: CacheBlock, data: bytes, usable: int) -> None:
        n, end = len(block.tokens), block.first + len(block.tokens)
        if self.plan.state_bytes:
            size = _ROWS.size + _ROWS.unpack_from(data)[0]
            if len(data) > size and end <= usable:
                self.session.snapshots.add(end, memoryview(data)[size:])
            data = data[_ROWS.size : size]
        self.executor.write_cache(data, block.first, n)
        self.session.restored(block.first, block.tokens)

    @property
    def tokens(self) -> list[int]:
        """The ids whose rows the KV cache holds."""
        return self.session.tokens

    def close(self) -> None:
        """Frees the model; the engine is not used again."""
        self.session.tokens = []
        self.executor.close()


def _tokens(
    token: int | None, found: Sequence[Fragment], parser: AnswerParser, logprob: float = 0.0, source: Source = ""
) -> Iterator[Token]:
    """The token, with the text it released; a second fragment (across a tag) has no id."""
    if not found and token is not None:
        yield Token(token, "", parser.kind, logprob, source=source)
    for i, fragment in enumerate(found):
        call = fragment if fragment.kind == "call" else None
        yield Token(token if i == 0 else None, fragment.text, fragment.kind, logprob, call, source)


class _Clock:
    """Keeps the decode figures of Stats, token by token."""

    def __init__(self, stats: Stats, plan: Plan, started: float) -> None:
        self.stats, self.plan, self.started, self.prefilled = stats, plan, started, time.perf_counter()
        self.first = 0.0
        self.times: deque[float] = deque(maxlen=512)

    def tick(self, depth: int) -> None:
        """A token came; the cache holds `depth` rows."""
        now, s = time.perf_counter(), self.stats
        s.generated_tokens += 1
        s.context_used = depth
        self.times.append(now)
        if s.generated_tokens == 1:
            self.first = now
            s.phase, s.ttft_s = "decode", now - self.started
            s.first_token_s = now - self.prefilled
            return
        s.decode_s = now - self.first
        s.decode_tok_s = (s.generated_tokens - 1) / s.decode_s
        s.token_s = 1 / s.decode_tok_s
        while len(self.times) > 2 and now - self.times[0] > 0.5:
            self.times.popleft()
        s.last_tok_s = (len(self.times) - 1) / (now - self.times[0])
        s.bytes_per_token = self.plan.bytes_per_token(depth)
        s.gb_s = s.bytes_per_token * max(0, s.decode_steps - 1) / s.decode_s / 1e9  # a step reads the weights once
        s.limit_share = s.gb_s / s.limit_gb_s if s.limit_gb_s else 0.0


def _describe(gguf: GGUF, config: ModelConfig, executor: MeasurableExecutor, max_context: int) -> EngineInfo:
    plan = executor.plan
    used = {w.tensor for op in plan.ops for w in weights_of(op)}
    parameters = sum(math.prod(gguf.tensors[name].shape) for name in used)
    idle = 0
    if e := config.experts:
        per_expert = sum(math.prod(gguf.tensors[n].shape) for n in used if "_exps." in n) // e.count
        idle = per_expert * (e.count - e.used)
    quants = Counter[str]()
    for name in used:
        quants[gguf.tensors[name].type.name] += gguf.tensors[name].nbytes
    return EngineInfo(
        name=config.name,
        path=gguf.path,
        architecture=config.architecture,
        quant=quants.most_common(1)[0][0],
        parameters=parameters,
        active_parameters=parameters - idle,
        layers=config.layers,
        experts=config.experts.count if config.experts else 0,
        experts_used=config.experts.used if config.experts else 0,
        trained_context=config.context,
        max_context=max_context,
        device=executor.device,
        threads=executor.threads,
        weight_bytes=executor.weight_bytes,
        kv_bytes_per_token=plan.kv_bytes_per_token,
        file_bytes=gguf.nbytes,
        fingerprint=gguf.fingerprint(),
        sampling=sampling_defaults(gguf.metadata),
    )
