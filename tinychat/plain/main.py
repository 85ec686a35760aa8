"""Starts the plain chat."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.factory import open_backend
from tinychat.backend.protocol import Speculate
from tinychat.chat import settings
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Conversation
from tinychat.chat.history import History
from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.registry import resolve
from tinychat.plain.chat import PlainChat
from tinychat.plain.printer import Printer
from tinychat.plain.reading import LineReader
from tinychat.tools.mcp import McpServers
from tinychat.tools.mcp_config import config_path, read_servers
from tinychat.tools.permission import Permissions


def main(
    model: str | None = None,
    path: Path | None = None,
    preset: str | None = None,
    *,
    speculate: Speculate = "auto",
    tools: Path | None = None,
    mcp_file: Path | None = None,
    **load_options: Any,
) -> int:
    """Runs the plain chat; the arguments are those of the app. Without `path` /model chooses what answers."""
    own, printer = settings.load(), Printer()
    problems, history, mcp = list(own.problems), None, McpServers(())
    try:
        history = History()
        problems += [history.problem] * bool(history.problem)
    except TinychatError as e:
        problems.append(f"{e}; conversations are not saved")
    try:
        mcp = McpServers(read_servers(mcp_file or config_path()))
    except TinychatError as e:
        problems.append(f"{e}; no MCP server is started")
    for problem in problems:
        printer.note(problem, error=True)
    opened = partial(open_backend, thread=EngineThread(), store_bytes=int(own.kv_cache_gb * 1e9), speculate=speculate)
    controller = Controller(
        opened,
        Conversation(parameters=own.parameters),
        save=history.save if history else None,
        permissions=Permissions.of_user(),
    )
    options = {"threads": own.threads, **load_options}

    def load(name: str) -> str:
        if not name.strip():
            here = [entry.name for entry in cache.entries() if not entry.partial]
            return "\n".join(here) or "no model is here; `tinychat cache pull NAME` downloads one"
        found = resolve(name.strip(), settings.load().models)
        if (file := cache.path_of(found)) is None:
            raise TinychatError(
                f"{found.name} is not on this computer; `tinychat cache pull {found.name}` downloads it"
            )
        controller.load(found.name, file, **{"preset": found.preset, **options})
        return ""

    reader = LineReader(history.prompts() if history else ())
    chat = PlainChat(controller, reader, load, history, mcp, printer)
    if tools is not None:
        chat.use_folder(tools)
    mcp.start()
    if path is not None:
        controller.load(model or path.name, path, **{"preset": preset, **options})
    else:
        printer.note("no model is loaded; /model lists those that are here, /model NAME loads one")
    try:
        chat.run()
    finally:
        mcp.close()
        if history is not None:
            history.close()
    return 0
