"""`tinychat run`: one answer to one prompt."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tinychat.chat.conversation import Attachment, Turn
from tinychat.chat.parameters import Parameters
from tinychat.commands.keys import read_key
from tinychat.commands.loading import obtain, prompt_text, settings_of_user
from tinychat.console import Bar, say, show_json
from tinychat.errors import TinychatError, printable
from tinychat.files import expand
from tinychat.models.registry import Model, resolve
from tinychat.units import speed

if TYPE_CHECKING:
    from tinychat.backend.protocol import Backend, DoesNotFit
    from tinychat.engine.speculation import Speculate


def run(
    text: str | None,
    prompt: str,
    *,
    server: str | None,
    server_model: str | None,
    key_file: str | None,
    raw: bool,
    think: bool | None,
    files: Sequence[str],
    as_json: bool,
    device: str | None,
    threads: int | None,
    speculate: Speculate,
    **given: str | float | None,
) -> None:
    """One answer on stdout; thinking goes to stderr, if that is a terminal.

    `given` are parameters of the chat (temperature, system, ...); those that are None come from the settings. With
    `as_json` nothing is painted while the answer comes, so `painting_s` is 0.
    """
    question = _question(prompt, files)
    own = settings_of_user()
    chosen = _parameters(own.parameters, given)
    backend: Backend
    if server is not None:
        from tinychat.backend.remote import RemoteBackend

        backend = RemoteBackend.open(server, server_model, read_key(key_file))
        name = backend.info.name
    else:
        assert text is not None, "cli refuses it"
        model = resolve(text, own.models)
        options = {"device": device, "threads": threads or own.threads, "speculate": speculate}
        backend, name = _local(model, question, chosen, options), model.name
    from tinychat.backend.protocol import DoesNotFit, Failed, Finished, Piece, Request

    request = Request(
        messages=() if raw else _messages(chosen.system, question),
        raw=question if raw else None,
        sampling=chosen.sampling,
        max_tokens=chosen.max_tokens,
        thinking=think,
    )
    shown, ids = _Shown(quiet=as_json), list[int]()
    with closing(backend):
        for note in backend.info.notes:
            say(note)
        said = {"answer": "", "thinking": ""}
        try:
            for event in backend.answer(request):
                match event:
                    case Piece():
                        said[event.kind] += event.text
                        ids += [t.id for t in event.tokens]
                        shown.add(event.text, event.kind)
                    case DoesNotFit():
                        raise TinychatError(_too_long(event))
                    case Failed():
                        raise TinychatError(event.message)
                    case Finished():
                        finished = event
        finally:
            request.cancel.set()
            shown.end()
    stats = finished.stats
    if as_json:
        show_json(
            {
                "model": name,
                "text": said["answer"],
                "thinking": said["thinking"],
                "token_ids": ids,
                "stop_reason": finished.reason,
                "seed": chosen.seed,
                "device": backend.info.device,
                "threads": backend.info.threads,
                **stats.as_dict(),
                "painting_s": 0.0,
            }
        )
    elif sys.stderr.isatty():
        first = f"first token after {stats.ttft_s:.2f} s"
        say(f"{stats.generated_tokens} tokens · {speed(stats.decode_tok_s)} tok/s · {first}")
    if finished.reason == "context":
        say(f"the context of {backend.info.max_context:,} tokens is full; `--context N` loads the model with more")


def _local(model: Model, question: str, chosen: Parameters, options: dict[str, Any]) -> Backend:
    """The model on this machine, with a context that the question fits."""
    context = chosen.context or _needed_context(model, question, chosen.max_tokens)
    path = obtain(model)
    with Bar() as bar:
        bar.stage("loading the engine", 0.0)
        from tinychat.backend.local import LocalBackend

        return LocalBackend.open(path, max_context=context, preset=model.preset, progress=bar.stage, **options)


def _messages(system: str, question: str) -> tuple[dict[str, str], ...]:
    return (*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": question})


def _question(prompt: str, files: Sequence[str]) -> str:
    """The prompt with what is attached to it: `files`, and what a pipe or file on stdin has."""
    from tinychat.ui.chat.attach import read

    attached = [read(expand(name), name) for name in files]
    if prompt != "-" and _stdin_has_text() and (text := sys.stdin.buffer.read().decode("utf-8", "replace")).strip():
        attached.append(Attachment("stdin", text))
    return Turn("user", prompt_text(prompt), files=tuple(attached)).content


def _stdin_has_text() -> bool:
    """Whether stdin is a pipe or a file: not a terminal, not /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or replaced by something that is no file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def _parameters(own: Parameters, given: dict[str, str | float | None]) -> Parameters:
    """The settings' parameters with those that are `given`, and a seed that is a number."""
    values = {k: v for k, v in given.items() if v is not None}
    mine = {k: values.pop(k) for k in [*values] if k in ("seed", "max_tokens", "context", "system")}
    chosen = replace(own, sampling=replace(own.sampling, **values), **mine)  # type: ignore[arg-type]
    seed = secrets.randbits(32) if chosen.seed is None else chosen.seed
    return replace(chosen, seed=seed, sampling=replace(chosen.sampling, seed=seed))


def _too_long(event: DoesNotFit) -> str:
    u = event.usage
    return (
        f"the prompt has {u.prompt:,} tokens and an answer needs {event.reserve:,}, the context holds {u.limit:,}; "
        "shorten it or load the model with a larger one (--context N)"
    )


class _Shown:
    """Writes an answer while it comes: nothing a terminal would obey; thinking dimmed, on stderr."""

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
            self.wrote = False


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
