"""The subcommands that explain speed, without their arguments: `cli` parses, these do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinychat.commands.models_tmp import loaded, obtain, settings_of_user
from tinychat.console import Bar, grid, say, show, show_json
from tinychat.errors import TinychatError, printable
from tinychat.models.registry import Model, resolve

if TYPE_CHECKING:
    from tinychat.chat.settings import Settings


def bench(
    text: str | None,
    *,
    n_gen: int,
    n_prompt: int,
    kernel: str | None,
    block: bool,
    history: bool,
    wait: bool,
    as_json: bool,
    device: str | None,
    threads: int | None,
) -> None:
    """A model's prefill and decode speed; or one kernel's; or one layer's of each kind; or all that was measured
    before."""
    from tinychat.measure import bench as room

    if history:
        return _history(text, as_json)
    own = settings_of_user()
    if kernel is not None or block:
        return _rungs(text, kernel, own, wait, as_json, device, threads)
    assert text is not None, "cli refuses it"
    model = resolve(text, own.models)
    context = n_prompt + n_gen if n_prompt + n_gen > 4096 else None
    with loaded(model, own, context, device=device, threads=threads) as engine:
        with Bar() as bar:
            waiting = _Waiting(bar)
            result = room.run(engine, n_prompt, n_gen, report=waiting.stage, name=model.name, wait=wait)
        room.save(result)
        show_json(result.as_dict()) if as_json else show(room.table([result]))


def _rungs(
    text: str | None,
    kernel: str | None,
    own: Settings,
    wait: bool,
    as_json: bool,
    device: str | None,
    threads: int | None,
) -> None:
    from tinychat.measure import microbench as room

    with Bar() as bar:
        options: dict[str, Any] = {"device": device, "threads": threads or own.threads, "wait": wait}
        if kernel is not None:
            found = room.kernel(kernel, report=_Waiting(bar).stage, **options)
        else:
            assert text is not None, "cli refuses it"
            model = resolve(text, own.models)
            found = room.block(obtain(model), model.name, report=_Waiting(bar).stage, **options)
    room.save(found)
    show_json({"results": [r.as_dict() for r in found]}) if as_json else show(room.table(found))


def _history(text: str | None, as_json: bool) -> None:
    from tinychat.measure import bench as room
    from tinychat.measure import microbench

    name = resolve(text, settings_of_user().models).name if text else None
    models = [r for r in room.history() if name in (None, r.model)]
    rungs = [r for r in microbench.history() if name in (None, r.model)]
    if as_json:
        return show_json({"models": [r.as_dict() for r in models], "ladder": [r.as_dict() for r in rungs]})
    if not models and not rungs:
        raise TinychatError("nothing was measured yet; `tinychat bench MODEL` measures a model and keeps the result")
    if models:
        show(room.table(models))
    if rungs:
        show(microbench.table(rungs))


class _Waiting:
    """Passes progress on, and says once on stderr that another benchmark has to end first, where no bar is seen."""

    def __init__(self, bar: Bar) -> None:
        self.bar = bar

    def stage(self, text: str, fraction: float) -> None:
        self.bar.stage(text, fraction)
        if text.startswith("waiting") and self.bar.progress.disable:
            say(text)


def limit(device: str | None, as_json: bool) -> None:
    """Measures the read bandwidth of this machine's GPU, or else of its CPU for each number of threads, and keeps
    it."""
    from tinychat.engine import memory_limit as room
    from tinychat.engine.devices import has_cuda
    from tinychat.measure.bench import machine_lock

    found = None
    with Bar() as bar, machine_lock(_Waiting(bar).stage):
        if device == "cuda" or (device is None and has_cuda()):
            try:
                found = room.measure_gpu()
            except TinychatError as e:
                if device:
                    raise
                say(f"CUDA is not used: {e}")
        found = found or room.measure(fresh=True)
    if as_json:
        return show_json(
            {"device": found.device, "gb_s": found.gb_s, "date": found.date, "file": str(room.store_path())}
        )
    best = max(found.gb_s.values())
    rows = [(str(n or ""), f"{v:,.1f}", "█" * round(30 * v / best)) for n, v in sorted(found.gb_s.items())]
    show(grid(rows, ("" if 0 in found.gb_s else "threads", "GB/s", ""), right=(0, 1)))
    say(f"{found.device}; kept in {room.store_path()}, shares of the limit refer to it")


def profile(
    text: str, *, steps: int, source: bool, wait: bool, as_json: bool, device: str | None, threads: int | None
) -> None:
    """Where the time of a token goes; with `source` also the source of the slowest kernels."""
    from tinychat.measure import profile as room

    own = settings_of_user()
    model = resolve(text, own.models)
    context = 2 * steps + 64 if 2 * steps + 64 > 4096 else None  # every second step is one without clocks
    with loaded(model, own, context, device=device, threads=threads) as engine:
        with Bar() as bar:
            found = room.profile(engine, steps, _Waiting(bar).stage, name=text if model.path else model.name, wait=wait)
        sources = {k.name: k.source for k in room.kernels(engine)} if source else {}
    slowest = {row.name: sources.get(row.name, "") for row in found.rows[:3]} if source else {}
    if as_json:
        return show_json(found.as_dict() | ({"sources": slowest} if source else {}))
    show(room.view(found))
    for name, code in slowest.items():
        print(f"\n{printable(name, newlines=False)}\n{printable(code)}")


def kernels(text: str, *, source: str | None, as_json: bool, device: str | None, threads: int | None) -> None:
    """The kernels of a decode step on a device, or the source of one."""
    from tinychat.measure import profile as room

    own = settings_of_user()
    with loaded(resolve(text, own.models), own, device=device, threads=threads) as engine:
        found = room.kernels(engine)
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


def smoke(names: list[str], *, wait: bool, as_json: bool, device: str | None, threads: int | None) -> int:
    """Asks every model of the cache (or `names`) what it should know and compares. Returns 1 when an answer failed."""
    from tinychat.engine import Engine
    from tinychat.measure import smoke as room
    from tinychat.measure.bench import machine_lock
    from tinychat.models import cache

    own = settings_of_user()
    models = [resolve(name, own.models) for name in names]
    if not names:
        models = [e.model for e in cache.entries(own.models) if e.model and not e.partial]
    found = []
    with Bar() as bar, machine_lock(_Waiting(bar).stage, wait=wait):
        for i, model in enumerate(models):

            def load(model: Model = model) -> Engine:
                if (path := cache.path_of(model)) is None:
                    raise TinychatError(f"{model.name} is not here; `tinychat cache pull {model.name}` downloads it")
                return Engine.load(path, device=device, threads=threads or own.threads, preset=model.preset)

            def report(text: str, fraction: float, i: int = i, name: str = model.name) -> None:
                bar.stage(f"{name}: {text}", (i + fraction) / len(models))

            found += room.check(load, model.name, report)
    if not found:
        raise TinychatError("the cache holds no model; `tinychat cache pull smollm2` fetches a small one")
    counts = {kind: sum(r.result == kind for r in found) for kind in ("passed", "failed", "unverified")}
    if as_json:
        show_json({"results": [r.as_dict() for r in found], **counts})
    else:
        show(room.table(found))
        say(", ".join(f"{n} {kind}" for kind, n in counts.items() if n))
    return 1 if counts["failed"] else 0
