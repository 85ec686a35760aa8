"""An engine that says what a script tells it, at a given speed: it duck-types Engine for tests and for looking at the
app.

Prefix reuse, chunked prefill, the context limit, thinking and stop behave as in the real one.
`python -m tests.support.scripted` is a demo of the app.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tinychat.chat.controller import LoadEngine
from tinychat.engine.answer import AnswerParser
from tinychat.engine.engine import ModelInfo, Token
from tinychat.engine.session import CHUNK, common_prefix
from tinychat.engine.stats import Stats, rss_bytes
from tinychat.errors import TinychatError
from tinychat.kernels.ops import Sampling

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
)
SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<think>", "</think>")


@dataclass
class Script:
    """What the engine does. `answers` are given in turn (the last one again and again), or made from the prompt's text.

    `rate` and `prefill_rate` are tokens per second, 0 = at once; `load_s` is spread over five progress reports;
    `fail_load` and `fail_after` (tokens) raise; `busy_s` burns Python time per token (an engine that does not release
    the GIL).
    """

    answers: Sequence[str] | Callable[[str], str] = ("Hello! How can I help?",)
    rate: float = 0
    prefill_rate: float = 0
    load_s: float = 0
    fail_load: str = ""
    fail_after: int | None = None
    busy_s: float = 0
    info: ModelInfo = INFO
    prompts: list[str] = field(default_factory=list)  # what was asked, in order, for assertions
    samplings: list[Sampling] = field(default_factory=list)
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

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        return "".join(self.texts[i] for i in ids if special or i >= len(SPECIAL))

    def token_text(self, token: int) -> str:
        return self.texts[token]

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode()

    def is_special(self, token: int) -> bool:
        return token < len(SPECIAL)

    def token_id(self, text: str) -> int | None:
        return self._ids.get(text)


class ScriptedChat:
    source, note = "file", ""
    think_tags = ("<think>", "</think>")

    def __init__(self, tokenizer: Words) -> None:
        self._tokenizer = tokenizer

    def text(
        self,
        messages: Sequence[dict[str, str]],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> str:
        out = []
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
        messages: Sequence[dict[str, str]],
        thinking: bool | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> list[int]:
        return self._tokenizer.encode(
            self.text(messages, thinking, add_generation_prompt, continue_final), special=True
        )

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        tail = self._tokenizer.decode(prompt_ids, special=True).rpartition("<|assistant|>")[2]
        return tail.startswith("<think>") and "</think>" not in tail


class ScriptedEngine:
    def __init__(self, script: Script, max_context: int | None = None) -> None:
        self.script = script
        self.info = replace(script.info, max_context=max_context or script.info.max_context)
        self.tokenizer = Words()
        self.chat = ScriptedChat(self.tokenizer)
        self.notes: list[str] = []
        self.routing, self.watch_routing = None, False
        self.stop_reason = "stopped"
        self.tokens: list[int] = []
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
        self._given = 0

    def _answer(self, prompt: str) -> str:
        answers = self.script.answers
        if callable(answers):
            return answers(prompt)
        self._given += 1
        return answers[min(self._given, len(answers)) - 1]

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        *,
        raw: bool = False,
        on_prefill: Callable[[int, int, int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[Token]:
        s, script, started = self.stats, self.script, time.perf_counter()
        if len(prompt_ids) > self.info.max_context:
            raise TinychatError(
                f"the prompt has {len(prompt_ids):,} tokens, the context holds {self.info.max_context:,}"
            )
        prompt = self.tokenizer.decode(prompt_ids, special=True)
        script.prompts.append(prompt)
        script.samplings.append(sampling or Sampling())
        self.stop_reason, s.generated_tokens, s.decode_tok_s, s.last_tok_s, s.ttft_s = "stopped", 0, 0.0, 0.0, 0.0
        try:
            if not self._prefill(prompt_ids, on_prefill, stop):
                return
            s.phase, s.ttft_s = "decode", time.perf_counter() - started
            splitter = None if raw else AnswerParser(self.chat.think_tags, opened=self.chat.opens_thinking(prompt_ids))
            yield from self._decode(self._answer(prompt), splitter, max_tokens, stop)
        finally:
            s.phase, s.rss_bytes = "idle", rss_bytes()

    def _prefill(
        self, prompt: Sequence[int], on_prefill: Callable[[int, int, int], None] | None, stop: threading.Event | None
    ) -> bool:
        s, started = self.stats, time.perf_counter()
        reused = common_prefix(self.tokens, prompt[:-1])
        del self.tokens[reused:]
        total = len(prompt) - 1 - reused
        s.phase, s.prompt_tokens, s.reused_tokens, s.prefilled_tokens = "prefill", len(prompt), reused, 0
        if on_prefill:
            on_prefill(0, total, reused)
        for start in range(0, total, CHUNK):
            if stop and stop.is_set():
                return False
            n = min(CHUNK, total - start)
            if self.script.prefill_rate:
                time.sleep(n / self.script.prefill_rate)
            self.tokens += prompt[reused + start : reused + start + n]
            s.prefilled_tokens, s.prefill_s, s.context_used = start + n, time.perf_counter() - started, len(self.tokens)
            s.prefill_tok_s = s.prefilled_tokens / max(s.prefill_s, 1e-9)
            if on_prefill:
                on_prefill(start + n, total, reused)
        self.tokens.append(prompt[-1])
        return True

    def _decode(
        self, answer: str, splitter: AnswerParser | None, max_tokens: int | None, stop: threading.Event | None
    ) -> Iterator[Token]:
        s, script, started = self.stats, self.script, time.perf_counter()
        self.stop_reason = "eos"
        for n, token in enumerate(self.tokenizer.encode(answer, special=True), 1):
            if stop and stop.is_set():
                self.stop_reason = "stopped"
                break
            if len(self.tokens) >= self.info.max_context:
                self.stop_reason = "context"
                break
            if script.fail_after is not None and n > script.fail_after:
                raise TinychatError("the scripted engine failed as it was told to")
            if script.busy_s:
                until = time.perf_counter() + script.busy_s
                while time.perf_counter() < until:
                    pass
            if script.rate:
                time.sleep(max(0.0, started + n / script.rate - time.perf_counter()))
            self.tokens.append(token)
            elapsed = max(time.perf_counter() - started, 1e-9)
            s.generated_tokens, s.context_used, s.decode_s = n, len(self.tokens), elapsed
            s.decode_tok_s = s.last_tok_s = n / elapsed
            s.gb_s = s.bytes_per_token * s.decode_tok_s / 1e9 if script.rate else 0.0
            s.limit_share = s.gb_s / s.limit_gb_s
            text = self.tokenizer.decode([token], special=True)
            pieces = [(p.kind, p.text) for p in splitter.feed(text)] if splitter else [("answer", text)]
            if not pieces:
                pieces = [(splitter.kind if splitter else "answer", "")]
            for i, (kind, part) in enumerate(pieces):
                yield Token(token if i == 0 else None, part, kind, -0.25)  # type: ignore[arg-type]
            if max_tokens is not None and n >= max_tokens:
                self.stop_reason = "length"
                break
        for piece in splitter.flush() if splitter else ():
            yield Token(None, piece.text, piece.kind)

    def save_cache(self) -> bool:
        return False

    def close(self) -> None:
        self.tokens = []


def scripted_load(script: Script) -> LoadEngine:
    """For Worker(load_engine=...)."""

    def load(
        path: str | Path,
        *,
        progress: Callable[[str, float], None] | None = None,
        max_context: int | None = None,
        **options: Any,
    ) -> Any:
        script.loads.append({"path": str(path), "max_context": max_context, **options})
        for i in range(5):
            if progress:
                progress("loading weights", i / 5)
            time.sleep(script.load_s / 5)
        if script.fail_load:
            raise TinychatError(script.fail_load)
        return ScriptedEngine(script, max_context)

    return load


LONG = """<think>
The user wants to know how multi-head latent attention saves memory. Let me recall the shapes: 32 heads of 128, K and V
each, against one row of 512 + 64 values.

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


def main() -> int:
    """The demo: python -m tests.support.scripted [tokens per second] [context]."""
    from tinychat.ui.app import TinychatApp

    rate = float(sys.argv[1]) if len(sys.argv) > 1 else 72
    info = replace(INFO, max_context=int(sys.argv[2]) if len(sys.argv) > 2 else 4096)
    script = Script(answers=(LONG, LONG * 8), rate=rate, prefill_rate=800, load_s=1.0, info=info)
    app = TinychatApp(model="scripted:1b", path=INFO.path, load_engine=scripted_load(script), history=None)
    app.run()
    return app.return_code or 0


if __name__ == "__main__":
    sys.exit(main())
