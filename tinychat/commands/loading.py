"""Finds a model by the name that a user typed and opens its file, its header or its engine; shared by the commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from rich.filesize import decimal

from tinychat import process
from tinychat.chat import settings
from tinychat.console import Bar, say, say_notes
from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.kernels.cuda import driver
from tinychat.models import cache
from tinychat.models.hosts import shown
from tinychat.models.registry import Model, resolve
from tinychat.models.sources import scheme_of

if TYPE_CHECKING:
    from tinychat.chat.settings import Settings
    from tinychat.engine import Engine
    from tinychat.engine.speculation import Speculate

CONTEXT = 4096  # tokens; the context for which the memory check before a download computes the KV cache
MAX_TEXT = 4 << 20  # bytes; a tokenizer takes up to 350 bytes of memory for each


def settings_of_user() -> Settings:
    """The settings of the user's file; prints the file's problems on stderr."""
    found = settings.load()
    for problem in found.problems:
        say(problem)
    return found


def obtain(model: Model, *, anyway: bool = False) -> Path:
    """The file of `model`; downloads it if it is missing and the model can run here (or `anyway`). Raises
    TinychatError."""
    if path := cache.path_of(model):
        return path
    if model.why_not:
        raise TinychatError(model.why_not)
    from tinychat.engine.fit import fit

    context = min(model.context, CONTEXT)
    verdict = fit(model.size, model.kv_bytes(context), context)
    if verdict.verdict == "does not fit":
        line = f"{model.name} does not fit into this machine's memory: {verdict.explanation}"
        if not anyway:
            raise TinychatError(
                f"{line}; take a smaller model or quant, or download it anyway with `tinychat cache pull`"
            )
        say(line)
    label = f" ({model.label})" if model.label else ""
    say(f"downloading {model.name}{label} to {cache.downloads_dir()}, where {decimal(cache.free_bytes())} are free")
    with Bar() as bar:
        return cache.pull(model, bar.download)


@contextlib.contextmanager
def loaded(
    model: Model,
    own: Settings,
    context: int | None = None,
    *,
    device: str | None,
    threads: int | None,
    speculate: Speculate = 0,
) -> Iterator[Engine]:
    """The engine with `model`, which is downloaded if missing; closes it on exit. `context`: tokens (None: the engine's
    default); `speculate`: as Engine.load, by default single steps, which is what is measured."""
    path = obtain(model)
    with Bar() as bar, process.starting():
        bar.stage("loading the engine", 0.0)
        driver.start(device)
        from tinychat.engine.engine import Engine

        engine = Engine.load(
            path,
            max_context=context,
            device=device,
            threads=threads or own.threads,
            preset=model.preset,
            speculate=speculate,
            progress=bar.stage,
        )
    say_notes(filter(None, (*engine.notes, engine.chat.fallback)))
    with contextlib.closing(engine):
        yield engine


@contextlib.contextmanager
def header(text: str) -> Iterator[tuple[Model, Path]]:
    """The model that `text` names and a file with its header. If the model is not in the cache, only its header is
    fetched, where the source allows that."""
    model = resolve(text, settings_of_user().models)
    if path := cache.path_of(model):
        yield model, path
    elif (read := scheme_of(model.sources[0]).header) is None:
        yield model, obtain(model)
    else:
        say(f"{model.name} is not here; reading its header from {shown(model.sources[0])}")
        with read(model.sources[0]) as path:
            yield model, path


def prompt_text(prompt: str) -> str:
    """The prompt; for "-" all of stdin. Raises TinychatError when the text is empty."""
    text = stdin_text() if prompt == "-" else prompt.encode(errors="surrogateescape").decode("utf-8", "replace")
    if not text.strip():
        raise TinychatError("the prompt is empty")
    return text


def stdin_text() -> str:
    """All of stdin, read as UTF-8 in any locale. Raises TinychatError for more than MAX_TEXT bytes."""
    return _text(sys.stdin.buffer, "stdin")


def text_of(file: str) -> str:
    """All of a text file, likewise; a pipe, too."""
    try:
        with open(expand(file), "rb") as f:
            return _text(f, printable(file))
    except OSError as e:
        raise TinychatError(f"{printable(file)}: cannot be read: {(e.strerror or str(e)).lower()}") from None


def _text(source: BinaryIO, name: str) -> str:
    data = source.read(MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise TinychatError(f"{name} has more than {decimal(MAX_TEXT)} of text; no model reads so much at once")
    return data.decode("utf-8", "replace")
