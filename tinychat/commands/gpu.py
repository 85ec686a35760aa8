"""What the GPU does while a command is imported."""

from __future__ import annotations

from typing import Any

from tinychat.kernels.cuda import driver


def begin(*, device: str | None, server: str | None, **others: Any) -> None:
    """Makes the GPU's context, which takes as long as the imports, for a command with these arguments that runs a model
    at once."""
    if server is None:
        driver.start(device)
