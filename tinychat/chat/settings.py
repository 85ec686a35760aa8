"""The user's settings: one TOML file, read on start, changed one key at a time; comments and unknown keys stay.

model = "glm-4.7:flash"          # what `tinychat` opens; without it, last_model, which the chat writes
kv_cache_gb = 8
stop_repetition = false          # let an answer repeat itself without end
titles = false                   # name no conversation by its model
[parameters]                     # of a new conversation
temperature = 0.6
[presets.coder]
system = "You write Python."
[models."mine"]                  # see registry.user_models
path = "~/mine.gguf"
[servers."box"]                  # see servers.user_server
url = "http://box:8080"
key_file = "~/.config/box.key"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from platformdirs import user_config_dir

from tinychat.chat.parameters import PARAMETERS, Parameters, get_parameter, set_parameter
from tinychat.chat.servers import SavedServer, user_server
from tinychat.errors import TinychatError, encodable, printable
from tinychat.files import alone, replace_file
from tinychat.models.registry import Model, user_models

if TYPE_CHECKING:
    import tomlkit  # imported where a file is written, because every chat reads one before its first screen


@dataclass(frozen=True)
class Settings:
    """The values of the settings file; `problems` are lines for the user about its errors."""

    model: str = ""  # registry name, path or URL; "" = last_model, or ask with the picker
    last_model: str = ""  # registry name, path or saved server that was loaded last; the chat writes it
    threads: int | None = None  # None = as many as the machine has cores
    theme: str = ""  # "" = tinychat's own
    notify: str = "bell"  # when an answer is done that nobody looks at, or took long: off, bell, desktop
    experts: bool = False  # the heat strip of experts in the panel
    kv_cache_gb: float = 4.0  # most disk space for saved KV caches, 10^9 bytes; 0 = save none
    stop_repetition: bool = True  # of an answer that repeats one block of text without end
    titles: bool = True  # a model on this computer gives a conversation a title after its first answer
    parameters: Parameters = field(default_factory=Parameters)
    presets: Mapping[str, Parameters] = field(default_factory=dict)
    models: tuple[Model, ...] = ()
    servers: tuple[SavedServer, ...] = ()
    problems: tuple[str, ...] = ()


_KEYS: dict[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "model": ((str,), lambda v: True, "a string"),
    "last_model": ((str,), lambda v: True, "a string"),
    "threads": ((int,), lambda v: 1 <= v <= 1024, "a whole number from 1 to 1024"),
    "theme": ((str,), lambda v: True, "a string"),
    "notify": ((str,), lambda v: v in ("off", "bell", "desktop"), '"off", "bell" or "desktop"'),
    "experts": ((bool,), lambda v: True, "true or false"),
    "stop_repetition": ((bool,), lambda v: True, "true or false"),
    "titles": ((bool,), lambda v: True, "true or false"),
    "kv_cache_gb": ((int, float), lambda v: 0 <= v < 1e6, "a number of gigabytes, 0 or more"),
}
_PLAIN: dict[str, type] = {"system": str, "thinking": bool, "drop_oldest": bool}  # of Parameters, beside PARAMETERS
_TABLES = ("parameters", "presets", "models", "servers")


def path() -> Path:
    """Where the settings file is, or would be."""
    return Path(user_config_dir("tinychat", appauthor=False)) / "settings.toml"


def load(file: Path | None = None) -> Settings:
    """Reads `file` (default: `path()`). Never raises: what is wrong is in `problems`, and the default takes its
    place."""
    file = file or path()
    try:
        return parse(_read(file))
    except FileNotFoundError:
        return Settings()
    except (OSError, ValueError, RecursionError) as e:
        why = e.strerror if isinstance(e, OSError) else str(e)
        line = f"{_shown(file)}: {printable(str(why), newlines=False)}; the defaults are used until it is fixed"
        return Settings(problems=(line,))


def _read(file: Path) -> str:
    """Raises OSError or ValueError. A pipe, whose other end may never write, is not read."""
    if file.exists() and not file.is_file():
        raise ValueError("it is not a file")
    return file.read_text(encoding="utf-8")


def parse(text: str) -> Settings:
    """The settings in TOML `text`. Raises tomllib.TOMLDecodeError when it is no TOML; all else lands in `problems`."""
    data = tomllib.loads(text)
    problems: list[str] = []
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key in _KEYS:
            kinds, right, wanted = _KEYS[key]
            if type(value) in kinds and right(value):
                values[key] = value
            else:
                problems.append(f"settings: {key} must be {wanted}; its default is used")
        elif key not in _TABLES:
            problems.append(f"settings: unknown key {printable(key, newlines=False)!r} is ignored (and kept)")
        elif not isinstance(value, dict):
            problems.append(f"settings: {key} must be a table, [{key}]; it is ignored")
    tables = {key: data[key] if isinstance(data.get(key), dict) else {} for key in _TABLES}
    values["parameters"] = _parameters(tables["parameters"], "parameters", problems)
    values["presets"] = {
        name: _parameters(entry, f"presets.{printable(name, newlines=False)}", problems)
        for name, entry in tables["presets"].items()
    }
    models: list[Model] = []
    for name, entry in tables["models"].items():
        try:
            models += user_models({name: entry})
        except TinychatError as e:
            problems.append(f"{e}; this model is ignored")
    servers: list[SavedServer] = []
    for name, entry in tables["servers"].items():
        try:
            servers.append(user_server(name, entry))
        except TinychatError as e:
            problems.append(f"{e}; this server is ignored")
    return Settings(**values, models=tuple(models), servers=tuple(servers), problems=tuple(problems))


def update(file: Path | None = None, **changes: Any) -> Settings:
    """Writes `changes` (fields of Settings: the plain ones and `parameters`) into the file; all else in it stays.

    Returns the settings as they are now. Raises TinychatError when the file is broken or cannot be written.
    """

    def edit(doc: tomlkit.TOMLDocument) -> None:
        for key, value in changes.items():
            if key == "parameters":
                _put(doc, key, _table(doc.get(key), value))
            elif key not in _KEYS:
                raise KeyError(key)
            elif value is None:
                doc.pop(key, None)
            else:
                doc[key] = value

    return _edit(file, edit)


def save_preset(name: str, parameters: Parameters, file: Path | None = None) -> Settings:
    """Stores `parameters` as preset `name`, replacing one of that name. Raises TinychatError."""
    if not (name := name.strip()):
        raise TinychatError("a preset needs a name")

    def edit(doc: tomlkit.TOMLDocument) -> None:
        presets = _tables(doc, "presets")
        _put(presets, name, _table(presets.get(name), parameters))

    return _edit(file, edit)


def delete_preset(name: str, file: Path | None = None) -> Settings:
    """Removes preset `name`, if there is one. Raises TinychatError."""
    return _edit(file, lambda doc: _tables(doc, "presets").pop(name, None))


def save_server(server: SavedServer, file: Path | None = None) -> Settings:
    """Stores `server`, replacing one of its name. Raises TinychatError."""
    said = {f.name: getattr(server, f.name) for f in fields(server) if f.name != "name"}
    user_server(server.name, said)
    import tomlkit

    def edit(doc: tomlkit.TOMLDocument) -> None:
        servers = _tables(doc, "servers")
        old = servers.get(server.name)
        table = old if isinstance(old, dict) else tomlkit.table()
        for key, value in said.items():
            if value:
                table[key] = value
            else:
                table.pop(key, None)
        _put(servers, server.name, table)

    return _edit(file, edit)


def delete_server(name: str, file: Path | None = None) -> Settings:
    """Removes server `name`, if there is one. Raises TinychatError."""
    return _edit(file, lambda doc: _tables(doc, "servers").pop(name, None))


def write_text(text: str, file: Path | None = None) -> Settings:
    """Replaces the whole file by `text`, which the user edited. Raises TinychatError, and leaves the file, when it is
    no TOML."""
    try:
        settings = parse(text)
    except ValueError as e:
        raise TinychatError(f"not saved: {printable(str(e), newlines=False)}") from None
    _write(file or path(), text)
    return settings


def _parameters(entry: Any, where: str, problems: list[str]) -> Parameters:
    out = Parameters()
    if not isinstance(entry, dict):
        problems.append(f"settings: [{where}] must be a table; it is ignored")
        return out
    for key, value in entry.items():
        if key in PARAMETERS and isinstance(value, int | float) and not isinstance(value, bool):
            try:
                out = set_parameter(out, key, repr(value))
            except (TinychatError, ValueError) as e:  # thousands of hexadecimal digits
                problems.append(f"settings: [{where}] {e}; its default is used")
        elif _PLAIN.get(key) is type(value):
            changed: dict[str, Any] = {key: value}
            out = replace(out, **changed)
        elif key in PARAMETERS or key in _PLAIN:
            problems.append(f"settings: [{where}] {key} has a value of the wrong type; its default is used")
        else:
            problems.append(
                f"settings: unknown key {printable(key, newlines=False)!r} in [{where}] is ignored (and kept)"
            )
    return out


def _tables(doc: tomlkit.TOMLDocument, key: str) -> Any:
    """The table of tables `key`. Raises TinychatError where it is something else."""
    import tomlkit

    found = doc.get(key)
    if found is None:
        doc[key] = found = tomlkit.table(is_super_table=True)
    if not isinstance(found, dict):
        raise TinychatError(f"settings: {key} must be a table, [{key}]; nothing was saved, fix it first")
    return found


def _table(old: Any, parameters: Parameters) -> Any:
    """Table `old` with the values of `parameters`; defaults are removed, unknown keys stay."""
    import tomlkit

    table = old if isinstance(old, tomlkit.items.AbstractTable) else tomlkit.table()
    default = Parameters()
    values: dict[str, Any] = {name: get_parameter(parameters, name) for name in PARAMETERS}
    values |= {key: getattr(parameters, key) for key in _PLAIN}
    usual: dict[str, Any] = {name: get_parameter(default, name) for name in PARAMETERS}
    usual |= {key: getattr(default, key) for key in _PLAIN}
    for key, value in values.items():
        if value == usual[key] and key not in parameters.chosen:
            table.pop(key, None)
        elif table.get(key) != value:
            table[key] = value
    return table


def _put(parent: Any, key: str, table: Any) -> None:
    import tomlkit

    if parent.get(key) is not table:
        if isinstance(parent, tomlkit.items.InlineTable):  # has no other tables in it
            table = tomlkit.inline_table() | table
        parent[key] = table


def _edit(file: Path | None, edit: Callable[[tomlkit.TOMLDocument], Any]) -> Settings:
    import tomlkit

    file = file or path()
    with alone(file.parent):
        try:
            doc = tomlkit.parse(_read(file))
        except FileNotFoundError:
            doc = tomlkit.document()
        except (OSError, ValueError, RecursionError) as e:
            why = printable(str(e), newlines=False)
            raise TinychatError(f"{_shown(file)} cannot be read ({why}); nothing was saved, fix it first") from None
        edit(doc)
        text = encodable(tomlkit.dumps(doc))
        _write(file, text)
    return parse(text)


def _write(file: Path, text: str) -> None:
    """Replaces `file` as a whole (through a symbolic link), or leaves it as it was."""
    file = Path(os.path.realpath(file))
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Private, also where the old file was not.
        replace_file(file, encodable(text).encode(), mode=0o600, durable=True)
    except OSError as e:
        raise TinychatError(f"{_shown(file)} cannot be written: {(e.strerror or str(e)).lower()}") from None


def _shown(file: Path) -> str:
    return printable(str(file), newlines=False)


assert set(_KEYS) | set(_TABLES) | {"problems"} == {f.name for f in fields(Settings)}
