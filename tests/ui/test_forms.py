"""The forms: parameters with presets, the settings file, help; and the small dialogs."""

import pytest
from textual.app import App
from textual.binding import Binding
from textual.widgets import Checkbox, Input, Select, Static, TextArea

from tests.support.screens import UNSET, Host, text_of, until
from tinychat.chat import settings
from tinychat.chat.parameters import PARAMETERS, Parameters, set_parameter
from tinychat.ui.chat.commands import COMMANDS
from tinychat.ui.keys import KeyLine
from tinychat.ui.screens.dialogs import AskScreen, ConfirmScreen
from tinychat.ui.screens.help import HelpScreen
from tinychat.ui.screens.parameters import ParametersScreen
from tinychat.ui.screens.settings import SettingsScreen
from tinychat.ui.screens.sheet import Sheet

BRIEF = set_parameter(set_parameter(Parameters(system="Be brief.", thinking=False), "top_k", "7"), "seed", "42")


def detail(app):
    return str(app.screen.query_one(".detail").render())


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_the_form_shows_and_returns_everything(size):
    app = Host(ParametersScreen(BRIEF))
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        text = text_of(app)
        assert "Be brief." in text and "[ ]" in text and "temperature" in text
        assert app.screen.focused.id == "system"
        await pilot.press("down")  # from its last line on to the next field, and back
        assert app.screen.focused.id == "thinking"
        await pilot.press("up", "up")
        assert app.screen.focused.id == "preset"
        for name in PARAMETERS:  # those below the edge of a small terminal are scrolled to
            app.screen.query_one(f"#{name}", Input).focus()
            await until(pilot, lambda name=name: name.replace("_", " ") in text_of(app))
        assert [app.screen.query_one(f"#{name}", Input).value for name in ("seed", "max_tokens")] == ["42", "off"]
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: app.screen.outer_size == (100, 30))  # laid out for it
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result == BRIEF  # nothing changed by going through the form
    app = Host(ParametersScreen(BRIEF))
    async with app.run_test(size=size) as pilot:
        app.screen.query_one("#temperature", Input).value = "0,25"
        app.screen.query_one("#seed", Input).value = "random"
        app.screen.query_one("#context", Input).value = "8192"
        app.screen.query_one("#system", TextArea).text = "Other"
        app.screen.query_one(Checkbox).value = True
        await pilot.pause()
        assert "[✓]" in text_of(app)
        app.screen.query_one("#context", Input).focus()
        await pilot.press("enter")
        await until(pilot, lambda: app.result is not UNSET)
    p = app.result
    assert (p.system, p.thinking, p.sampling.temperature, p.seed) == ("Other", True, 0.25, None)
    assert (p.context, p.sampling.top_k) == (8192, 7)


async def test_a_wrong_number_is_explained_and_not_taken():
    app = Host(ParametersScreen(Parameters()))
    async with app.run_test(size=(80, 24)) as pilot:
        app.screen.query_one("#top_p", Input).value = "1.5"
        await pilot.pause()
        assert "top_p is a number from 0 to 1, not 1.5" in text_of(app)
        await pilot.press("ctrl+s")
        assert app.result is UNSET and app.focused.id == "top_p"
        app.screen.query_one("#top_p", Input).value = "0.5"
        await pilot.pause()
        assert "is not" not in text_of(app)
        assert "that together reach this probability" in detail(app)  # the help of the field, in full
        await pilot.press("escape")
        await until(pilot, lambda: app.result is None)


async def test_arrows_go_through_the_form():
    app = Host(ParametersScreen(Parameters()))
    async with app.run_test(size=(80, 24)) as pilot:
        app.screen.query_one("#top_k", Input).focus()
        await pilot.pause()
        await pilot.press("down")
        await until(pilot, lambda: app.focused.id == "top_p")
        await pilot.press("up", "up")
        await until(pilot, lambda: app.focused.id == "temperature")


