"""`tinychat limit`: measures the read bandwidth of this machine's memory."""

from __future__ import annotations

from tinychat.console import Bar, grid, say, show, show_json
from tinychat.errors import TinychatError
from tinychat.units import bar as bar_of


def limit(device: str | None, as_json: bool) -> None:
    """Measures and stores the read bandwidth, in GB/s, of the GPU, or of the CPU for each number of threads."""
    from tinychat.engine import memory_limit
    from tinychat.engine.devices import has_cuda
    from tinychat.measure.lock import machine_lock

    found = None
    with Bar() as bar, machine_lock(bar.stage):
        if device == "cuda" or (device is None and has_cuda()):
            try:
                found = memory_limit.measure_gpu()
            except TinychatError as e:
                if device:
                    raise
                say(f"CUDA is not used: {e}")
        found = found or memory_limit.measure()
    if as_json:
        file = str(memory_limit.store_path())
        return show_json({"device": found.device, "gb_s": found.gb_s, "date": found.date, "file": file})
    best = max(found.gb_s.values())
    rows = [(str(n or ""), f"{v:,.1f}", bar_of(v / best, 30)) for n, v in sorted(found.gb_s.items())]
    show(grid(rows, ("" if 0 in found.gb_s else "threads", "GB/s", ""), right=(0, 1)))
    say(f"{found.device}; kept in {memory_limit.store_path()}, shares of the limit refer to it")
    if found.noise:
        say(found.noise)
