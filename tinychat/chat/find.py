"""Finds text in a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tinychat.chat.conversation import Conversation, Turn


@dataclass(frozen=True)
class Hit:
    """Occurrence `number` (from 0) in the text, or the thinking, of turn `index`."""

    index: int
    thinking: bool
    number: int
    line: str  # of the text, around it


def pattern_of(search: str, texts: Iterable[str]) -> re.Pattern[str]:
    """What to look for: `search` as it is, without regard to case and to how much space is between words, if one of
    `texts` has it; otherwise each of its words."""
    words = [re.escape(word) for word in search.split()]
    phrase = re.compile(r"\s+".join(words) or "(?!)", re.IGNORECASE)
    if any(phrase.search(text) for text in texts):
        return phrase
    return re.compile("|".join(words) or "(?!)", re.IGNORECASE)


def find(conversation: Conversation, search: str) -> list[Hit]:
    """The hits in the turns that are shown, in order."""
    pattern = pattern_of(search, (text for turn in conversation.turns for text in (turn.thinking, turn.text)))
    return [
        Hit(index, thinking, number, line_around(text, match.start()))
        for index, turn in enumerate(conversation.turns)
        for thinking, text in ((True, turn.thinking), (False, turn.text))
        for number, match in enumerate(pattern.finditer(text))
    ]


def version_with(conversation: Conversation, search: str) -> Turn | None:
    """A turn beside the shown path, the latest, that has all words of `search`, as the search of the history finds."""
    words = search.casefold().split()
    found = (t for t in reversed(conversation.others) if all(word in t.text.casefold() for word in words))
    return next(found, None)


def line_around(text: str, at: int) -> str:
    """The line of `text` that has position `at`, at most 100 characters of it."""
    start = max(text.rfind("\n", 0, at) + 1, at - 40)
    end = text.find("\n", at)
    return text[start : min(start + 100, len(text) if end < 0 else end)]
