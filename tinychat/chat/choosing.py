"""Which model a text, a conversation or the last start means, and how the next start finds it again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tinychat.chat import servers, settings
from tinychat.chat.conversation import Conversation
from tinychat.chat.settings import Settings
from tinychat.chat.state import ModelChoice
from tinychat.errors import TinychatError, printable
from tinychat.models import cache
from tinychat.models.registry import resolve


def here(text: str, own: Settings) -> ModelChoice | None:
    """The model that `text` names, where it is on this computer or a saved server. Raises TinychatError."""
    if (saved := servers.find(own.servers, text)) is not None:
        return ModelChoice(text.strip(), Path(saved.url) / saved.model, {"server": saved.connection()})
    found = resolve(text, own.models)
    path = cache.path_of(found)
    options: dict[str, Any] = {"preset": found.preset, "threads": own.threads}
    return None if path is None else ModelChoice(found.name, path, options)


def earlier(conversation: Conversation | None, own: Settings, problems: list[str]) -> ModelChoice | None:
    """The model of `conversation`, else the one of the settings, else that of last time: the first that is still here;
    `problems` gets why another one is not."""
    first = conversation.model if conversation else ""
    if first == Path(own.last_model).name:  # a conversation knows no more of a file than its name
        first = own.last_model
    for text in filter(None, (first, own.model, own.last_model)):
        try:
            if (found := here(text, own)) is not None:
                return found
            problems.append(f"{printable(text, newlines=False)} is not on this computer")
        except TinychatError as e:
            problems.append(str(e))
    return None


def reference(choice: ModelChoice, own: Settings) -> str:
    """A text with which `here` finds `choice` again; "" where there is none, for a server that is not saved."""
    if "server" in choice.options:
        return choice.name if servers.find(own.servers, choice.name) else ""
    try:
        found = here(choice.name, own)
    except TinychatError:
        found = None
    known = found is not None and found.path == choice.path and choice.name != choice.path.name
    return choice.name if known else str(choice.path)


def remember(choice: ModelChoice, keep: Callable[..., object]) -> None:
    """Gives `keep` the model of the next start as the setting last_model, if it changed."""
    own = settings.load()
    if (text := reference(choice, own)) and text != own.last_model:
        with suppress(TinychatError):  # what is wrong with the settings was said at the start
            keep(last_model=text)
