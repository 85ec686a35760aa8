"""`tinychat import FILE`: conversations from other programs."""

from __future__ import annotations

from contextlib import closing

from tinychat.chat.history import History
from tinychat.chat.importing import take
from tinychat.files import expand


def import_chats(file: str) -> None:
    """Puts the conversations of an export into the history and says what was taken over. Raises TinychatError."""
    with closing(History()) as history:
        print(take(history, expand(file)))
