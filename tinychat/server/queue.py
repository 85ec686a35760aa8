"""The queue: the engine answers one request at a time, and clients wait for it in a fair, bounded queue."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque

from tinychat.server.refusal import RequestRefused


class Queue:
    """One turn at a time. Waiting clients come in rotation, each one's requests in their order, so that a client with
    many requests does not keep another one waiting for all of them. Used from one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size  # requests that may wait
        self.running = 0
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._began = 0.0
        self._mean_s = 0.0  # of a turn, as a moving average

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._waiting.values()))

    async def enter(self, client: str) -> None:
        """Waits for a turn, which ends with `leave`. Raises RequestRefused when too many wait already.

        A task that is cancelled while it waits leaves the queue at once.
        """
        if not self.running:
            return self._begin()
        if (waiting := self.waiting) >= self.size:
            retry_s = max(1.0, math.ceil(self._mean_s * (waiting + 1)))
            raise RequestRefused("busy", f"{waiting} requests are waiting already", retry_s=min(retry_s, 600.0))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own = self._waiting.setdefault(client, deque())
        own.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the turn came in the same moment
            else:
                own.remove(turn)
                if not own:
                    del self._waiting[client]
            raise

    def leave(self) -> None:
        """Ends the present turn; the next one begins."""
        spent = time.monotonic() - self._began
        self._mean_s = spent if not self._mean_s else 0.7 * self._mean_s + 0.3 * spent
        self.running = 0
        if self._waiting:
            client, own = self._waiting.popitem(last=False)
            turn = own.popleft()
            if own:
                self._waiting[client] = own  # behind the others
            self._begin()
            turn.set_result(None)

    def _begin(self) -> None:
        self.running, self._began = 1, time.monotonic()
