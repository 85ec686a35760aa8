"""The conversation on the screen: it sticks to the end until the user scrolls, and keeps only so many turns mounted."""

from __future__ import annotations

import asyncio
import re

from textual.app import ComposeResult
from textual.await_remove import AwaitRemove
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from tinychat.chat.changes import Grew
from tinychat.chat.conversation import Conversation
from tinychat.chat.find import Hit
from tinychat.ui.chat.call import CallMessage
from tinychat.ui.chat.markdown import MarkdownView
from tinychat.ui.chat.message import AnswerMessage, NoticeLine, TurnMessage, UserMessage
from tinychat.ui.chat.summary import SummaryMessage
from tinychat.ui.chat.welcome import Welcome

MOUNTED = 40  # turns; older ones come back on demand, so that a long conversation costs no more than a short one
FAR = 400  # turns: where what is looked for is further up, those between are not mounted


class Transcript(VerticalScroll, can_focus=False):
    """Messages by turn number. The screen calls `reset`, `grew`, `ended` and `say` as the controller's changes say."""

    BLANK = True  # nothing of its own is painted under the messages

    def __init__(self) -> None:
        super().__init__(id="transcript")
        self._conversation = Conversation()
        self._several = False  # models have answered
        self._from = 0  # first mounted turn of those up to the end
        self._island = range(0)  # turns far above them that are mounted, too
        self.unfold = False  # whether the thinking of a new answer is shown: as the user left the last one

    def compose(self) -> ComposeResult:
        yield Welcome()
        yield Earlier()
        yield Static("the turns above are no longer sent to the model", classes="cut")
        yield Between()

    def on_mount(self) -> None:
        self.query_one(Earlier).display = self.query_one(".cut").display = self.query_one(Between).display = False

    def watch_virtual_size(self) -> None:
        """Anchored only when there is more than a screenful: shorter text stays at the top and does not move."""
        over = self.virtual_size.height > self.size.height
        if over != self.is_anchored:
            self.anchor(over)
            if not over:  # at once: later it would undo an anchor that was set meanwhile
                self.scroll_home(animate=False, immediate=True)

    def to_end(self) -> None:
        """Shows the end and follows it again, where there is more than a screenful."""
        if self.is_anchored:
            self.anchor()

    @property
    def at_end(self) -> bool:
        """Whether the last line is on the screen."""
        return self.max_scroll_y - self.scroll_y <= 1

    def messages(self) -> list[TurnMessage]:
        return [w for w in self.children if isinstance(w, TurnMessage)]

    def message(self, index: int) -> TurnMessage | None:
        return next((m for m in reversed(self.messages()) if m.index == index), None)

    @property
    def last_answer(self) -> AnswerMessage | None:
        return next((m for m in reversed(self.messages()) if isinstance(m, AnswerMessage)), None)

    async def reset(self, conversation: Conversation, start: int, live: bool) -> None:
        """Shows `conversation`, whose turns before `start` are as they were; `live`: its last answer is being
        written."""
        self._conversation = conversation
        self._several = len({t.model for t in (*conversation.turns, *conversation.others) if t.model}) > 1
        with self.app.batch_update():
            if start == 0:
                self._from = 0
                await _gone(self.query_children("TurnMessage, NoticeLine").remove())
            else:
                gone: list[Widget] = [m for m in self.messages() if m.index >= start]
                if gone:
                    later = list(self.children)[self.children.index(gone[0]) + 1 :]
                    gone += [w for w in later if isinstance(w, NoticeLine)]
                await _gone(self.remove_children(gone))
            total = len(conversation.turns)
            self._from = max(self._from, total - MOUNTED, 0) if start else max(0, total - MOUNTED)
            await self._leave_island()
            await self.mount_all([self._make(i, live and i == total - 1) for i in range(max(start, self._from), total)])
            self._marks()
        self.to_end()

    @property
    def first_shown(self) -> int:
        """Number of the first turn that is not above the screen."""
        return next((m.index for m in self.messages() if m.region.bottom > self.region.y), 0)

    def mark(self, pattern: re.Pattern[str] | None) -> None:
        """Marks what `pattern` finds in the messages."""
        for view in self.query(MarkdownView):
            view.mark(pattern)

    async def show_hit(self, hit: Hit, pattern: re.Pattern[str]) -> None:
        """Brings `hit` of `pattern` onto the screen, and marks it and the others."""
        if hit.index < self._from - FAR and self.message(hit.index) is None:
            await self._leave_island()
            await self._show_island(range(max(0, hit.index - MOUNTED // 2), hit.index + MOUNTED // 2))
        elif self.message(hit.index) is None:
            await self.show_earlier(hit.index)
        message = self.message(hit.index)
        if message is None:
            return
        self.release_anchor()
        view = message.unfolded(hit.thinking)
        self.mark(pattern)
        self.call_after_refresh(self._bring, message, view, hit.number)

    def _bring(self, message: TurnMessage, view: MarkdownView | None, number: int) -> None:
        """Scrolls to the place of hit `number` of `view`, or to `message`."""
        # not relative to where the transcript is scrolled: regions are those of the last layout, and it may have moved
        y = message.virtual_region.y
        if view is not None:
            y += view.region.y - message.region.y + view.mark_now(number)
        self.scroll_to(y=y - self.size.height // 3, animate=False, immediate=True)

    async def show_earlier(self, index: int | None = None) -> None:
        """Mounts more of the older turns, at least from `index` on; what is on the screen stays where it is."""
        if self._island and index is None:
            top = self.messages()[0]
            await self._show_island(range(max(0, self._island.start - MOUNTED), self._island.stop))
            self.call_after_refresh(self.scroll_to_widget, top, top=True, animate=False)
            return
        await self._leave_island()
        first = self.messages()[0] if self.messages() else None
        until, self._from = self._from, max(0, min(self._from - MOUNTED, self._from if index is None else index))
        added = [self._make(i, False) for i in range(self._from, until)]
        self.release_anchor()
        await self.mount_all(added, before=first)
        self._marks()
        if first is not None and index is None:
            self.call_after_refresh(self.scroll_to_widget, first, top=True, animate=False)

    async def show_between(self) -> None:
        """Mounts more of the turns behind the island; they may join it with the others."""
        if self._island:
            await self._show_island(range(self._island.start, min(self._island.stop + MOUNTED, self._from)))

    async def _show_island(self, turns: range) -> None:
        """Mounts those of `turns`, a range that has the island, which are not mounted yet."""
        island, self._island = self._island, turns  # before anything is awaited: a second click may come meanwhile
        if turns.stop == self._from:
            self._from, self._island = turns.start, range(0)
        self.release_anchor()
        between, old = self.query_one(Between), island or range(turns.start, turns.start)
        above, below = range(turns.start, old.start), range(old.stop, turns.stop)
        await self.mount_all([self._make(i, False) for i in above], before=self.message(old.start) or between)
        await self.mount_all([self._make(i, False) for i in below], before=between)
        self._marks()

    async def _leave_island(self) -> None:
        """Removes what is above the turns up to the end."""
        self._island = range(0)
        await _gone(self.remove_children(self._above()))

    def toggle_thinking(self) -> None:
        """Folds or unfolds the last thinking there is."""
        for message in reversed(self.messages()):
            if isinstance(message, AnswerMessage) and message.thinking.display:
                message.thinking.toggle()
                self.unfold = not message.thinking.folded
                if self.unfold and not message.live and message.thinking.region.y < self.region.y:  # it begins above
                    self.release_anchor()
                    self.call_after_refresh(self.scroll_to_widget, message.thinking, top=True, animate=False)
                return

    def grew(self, grew: Grew) -> None:
        if (answer := self.last_answer) is not None:
            answer.grew(grew)

    async def say(self, text: str, error: bool = False) -> None:
        self.query_one(Welcome).display = False
        await self.mount(NoticeLine(text, error))
        self.to_end()

    def _make(self, index: int, live: bool) -> TurnMessage:
        turn = self._conversation.turns[index]
        if turn.role == "user":
            message: TurnMessage = UserMessage(index, turn)
        elif turn.role == "summary":
            message = SummaryMessage(index, turn)
        elif turn.role == "tool":
            message = CallMessage(index, turn, self._conversation.call_of(index), live)
        else:
            message = AnswerMessage(index, turn, live)
            message.thinking.folded = not (live and self.unfold)
            message.by = turn.model if self._several else ""
        after_call = index > 0 and self._conversation.turns[index - 1].role == "tool" != turn.role
        message.set_class(after_call, "-after-call")
        versions = self._conversation.versions(index)
        message.version = versions.index(turn) + 1, len(versions)
        self._mark_unsent(message)
        return message

    def _above(self) -> list[Widget]:
        """The messages before the first turn to be shown, and the notes among them."""
        if not self._from:
            return []
        first = next(
            (i for i, w in enumerate(self.children) if isinstance(w, TurnMessage) and w.index >= self._from), None
        )
        return [w for w in self.children[:first] if isinstance(w, TurnMessage | NoticeLine)]

    def _marks(self) -> None:
        """The welcome, the line where the sent part begins, and what is not mounted."""
        c = self._conversation
        self.query_one(Welcome).display = not c.turns
        earlier, cut, between = self.query_one(Earlier), self.query_one(".cut"), self.query_one(Between)
        above = self._island.start if self._island else self._from
        earlier.display, between.display = above > 0, bool(self._island)
        earlier.update(Content(f"▴ {above:,} earlier turns"))
        between.update(Content(f"▾ {self._from - self._island.stop:,} turns between"))
        first = self.message(c.sent_from) if c.sent_from and c.turns[c.sent_from - 1].role != "summary" else None
        cut.display = first is not None
        if first is not None:
            self.move_child(cut, before=first)
        for message in self.messages():
            self._mark_unsent(message)

    def _mark_unsent(self, message: TurnMessage) -> None:
        c = self._conversation
        message.set_class(message.index < c.sent_from and message.index != c.summary, "-unsent")


class Below(Static):
    """The mark that new text has come below the screen."""

    ALLOW_SELECT = False

    class Clicked(Message):
        """The user wants to see it."""

    def on_click(self) -> None:
        self.post_message(self.Clicked())


class Earlier(Static):
    """A line at the top that brings older turns back."""

    def on_click(self) -> None:
        transcript = self.parent
        assert isinstance(transcript, Transcript)
        self.run_worker(transcript.show_earlier())


class Between(Static):
    """A line between turns far above and the last ones that brings those between."""

    def on_click(self) -> None:
        transcript = self.parent
        assert isinstance(transcript, Transcript)
        self.run_worker(transcript.show_between())


async def _gone(removal: AwaitRemove) -> None:
    """Waits for a removal in a task of its own: the timer that asked may be cancelled when the app closes, and must not
    cancel the widgets' tasks, which the app waits for."""

    async def wait() -> None:
        await removal

    await asyncio.shield(wait())
