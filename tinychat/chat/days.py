"""Conversations by the day of their latest change."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from datetime import datetime

from tinychat.chat.history import Summary


def by_day(found: Iterable[Summary], now: float | None = None) -> Iterator[tuple[str, list[Summary]]]:
    """The summaries in their order, which is latest first, under Today, Yesterday, Previous 7 days, and months."""
    today = datetime.fromtimestamp(time.time() if now is None else now)
    for heading, group in itertools.groupby(found, lambda s: _heading(datetime.fromtimestamp(s.updated), today)):
        yield heading, list(group)


def _heading(then: datetime, today: datetime) -> str:
    days = (today.date() - then.date()).days
    if days <= 1:
        return "Yesterday" if days == 1 else "Today"
    if days <= 7:
        return "Previous 7 days"
    return then.strftime("%B" if then.year == today.year else "%B %Y")
