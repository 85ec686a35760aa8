"""What a tool is: a name and a schema for the model, a function that runs, and the question that it asks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinychat.errors import TinychatError

Kind = Literal["read", "write", "run", "call"]
Answer = Literal["folder", "once", "conversation", "always", "no"]
State = Literal["done", "failed", "refused", "stopped"]


@dataclass(frozen=True)
class Question:
    """What a tool asks the user before it acts. `detail` is exactly what will happen: the diff, the command, the
    arguments. `exact` is the same for the same action and for no other; `scope` is what "for this conversation"
    allows."""

    kind: Kind
    title: str
    detail: str
    exact: str
    scope: str

    @property
    def options(self) -> tuple[Answer, ...]:
        """The answers that there are, the widest permission last but for "no"."""
        return ("folder", "no") if self.kind == "read" else ("once", "conversation", "always", "no")


class Refused(TinychatError):
    """The user, or a place without one, said no."""


class Stopped(TinychatError):
    """The call was cancelled while it ran."""


@dataclass(frozen=True)
class Context:
    """What a running tool is given: `ask` returns when the user allows it and raises Refused otherwise; `cancel` is set
    when the call shall end."""

    ask: Callable[[Question], None]
    cancel: threading.Event


@dataclass(frozen=True)
class Tool:
    """`schema` is the JSON schema of the arguments, an object. `run` gets arguments that have its required keys and
    types; it returns what the model reads, and raises TinychatError for what the model should read as an error."""

    name: str
    description: str
    schema: Mapping[str, Any]
    run: Callable[[Mapping[str, Any], Context], str]

    @property
    def definition(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Result:
    """What a call gave: the text for the model, and how it ended."""

    text: str
    state: State = "done"
