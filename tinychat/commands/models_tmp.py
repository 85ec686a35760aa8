"""The subcommands, without their arguments: `cli` parses, these do."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from tinychat.chat import settings
from tinychat.console import Bar, grid, say, show, show_json
from tinychat.errors import TinychatError, printable
from tinychat.models import cache
from tinychat.models.download import remote_header
from tinychat.models.registry import MODELS, Model, resolve

if TYPE_CHECKING:
    from tinychat.chat.settings import Settings
    from tinychat.engine import Engine

# From a name to a file, and to an engine


def obtain(model: Model, *, anyway: bool = False) -> Path:
    """The file of `model`, downloaded first if it is not here: after saying so, and only if it can run (or
    `anyway`)."""
    if path := cache.path_of(model):
        return path
    if model.why_not:
        raise TinychatError(model.why_not)
    from tinychat.engine.fit import fit

    verdict = fit(model.size, model.kv_bytes_per_token, min(model.context, 4096))
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
    model: Model, own: Settings, context: int | None = None, *, device: str | None, threads: int | None
) -> Iterator[Engine]:
    """The engine with `model`, downloaded if need be; closed afterwards. `context` None is the engine's default."""
    path = obtain(model)
    with Bar() as bar:
        bar.stage("loading the engine", 0.0)
        from tinychat.engine import Engine

        engine = Engine.load(
            path,
            max_context=context,
            device=device,
            threads=threads or own.threads,
            preset=model.preset,
            progress=bar.stage,
        )
    for note in (*engine.notes, engine.chat.note):
        if note:
            say(note)
    with contextlib.closing(engine):
        yield engine


@contextlib.contextmanager
def header(text: str) -> Iterator[tuple[Model, Path]]:
    """The model that `text` names and a file with its header; of a model that is not here only the header is
    fetched."""
    model = resolve(text, settings_of_user().models)
    if path := cache.path_of(model):
        yield model, path
    elif not model.sources[0].startswith("http"):
        yield model, obtain(model)
    else:
        say(f"{model.name} is not here; reading its header from {model.sources[0]}")
        with remote_header(model.sources[0]) as path:
            yield model, path


def settings_of_user() -> Settings:
    """The settings file; what is wrong in it is said on stderr."""
    found = settings.load()
    for problem in found.problems:
        say(problem)
    return found


# The model at work


def chat(text: str | None) -> int:
    """The app, on the model that `text` or else the settings name; without one, on the picker. Returns the exit
    code."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise TinychatError("the chat needs a terminal; `tinychat run MODEL PROMPT` gives one answer without")
    own = settings.load()  # what is wrong in it, the app says
    if not (text := text or own.model):
        from tinychat.ui.app import main

        return main()
    model = resolve(text, own.models)
    path = obtain(model)
    from tinychat.ui.app import main

    return main(model.name, path, model.preset)


def run(
    text: str,
    prompt: str,
    *,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    raw: bool,
    think: bool | None,
    as_json: bool,
    device: str | None,
    threads: int | None,
) -> None:
    """One answer on stdout. Thinking goes to stderr, if somebody looks. Parameters that are None come from the
    settings.

    With `as_json` nothing is painted while the answer comes, so `painting_s` is 0.
    """
    prompt = _text(prompt)
    own = settings_of_user()
    model, chosen = resolve(text, own.models), own.parameters
    seed = next(s for s in (seed, chosen.seed, secrets.randbits(32)) if s is not None)
    sampling = replace(chosen.sampling, seed=seed)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    max_tokens = max_tokens or chosen.max_tokens
    context = chosen.context or _needed_context(model, prompt, max_tokens)
    with loaded(model, own, context, device=device, threads=threads) as engine:
        if raw:
            ids = engine.tokenizer.encode_prompt(prompt)
        else:
            system = [{"role": "system", "content": chosen.system}] if chosen.system else []
            ids = engine.chat.render([*system, {"role": "user", "content": prompt}], thinking=think)
        shown = _Shown(quiet=as_json)
        tokens = []
        for token in engine.generate(ids, sampling, max_tokens, raw=raw):
            tokens.append(token)
            shown.add(token.text, token.kind)
        shown.end()
        s = engine.stats
        if as_json:
            said = {kind: "".join(t.text for t in tokens if t.kind == kind) for kind in ("answer", "thinking")}
            show_json(
                {
                    "model": model.name,
                    "text": said["answer"],
                    "thinking": said["thinking"],
                    "token_ids": [t.id for t in tokens if t.id is not None],
                    "stop_reason": engine.stop_reason,
                    "seed": seed,
                    "device": engine.info.device,
                    "threads": engine.info.threads,
                    **s.as_dict(),
                    "painting_s": 0.0,
                }
            )
        elif sys.stderr.isatty():
            say(f"{s.generated_tokens} tokens · {s.decode_tok_s:.1f} tok/s · first token after {s.ttft_s:.2f} s")
        if engine.stop_reason == "context":
            say(f"the context of {engine.info.max_context:,} tokens is full")


class _Shown:
    """Writes an answer while it comes: nothing a terminal would obey, thinking dim and beside the answer."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.wrote, self.thought = quiet, False, False
        self.clean = printable if sys.stdout.isatty() else lambda text: text

    def add(self, text: str, kind: str) -> None:
        if self.quiet or not text:
            return
        if kind == "thinking":
            if sys.stderr.isatty():
                self.thought = True
                print(f"\x1b[2m{printable(text)}\x1b[0m", end="", file=sys.stderr, flush=True)
            return
        if self.thought:
            print(file=sys.stderr)
            self.thought = False
        self.wrote = True
        print(self.clean(text), end="", flush=True)

    def end(self) -> None:
        if self.wrote:
            print(flush=True)


