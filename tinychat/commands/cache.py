"""`tinychat cache`: the model files on this machine."""

from __future__ import annotations

from pathlib import Path

from rich.filesize import decimal

from tinychat.commands.loading import obtain, settings_of_user
from tinychat.console import Bar, grid, say, show
from tinychat.errors import TinychatError, printable
from tinychat.measure.profiles import clear_profiles, profiles_dir
from tinychat.models import cache
from tinychat.models.registry import MODELS, Model, resolve


def path(text: str | None) -> None:
    """Prints the folder of the model files, or the path of one model's file."""
    if text is None:
        return print(cache.downloads_dir())
    model = resolve(text, settings_of_user().models)
    if not (path := cache.path_of(model)):
        raise TinychatError(f"{model.name} is not in the cache; `tinychat cache pull {model.name}` downloads it")
    print(path)


def list_files(everything: bool) -> None:
    """The files of the cache; with `everything` also the models that could be downloaded."""
    from tinychat.backend import saved  # NumPy

    own = settings_of_user().models
    rows: list[tuple[str, ...]] = []
    here: set[Model | None] = set()
    for e in cache.entries(own):
        state = "complete" if not e.partial else f"partial, {e.size / e.total:.0%}" if e.total else "partial"
        rows.append((e.name, state, decimal(e.size), e.model.label if e.model else "", e.key))
        here.add(e.model)
    if everything:
        rows += [(m.name, "here" if m.path else "not here", "", m.label, "") for m in (*own, *MODELS) if m not in here]
    if rows:
        show(grid(rows, ("model", "state", "size", "what", "file"), right=(2,)))
    else:
        say(f"nothing in {cache.downloads_dir()} yet; `tinychat cache list --all` shows what there is to download")
    files, nbytes = saved.usage()
    if files:
        blocks = f"{files:,} block{'s' * (files != 1)}"
        say(f"{decimal(nbytes)} of saved KV caches in {blocks}; `tinychat cache clear kv` deletes them")
    if profiles := [p.stat().st_size for p in profiles_dir().glob("*.json")]:
        count = f"{len(profiles)} profile{'s' * (len(profiles) != 1)}"
        say(f"{decimal(sum(profiles))} in {count}; `tinychat cache clear profiles` deletes them")


def clear(what: str) -> None:
    """Deletes saved KV caches ("kv") or profiles ("profiles")."""
    from tinychat.backend import saved

    freed = saved.clear() if what == "kv" else clear_profiles()
    print(f"deleted {decimal(freed)}")


def pull(text: str) -> None:
    """Downloads a model unless the cache has it."""
    print(obtain(resolve(text, settings_of_user().models), anyway=True))


def add(file: str, text: str, mode: str) -> None:
    """Adds a local file to the cache."""
    model = resolve(text, settings_of_user().models)
    with Bar() as bar:
        print(cache.add(Path(file), model, mode, bar.download))  # type: ignore[arg-type]


def verify(text: str | None) -> None:
    """Reads files of the cache and compares their SHA-256. Raises TinychatError when one is damaged."""
    complete = [e for e in (_entries(text) if text else cache.entries(settings_of_user().models)) if not e.partial]
    damaged = []
    for entry in complete:
        try:
            with Bar() as bar:
                print(f"{entry.name}: {cache.verify(entry, bar.download)}")
        except TinychatError as e:
            say(str(e))
            damaged.append(entry.name)
    if damaged:
        raise TinychatError(f"{len(damaged)} of {len(complete)} damaged: {', '.join(damaged)}")
    if not complete:
        say("no complete file to verify")


def rm(text: str) -> None:
    """Deletes a model's file and partial file."""
    for entry in _entries(text):
        cache.remove(entry)
        print(f"deleted {entry.name}{' (partial)' if entry.partial else ''}, {decimal(entry.size)}")


def prune() -> None:
    """Deletes the remains of unfinished downloads."""
    gone = cache.prune()
    for path, size in gone:
        print(f"deleted {path.name}, {decimal(size)}")
    if not gone:
        say("nothing to delete")


def _entries(text: str) -> list[cache.CachedFile]:
    """The cache's entries of a model, named as in the registry or by the file name that `cache list` shows."""
    own = settings_of_user().models
    if found := [e for e in cache.entries(own) if e.key == text]:
        return found
    model = resolve(text, own)
    if model.path:
        raise TinychatError(f"{printable(str(model.path))} is a file of your own, not one of the cache")
    if not (found := cache.find(model)):
        raise TinychatError(f"{model.name} is not in the cache")
    return found
