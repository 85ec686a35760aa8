"""What MCP servers add to the prompt's completions."""

from __future__ import annotations

from tinychat.chat.mcp import called, named, usage
from tinychat.tools.mcp import McpServers
from tinychat.ui.chat.prompt import Choice

SHOWN = 40  # completions


def prompt_choices(servers: McpServers, text: str) -> list[Choice]:
    """Completions of a prompt that begins with /."""
    typed = text[1:].lower()
    found = (p for status in servers.status for p in status.prompts if called(p).lower().startswith(typed))
    return [
        Choice(f"/{called(p)}" + " " * bool(p.arguments), usage(p), p.description, final=not p.arguments)
        for p in [*found][:SHOWN]
    ]


def resource_choices(servers: McpServers, typed: str) -> list[Choice]:
    """Completions of a word behind @."""
    found = (r for status in servers.status for r in status.resources if named(r).lower().startswith(typed.lower()))
    return [Choice(f"@{named(r)}", f"{named(r)}  {r.name}") for r in [*found][:SHOWN]]
