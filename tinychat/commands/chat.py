"""`tinychat [MODEL]`: the app."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinychat.chat import servers, settings
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
) -> int:
    """Runs the app with the model that `text` or the settings name, or with a server's model; without either, with the
    model of last time, or the picker. With `resume` it opens the last conversation, whose model wins over the
    settings'. Returns the exit code."""
    if not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)):  # Textual paints on stderr
        raise TinychatError("the chat needs a terminal; `tinychat run MODEL PROMPT` gives one answer without")
    if os.environ.get("TERM") == "dumb":
        raise TinychatError(
            "this terminal cannot show the chat (TERM=dumb); `tinychat run MODEL PROMPT` gives one answer in plain text"
        )
    own = settings.load()  # the app shows what is wrong in it
    options: dict[str, Any] = {k: v for k, v in (("device", device), ("threads", threads)) if v is not None}
    options |= {"speculate": speculate, "resume": resume}
    if tools is not None:
        options["tools"] = expand(tools)
    if mcp_file is not None:
        options["mcp_file"] = expand(mcp_file)
    if server is not None:
        from tinychat.ui.app import main

        # The path is never read; the picker shows the name beside other models.
        return main(
            server_model or server,
            Path(server),
            server=servers.chosen(own.servers, server, server_model, key_file),
            **{k: v for k, v in options.items() if k in ("resume", "tools", "mcp_file")},
        )
    if not (text := text or ("" if resume else own.model)):
        from tinychat.ui.app import main

        return main(**options)
    model = resolve(text, own.models)
    path = obtain(model)
    from tinychat.ui.app import main

    return main(model.name, path, model.preset, **options)
