"""A profile as data. Times in seconds per token.

The origin of each number: "in the batch" was read from clocks inside the running step; "alone" is the time of one
kernel, waited for; "derived" was calculated from those. The time of a batch is not divided over its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinychat.measure.results import Conditions

WAITING, SAMPLING, REST, STALLS = (
    "waiting at barriers, or away",
    "sampling",
    "outside the step",
    "stalls of single steps",
)


@dataclass(frozen=True)
class OpTime:
    """All calls of one op (or kernel) of the same shape and type in a token."""

    name: str
    op: str
    shape: str
    quant: str
    category: str
    calls: int
    seconds: float  # waiting included
    waited: float
    share: float  # of the token
    nbytes: int
    gb_s: float  # nbytes / seconds
    limit_share: float
    tasks: int  # of one call
    busiest: float  # share of the work that the busiest thread did


@dataclass(frozen=True)
class Flag:
    """Something wrong, in words. `kind` is one of flags.KINDS."""

    kind: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Profile(Conditions):
    """The profile of one model on one device. Times in seconds per token, medians over `steps`."""

    cores: int
    how: str  # how `rows` were measured: "in the batch", "alone"
    steps: int
    depth: int  # rows of the KV cache
    token_s: float  # without clocks
    fastest_s: float
    slowest_s: float
    tok_s: float
    bytes_per_token: int
    gb_s: float
    limit_share: float
    clocks: float  # cost of the clocks, as a share of the token
    explained: float  # share of the measured token that rows and sampling add up to; may exceed 1 for kernels run alone
    kernels: int
    batches: list[dict[str, Any]]
    overhead_s: float  # derived: the time of a token in which no kernel works, per kernel
    first_s: list[float]  # of the first steps, before the steady state
    caches: list[dict[str, Any]]
    rows: list[OpTime]
    categories: dict[str, float]
    waits: list[float]  # share of the token that each thread waits
    uneven: float  # share of the token that threads wait because others have more work
    flags: list[Flag] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    deeper: list[str] = field(default_factory=list)
