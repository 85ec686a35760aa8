"""Why a request is not answered: one exception, which each dialect formats."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from tinychat.backend.protocol import DoesNotFit, Failed

RefusalKind = Literal[
    "invalid", "key", "forbidden", "missing", "method", "slow", "large", "context", "busy", "lost", "internal"
]

STATUS: dict[RefusalKind, int] = {
    "invalid": 400,
    "context": 400,
    "key": 401,
    "forbidden": 403,
    "missing": 404,
    "method": 405,
    "slow": 408,
    "large": 413,
    "internal": 500,
    "lost": 502,
    "busy": 503,
}


@dataclass
class RequestRefused(Exception):
    """The request is refused; `message` is one line for the client, `field` the field that is wrong.

    `retry_s`: come again after so many seconds (0: not said). `details` are further fields that a dialect may show.
    """

    kind: RefusalKind
    message: str
    field: str | None = None
    retry_s: float = 0.0
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def status(self) -> int:
        """The HTTP status code."""
        return STATUS[self.kind]


def invalid(message: str, field: str | None = None) -> RequestRefused:
    """A refusal of one field by its name."""
    return RequestRefused("invalid", f"{field}: {message}" if field else message, field)


def refusal_of(event: Failed | DoesNotFit) -> RequestRefused:
    """A backend's failure as the refusal that the client gets."""
    if isinstance(event, DoesNotFit):
        prompt, context = event.usage.prompt, event.usage.limit
        return RequestRefused(
            "context",
            f"the prompt has {prompt:,} tokens and an answer needs {event.reserve:,}, the context holds {context:,}",
            details={"n_prompt_tokens": prompt, "n_ctx": context},
        )
    message = " ".join(event.message.split())
    return RequestRefused(event.cause, message, event.field or None, retry_s=event.retry_s)