def _needed_context(model: Model, prompt: str, max_tokens: int | None) -> int | None:
    """A context large enough for a long `prompt` and an answer; None when the engine's default will do."""
    if len(prompt.encode()) + (max_tokens or 0) < 3000:
        return None
    from tinychat.engine.config import ModelConfig
    from tinychat.engine.engine import DEFAULT_CONTEXT
    from tinychat.engine.gguf import GGUF
    from tinychat.engine.tokenizer import Tokenizer

    gguf = GGUF.open(obtain(model))
    needed = len(Tokenizer(gguf.metadata).encode(prompt)) + 256 + (max_tokens or 1024)
    return min(needed, ModelConfig.from_gguf(gguf).context) if needed > DEFAULT_CONTEXT else None


def perplexity(
    text: str, file: str, *, context: int, chunks: int | None, as_json: bool, device: str | None, threads: int | None
) -> None:
    """How well the model foretells a text file, as llama.cpp's llama-perplexity computes it."""
    from tinychat.measure import perplexity as room

    try:
        prose = Path(file).read_text("utf-8", "replace")
    except OSError as e:
        raise TinychatError(f"{printable(file)}: cannot be read: {(e.strerror or str(e)).lower()}") from None
    own = settings_of_user()
    model = resolve(text, own.models)
    with (
        loaded(model, own, context if context > 4096 else None, device=device, threads=threads) as engine,
        Bar() as bar,
    ):
        for now in room.perplexity(engine, prose, context, chunks):
            left = timedelta(seconds=int(now.eta_s))
            bar.stage(
                f"window {now.chunks + 1} of {now.total_chunks} · perplexity {now.ppl:.2f} · {left} left", now.progress
            )
    if as_json:
        show_json(
            {"model": model.name, "ppl": now.ppl, "ppl_err": now.ppl_err, "tokens": now.tokens, "chunks": now.chunks}
        )
    else:
        print(
            f"perplexity {now.ppl:.4f} ± {now.ppl_err:.4f} over {now.tokens:,} tokens in {now.chunks} "
            f"windows of {context}"
        )


# Looking into files


def tokenize(text: str, prompt: str, *, as_json: bool) -> None:
    """The ids of a raw prompt, as llama.cpp's llama-tokenize gives them."""
    from tinychat.engine.tokenizer import Tokenizer

    prompt = _text(prompt)
    with header(text) as (_, path):
        tokenizer = Tokenizer.from_gguf(path)
        ids = tokenizer.encode_prompt(prompt)
        tokens = [tokenizer.token_text(i) for i in ids]
    if as_json:
        show_json({"ids": ids, "tokens": tokens})
    else:
        for i, token in zip(ids, tokens):
            print(f"{i:>8}  {printable(token, newlines=False)}")


