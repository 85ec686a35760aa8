"""`tinychat bench`: measures the speed of a model, of its layers or of one kernel, and shows earlier results."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from tinychat.backend.address import Server
from tinychat.chat import servers
from tinychat.commands.loading import CONTEXT, loaded, obtain, settings_of_user
from tinychat.console import Bar, grid, say, show, show_json
from tinychat.errors import TinychatError
from tinychat.models.registry import resolve

if TYPE_CHECKING:
    from tinychat.engine.speculation import Speculate


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
    speculate: Speculate,
    accept: float | None,
    server: str | None,
    server_model: str | None,
    key_file: str | None,
) -> None:
    """Measures prefill and decode speed of a model, one kernel (`kernel`), one layer of each kind (`block`) or a
    server's model (`server`); or lists earlier results (`history`)."""
    from tinychat.measure import bench, log, tables

    if history:
        return _history(text, as_json)
    own = settings_of_user()
    if server is not None:
        at = servers.chosen(own.servers, server, server_model, key_file)
        return _server(at, n_prompt, n_gen, wait=wait, as_json=as_json)
    threads = threads or own.threads
    if kernel is not None or block:
        return _parts(text, kernel, as_json, wait=wait, device=device, threads=threads)
    assert text is not None, "cli refuses it"
    model = resolve(text, own.models)
    context = n_prompt + n_gen if n_prompt + n_gen > CONTEXT else None
    kinds = speculate if accept is None else speculate or "auto"
    with loaded(model, own, context, device=device, threads=threads, speculate=kinds) as engine:
        with Bar() as bar:
            result = bench.run(
                engine,
                n_prompt,
                n_gen,
                report=bar.stage,
                name=model.name,
                speculate=speculate,
                accept=accept,
                wait=wait,
            )
        show_json(result.as_dict()) if as_json else show(tables.model_table([result]))
        if accept is not None:
            say(tables.synthetic_line(result, engine.plan.mtp is not None))
        log.save(result)


def _server(at: Server, n_prompt: int, n_gen: int, *, wait: bool, as_json: bool) -> None:
    from tinychat.backend.remote import RemoteBackend
    from tinychat.measure import served

    with contextlib.closing(RemoteBackend.open(at.url, at.model, at.key)) as backend, Bar() as bar:
        result = served.run(backend, n_prompt, n_gen, report=bar.stage, wait=wait)
    if as_json:
        return show_json(result.as_dict())
    rows = [
        ("model", result.model),
        ("server", at.url),
        ("decode", f"{result.decode_tok_s:.1f} tok/s"),
        ("first token", f"{1e3 * result.ttft_s:.1f} ms, behind {result.prompt_tokens:,} tokens of prompt"),
        ("answers", f"{result.generated_tokens:,} tokens, median of {len(result.decode_runs)}"),
    ]
    show(grid(rows))


def _parts(text: str | None, kernel: str | None, as_json: bool, **options: Any) -> None:
    from tinychat.measure import log, microbench, tables

    with Bar() as bar:
        if kernel is not None:
            found = microbench.kernel(kernel, report=bar.stage, **options)
        else:
            assert text is not None, "cli refuses it"
            model = resolve(text, settings_of_user().models)
            found = microbench.layers(obtain(model), model.name, report=bar.stage, **options)
    show_json({"results": [r.as_dict() for r in found]}) if as_json else show(tables.part_table(found))
    for result in found:
        log.save(result)


def _history(text: str | None, as_json: bool) -> None:
    from tinychat.measure import log, tables

    name = resolve(text, settings_of_user().models).name if text else None
    models = [r for r in log.history() if name in (None, r.model)]
    parts = [r for r in log.parts() if name in (None, r.model)]
    if as_json:
        return show_json({"models": [r.as_dict() for r in models], "ladder": [r.as_dict() for r in parts]})
    if not models and not parts:
        raise TinychatError("nothing was measured yet; `tinychat bench MODEL` measures a model and keeps the result")
    if models:
        show(tables.model_table(models))
    if parts:
        show(tables.part_table(parts))