async def test_presets_are_saved_loaded_and_deleted():
    settings.save_preset("brief", BRIEF)
    app = Host(ParametersScreen(Parameters()))
    async with app.run_test(size=(80, 24)) as pilot:
        assert not app.screen.check_action("delete_preset", ())
        app.screen.query_one(Select).value = "brief"
        await until(pilot, lambda: app.screen.query_one("#top_k", Input).value == "7")
        assert app.screen.query_one("#system", TextArea).text == "Be brief."
        app.screen.query_one("#top_k", Input).value = "9"
        await pilot.press("ctrl+t")
        await until(pilot, lambda: isinstance(app.screen, AskScreen))
        assert app.screen.query_one(Input).value == "brief"
        app.screen.query_one(Input).value = "short [x]"
        await pilot.press("enter")
        await until(pilot, lambda: set(settings.load().presets) == {"brief", "short [x]"})
        assert settings.load().presets["short [x]"].sampling.top_k == 9 and settings.load().presets["brief"] == BRIEF
        await until(pilot, lambda: app.screen.query_one(Select).value == "short [x]")
        await pilot.press("ctrl+d", "y")
        await until(pilot, lambda: set(settings.load().presets) == {"brief"})
        assert app.screen.query_one("#top_k", Input).value == "9"  # the form keeps what it had
        await pilot.press("ctrl+b")
        await until(pilot, lambda: settings.load().parameters.sampling.top_k == 9)
    assert settings.load().parameters.system == "Be brief."


async def test_a_broken_settings_file_is_said_and_kept():
    settings.path().parent.mkdir(parents=True)
    settings.path().write_text("broken = ")
    app = Host(ParametersScreen(BRIEF))
    async with app.run_test(size=(140, 40), notifications=True) as pilot:
        await pilot.press("ctrl+b")
        await until(pilot, lambda: [n for n in app._notifications if "nothing was saved" in n.message])
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.result == BRIEF)
    assert settings.path().read_text() == "broken = "


async def test_the_settings_file_is_edited_as_text():
    app = Host(SettingsScreen())
    async with app.run_test(size=(80, 24)) as pilot:
        area = app.screen.query_one(TextArea)
        assert settings.parse(area.text) == settings.Settings()  # a newcomer finds comments only
        area.text = "theme = "
        await pilot.pause()
        assert "Invalid value" in text_of(app)
        await pilot.press("ctrl+s")
        assert app.result is UNSET and not settings.path().exists()
        area.text = 'theme = "nord"  # mine\nthreads = 0\n'
        await pilot.pause()
        assert "threads must be" in text_of(app)  # said, and saved all the same
        await pilot.press("ctrl+s")
        await until(pilot, lambda: app.result is not UNSET)
    assert app.result.theme == "nord" and "# mine" in settings.path().read_text()
    app = Host(SettingsScreen())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "# mine" in text_of(app))
        app.screen.query_one(TextArea).text = "x = 1"
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ConfirmScreen))
        await pilot.press("escape")
        assert isinstance(app.screen, SettingsScreen)
        await pilot.press("escape", "y")
        await until(pilot, lambda: app.result is None)
    assert "# mine" in settings.path().read_text()


@pytest.mark.parametrize("width, name", [(80, "-narrow"), (100, "-wide")])
async def test_a_sheet_has_the_class_of_its_width_before_its_widgets_are_made(width, name):
    """And keeps it, or all of them would be styled again."""

    class Noting(Sheet[None]):
        CSS_PATH = None

        def body(self):
            self.first = set(self.classes)
            yield Static("text")

    app = Host(Noting())
    async with app.run_test(size=(width, 24)) as pilot:
        await until(pilot, lambda: app.screen.query(".sheet Static"))
        for classes in (app.screen.first, app.screen.classes):
            assert classes & {"-narrow", "-wide"} == {name}


async def test_help_lists_the_keys_of_the_screen_below_and_the_commands():
    class Below(App):
        def compose(self):
            yield Input()

        BINDINGS = [
            Binding("f7", "bell", "ring the bell"),
            Binding("f6", "bell", "ring the bell"),
            Binding("x", "bell2", ""),
        ]

    app = Below()
    async with app.run_test(size=(80, 24)) as pilot:
        app.push_screen(HelpScreen([(c.usage, c.help) for c in COMMANDS]))
        await pilot.pause()
        text = text_of(app)
        assert "ring the bell" in text and "f7, f6" in text.lower() and "Cursor" not in text and "palette" in text
        for _ in range(6):
            await pilot.press("pagedown")
        await until(pilot, lambda: f"/{COMMANDS[-1].name}" in text_of(app))
        await pilot.click(KeyLine, offset=(5, 0))  # esc close
        await until(pilot, lambda: not isinstance(app.screen, HelpScreen))


async def test_dialogs_by_mouse():
    app = Host(ConfirmScreen("Really \x1b[31m[b]?", "Do it"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert "Really \\x1b[31m[b]?" in text_of(app)
        await pilot.click("#no")
        await until(pilot, lambda: app.result is False)
    app = Host(AskScreen("Name?", "x"))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("escape")
        await until(pilot, lambda: app.result is None)
