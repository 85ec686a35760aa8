"""Reading a long conversation: its summary, finding text in it, new text below."""

from tests.ui.test_chat import desk


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
