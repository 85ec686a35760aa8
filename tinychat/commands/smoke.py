"""`tinychat smoke`: compares the answers of the cached models with expected tokens."""

from __future__ import annotations

from tinychat.commands.loading import settings_of_user
from tinychat.console import Bar, say, show, show_json
from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.registry import Model, resolve


def smoke(names: list[str], *, wait: bool, as_json: bool, device: str | None, threads: int | None) -> int:
    """Asks every model of the cache (or `names`) and compares the tokens. Returns 1 when an answer failed."""
    from tinychat.engine import Engine
    from tinychat.measure import smoke
    from tinychat.measure.lock import machine_lock

    own = settings_of_user()
    models = [resolve(name, own.models) for name in names]
    if not names:
        models = [e.model for e in cache.entries(own.models) if e.model and not e.partial]
    found = []
    with Bar() as bar, machine_lock(bar.stage, wait=wait):
        for i, model in enumerate(models):

            def load(model: Model = model) -> Engine:
                if (path := cache.path_of(model)) is None:
                    raise TinychatError(f"{model.name} is not here; `tinychat cache pull {model.name}` downloads it")
                return Engine.load(path, device=device, threads=threads or own.threads, preset=model.preset)

            def report(text: str, fraction: float, i: int = i, name: str = model.name) -> None:
                bar.stage(f"{name}: {text}", (i + fraction) / len(models))

            found += smoke.check(load, model.name, report)
    if not found:
        raise TinychatError("the cache holds no model; `tinychat cache pull smollm2` fetches a small one")
    counts = {kind: sum(r.result == kind for r in found) for kind in ("passed", "failed", "unverified")}
    if as_json:
        show_json({"results": [r.as_dict() for r in found], **counts})
    else:
        show(smoke.table(found))
        say(", ".join(f"{n} {kind}" for kind, n in counts.items() if n))
    return 1 if counts["failed"] else 0
