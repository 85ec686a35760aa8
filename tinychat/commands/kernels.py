"""`tinychat kernels`: lists the kernels that a model runs on a device."""

from __future__ import annotations

from tinychat.commands.loading import loaded, settings_of_user
from tinychat.console import grid, show, show_json
from tinychat.errors import TinychatError, printable
from tinychat.models.registry import resolve


def kernels(text: str, *, source: str | None, as_json: bool, device: str | None, threads: int | None) -> None:
    """Prints the kernels of a decode step on a device, or the source of kernel `source`."""
    from tinychat.measure import profile

    own = settings_of_user()
    with loaded(resolve(text, own.models), own, device=device, threads=threads) as engine:
        found = profile.kernels(engine)
        device = engine.info.device
    if source is not None:
        found = [k for k in found if k.name == source]
        if not found:
            raise TinychatError(f"there is no kernel {source!r} here; `tinychat kernels MODEL` shows them")
    if as_json:
        return show_json({"device": device, "kernels": [vars(k) for k in found]})
    if source is not None:
        return print(printable(found[0].source), end="")
    rows = [(k.name, f"{k.calls:,}", k.launch, k.resources, f"{k.source.count(chr(10)):,}") for k in found]
    show(grid(rows, ("kernel", "calls per token", "launch", "resources", "lines of source"), right=(1, 4)))
