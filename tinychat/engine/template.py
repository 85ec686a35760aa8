"""A model's own chat template: Jinja as HF transformers renders it, in a sandbox with a bound on time and memory."""

from __future__ import annotations

import threading
import warnings
from typing import Any

from tinychat.engine.sandbox import Sandbox
from tinychat.errors import TinychatError, printable

MAX_SOURCE = 1 << 16  # characters; the longest published template has some 20,000


class ChatTemplate:
    """A compiled template. Raises TinychatError, in one line, for a source that is broken or far too long."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lock = threading.Lock()  # the budget is shared, so one rendering at a time
        self._sandbox = Sandbox()
        if len(source) > MAX_SOURCE:
            raise TinychatError(f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)  # what a template gets wrong shows when it runs
                self._template = self._sandbox.from_string(source)
        except Exception as e:
            raise _failure(e) from None

    def render(self, **variables: Any) -> str:
        """The text. Raises TinychatError when the template fails, refuses the conversation, or asks for too much."""
        with self._lock:
            try:
                self._sandbox.start(variables)
                return self._template.render(variables)
            except Exception as e:
                raise _failure(e) from None


def _failure(e: Exception) -> TinychatError:
    why = str(e) or type(e).__name__
    return TinychatError(f"the file's chat template failed: {printable(why[:200], newlines=False)}")
