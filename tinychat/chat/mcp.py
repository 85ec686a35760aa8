"""What MCP servers add to a message: their prompts as /server:name, their resources as @server:uri."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from tinychat.chat.attach import MAX_BYTES
from tinychat.chat.conversation import Attachment
from tinychat.errors import TinychatError, printable
from tinychat.tools.mcp import McpServers, McpStatus, Resource, ServerPrompt


def find_prompt(servers: McpServers, name: str) -> ServerPrompt | None:
    """The prompt that /name means."""
    return next((p for status in servers.status for p in status.prompts if called(p) == name), None)


def called(prompt: ServerPrompt) -> str:
    return _word(f"{prompt.server}:{prompt.name}")


def named(resource: Resource) -> str:
    return _word(f"{resource.server}:{resource.uri}")


def usage(prompt: ServerPrompt) -> str:
    """/server:name FIRST [second=...]"""
    words = (a.upper() if a in prompt.required else f"[{a}=…]" for a in prompt.arguments)
    return printable(" ".join((f"/{called(prompt)}", *words)), newlines=False)


def arguments_of(prompt: ServerPrompt, text: str) -> dict[str, str]:
    """What stands behind a prompt's name: name=value, and values alone for the arguments in their order; the last one
    takes the rest. Raises TinychatError."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    given: dict[str, str] = {}
    alone: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and name in prompt.arguments:
            given[name] = value
        else:
            alone.append(word)
    free = [name for name in prompt.arguments if name not in given]
    if alone and not free:
        raise TinychatError(f"{usage(prompt)}: there is no argument for {printable(alone[0])!r}")
    for i, name in enumerate(free[: len(alone)]):
        given[name] = alone[i] if i < len(free) - 1 else " ".join(alone[i:])
    return given


def details(status: McpStatus) -> str:
    """Why it failed, or what it has."""
    lines = [status.why] * bool(status.why)
    lines += [f"{tool.name}: {' '.join(tool.description.split())[:200]}" for tool in status.tools]
    lines += [f"{usage(p)}: {p.description}" for p in status.prompts]
    lines += [f"@{named(r)}: {r.name}" for r in status.resources]
    return "\n".join(lines)


def resources_in(servers: McpServers, text: str) -> list[Resource]:
    """The resources that `text` names with @server:uri."""
    words = set(re.findall(r"(?<!\S)@(\S+)", text))
    return [r for status in servers.status for r in status.resources if named(r) in words]


def read(servers: McpServers, found: Sequence[Resource]) -> dict[str, Attachment]:
    """Their texts, by the word behind @. Waits for the servers. Raises TinychatError."""
    out = {}
    for resource in found:
        text = servers.read(resource)
        if len(text) > MAX_BYTES:
            raise TinychatError(
                f"{named(resource)} has {len(text):,} characters; at most {MAX_BYTES:,} can be attached"
            )
        out[named(resource)] = Attachment(named(resource), text)
    return out


def _word(text: str) -> str:
    """Without what cannot be typed as one word."""
    return re.sub(r"\s", "_", printable(text, newlines=False))
