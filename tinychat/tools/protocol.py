"""The interface of a tool: a name and a schema for the model, a function that runs, and the question to the user."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tinychat.errors import TinychatError

QuestionKind = Literal["read", "write", "run", "call"]
PermissionAnswer = Literal["folder", "once", "conversation", "always", "no"]
ResultState = Literal["done", "failed", "refused", "stopped"]


@dataclass(frozen=True)
class Question:
    """What a tool asks the user before it acts. `detail` shows the action in full: the diff, the command, the
    arguments. `exact` identifies the action: equal for equal actions only. `scope` is what "for this conversation"
    allows."""

    kind: QuestionKind
    title: str
    detail: str
    exact: str
    scope: str

    @property
    def options(self) -> tuple[PermissionAnswer, ...]:
        """The possible answers, from the narrowest permission to the widest, then "no"."""
        return ("folder", "no") if self.kind == "read" else ("once", "conversation", "always", "no")


class CallRefused(TinychatError):
    """The user refused the action, or there is no user to ask."""


class CallStopped(TinychatError):
    """The call was cancelled while it ran."""


@dataclass(frozen=True)
class CallContext:
    """What a running tool is given. `ask` returns when the user allows the action and raises CallRefused otherwise;
    `cancel` is set when the call has to end."""

    ask: Callable[[Question], None]
    cancel: threading.Event


@dataclass(frozen=True)
class Tool:
    """`schema` is the JSON schema of the arguments, an object. `run` gets arguments with the required keys and types
    and returns the text for the model; the model reads the message of a TinychatError that `run` raises."""

    name: str
    description: str
    schema: Mapping[str, Any]
    run: Callable[[Mapping[str, Any], CallContext], str]

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.schema)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Result:
    """The result of a call: the text for the model, and how the call ended."""

    text: str
    state: ResultState = "done"
