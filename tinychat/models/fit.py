"""Whether a model fits into this machine's memory, by what its header says, and how fast the memory lets it be."""

from __future__ import annotations

from pathlib import Path

from tinychat.engine.fit import Fit, Sizes, fit, sizes
from tinychat.engine.stats import available_memory
from tinychat.errors import TinychatError
from tinychat.models.registry import Model
from tinychat.models.sources import scheme_of

__all__ = ["Fit", "Sizes", "available_memory", "fit", "memory_gb_s", "predicted_tok_s", "sizes_of"]


def memory_gb_s(threads: int | None) -> float:
    """GB/s at which models are read here (memory_limit.usual); 0.0 where that cannot be told."""
    from tinychat.engine.memory_limit import usual  # not at import time, which would delay the start of the chat

    return usual(threads)


def predicted_tok_s(model: Model, weight_bytes: int, gb_s: float) -> float:
    """Tokens per second when every token reads its active weights once at `gb_s`; 0.0 where something is not
    known."""
    share = model.active_parameters / model.parameters if model.parameters and model.active_parameters else 1.0
    return gb_s * 1e9 / (weight_bytes * min(share, 1.0)) if weight_bytes else 0.0


def sizes_of(model: Model, path: Path | None) -> Sizes:
    """By the header in the file at `path`, or by range requests from the model's first source. Raises TinychatError,
    ValueError, OSError."""
    if path is not None:
        return sizes(path)
    read = scheme_of(source := model.sources[0]).header
    if read is None:
        raise TinychatError(f"{model.name}: its size is known when it is here")
    with read(source) as header:
        return sizes(header)
