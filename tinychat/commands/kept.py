"""The conversation of the history that `run --conversation NAME` continues or begins."""

from __future__ import annotations

import time
from dataclasses import replace

from tinychat.chat.conversation import Conversation
from tinychat.chat.history import History
from tinychat.chat.parameters import Parameters
from tinychat.chat.saving import Saver
from tinychat.console import say
from tinychat.errors import TinychatError


class KeptConversation:
    """The latest one that is called `name`, by its user or by itself; a new one of that name with `parameters` where
    there is none. Raises TinychatError where the history cannot be used."""

    def __init__(self, name: str, parameters: Parameters) -> None:
        name = " ".join(name.split())
        if not name:
            raise TinychatError("--conversation needs a name")
        self._history = History()
        found = self._history.titled(name)
        self.conversation = self._history.load(found) if found else Conversation(name=name, parameters=parameters)

    def save(self, conversation: Conversation) -> None:
        """Stores what became of it, if anything was answered; without a schema that was given for this answer. Where
        another tinychat has changed it meanwhile, a copy is stored."""
        last = conversation.turns[-1]
        if not (last.text or last.thinking or last.calls):
            return
        p = replace(conversation.parameters, schema=self.conversation.parameters.schema)
        saver = Saver(self._history.save, time.monotonic)
        saver.save(replace(conversation, parameters=p))
        saver.finish()
        for notice in saver.poll():
            say(notice.text)
