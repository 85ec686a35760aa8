"""Results of measurements, as data. Speeds are per second, times in seconds, sizes in bytes."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from tinychat import __version__


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions of a measurement: model file, device, software, machine."""

    model: str
    fingerprint: str  # GGUF.fingerprint(); "" where no file was measured
    device: str
    threads: int
    limit_gb_s: float  # measured read bandwidth of the device; 0: not measured
    versions: dict[str, str]
    machine: str
    date: str  # ISO 8601, UTC

    @classmethod
    def now(cls, model: str, fingerprint: str, device: str, threads: int, limit_gb_s: float) -> Conditions:
        """The conditions of a measurement made now, on this machine, by this process."""
        return Conditions(
            model=model,
            fingerprint=fingerprint,
            device=device,
            threads=threads,
            limit_gb_s=limit_gb_s,
            versions={
                "tinychat": __version__,
                "tinygrad": metadata.version("tinygrad"),
                "python": platform.python_version(),
            },
            machine=f"{platform.system()} {platform.machine()}",
            date=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def share(self, gb_s: float) -> float:
        """`gb_s` as a share of the memory limit; 0 where that is not known."""
        return gb_s / self.limit_gb_s if self.limit_gb_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class ModelResult(Conditions):
    """Speed of a model: medians over `decode_runs`.

    `decode_tok_s` counts the tokens after the first; `ttft_s` is the time from the prompt's ids to the first token,
    without reused cache rows.
    """

    path: str
    quant: str
    n_prompt: int
    n_gen: int
    decode_tok_s: float
    prefill_tok_s: float
    ttft_s: float
    load_s: float
    kernels_per_token: int
    jit_batches: int
    bytes_per_token: int
    gb_s: float
    limit_share: float
    kv_bytes_per_token: int
    rss_bytes: int
    decode_runs: tuple[float, ...]
    max_context: int
    speculate: str = "off"  # "auto", drafts of a decode step, or "SYNTHETIC" and how many of how many were right
    tokens_per_step: float = 1.0
    single_tok_s: float = 0.0  # of the same answers in single steps, where drafts were synthetic
    break_even: float = 0.0  # share of such drafts that must be right, to be as fast as single steps

    @property
    def spread(self) -> float:
        """Half of the difference between the fastest and the slowest run, as a share of the median."""
        return (max(self.decode_runs) - min(self.decode_runs)) / 2 / self.decode_tok_s if self.decode_tok_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | {"spread": self.spread}


@dataclass(frozen=True, kw_only=True)
class PartResult(Conditions):
    """Time of a call of one kernel or one layer: median and quartiles over all copies and steps, waiting included."""

    kind: str  # "kernel", "block" (a layer)
    what: str
    quant: str
    how: str  # "in the batch", "alone", "N in a row"
    copies: int
    steps: int
    seconds: float
    low: float
    high: float
    nbytes: int  # to read per call
    gb_s: float
    limit_share: float
