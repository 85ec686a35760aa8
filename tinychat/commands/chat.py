"""`tinychat [MODEL]`: the app."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinychat import process
from tinychat.chat import servers, settings
from tinychat.chat.start import start
from tinychat.chat.state import ModelChoice
from tinychat.commands.loading import obtain
from tinychat.errors import TinychatError
from tinychat.files import expand
from tinychat.models.registry import resolve

if TYPE_CHECKING:
    from tinychat.engine.speculation import Speculate


def chat(
    text: str | None,
    *,
    resume: bool,
    device: str | None,
    threads: int | None,
    speculate: Speculate,
    server: str | None,
    server_model: str | None,
    key_file: str | None,
    tools: str | None,
    mcp_file: str | None,
    plain: bool,
) -> int:
    """Runs the app with the model that `text` or the settings name, or with a server's model; without either, with the
    model of last time, or the picker. With `resume` it opens the last conversation, whose model wins over the
    settings'. Where `plain`, the terminal or the user's environment asks for it, the plain chat runs in place of the
    app. Returns the exit code."""
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))  # Textual paints on stderr
    plain = plain or (terminal and wants_plain(os.environ))
    if not plain and not terminal:
        raise TinychatError(
            "the chat needs a terminal; `tinychat --plain` does without, `tinychat run MODEL PROMPT` gives one answer"
        )
    own = settings.load()
    options: dict[str, Any] = {k: v for k, v in (("device", device), ("threads", threads)) if v is not None}
    choice = None
    if server is not None:  # the path is never read; the picker shows the name beside other models
        opened = {"server": servers.chosen(own.servers, server, server_model, key_file)}
        choice, options = ModelChoice(server_model or server, Path(server), opened), {}
    elif text := text or ("" if resume else own.model):
        model = resolve(text, own.models)
        choice = ModelChoice(model.name, obtain(model), {"preset": model.preset, "threads": own.threads})
    begun = start(
        own,
        choice,
        resume=resume,
        speculate=speculate,
        tools=expand(tools) if tools is not None else None,
        mcp_file=expand(mcp_file) if mcp_file is not None else None,
        load_options=options,
    )
    if plain:
        from tinychat.plain.main import main
    else:
        process.prepare_for_screen()  # first: the imports are half of what a full collection would look at
        with process.starting():
            from tinychat.ui.app import main
    return main(begun)


def wants_plain(environ: Mapping[str, str]) -> bool:
    """Whether the terminal can only show lines (TERM=dumb, as in Emacs' shell), or ACCESSIBLE is set, with which
    people who use a screen reader tell programs so."""
    return environ.get("TERM") == "dumb" or bool(environ.get("ACCESSIBLE"))
