"""Which MCP servers there are: the file that other clients use, {"mcpServers": {NAME: {"command": ...}}}.

A server is started by "command" with "args", "env" and "cwd", or reached at "url" with "headers"; "disabled": true
keeps it off. Whatever else is in the file stays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_config_dir

from tinychat.errors import TinychatError, encodable, printable
from tinychat.files import alone, replace_file


@dataclass(frozen=True)
class ServerConfig:
    """One server. Exactly one of `command` and `url` is there."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    on: bool = True

    @property
    def where(self) -> str:
        """The command or the URL, for people; values of env and headers are secrets and not in it."""
        return self.url or " ".join((self.command, *self.args))


def config_path() -> Path:
    """Where the user's file is, or would be."""
    return Path(user_config_dir("tinychat", appauthor=False)) / "mcp.json"


def read_servers(file: Path) -> tuple[ServerConfig, ...]:
    """The servers of `file`; none where there is no file. Raises TinychatError that names what is wrong."""
    data = _read(file)
    servers = data.get("mcpServers", {})
    if not isinstance(servers, dict):
        raise _wrong(file, '"mcpServers" is to be an object')
    return tuple(_server(file, name, entry) for name, entry in servers.items())


def switch(file: Path, name: str, on: bool) -> None:
    """Writes that server `name` is on or off. Raises TinychatError."""
    with alone(file.parent):
        data = _read(file)
        entry = data.get("mcpServers", {}).get(name)
        if not isinstance(entry, dict):
            raise _wrong(file, f"there is no server {printable(name)!r} any more")
        if on:
            entry.pop("disabled", None)
        else:
            entry["disabled"] = True
        try:
            replace_file(file, encodable(json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode(), durable=True)
        except OSError as e:
            raise _wrong(file, f"cannot be written: {(e.strerror or str(e)).lower()}") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        why = (e.strerror or str(e)).lower() if isinstance(e, OSError) else str(e)
        raise _wrong(file, f"cannot be read: {printable(why, newlines=False)}") from None
    if not isinstance(data, dict):
        raise _wrong(file, "is to be a JSON object")
    return data


def _server(file: Path, name: str, entry: Any) -> ServerConfig:
    def of(key: str, kind: type, default: Any) -> Any:
        value = entry.get(key, default)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not isinstance(value, kind) or not all(isinstance(each, str) for each in inner):
            raise _wrong(file, f"server {printable(name)!r}: {key!r} has the wrong type")
        return value

    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise _wrong(file, f'server {printable(name)!r} is to have either "command" or "url"')
    return ServerConfig(
        name,
        of("command", str, ""),
        tuple(of("args", list, [])),
        of("env", dict, {}),
        of("cwd", str, ""),
        of("url", str, ""),
        of("headers", dict, {}),
        on=not of("disabled", bool, False),
    )


def _wrong(file: Path, why: str) -> TinychatError:
    return TinychatError(f"{printable(str(file), newlines=False)}: {why}")
