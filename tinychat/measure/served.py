"""Measures the speed of a backend, such as a server with any engine, by this process's clock."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from tinychat.backend.protocol import Backend, DoesNotFit, Failed, Finished, Piece, Request
from tinychat.engine.devices import OnProgress
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import Sampling
from tinychat.measure.bench import TEXT
from tinychat.measure.lock import machine_lock

TOKENS_PER_WORD = 1.3  # estimate for English prose; the server reports the true number of tokens


@dataclass(frozen=True)
class ServedResult:
    """Medians over `decode_runs`. `decode_tok_s` counts the tokens after the first, from the arrival of the first piece
    to that of the last; `ttft_s` is from the request to the first piece."""

    model: str
    device: str
    prompt_tokens: int
    generated_tokens: int
    decode_tok_s: float
    ttft_s: float
    decode_runs: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(
    backend: Backend,
    n_prompt: int = 128,
    n_gen: int = 64,
    repeats: int = 3,
    report: OnProgress | None = None,
    *,
    wait: bool = True,
) -> ServedResult:
    """Requests `n_gen` tokens after a prompt of about `n_prompt` tokens, `repeats` times after one warm-up, each time
    with another text. Holds the machine's benchmark lock. Raises TinychatError."""
    report = report or (lambda text, fraction: None)
    with machine_lock(report, None, wait=wait):
        runs = []
        for n in range(repeats + 1):
            report(f"run {n} of {repeats}" if n else "warming up", n / (repeats + 1))
            runs.append(_once(backend, n_prompt, n_gen, n))
    prompts, generated, decode, ttft = (tuple(values) for values in zip(*runs[1:]))
    info = backend.info
    return ServedResult(
        info.name,
        info.device,
        int(statistics.median(prompts)),
        int(statistics.median(generated)),
        statistics.median(decode),
        statistics.median(ttft),
        decode,
    )


def _once(backend: Backend, n_prompt: int, n_gen: int, turn: int) -> tuple[int, int, float, float]:
    """(prompt tokens, generated tokens, decode tok/s, TTFT in s) of one request."""
    words = TEXT.split()
    start = 7 * turn % len(words)
    count = max(1, int(n_prompt / TOKENS_PER_WORD))
    text = " ".join((words[start:] + words[:start]) * (count // len(words) + 1))
    message = {"role": "user", "content": " ".join(text.split()[:count])}
    began = time.perf_counter()
    first = last = 0.0
    for event in backend.answer(
        Request(messages=(message,), sampling=Sampling(temperature=0.0), max_tokens=n_gen, thinking=None)
    ):
        now = time.perf_counter()
        match event:
            case Piece(text=text) if text:
                first, last = first or now, now
            case Failed(message=reason):
                raise TinychatError(reason)
            case DoesNotFit(usage=usage):
                raise TinychatError(f"the prompt does not fit the server's context of {usage.limit:,} tokens")
            case Finished(usage=usage):
                end = usage
    if not first or end.answer < 2 or last <= first:
        raise TinychatError("the answer is too short to measure its speed; ask for more tokens with -n")
    return end.prompt, end.answer, (end.answer - 1) / (last - first), first - began
