"""The tools that a model is offered, and the run of one call, whose result is always a text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tinychat.errors import TinychatError, encodable, printable
from tinychat.tools.protocol import CallContext, CallRefused, CallStopped, Result, Tool

LIMIT = 20_000  # characters of a result
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class Toolbox:
    """Tools by name: those given, and what `more` has at the moment. Any thread may call."""

    def __init__(self, tools: Iterable[Tool] = (), more: Callable[[], Iterable[Tool]] = tuple) -> None:
        self._own, self._more = {tool.name: tool for tool in tools}, more

    @property
    def _tools(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self._more()} | self._own

    @property
    def definitions(self) -> tuple[dict[str, Any], ...]:
        """The tools as OpenAI writes them."""
        return tuple(tool.definition for tool in self._tools.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tools)

    def call(self, name: str, arguments: str, context: CallContext, limit: int = LIMIT) -> Result:
        """Runs tool `name` with `arguments`, JSON text. Never raises: an error becomes the result's text."""
        try:
            tool = self._tools.get(name)
            if tool is None:
                raise TinychatError(f"there is no tool {name!r}; there are {', '.join(self._tools) or 'none'}")
            text = tool.run(_checked(tool, arguments), context)
        except CallRefused as e:
            return Result(str(e), "refused")
        except CallStopped as e:
            return Result(str(e), "stopped")
        except TinychatError as e:
            return Result(f"error: {e}", "failed")
        except Exception as e:  # a tool must not end the conversation
            return Result(f"error: {type(e).__name__}: {e}", "failed")
        return Result(cut(encodable(text), limit))


def cut(text: str, limit: int) -> str:
    """`text` in at most about `limit` characters: the middle is left out, and a line says so."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def _checked(tool: Tool, arguments: str) -> Mapping[str, Any]:
    """The arguments as an object that has what `tool` requires. Raises TinychatError."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise TinychatError("the arguments are not JSON") from None
    if not isinstance(value, dict):
        raise TinychatError("the arguments are no JSON object")
    properties = tool.schema.get("properties", {})
    for name in tool.schema.get("required", ()):
        if name not in value:
            raise TinychatError(f"the argument {name!r} is missing; {tool.name} takes {', '.join(properties)}")
    for name, given in value.items():
        wanted = properties.get(name, {}).get("type")
        kinds = _TYPES.get(wanted, ()) if isinstance(wanted, str) else ()
        if kinds and (not isinstance(given, kinds) or (isinstance(given, bool) and wanted != "boolean")):
            raise TinychatError(f"the argument {printable(name)!r} is to be of type {wanted}")
    return value
