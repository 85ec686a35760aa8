"""Reading a long conversation: its summary, finding text in it, new text below."""

from dataclasses import replace

from tests.support.scripted import INFO
from tests.ui.test_chat import desk
from tinychat.chat.conversation import Conversation, Turn
from tinychat.chat.history import History
from tinychat.ui.chat.findbar import FindBar
from tinychat.ui.screens.conversations import ConversationsScreen


async def test_a_summary_is_a_folded_note():
    def answer(prompt):
        return "The gist." if "Summarise our conversation" in prompt else "An answer."

    async with desk(size=(80, 24)) as d:
        d.script.answers = answer
        for text in ("first", "second", "third"):
            await d.ask(text)
        await d.send("/compact")
        await d.until(lambda: d.controller.conversation.summary == 4)
        await d.settle()
        assert "▸ summary of 4 earlier turns" in d.screen and "The gist." not in d.screen and "first" in d.screen
        await d.pilot.press("ctrl+up", "up", "up", "enter")
        await d.pilot.pause()
        assert "The gist." in d.screen
        await d.pilot.press("left")
        await d.until(lambda: d.controller.conversation.summary is None)
        assert len(d.turns) == 6


def talk(turns):
    """Questions and long answers; one near the beginning has the word needle, in its thinking as well."""
    made = []
    for i in range(turns // 2):
        needle = i == 1
        made.append(Turn("user", f"question {i}", stop_reason="eos"))
        text = "\n\n".join(
            f"Paragraph {n} of answer {i}" + " has a **Needle**." * (needle and n == 30) for n in range(40)
        )
        made.append(Turn("assistant", text, thinking="a needle, hm" * needle, stop_reason="eos"))
    return Conversation(tuple(made))


async def test_finding_text_and_new_text_below(tmp_path):
    roomy, history = replace(INFO, max_context=60000), History(tmp_path / "h.db")
    async with desk("Line.\n\n" * 9000, size=(80, 24), rate=100, info=roomy, history=history) as d:
        d.controller.open(talk(100))
        await d.chat.apply()
        await d.pilot.press("ctrl+f", *"needle")
        await d.until(lambda: "1 of 2" in d.screen)
        await d.until(lambda: "a needle, hm" in d.screen)
        assert d.chat.transcript.first_shown <= 3, "a turn that was not mounted, and its thinking is unfolded"
        await d.pilot.press("enter")
        await d.until(lambda: "has a Needle." in d.screen and "2 of 2" in d.screen)
        await d.pilot.press("down")
        await d.until(lambda: "1 of 2" in d.screen)
        await d.pilot.press("escape")
        assert d.chat.prompt.has_focus and not d.chat.query_one(FindBar).display
        await d.send("more")
        await d.until(lambda: d.controller.running and d.controller.running.tokens > 30 and d.chat.transcript.at_end)
        assert "↓ new text" not in d.screen
        await d.pilot.press("pageup")
        await d.until(lambda: "↓ new text" in d.screen)
        await d.pilot.press("end")
        await d.until(lambda: d.chat.transcript.at_end and "↓ new text" not in d.screen)
        d.controller.stop()
        await d.settle()
        await d.send("/find nowhere")
        await d.until(lambda: "nothing found" in d.screen and "esc close" in d.screen)
        await d.pilot.press("escape")
        d.controller.new()
        await d.until(lambda: history.find("needle"))  # saved, on a thread of its own
        await d.pilot.press("f3")
        await d.until(lambda: isinstance(d.app.screen, ConversationsScreen) and d.app.screen.focused)
        await d.pilot.press(*"needle")
        await d.until(lambda: d.app.screen.search == "needle" and d.app.screen._chosen)
        await d.pilot.press("enter")
        await d.until(lambda: "1 of 2" in d.screen and "a needle, hm" in d.screen)


async def test_a_hit_is_found_where_the_screen_was_moved_since_it_was_laid_out():
    """Opened from a search, a conversation goes to its end at the time at which the hit is scrolled to."""
    async with desk(size=(80, 24)) as d:
        d.controller.open(talk(100))
        await d.chat.apply()
        await d.pilot.press("ctrl+f", *"needle")
        await d.until(lambda: "a needle, hm" in d.screen)
        transcript, message = d.chat.transcript, d.chat.transcript.message(3)
        transcript.scroll_to(y=transcript.max_scroll_y, animate=False, immediate=True)
        transcript._bring(message, message.unfolded(True), 0)
        await d.pilot.pause()
        assert "a needle, hm" in d.screen
