"""Choosing the next token: the parameters, their ranges, and the NumPy meaning of both, which every executor's own code
is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import numpy as np

_LOG_FLOAT_MAX = 88.7228391  # of the largest float32, as in llama.cpp
_M1, _M2, _M3 = (np.uint64(m) for m in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


@dataclass(frozen=True)
class Parameter:
    """A number that a user may set, from `low` to `high`. `empty` is the word that means None ("" = none)."""

    name: str
    kind: type[int] | type[float]
    low: float
    high: float
    help: str
    empty: str = ""

    def takes(self, value: object) -> TypeGuard[int | float]:
        """Whether `value` is a number in the range."""
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high


def _number(default: float, low: float, high: float, help: str) -> Any:
    return field(default=default, metadata={"low": low, "high": high, "help": help})


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from logits l (float32, vocab); order and meaning as llama.cpp's default chain.

    Of each distinct token of the last `repeat_last_n`, l[i] is divided by repeat_penalty (l > 0) or multiplied
    (l <= 0), then loses presence_penalty, and frequency_penalty as often as the token occurs there. DRY
    (dry_multiplier > 0): a token that would continue a repetition of the last n >= dry_allowed_length tokens loses
    dry_multiplier * dry_base ** (n - dry_allowed_length); repetitions are looked for in the last dry_penalty_last_n
    tokens (-1: all) and end at `dry_breakers`, token ids that are never penalised themselves. `logit_bias` is added
    last (in llama.cpp first: the same but beside a repeat_penalty).
    Then only tokens survive that are among the top_k largest (0 = all), in the smallest set of largest-first mass
    >= top_p, and with probability >= min_p * the largest. Then temperature: 0 takes the largest (lowest id on ties);
    otherwise the survivor with the largest l / temperature + gumbel(seed, position, id) wins, which draws from the
    softmax (`gumbel` has the hash). No state but the position, so a rolled-back position draws the same again.
    """

    temperature: float = _number(0.7, 0, 5, "0 always takes the likeliest token; higher is more varied")
    top_k: int = _number(40, 0, 1_000_000, "only the k likeliest tokens (0 = all)")
    top_p: float = _number(0.95, 0, 1, "only the likeliest tokens that together reach this probability")
    min_p: float = _number(0.05, 0, 1, "only tokens with at least this share of the likeliest one's probability")
    repeat_penalty: float = _number(1.0, 0.1, 10, "above 1 makes recent tokens less likely (1 = off)")
    repeat_last_n: int = _number(64, 0, 1_000_000, "how many recent tokens these three penalties look at")
    presence_penalty: float = _number(0.0, -2, 2, "what a recent token's logit loses (0 = off)")
    frequency_penalty: float = _number(0.0, -2, 2, "what a token's logit loses for each time it occurred (0 = off)")
    dry_multiplier: float = _number(
        0.0, 0, 100, "strength of the DRY penalty on repeated sequences of tokens (0 = off)"
    )
    dry_base: float = _number(1.75, 1, 100, "how much the DRY penalty grows with each further token of a repetition")
    dry_allowed_length: int = _number(2, 0, 1_000_000, "repetitions shorter than this many tokens cost nothing (DRY)")
    dry_penalty_last_n: int = _number(-1, -1, 1_000_000, "how many recent tokens DRY looks at (-1 = all, 0 = off)")
    dry_breakers: tuple[int, ...] = ()  # the engine fills them in
    logit_bias: tuple[tuple[int, float], ...] = ()  # distinct token ids, and what is added to their logits
    seed: int = 0

    @property
    def counts(self) -> bool:
        """Whether the repeat, presence or frequency penalty can change a logit."""
        off = self.repeat_penalty == 1.0 and self.presence_penalty == 0.0 and self.frequency_penalty == 0.0
        return not off and self.repeat_last_n > 0

    @property
    def has_dry(self) -> bool:
        """Whether the DRY penalty is on."""
        return self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0

    @property
    def has_penalties(self) -> bool:
        """Whether `penalties` can change a logit."""
        return self.has_dry or self.counts or bool(self.logit_bias)


GREEDY = Sampling(temperature=0.0)
SAMPLING_PARAMETERS = {
    f.name: Parameter(f.name, int if f.type == "int" else float, **f.metadata) for f in fields(Sampling) if f.metadata
}
"""The fields of Sampling that a user may set, but for the seed, whose ranges differ."""


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
