"""A backend that says what a script tells it, at a given speed, for tests and for looking at the app.

Prefix reuse, chunked prefill, the context limit, thinking and stop behave as in the real one.
`python -m tests.support.scripted` is a demo of the app.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.instruments import EngineJob, ExpertCounts, JobDone, JobEvent, JobProgress, TokenText
from tinychat.backend.prompting import PromptMaker
from tinychat.backend.protocol import (
    Backend,
    Capabilities,
    DoesNotFit,
    Event,
    Failed,
    Finished,
    ModelInfo,
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
from tinychat.chat.loading import OpenBackend
from tinychat.engine.answer import AnswerParser
from tinychat.engine.drafts import common_prefix
from tinychat.engine.scanner import Fragment
from tinychat.engine.stats import Stats, rss_bytes
from tinychat.engine.tool_calls import PLAIN, as_plain
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import Sampling

CHUNK = 256  # tokens that one event of the prefill stands for
INFO = ModelInfo(
    name="scripted:1b",
    path=Path("/nowhere/scripted-1b-Q4_K_M.gguf"),
    architecture="llama",
    quant="Q4_K",
    parameters=1_240_000_000,
    active_parameters=1_240_000_000,
    layers=16,
    experts=0,
    experts_used=0,
    trained_context=131072,
    max_context=4096,
    device="CPU · 2 threads",
    threads=2,
    weight_bytes=770_000_000,
    kv_bytes_per_token=32768,
    file_bytes=808_000_000,
    fingerprint="scripted",
    can=Capabilities(
        thinking=True, tools=True, logprobs=True, continue_final=True, exact_counts=True, instruments=True
    ),
)
SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>", "</think>")


@dataclass
class Script:
    """What the backend does. `answers` are given in turn (the last one for ever), or made from the prompt's text.

    `rate` and `prefill_rate` are tokens per second, 0 = at once; `load_s` is spread over five progress reports;
    `fail_load` and `fail_after` (tokens) raise; `busy_s` burns Python time per token (an engine that does not release
    the GIL). `hold` is called on the engine's thread before each step, with "load", "prefill" or "token": who waits in
    it keeps the backend there, whatever a busy machine does meanwhile.
    """

    answers: Sequence[str] | Callable[[str], str] = ("Hello! How can I help?",)
    rate: float = 0
    prefill_rate: float = 0
    load_s: float = 0
    fail_load: str = ""
    fail_after: int | None = None
    busy_s: float = 0
    hold: Callable[[str], object] = lambda step: None
    info: ModelInfo = INFO
    prompts: MutableSequence[str] = field(default_factory=list)  # what was asked, in order, for assertions
    samplings: MutableSequence[Sampling] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)


class Words:
    """A tokenizer of words with the blanks before them; special strings are one token each."""

    def __init__(self) -> None:
        self.texts: list[str] = list(SPECIAL)
        self._ids = {text: i for i, text in enumerate(SPECIAL)}
        self._lock = threading.Lock()
        self._special = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")

    def encode(self, text: str, special: bool = False) -> list[int]:
        parts = self._special.split(text) if special else [text]
        pieces = [
            p
            for part in parts
            for p in ([part] if special and part in SPECIAL else re.findall(r"\s?[^\s]{1,6}|\s", part))
        ]
        with self._lock:
            for piece in pieces:
                if piece not in self._ids:
                    self._ids[piece] = len(self.texts)
                    self.texts.append(piece)
            return [self._ids[p] for p in pieces]

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text, special=True)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return "".join(self.texts[i] for i in ids if special or i >= len(SPECIAL))

    def token_text(self, token: int) -> str:
        return self.texts[token]

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode(errors="replace")

    def is_special(self, token: int) -> bool:
        return token < len(SPECIAL)

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)


class ScriptedChat:
    """Renders as the engine's Chat does, tools as for a template without any."""

    template_s = tokenise_s = 0.0
    think_tags = ("<think>", "</think>")

    def __init__(self, tokenizer: Words) -> None:
        self._tokenizer = tokenizer

    def text(
        self,
        messages: Sequence[dict[str, Any]],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        out = []
        if tools or any(m["role"] == "tool" for m in messages):
            messages = as_plain(messages, tools)
        for i, m in enumerate(messages):
            last = i == len(messages) - 1
            reasoning = m.get("reasoning_content")
            if reasoning and last and continue_final and not m["content"]:
                body = f"<think>\n{reasoning}"
            elif reasoning:
                body = f"<think>\n{reasoning}\n</think>\n\n{m['content']}"
            else:
                body = m["content"]
            out.append(f"<|{m['role']}|>{body}" + ("" if last and continue_final else "<|end|>"))
        return "".join(out) + ("<|assistant|>" if add_generation_prompt and not continue_final else "")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        return self._tokenizer.encode(
            self.text(messages, thinking, add_generation_prompt, continue_final, tools), special=True
        )

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        tail = self._tokenizer.decode(prompt_ids, special=True).rpartition("<|assistant|>")[2]
        return tail.startswith("<think>") and "</think>" not in tail


class ScriptedBackend:
    """Implements Backend and Instrumented; a job gets no engine but this backend."""

    def __init__(self, script: Script, max_context: int | None = None) -> None:
        self.script = script
        self.info = replace(script.info, max_context=max_context or script.info.max_context)
        self.tokenizer, self.thread = Words(), EngineThread()
        self.chat = ScriptedChat(self.tokenizer)
        self._prompts = PromptMaker(self)  # type: ignore[arg-type]
        self._prompt = tuple[int, ...]()
        self._asked: list[threading.Event] = []
        self._closed = False
        self._cached: list[int] = []
        self._given = 0
        i = self.info
        self.stats = Stats(
            weight_bytes=i.weight_bytes,
            kv_bytes=i.kv_bytes_per_token * i.max_context,
            context_max=i.max_context,
            kv_bytes_per_token=i.kv_bytes_per_token,
            kernels_per_token=1,
            jit_batches=1,
            jit_state="replaying",
            bytes_per_token=i.weight_bytes // 7,
            limit_gb_s=18.7,
            rss_bytes=rss_bytes(),
        )

    # Backend

    def answer(self, request: Request) -> EventStream[Event]:
        stream: EventStream[Event] = EventStream()
        if self._closed:
            stream.put(Failed("the model was unloaded", "invalid"))
            stream.end()
            return stream
        if self._asked:
            stream.put(Queued(len(self._asked)))
        self._asked.append(request.cancel)

        def job() -> None:
            try:
                for event in self._events(request):
                    stream.put(event)
                    self.told(event)
            except TinychatError as e:
                stream.put(Failed(str(e)))
            self._asked.remove(request.cancel)
            self.stats = replace(self.stats, phase="idle")
            stream.end()

        self.thread.submit(job)
        return stream

    def measure(self, request: Request) -> Usage:
        return self.thread.call(lambda: self._prompts.measure(request))

    def snapshot(self) -> Stats:
        return self.stats

    def close(self) -> None:
        self._closed = True
        for cancel in list(self._asked):
            cancel.set()

    def told(self, event: Event) -> None:
        """Called with every event of an answer; tests may look."""

    # Instrumented

    def run_job(self, job: EngineJob, cancel: threading.Event) -> EventStream[JobEvent]:
        stream: EventStream[JobEvent] = EventStream()

        def report(text: str, fraction: float) -> None:
            stream.put(JobProgress(text, fraction))

        def run() -> None:
            try:
                if cancel.is_set():
                    raise TinychatError("stopped before it began; nothing was measured")
                stream.put(JobDone(job(self, report, cancel)))  # type: ignore[arg-type]
            except Exception as e:  # a job gets no engine here
                stream.put(Failed(str(e)))
            stream.end()

        self.thread.submit(run)
        return stream

    def last_prompt(self) -> tuple[int, ...]:
        return self._prompt

    def token_texts(self, ids: Sequence[int]) -> list[TokenText]:
        t = self.tokenizer
        return [TokenText(i, t.token_text(i), t.is_special(i), t.token_bytes(i)) for i in ids]

    def tokenize(self, text: str, *, special: bool, whole: bool) -> list[int]:
        return self.tokenizer.encode(text, special)

    def prompt_text(self, request: Request) -> str:
        return self.thread.call(lambda: self._prompts.text(request))

    def forget(self, conversation: str) -> None:
        pass

    def watch_experts(self, on: bool) -> None:
        pass

    def experts(self) -> ExpertCounts | None:
        return None

    # the thread

    def _events(self, request: Request) -> Iterator[Event]:
        if request.sampling.logit_bias or request.logprobs or not all("function" in tool for tool in request.tools):
            yield Failed("the script has no logit_bias and no top_logprobs, and a tool has a function", "invalid")
            return
        nothing = Finished("stopped", Usage(limit=self.info.max_context), self.stats)
        if request.cancel.is_set():
            yield nothing
            return
        made = self._prompts.make(request)
        if isinstance(made, DoesNotFit):
            yield made
            return
        self._prompt = tuple(made.ids)
        yield Prompted(made.usage, made.dropped)
        started, text = time.perf_counter(), self.tokenizer.decode(made.ids, special=True)
        self.script.prompts.append(text)
        self.script.samplings.append(request.sampling)
        yield from self._prefill(made.ids, request.cancel)
        reason: StopReason = "stopped"
        found, count = "", 0
        if not request.cancel.is_set():
            self.stats = replace(self.stats, phase="decode", ttft_s=time.perf_counter() - started)
            opened, tags = self.chat.opens_thinking(made.ids), self.chat.think_tags
            parser = AnswerParser(tags, opened=opened, form=PLAIN, tools=request.tools) if request.raw is None else None
            for event in self._decode(self._answer(text), parser, request):
                if isinstance(event, Piece | ToolCall):
                    count += len(event.tokens) if isinstance(event, Piece) else 0
                    yield event
                else:
                    reason, found = event
        usage = replace(made.usage, answer=made.usage.answer + count, cached=self.stats.reused_tokens)
        yield Finished(reason, usage, replace(self.stats, phase="idle", rss_bytes=rss_bytes()), found)

    def _answer(self, prompt: str) -> str:
        answers = self.script.answers
        if callable(answers):
            return answers(prompt)
        self._given += 1
        return answers[min(self._given, len(answers)) - 1]

    def _prefill(self, prompt: Sequence[int], cancel: threading.Event) -> Iterator[Prefilling]:
        started = time.perf_counter()
        reused = common_prefix(self._cached, prompt[:-1])
        del self._cached[reused:]
        total = len(prompt) - 1 - reused
        self.stats = replace(
            self.stats,
            phase="prefill",
            prompt_tokens=len(prompt),
            reused_tokens=reused,
            prefilled_tokens=0,
            generated_tokens=0,
            decode_tok_s=0.0,
            last_tok_s=0.0,
            ttft_s=0.0,
        )
        yield Prefilling(0, total, reused)
        for start in range(0, total, CHUNK):
            if cancel.is_set():
                return
            n = min(CHUNK, total - start)
            self.script.hold("prefill")
            if self.script.prefill_rate:
                time.sleep(n / self.script.prefill_rate)
            self._cached += prompt[reused + start : reused + start + n]
            seconds = time.perf_counter() - started
            self.stats = replace(
                self.stats,
                prefilled_tokens=start + n,
                prefill_s=seconds,
                context_used=len(self._cached),
                prefill_tok_s=(start + n) / max(seconds, 1e-9),
            )
            yield Prefilling(start + n, total, reused)
        self._cached.append(prompt[-1])

    def _decode(
        self, answer: str, splitter: AnswerParser | None, request: Request
    ) -> Iterator[Piece | ToolCall | tuple[StopReason, str]]:
        """Pieces and calls, and then why it ended and the stop string that did."""
        script, started, stops = self.script, time.perf_counter(), StopStrings(request.stop)
        reason: StopReason = "eos"
        calls = set[int]()

        def made(piece: Fragment) -> ToolCall:
            calls.discard(piece.index) if piece.note else calls.add(piece.index)
            return ToolCall(piece.index, piece.text, piece.id, piece.name, piece.note)

        for n, token in enumerate(self.tokenizer.encode(answer, special=True), 1):
            script.hold("token")
            if request.cancel.is_set():
                reason = "stopped"
                break
            if len(self._cached) >= self.info.max_context:
                reason = "context"
                break
            if script.fail_after is not None and n > script.fail_after:
                raise TinychatError("the scripted engine failed as it was told to")
            if script.busy_s:
                until = time.perf_counter() + script.busy_s
                while time.perf_counter() < until:
                    pass
            if script.rate:
                time.sleep(max(0.0, started + n / script.rate - time.perf_counter()))
            self._cached.append(token)
            self._count(n, max(time.perf_counter() - started, 1e-9))
            text = self.tokenizer.decode([token], special=True)
            pieces = splitter.feed(text) if splitter else [Fragment("answer", text)]
            if not pieces and splitter and splitter.kind != "call":
                pieces = [Fragment(splitter.kind, "")]
            for i, piece in enumerate(pieces):
                if piece.kind == "call":
                    yield made(piece)
                    continue
                part = stops.feed(piece.text) if piece.kind == "answer" else piece.text
                yield Piece(piece.kind, part, (TokenPiece(token, part, -0.25),) if i == 0 else ())
            if stops.found:
                reason = "stop"
                break
            if request.max_tokens is not None and n >= request.max_tokens:
                reason = "length"
                break
        for piece in splitter.flush() if splitter else ():
            if piece.kind == "call":
                yield made(piece)
            else:
                yield Piece(piece.kind, stops.feed(piece.text) if piece.kind == "answer" else piece.text)
        if calls and reason == "eos":
            reason = "tool_calls"
        if rest := stops.flush():
            yield Piece("answer", rest)
        yield reason, stops.found

    def _count(self, n: int, elapsed: float) -> None:
        speed = n / elapsed
        gb_s = self.stats.bytes_per_token * speed / 1e9 if self.script.rate else 0.0
        self.stats = replace(
            self.stats,
            generated_tokens=n,
            context_used=len(self._cached),
            decode_s=elapsed,
            decode_tok_s=speed,
            last_tok_s=speed,
            gb_s=gb_s,
            limit_share=gb_s / self.stats.limit_gb_s,
        )


def scripted(script: Script) -> OpenBackend:
    """Opens ScriptedBackends, for Controller and TinychatApp."""

    def open_backend(
        path: Path,
        *,
        replaces: Backend | None = None,
        progress: Callable[[str, float], None] | None = None,
        max_context: int | None = None,
        **options: Any,
    ) -> ScriptedBackend:
        script.loads.append({"path": str(path), "max_context": max_context, **options})
        for i in range(5):
            if progress:
                progress("loading weights", i / 5)
            script.hold("load")
            time.sleep(script.load_s / 5)
        if script.fail_load:
            raise TinychatError(script.fail_load)
        if replaces is not None:
            replaces.close()
        return ScriptedBackend(script, max_context)

    return open_backend


LONG = """<think>
The user wants to know how multi-head latent attention saves memory. Let me recall the shapes: \
32 heads of 128, K and V each,
against one row of 512 + 64 values.

So the saving is about 14 times.
</think>

# Multi-head latent attention

It caches one small **latent row** per token instead of K and V, and `W_k_b` is folded into the query:

```python
def absorb(q: Tensor, w_k_b: Tensor) -> Tensor:
    # (heads, nope) @ (heads, nope, kv_lora) -> (heads, kv_lora)
    return (q.unsqueeze(1) @ w_k_b).squeeze(1)
```

| model | K and V | latent | saving |
|---|---:|---:|---:|
| GLM-4.7-Flash | 16,384 B | 1,152 B | 14.2x |
| Youtu-LLM-2B | 8,192 B | 1,152 B | 7.1x |

1. **Down**: the hidden state is projected to a latent of 512 values.
   - it is normalised
   - 64 more values carry the position
2. **Cache**: only that row is kept.
3. **Up**: K and V are never made; their matrices move into the query and the output.

> The cache is smaller, so a step reads less memory, so it is faster.

See [the paper](https://arxiv.org/abs/2405.04434) for the rest.
"""


def plain() -> int:
    """The plain chat with answers of its own."""
    from tinychat import process
    from tinychat.chat.controller import Controller
    from tinychat.chat.history import History
    from tinychat.plain.chat import PlainChat
    from tinychat.plain.reading import LineReader

    def answer(prompt: str) -> str:
        long = "word " * 2000 if "long" in prompt.rpartition("<|user|>")[2] else "It is \x1b[31mfour\x1b[0m."
        return f"<think>\nLet me see.\n</think>\n\n{long}"

    process.prepare()
    history = History()
    controller = Controller(scripted(Script(answer, rate=200)), save=history.save)
    controller.load("scripted:1b", Path("/nowhere"))
    PlainChat(controller, LineReader(history.prompts()), lambda name: name, history).run()
    return 0


def main() -> int:
    """The demo: python -m tests.support.scripted [tokens per second] [context]; with the word plain, the plain chat."""
    if sys.argv[1:] == ["plain"]:
        return plain()
    from tinychat.ui.app import TinychatApp

    rate = float(sys.argv[1]) if len(sys.argv) > 1 else 72
    info = replace(INFO, max_context=int(sys.argv[2]) if len(sys.argv) > 2 else 4096)
    script = Script(answers=(LONG, LONG * 8), rate=rate, prefill_rate=800, load_s=1.0, info=info)
    app = TinychatApp(model="scripted:1b", path=INFO.path, open_backend=scripted(script), history=None)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
