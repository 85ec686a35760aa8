"""The request that is being answered: how many tokens it has, and how long it has been thinking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinychat.backend.local import Prefilling
from tinychat.engine.engine import Token


@dataclass
class Running:
    """Times are on the controller's clock, in seconds."""

    request: int
    seed: int
    before: int = 0  # tokens that the turn already had (it is being continued)
    thought_s: float = 0.0  # that the model thought until the present stretch of it
    tokens: int = 0
    thinking_tokens: int = 0
    thinking_since: float | None = None
    kind: Literal["thinking", "answer", "call"] = "answer"
    prefill: Prefilling | None = None
    stopping: bool = False
    skip: bool = False  # stopped only to go on behind the thinking

    def take(self, token: Token, now: float) -> None:
        """Counts a token that came."""
        if token.id is not None:
            self.tokens += 1
            self.thinking_tokens += token.kind == "thinking"
        if token.kind == "thinking":
            self.thinking_since = self.thinking_since or now
        elif self.thinking_since is not None:
            self.thought_s += now - self.thinking_since
            self.thinking_since = None
        self.kind = token.kind

    def thinking_s(self, now: float) -> float:
        """How long it has been thinking, with the time before it was continued."""
        return self.thought_s + (now - self.thinking_since if self.thinking_since is not None else 0.0)
