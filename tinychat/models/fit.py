"""Whether a model fits into this machine's memory, by what its header says."""

from __future__ import annotations

from pathlib import Path

from tinychat.engine.fit import Fit, fit, sizes
from tinychat.engine.stats import available_memory
from tinychat.errors import TinychatError
from tinychat.models.registry import Model
from tinychat.models.sources import scheme_of

__all__ = ["Fit", "available_memory", "fit", "sizes_of"]


def sizes_of(model: Model, path: Path | None) -> tuple[int, int]:
    """(bytes of the weights, bytes of KV cache per token), from the header in the file at `path`, or by range requests
    from the model's first source. Raises TinychatError, ValueError, OSError."""
    if path is not None:
        return sizes(path)
    read = scheme_of(source := model.sources[0]).header
    if read is None:
        raise TinychatError(f"{model.name}: its size is known when it is here")
    with read(source) as header:
        return sizes(header)
