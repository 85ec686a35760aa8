"""Choosing the next token: the parameters and their ranges. Their meaning is in `sampler`; this module does without
NumPy, because a chat reads it before its first screen."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard


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
