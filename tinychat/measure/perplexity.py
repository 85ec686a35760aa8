"""Perplexity of a model on a text, computed as llama.cpp's `llama-perplexity` does, so that the figures can be
compared.

The text's tokens are cut into windows of `context` tokens. Each window starts from an empty cache (with BOS in place of
its first token if the model uses BOS), and the tokens of its second half are scored, each given those before it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tinychat.engine.engine import Engine
from tinychat.errors import TinychatError

STEP = 128  # tokens per run: the interval of progress reports, and the number of logit rows in memory


@dataclass(frozen=True)
class Estimate:
    """The result so far: exp(mean of -log p) over the `tokens` scored, and its standard error; NaN below two tokens."""

    ppl: float
    ppl_err: float
    tokens: int
    chunks: int  # windows finished
    total_chunks: int
    progress: float  # 0 to 1
    eta_s: float


def perplexity(engine: Engine, text: str, context: int = 512, chunks: int | None = None) -> Iterator[Estimate]:
    """Yields an Estimate every few tokens; the last one is the result. `chunks` limits the windows.

    One newline at the end of `text` does not count. Raises TinychatError for a text of less than two windows, or a
    window larger than the engine's context.
    """
    if not 4 <= context <= engine.info.max_context:
        raise TinychatError(
            f"a window of {context:,} tokens: expected 4 to {engine.info.max_context:,}, "
            "the context that the model was loaded with"
        )
    if chunks is not None and chunks < 1:
        raise TinychatError(f"{chunks} windows: expected at least 1")
    bos = engine.tokenizer.bos_id if engine.tokenizer.add_bos else None
    ids = ([] if bos is None else [bos]) + engine.tokenizer.encode(text.removesuffix("\n"))
    if len(ids) < 2 * context:
        raise TinychatError(
            f"the text has {len(ids):,} tokens; a window of {context:,} needs at least {2 * context:,}: "
            "take a longer text or a smaller window"
        )
    total = min(len(ids) // context, chunks or len(ids))
    return _estimates(engine, ids, bos, context, total)


def _estimates(engine: Engine, ids: list[int], bos: int | None, context: int, total: int) -> Iterator[Estimate]:
    losses: list[np.ndarray] = []
    started = time.perf_counter()
    engine.session.tokens = []  # no rows of earlier prompts are reused
    for chunk in range(total):
        window = ids[chunk * context : (chunk + 1) * context]
        targets = window[1:]
        if bos is not None:
            window[0] = bos
        for at, end in _steps(context):
            scored = at >= context // 2
            logits = engine.executor.forward(window[at:end], at, "all" if scored else "none")
            if scored:
                assert logits is not None
                losses.append(negative_log_likelihood(logits, targets[at:end]))
            done = (chunk * context + end) / (total * context)
            elapsed = time.perf_counter() - started
            yield _estimate(losses, chunk + (end == context), total, done, elapsed / done - elapsed)


def _steps(context: int) -> list[tuple[int, int]]:
    """(start, end) of the runs of a window: at most STEP tokens each, none across the window's middle."""
    half = context // 2
    return [(a, min(a + STEP, b)) for first, b in ((0, half), (half, context)) for a in range(first, b, STEP)]


def negative_log_likelihood(logits: np.ndarray, targets: list[int]) -> np.ndarray:
    """-log softmax(logits)[target] of each row that has a target: float64 (len(targets),)."""
    logits = logits[: len(targets)]
    top = logits.max(-1, keepdims=True)
    total = np.exp(logits - top).sum(-1, dtype=np.float64)
    return np.log(total) - (logits[np.arange(len(targets)), targets] - top[:, 0])


def _estimate(losses: list[np.ndarray], chunks: int, total: int, progress: float, eta_s: float) -> Estimate:
    x = np.concatenate([np.empty(0), *losses])
    ppl = math.exp(x.mean()) if len(x) else math.nan
    error = ppl * math.sqrt(x.var() / (len(x) - 1)) if len(x) > 1 else math.nan
    return Estimate(ppl, error, len(x), chunks, total, progress, eta_s)
