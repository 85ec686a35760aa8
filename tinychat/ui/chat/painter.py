"""Brings the widgets of the chat up to date with the controller, at a fixed rate."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from textual.content import Content
from textual.widgets import Static

from tinychat.chat.changes import Asks, Change, Ended, Grew, ModelChanged, Notice, Overflow, Reset, SentBack
from tinychat.ui.chat.call import CallMessage
from tinychat.ui.chat.message import AnswerMessage
from tinychat.ui.chat.status import StatusLine
from tinychat.ui.chat.view import ChatView
from tinychat.ui.chat.welcome import Welcome
from tinychat.ui.keys import KeyLine
from tinychat.ui.panel import EnginePanel, ExpertsStrip, Reading, figures
from tinychat.ui.panel.reading import PaintMeter

SHARE = 0.2  # of a core that painting a growing answer may take: the others, and the interpreter, are the engine's
LONGEST = 0.1  # seconds between two paints, at most, unless they take half of a core even so


class Painter:
    """`meter` counts painted tokens; `longest_gap` is the longest time in seconds between two paints of a growing
    answer."""

    def __init__(self, chat: ChatView) -> None:
        self._chat = chat
        self._lock = asyncio.Lock()
        self.meter = PaintMeter()
        self.longest_gap = 0.0
        self._painted_at = 0.0
        self._spent_at = 0.0  # CPU seconds of this thread when the last paint began
        self._speeds: deque[float] = deque(maxlen=64)
        self._state: tuple[Any, ...] = ()

    @property
    def due(self) -> bool:
        """Whether it is time to paint again: the more the last paint took, the later, and not while the terminal has
        not shown it."""
        if self._chat.controller.running is None:
            return True
        if (link := self._chat.link) is not None and link.behind:
            return False
        spent = time.thread_time() - self._spent_at
        wait = max(min(spent / SHARE, LONGEST), 2 * spent)
        return time.monotonic() - self._painted_at >= wait

    async def apply(self) -> None:
        """Paints what changed since the last time."""
        c = self._chat.controller
        async with self._lock:  # a timer and a key may both be here, and the changes have an order
            now = time.monotonic()
            if c.busy and self._painted_at:
                self.longest_gap = max(self.longest_gap, now - self._painted_at)
            self._painted_at, self._spent_at = now, time.thread_time()
            for change in c.poll():
                await self._apply(change)
        if c.busy:
            self._running()
            if (link := self._chat.link) is not None:
                self._chat.call_after_refresh(link.ask)
        state = (
            c.busy,
            c.running and c.running.kind,
            c.ready,
            len(c.queue),
            len(c.conversation.turns),
            c.conversation.id,
            c.conversation.title,
            c.conversation.project,
            self._chat.editing,
        )
        if state != self._state:
            self._state = state
            self._chat.screen.query_one("#prompt-mark", Static).update("✎" if self._chat.editing is not None else "›")
            self._chat.box.show_waiting([t.text for t in c.queue])
            self._chat.screen.refresh_bindings()
            self._chat.list_conversations()

    async def _apply(self, change: Change) -> None:
        chat, transcript = self._chat, self._chat.transcript
        match change:
            case Grew():
                self.meter.begin()
                transcript.grew(change)
                chat.call_after_refresh(chat.mark_below)
                chat.call_after_refresh(self.meter.painted, change.tokens)
            case Reset():
                if change.live:
                    self.meter.restart()
                    self._speeds.clear()
                chat.show_draft()
                await transcript.reset(change.conversation, change.start, change.live)
            case Ended():
                message = transcript.message(change.index)
                self.meter.begin()
                chat.call_after_refresh(self.meter.painted, 0)
                if isinstance(message, AnswerMessage | CallMessage):
                    message.update(change.turn, live=False)
            case Notice():
                await chat.say(change.text, change.error)
            case SentBack():
                chat.give_back([change.turn])
            case Overflow():
                chat.ask_about(change)
            case Asks():
                chat.ask_permission(change.question)
            case ModelChanged():
                self.panel()
                chat.model_changed()

    def _running(self) -> None:
        """The counting line of the answer that is being written, or of the call that runs."""
        c = self._chat.controller
        if (calling := c.calling) is not None:
            call = self._chat.transcript.message(calling.index)
            if isinstance(call, CallMessage):
                call.update(call.turn, True, calling.run.seconds, calling.asked is not None)
            return
        message = self._chat.transcript.last_answer
        if c.running is not None and message is not None and message.live:
            turn = c.conversation.turns[-1]
            reading = "" if c.running.tokens else figures.awaited(c.running.prefill, c.stats)
            thought = turn.thinking_tokens + c.running.thinking_tokens
            message.update(turn, True, thought, c.elapsed_thinking(), reading or c.running.written.progress)

    def panel(self) -> None:
        """The panel and the line at the top, a few times a second."""
        chat, c = self._chat, self._chat.controller
        stats, info, running = c.stats, c.info, c.running
        title = " / ".join(filter(None, (c.conversation.project, c.conversation.title)))
        if running is not None and stats is not None and stats.phase == "decode" and stats.last_tok_s:
            self._speeds.append(stats.last_tok_s)
        prefill = running.prefill if running is not None and not running.tokens else None
        experts, instruments = None, c.instruments
        if instruments is not None:
            instruments.watch_experts(chat.experts)
            experts = instruments.experts() if chat.experts else None
        chat.screen.set_class(experts is not None, "-experts")
        reading = Reading(
            stats,
            info,
            c.usage,
            c.loading,
            prefill,
            tuple(self._speeds),
            self.meter.rate if running else self.meter.average,
            experts,
        )
        panel, beside = chat.screen.query_one(EnginePanel), chat.panel_shown
        panel.show(reading, chat.panel_shown == "inner")
        chat.screen.query_one(KeyLine).say(Content("") if beside else figures.activity(reading))
        chat.screen.query_one(ExpertsStrip).show(reading)
        modes = ["raw"] * c.raw + ["JSON schema"] * (c.conversation.parameters.schema is not None)
        modes += [c.replaying.progress] if c.replaying is not None else []
        mode = " · ".join(modes)
        chat.screen.query_one(StatusLine).show(c.conversation.model, info, title, mode, None if beside else c.usage)
        if not c.conversation.turns:
            chat.screen.query_one(Welcome).show(
                c.conversation.model if c.ready or c.loading else "", c.loading is not None, chat.attaches
            )
