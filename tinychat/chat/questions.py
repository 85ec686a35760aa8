"""The questions that the chat asks, in words: a context that is full, a tool that wants to act."""

from __future__ import annotations

from tinychat.chat.changes import Overflow
from tinychat.tools.protocol import PermissionAnswer, Question

_ANSWERS: dict[PermissionAnswer, str] = {
    "folder": "yes, in this folder",
    "once": "yes, this once",
    "conversation": "yes, and {} in this conversation",
    "always": "yes, and always for exactly this",
    "no": "no",
}
_KINDS = {"write": "all changes of files", "run": "all commands", "call": "all calls of this tool", "read": ""}


def permission_label(answer: PermissionAnswer, question: Question) -> str:
    """An answer to the question of a tool."""
    return _ANSWERS[answer].format(_KINDS[question.kind])


def explain(overflow: Overflow) -> str:
    """What is too much."""
    used, limit = overflow.usage.used, overflow.usage.limit
    if used >= limit and overflow.typed and not overflow.droppable and len(overflow.conversation.questions) > 1:
        return (
            f"The conversation has {used:,} tokens, the context holds {limit:,}: your message alone is too long for it."
        )
    if used >= limit:
        return f"The conversation has {used:,} tokens, the context holds {limit:,}."
    return f"{used:,} of {limit:,} tokens are used; that leaves {limit - used:,} for an answer."


def overflow_label(option: str, overflow: Overflow) -> str:
    """One of Overflow.options."""
    exchanges = "1 exchange" if overflow.droppable == 1 else f"up to {overflow.droppable} exchanges"
    return {
        "context": f"load the model with a context of {overflow.larger:,} tokens",
        "compact": f"let the model summarise the oldest turns ({exchanges})",
        "turns": f"leave out the oldest turns, now and later ({exchanges} now)",
        "thinking": f"leave out the thinking ({overflow.usage.thinking:,} tokens)",
        "stop": "stop here; the message stays in the prompt"
        if overflow.typed
        else "stop here; the answer stays as it is",
    }[option]