def info(text: str, *, grep: str | None, template: bool, tensors: bool, as_json: bool) -> None:
    """What a model is; or its metadata by a word of the key, its chat template, its tensors."""
    from tinychat.commands import describe

    with header(text) as (model, path):
        if template:
            source = describe.template(path)
            show_json({"template": source}) if as_json else print(printable(source))
        elif tensors:
            found = describe.tensors(path)
            if as_json:
                show_json({"tensors": found})
            else:
                cells = [(t["name"], t["type"], "×".join(map(str, t["shape"])), f"{t['bytes']:,}") for t in found]
                show(grid(cells, ("tensor", "type", "shape", "bytes"), right=(2, 3)))
        elif grep is not None:
            values = describe.metadata(path, grep)
            if not values and not as_json:
                raise TinychatError(f"no key of the metadata contains {grep!r}")
            show_json(values) if as_json else show(grid([(k, str(v)) for k, v in values.items()]))
        else:
            facts = describe.describe(path, model.name)
            if path != cache.path_of(model):
                facts["path"] = model.sources[0]
            show_json(facts | {"metadata": describe.metadata(path)}) if as_json else show(
                grid(list(describe.lines(facts)))
            )


def _text(prompt: str) -> str:
    """The prompt, or all of stdin for '-'."""
    text = sys.stdin.buffer.read().decode("utf-8", "replace") if prompt == "-" else prompt
    if not text.strip():
        raise TinychatError("the prompt is empty")
    return text


# The cache


def cache_path(text: str | None) -> None:
    """Where model files are, or where one is."""
    if text is None:
        return print(cache.downloads_dir())
    model = resolve(text, settings_of_user().models)
    if not (path := cache.path_of(model)):
        raise TinychatError(f"{model.name} is not in the cache; `tinychat cache pull {model.name}` downloads it")
    print(path)


def cache_list(everything: bool) -> None:
    """The files of the cache; with `everything` also the models that could be downloaded."""
    own = settings_of_user().models
    rows: list[tuple[str, ...]] = []
    here: set[Model | None] = set()
    for e in cache.entries(own):
        state = "whole" if not e.partial else f"partial, {e.size / e.total:.0%}" if e.total else "partial"
        rows.append((e.name, state, decimal(e.size), e.model.label if e.model else "", e.key))
        here.add(e.model)
    if everything:
        rows += [(m.name, "here" if m.path else "not here", "", m.label, "") for m in (*own, *MODELS) if m not in here]
    if rows:
        show(grid(rows, ("model", "state", "size", "what", "file"), right=(2,)))
    else:
        say(f"nothing in {cache.downloads_dir()} yet; `tinychat cache list --all` shows what there is to download")


def cache_pull(text: str) -> None:
    """Downloads a model unless it is here."""
    print(obtain(resolve(text, settings_of_user().models), anyway=True))


def cache_add(file: str, text: str, mode: str) -> None:
    """Takes a file that is here already into the cache."""
    model = resolve(text, settings_of_user().models)
    with Bar() as bar:
        print(cache.add(Path(file), model, mode, bar.download))  # type: ignore[arg-type]


def cache_verify(text: str | None) -> None:
    """Reads files of the cache and compares their SHA-256. Raises TinychatError when one is damaged."""
    whole = [e for e in (_entries(text) if text else cache.entries(settings_of_user().models)) if not e.partial]
    damaged = []
    for entry in whole:
        try:
            with Bar() as bar:
                print(f"{entry.name}: {cache.verify(entry, bar.download)}")
        except TinychatError as e:
            say(str(e))
            damaged.append(entry.name)
    if damaged:
        raise TinychatError(f"{len(damaged)} of {len(whole)} damaged: {', '.join(damaged)}")
    if not whole:
        say("no whole file to verify")


def cache_rm(text: str) -> None:
    """Deletes a model's file and partial file."""
    for entry in _entries(text):
        cache.remove(entry)
        print(f"deleted {entry.name}{' (partial)' if entry.partial else ''}, {decimal(entry.size)}")


def cache_prune() -> None:
    """Deletes what unfinished downloads have left."""
    gone = cache.prune()
    for path, size in gone:
        print(f"deleted {path.name}, {decimal(size)}")
    if not gone:
        say("nothing to delete")


def _entries(text: str) -> list[cache.Entry]:
    """What the cache holds of a model, or of the file name that `cache list` shows."""
    own = settings_of_user().models
    if found := [e for e in cache.entries(own) if e.key == text]:
        return found
    model = resolve(text, own)
    if model.path:
        raise TinychatError(f"{printable(str(model.path))} is a file of your own, not one of the cache")
    if not (found := cache.find(model)):
        raise TinychatError(f"{model.name} is not in the cache")
    return found
