"""What a chat begins with, on a screen or without: settings, history, MCP servers, conversation and model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.factory import open_backend
from tinychat.backend.protocol import Speculate
from tinychat.chat import settings
from tinychat.chat.choosing import earlier
from tinychat.chat.conversation import Conversation
from tinychat.chat.history import History
from tinychat.chat.loading import OpenBackend
from tinychat.errors import TinychatError
from tinychat.tools.mcp import McpServers
from tinychat.tools.mcp_config import config_path, read_servers


@dataclass(frozen=True)
class Start:
    """`path` None: no model is loaded. `options` are those of its load. `history` None: nothing is saved. `problems`
    are lines for the user."""

    own: settings.Settings
    history: History | None
    conversation: Conversation | None
    mcp: McpServers
    mcp_file: Path
    model: str | None
    path: Path | None
    options: dict[str, Any]
    open_backend: OpenBackend
    problems: tuple[str, ...]


def start(
    model: str | None,
    path: Path | None,
    preset: str | None,
    *,
    resume: bool,
    speculate: Speculate,
    mcp_file: Path | None,
    load_options: dict[str, Any],
) -> Start:
    """Begins with the last conversation where `resume` says so. `path`, if given, is to be loaded with `preset` and
    called `model`; otherwise that conversation's model or the one of last time. Every model that is loaded speculates
    as `speculate` says. `mcp_file` names MCP servers in place of the user's file."""
    own = settings.load()
    history, problems = None, list(own.problems)
    try:
        history = History()
    except TinychatError as e:
        problems.append(f"{e}; conversations are not saved")
    mcp_file, mcp = mcp_file or config_path(), McpServers(())
    try:
        mcp = McpServers(read_servers(mcp_file))
    except TinychatError as e:
        problems.append(f"{e}; no MCP server is started")
    conversation = None
    if resume and history is not None:
        try:
            conversation = next((history.load(found.id) for found in history.find(limit=1)), None)
        except TinychatError as e:
            problems.append(str(e))
        else:
            problems += ["there is no earlier conversation; this is a new one"] * (conversation is None)
    options = {"preset": preset, "threads": own.threads, **load_options}
    if path is None and (found := earlier(conversation, own, problems)) is not None:
        model, path, options = found.name, found.path, {**options, **found.options, **load_options}
    opened = partial(open_backend, thread=EngineThread(), store_bytes=int(own.kv_cache_gb * 1e9), speculate=speculate)
    return Start(own, history, conversation, mcp, mcp_file, model, path, options, opened, tuple(problems))
