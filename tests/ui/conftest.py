"""Pilot's press, click and pause wait for an idle processor, on a busy machine for nothing; here for the screen too.
And messages stay: on a busy machine their 5 s pass before a test looks."""

import contextlib

from textual.app import ScreenStackError
from textual.notifications import Notification
from textual.pilot import Pilot

from tests.support.screens import painted

wait_for_screen = Pilot._wait_for_screen


async def wait_until_painted(self: Pilot[None], timeout: float = 120.0) -> bool:
    done = await wait_for_screen(self, timeout)
    with contextlib.suppress(ScreenStackError):  # the app has ended
        await painted(self)
    return done


Pilot._wait_for_screen = wait_until_painted  # type: ignore[method-assign]
Notification.time_left = 600.0  # type: ignore[assignment]
