"""The NumPy meaning of Sampling, which every executor's own code is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tinychat.kernels.sampling import Sampling

_LOG_FLOAT_MAX = 88.7228391  # of the largest float32, as in llama.cpp
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


@dataclass(frozen=True)
class Penalties:
    """What the tokens so far do to logits: l[ids] is divided by `divisors` (l > 0) or multiplied (l <= 0), then
    `amounts` are subtracted. ids: distinct, int32; the others float64."""

    ids: np.ndarray
    divisors: np.ndarray
    amounts: np.ndarray

    def apply(self, logits: np.ndarray) -> np.ndarray:
        """Logits (float32, vocab) after the penalties, computed in float64."""
        if not len(self.ids):
            return logits
        out, before = logits.copy(), logits[self.ids].astype(np.float64)
        out[self.ids] = np.where(before > 0, before / self.divisors, before * self.divisors) - self.amounts
        return out


def penalties(s: Sampling, recent: Sequence[int] | np.ndarray) -> Penalties:
    """The penalties that `recent`, every token so far, brings under `s`; a bias is a negative one."""
    repeated = recent[-s.repeat_last_n :] if s.counts else ()
    repeated_ids, counts = np.unique(np.asarray(repeated, np.int32), return_counts=True)
    dry_ids, dry_amounts = dry(s, recent)
    biased = np.asarray([i for i, _ in s.logit_bias], np.int32)
    ids = np.unique(np.concatenate((repeated_ids, dry_ids, biased)))
    divisors, amounts = np.ones(len(ids)), np.zeros(len(ids))
    divisors[np.searchsorted(ids, repeated_ids)] = s.repeat_penalty
    amounts[np.searchsorted(ids, repeated_ids)] += counts * s.frequency_penalty + s.presence_penalty
    amounts[np.searchsorted(ids, dry_ids)] += dry_amounts
    amounts[np.searchsorted(ids, biased)] -= [bias for _, bias in s.logit_bias]
    return Penalties(ids, divisors, amounts)


def longest_dry(s: Sampling) -> int:
    """Tokens of a repetition from which on a longer one costs no more: a float32 holds no larger power of dry_base."""
    highest = int(_LOG_FLOAT_MAX / np.log(s.dry_base)) if s.dry_base > 1.000001 else 0
    return s.dry_allowed_length + highest


def dry(s: Sampling, recent: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids int32, float64 amounts to subtract) of the tokens that would continue a repetition.

    The meaning is llama.cpp's (src/llama-sampler.cpp, llama_sampler_dry_apply), with breakers of one token each.
    """
    nothing = np.empty(0, np.int32), np.empty(0)
    if not s.has_dry:
        return nothing
    last_n = s.dry_penalty_last_n
    back = np.asarray(recent if last_n < 0 else recent[-last_n:], np.int32)[::-1]  # the newest first
    broken = np.flatnonzero(np.isin(back, s.dry_breakers))
    limit = int(broken[0]) if len(broken) else len(back)
    if len(back) <= s.dry_allowed_length or limit < s.dry_allowed_length:
        return nothing
    limit = min(limit, longest_dry(s))
    starts = np.arange(1, len(back))  # the newest tokens again, this far back
    lengths = np.zeros(len(starts), np.int64)
    for n in range(limit):
        starts = starts[starts + n < len(back)]
        starts = starts[back[starts + n] == back[n]]
        if not len(starts):
            break
        lengths[starts - 1] = n + 1
    long = lengths >= s.dry_allowed_length
    long &= ~np.isin(back[:-1], s.dry_breakers)
    ids, places = np.unique(back[:-1][long], return_inverse=True)  # the token behind each repetition
    longest = np.zeros(len(ids), np.int64)
    np.maximum.at(longest, places, lengths[long])
    return ids, s.dry_multiplier * s.dry_base ** (longest - s.dry_allowed_length)


def sample(
    logits: np.ndarray, s: Sampling, position: int, recent: Sequence[int] = (), mask: np.ndarray | None = None
) -> tuple[int, float]:
    """(id, its log-probability under softmax(logits)) for the token that follows `position`. Logits: float32
    (n_vocab,). `mask`, uint32 ((n_vocab + 31) // 32,): only tokens i with bit i % 32 of word i // 32 set can come."""
    x = penalties(s, recent).apply(logits).astype(np.float64)
    if mask is not None:
        x[np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(x)] == 0] = -np.inf
    if s.temperature <= 0:
        token = int(x.argmax())
    else:
        token = int(np.where(survivors(x, s), x / s.temperature + gumbel(s.seed, position, len(x)), -np.inf).argmax())
    raw = logits.astype(np.float64)
    top = raw.max()
    return token, float(raw[token] - top - np.log(np.exp(raw - top).sum()))
