"""Choosing the next token: the NumPy meaning of `Sampling`, which every executor's own code is tested against."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tinychat.kernels.ops import Sampling

__all__ = ["Sampling", "gumbel", "sample", "survivors"]

_M1, _M2, _M3 = (np.uint64(m) for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def gumbel(seed: int, position: int, n_vocab: int) -> np.ndarray:
    """Gumbel noise of every token id: float64 (n_vocab,), from splitmix64's finaliser over (seed, position, id).

    argmax(l / T + noise) draws from softmax(l / T) without sorting (the Gumbel-max trick), whatever the order of ids.
    """
    with np.errstate(over="ignore"):
        x = np.uint64(seed % 2**64) * _M1 + np.uint64(position) * _M2 + np.arange(n_vocab, dtype=np.uint64) * _M3
        x = (x ^ (x >> np.uint64(30))) * _M2
        x = (x ^ (x >> np.uint64(27))) * _M3
        x ^= x >> np.uint64(31)
    u = ((x >> np.uint64(40)).astype(np.float64) + 0.5) / 2**24
    return -np.log(-np.log(u))


def survivors(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """bool (n_vocab,): the tokens that top_k, then top_p, then min_p leave. Equal logits survive together."""
    x = logits.astype(np.float64)
    order = np.sort(x)[::-1]
    keep = x >= order[min(s.top_k, len(x)) - 1] if 0 < s.top_k < len(x) else np.ones(len(x), bool)
    if s.top_p < 1.0:
        kept = np.sort(x[keep])[::-1]
        mass = np.exp(kept - kept[0])
        before = np.cumsum(mass) - mass  # mass of everything larger
        last = np.nonzero(before < s.top_p * mass.sum())[0].max(initial=0)
        keep &= x >= kept[last]
    if s.min_p > 0.0:
        keep &= x >= order[0] + np.log(s.min_p)
    return keep


def penalise(logits: np.ndarray, s: Sampling, recent: Sequence[int]) -> np.ndarray:
    """Logits after the repeat penalty over the last `repeat_last_n` tokens of `recent`."""
    if s.repeat_penalty == 1.0 or not recent or s.repeat_last_n <= 0:
        return logits
    out = logits.copy()
    ids = np.unique(np.asarray(recent[-s.repeat_last_n :], np.int64))
    out[ids] = np.where(out[ids] > 0, out[ids] / s.repeat_penalty, out[ids] * s.repeat_penalty)
    return out


def sample(logits: np.ndarray, s: Sampling, position: int, recent: Sequence[int] = ()) -> tuple[int, float]:
    """(id, its log-probability under softmax(logits)) for the token that follows `position`. Logits: float32
    (n_vocab,)."""
    x = penalise(logits, s, recent).astype(np.float64)
    if s.temperature <= 0:
        token = int(x.argmax())
    else:
        token = int(np.where(survivors(x, s), x / s.temperature + gumbel(s.seed, position, len(x)), -np.inf).argmax())
    raw = logits.astype(np.float64)
    top = raw.max()
    return token, float(raw[token] - top - np.log(np.exp(raw - top).sum()))
