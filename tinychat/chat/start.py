"""What a chat begins with, on a screen or without: settings, history, MCP servers, conversation and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from tinychat.chat.state import ModelChoice
from tinychat.errors import TinychatError
from tinychat.tools.mcp import McpServers
from tinychat.tools.mcp_config import config_path, read_servers


@dataclass(frozen=True)
class Start:
    """`model` None: none is loaded. `load_options` are those of every load. `history` None: nothing is saved. `tools`
    is the folder that tools work in. `problems` are lines for the user."""

    own: settings.Settings
    history: History | None
    conversation: Conversation | None
    mcp: McpServers
    mcp_file: Path
    tools: Path | None
    model: ModelChoice | None
    load_options: Mapping[str, Any]
    open_backend: OpenBackend
    problems: tuple[str, ...]


def start(
    own: settings.Settings,
    model: ModelChoice | None,
    *,
    resume: bool = False,
    speculate: Speculate = "auto",
    tools: Path | None = None,
    mcp_file: Path | None = None,
    load_options: Mapping[str, Any],
) -> Start:
    """Begins with the last conversation where `resume` says so, and with `model`; without one, with that conversation's
    model or the one of last time. Every model that is loaded speculates as `speculate` says. `mcp_file` names MCP
    servers in place of the user's file."""
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
    model = model or earlier(conversation, own, problems)
    if model is not None:
        model = replace(model, options={**model.options, **load_options})
    opened = partial(open_backend, thread=EngineThread(), store_bytes=int(own.kv_cache_gb * 1e9), speculate=speculate)
    if history is not None and history.problem and history.problem not in problems:
        problems.append(history.problem)
    return Start(own, history, conversation, mcp, mcp_file, tools, model, load_options, opened, tuple(problems))
