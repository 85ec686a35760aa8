"""Whether a model fits into memory, computed before it is downloaded or loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.filesize import decimal

from tinychat.engine import snapshots
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.engine.stats import OVERHEAD, available_memory
from tinychat.kernels.limits import LATENT_CHUNK, heads_bytes
from tinychat.kernels.ops import Plan

Sizes = tuple[int, Callable[[int], int]]
"""Bytes of a model's weights, and the bytes that a context of so many tokens takes."""

LATENT_PROMPTS = 250 << 20  # bytes of the activations of LATENT_CHUNK tokens on the CPU beyond OVERHEAD
COMFORT = 0.85  # of the available memory: above it, other programs start to swap


@dataclass(frozen=True)
class Fit:
    """A verdict with its reasons. `needed` and `available` in bytes."""

    verdict: Literal["fits", "tight", "does not fit", "unknown"]
    needed: int
    available: int
    explanation: str


def fit(weight_bytes: int, context_bytes: int, context: int, available: int | None = None) -> Fit:
    """Whether a model runs with `context` tokens, which take `context_bytes`, in `available` bytes of memory (default:
    this machine's free memory)."""
    if available is None:
        available = available_memory()
    needed = weight_bytes + context_bytes + OVERHEAD
    parts = (
        f"weights {decimal(weight_bytes)} + {decimal(context_bytes)} for {context:,} tokens "
        f"+ {decimal(OVERHEAD)} for the program"
    )
    if not weight_bytes or not available:
        return Fit(
            "unknown", needed, available, f"the {'size of the model' if available else 'free memory'} is not known"
        )
    verdict: Literal["fits", "tight", "does not fit"]
    verdict = "does not fit" if needed > available else "tight" if needed > COMFORT * available else "fits"
    return Fit(verdict, needed, available, f"{parts} = {decimal(needed)} of {decimal(available)} free")


def context_bytes(plan: Plan, context: int) -> int:
    """Bytes of the KV cache of a context of so many tokens, of the states and of their snapshots, and of what prompts
    of latent attention take on the CPU."""
    long = min(context, LATENT_CHUNK) if plan.latent and not plan.state_bytes else 0
    prompts = LATENT_PROMPTS * long // LATENT_CHUNK + heads_bytes(plan, context)
    return plan.kv_bytes(context) + snapshots.memory(plan) + prompts


def sizes(path: Path) -> Sizes:
    """Those of a GGUF, by its header alone. Raises TinychatError."""
    header = GGUF.open(path)
    plan = build_plan(header, ModelConfig.from_gguf(header))
    return plan.nbytes, partial(context_bytes, plan)
