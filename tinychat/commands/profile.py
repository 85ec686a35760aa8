"""`tinychat profile`: measures how the time of a token divides over the ops of a decode step."""

from __future__ import annotations

from tinychat.commands.loading import CONTEXT, loaded, settings_of_user
from tinychat.console import Bar, show, show_json
from tinychat.errors import printable
from tinychat.models.registry import resolve


def profile(
    text: str, *, steps: int, source: bool, wait: bool, as_json: bool, device: str | None, threads: int | None
) -> None:
    """Prints the time of each op of a token, over `steps` tokens; with `source` also the source of the three slowest
    kernels."""
    from tinychat.measure import profile

    own = settings_of_user()
    model = resolve(text, own.models)
    context = 2 * steps + 64 if 2 * steps + 64 > CONTEXT else None  # as many steps again run without clocks
    with loaded(model, own, context, device=device, threads=threads) as engine:
        with Bar() as bar:
            found = profile.profile(engine, steps, bar.stage, name=text if model.path else model.name, wait=wait)
        sources = {k.name: k.source for k in profile.kernels(engine)} if source else {}
    slowest = {row.name: sources.get(row.name, "") for row in found.rows[:3]} if source else {}
    if as_json:
        return show_json(found.as_dict() | ({"sources": slowest} if source else {}))
    show(profile.view(found))
    for name, code in slowest.items():
        print(f"\n{printable(name, newlines=False)}\n{printable(code)}")
