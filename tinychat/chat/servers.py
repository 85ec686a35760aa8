"""The servers in the user's settings: names, addresses and the places of their keys. The keys are not stored here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tinychat.backend.address import Server, address, read_key
from tinychat.errors import TinychatError, printable


@dataclass(frozen=True)
class SavedServer:
    """`[servers."name"]` of the settings. `model` "": the only one it has. The key is the value of the environment
    variable `key_env` or in the file `key_file`; at most one of them is given."""

    name: str
    url: str
    model: str = ""
    key_env: str = ""
    key_file: str = ""

    def connection(self) -> Server:
        """Address and key, which is read now. Raises TinychatError if the key cannot be read."""
        key = None
        if self.key_file:
            key = read_key(self.key_file)
        elif self.key_env and (key := read_key(None, self.key_env)) is None:
            raise TinychatError(f"server {self.name}: the variable {self.key_env} with its key is not set")
        return Server(self.url, self.model or None, key)


def user_server(name: str, entry: Any) -> SavedServer:
    """The server that a table of the settings describes. Raises TinychatError, whose text contains no value that may be
    a key."""
    where = f'settings: [servers."{printable(name, newlines=False)}"]'
    if not name.strip() or not isinstance(entry, Mapping):
        raise TinychatError(f'{where} needs a name and url = "http://..."')
    if "key" in entry:
        raise TinychatError(f"{where} a key does not belong into the settings; key_env or key_file says where it is")
    known = {f.name for f in fields(SavedServer)} - {"name"}
    for key, value in entry.items():
        if key not in known:
            raise TinychatError(f"{where} no field is called {printable(key, newlines=False)}")
        if not isinstance(value, str):
            raise TinychatError(f"{where} {key} must be a string")
    try:
        url = address(entry.get("url", ""))
    except TinychatError as e:
        raise TinychatError(f"{where} {e}") from None
    server = SavedServer(name.strip(), **{k: v.strip() for k, v in entry.items()} | {"url": url})
    if server.key_env and server.key_file:
        raise TinychatError(f"{where} has both key_env and key_file")
    if server.key_env and not re.fullmatch(r"[A-Za-z_]\w*", server.key_env, re.ASCII):
        raise TinychatError(f"{where} key_env must be the name of an environment variable")
    return server


def find(servers: Iterable[SavedServer], text: str) -> SavedServer | None:
    """The saved server called `text`; "name/model" is a model of it."""
    text = text.strip()
    for server in servers:
        if text.casefold() == server.name.casefold():
            return server
    for server in servers:
        if text.casefold().startswith(f"{server.name.casefold()}/"):
            return replace(server, model=text[len(server.name) + 1 :])
    return None


def is_address(text: str) -> bool:
    """Whether `text` is the address of a server (http://box:8080, https://llm.example.com/v1) and not of a file."""
    return bool(re.fullmatch(r"https?://[^/\s@]+(/|(/\S*)?/v1/?)?", text.strip(), re.IGNORECASE))


def chosen(servers: Iterable[SavedServer], text: str, model: str | None, key_file: str | None) -> Server:
    """The server that `--server text` means, a saved one or an address; `model` and `key_file` win over what is saved.
    Raises TinychatError."""
    saved = find(servers, text)
    if saved is None:
        return Server(text, model, read_key(key_file))
    server = replace(saved, model=model or saved.model, **{"key_file": key_file, "key_env": ""} if key_file else {})
    return server.connection()
