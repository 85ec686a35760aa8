"""Which backend a choice of a model means: a file on this machine, or a server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinychat.backend.address import Server
from tinychat.backend.protocol import Backend
from tinychat.kernels.cuda import driver


def open_backend(
    path: Path,
    *,
    server: Server | None = None,
    replaces: Backend | None = None,
    progress: Callable[[str, float], None] | None = None,
    **options: Any,
) -> Backend:
    """The model at `path`, as LocalBackend.open loads it with `options`; or, where `server` is given, that server: then
    `path` is not read, and `replaces` is closed once the server has answered. Raises TinychatError."""
    if server is None:
        driver.start(options.get("device"))
        from tinychat.backend.local import LocalBackend  # the engine and NumPy: behind the first screen

        return LocalBackend.open(path, replaces=replaces, progress=progress, **options)
    if progress is not None:
        progress(f"asking {server.url}", 0.0)
    from tinychat.backend.remote import RemoteBackend  # httpx, likewise

    backend = RemoteBackend.open(server.url, server.model, server.key)
    if replaces is not None:
        replaces.close()
    return backend
