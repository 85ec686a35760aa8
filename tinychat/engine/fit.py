"""Whether a model fits into memory, computed before it is downloaded or loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from tinychat.engine import snapshots
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.engine.stats import OVERHEAD, available_memory

COMFORT = 0.85  # of the available memory: above it, other programs start to swap


@dataclass(frozen=True)
class Fit:
    """A verdict with its reasons. `needed` and `available` in bytes."""

    verdict: Literal["fits", "tight", "does not fit", "unknown"]
    needed: int
    available: int
    explanation: str


def fit(
    weight_bytes: int, kv_bytes_per_token: int, context: int, available: int | None = None, state_bytes: int = 0
) -> Fit:
    """Whether a model runs with `context` tokens in `available` bytes of memory (default: this machine's free
    memory). `state_bytes`: snapshots.memory of its plan."""
    if available is None:
        available = available_memory()
    kv = kv_bytes_per_token * context + state_bytes
    needed = weight_bytes + kv + OVERHEAD
    parts = (
        f"weights {decimal(weight_bytes)} + {decimal(kv)} for {context:,} tokens + {decimal(OVERHEAD)} for the program"
    )
    if not weight_bytes or not available:
        return Fit(
            "unknown", needed, available, f"the {'size of the model' if available else 'free memory'} is not known"
        )
    verdict: Literal["fits", "tight", "does not fit"]
    verdict = "does not fit" if needed > available else "tight" if needed > COMFORT * available else "fits"
    return Fit(verdict, needed, available, f"{parts} = {decimal(needed)} of {decimal(available)} free")


def sizes(path: Path) -> tuple[int, int]:
    """(bytes of the weights and of the states, bytes of KV cache per token) of a GGUF, by its header alone. Raises
    TinychatError."""
    header = GGUF.open(path)
    plan = build_plan(header, ModelConfig.from_gguf(header))
    return plan.nbytes + snapshots.memory(plan), plan.kv_bytes_per_token
