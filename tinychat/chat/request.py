"""A conversation as a Request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from tinychat.backend.protocol import Request
from tinychat.chat.conversation import Conversation
from tinychat.chat.schema import response_format


def request_for(
    conversation: Conversation,
    *,
    go_on: bool = False,
    seed: int = 0,
    overflow: Literal["refuse", "oldest"] = "refuse",
    tools: tuple[Mapping[str, Any], ...] = (),
    tool_choice: Literal["auto", "none"] = "auto",
    defaults: Mapping[str, float] | None = None,
) -> Request:
    """The request for the next answer of `conversation`, which may call `tools` if `tool_choice` lets it; with `go_on`,
    for the continuation of the last answer. `defaults` are the model's own for what the user has not set.

    An answer that a schema constrains calls no tools; a raw answer has no schema."""
    p = conversation.parameters
    sampling = replace(p.sampling_of(defaults or {}), seed=seed)
    if conversation.turns[-1].raw:
        text = "".join(t.content for t in conversation.turns[conversation.last_prompt or 0 :])
        return Request(raw=text, sampling=sampling, max_tokens=p.max_tokens, conversation=conversation.id)
    messages, form = conversation.messages(), response_format(p.schema)
    last = conversation.turns[-1]
    if go_on and last.thinking_open and not last.text:
        del messages[-1]["content"]  # its thinking is not over; empty content would say so
    return Request(
        messages=tuple(messages),
        sampling=sampling,
        max_tokens=p.max_tokens,
        thinking=p.thinking,
        continue_final=go_on,
        overflow=overflow,
        tools=() if form else tools,
        tool_choice=tool_choice,
        response_format=form,
        conversation=conversation.id,
    )
