"""MCP servers on the screen: the list with their states, prompts as commands, resources as attachments."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.chat.test_tools import call
from tests.support.screens import text_of, until
from tests.support.scripted import INFO, Script, scripted
from tinychat import process
from tinychat.chat.controller import Controller
from tinychat.chat.mcp import arguments_of, usage
from tinychat.errors import TinychatError
from tinychat.plain.chat import PlainChat
from tinychat.plain.reading import LineReader
from tinychat.tools.mcp import McpServers, ServerPrompt
from tinychat.tools.mcp_config import read_servers
from tinychat.ui.app import TinychatApp
from tinychat.ui.chat.permission import PermissionScreen
from tinychat.ui.screens.mcp import McpScreen

pytest.importorskip("mcp")
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    own = {"command": sys.executable, "args": ["-m", "tests.support.mcp_server"], "cwd": ROOT}
    bad = {"command": "/no/such/\x1bprogram"}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"own": own, "bad": bad}}))
    return tmp_path / "mcp.json"


def plainly(servers: McpServers, script: Script, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain chat with `lines` as its input."""
    controller = Controller(scripted(script))
    controller.load("m", Path("/nowhere"))
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    monkeypatch.setattr(process, "on_interrupt", lambda act: None)  # Ctrl-C stays pytest's
    PlainChat(controller, LineReader(), str, None, servers).run()


async def test_a_server_from_its_start_to_its_end(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script([call("own_add", a=2, b=3), "Five.", "Milk."])
    servers = McpServers(read_servers(file))
    app = TinychatApp("m", INFO.path, open_backend=scripted(script), mcp=servers, mcp_file=file)
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: app.controller.ready)

            async def send(text: str) -> None:
                app.chat.prompt.put(text)
                await pilot.press("enter")

            await send("/mcp")
            await until(pilot, lambda: isinstance(app.screen, McpScreen) and "ready" in text_of(app))
            shown = text_of(app)
            assert "9 tools · 1 prompt · 1 resource" in shown and "Adds two numbers." in shown and "failed" in shown
            assert "\x1b" not in shown
            await pilot.press("down")
            await until(pilot, lambda: "o such file" in text_of(app))
            await pilot.press("enter")
            await until(pilot, lambda: "off" in text_of(app))
            assert [s.on for s in read_servers(file)] == [True, False]
            await pilot.press("escape")
            await until(pilot, lambda: app.screen is app.chat)

            await send("what is 2 + 3?")
            await until(pilot, lambda: isinstance(app.screen, PermissionScreen) and "?" in text_of(app))
            assert "Call add of the server own?" in text_of(app) and '"a": 2' in text_of(app)
            await pilot.press("home", "enter")
            await until(pilot, lambda: "Five." in text_of(app))
            assert "▸ own_add 2, 3" in text_of(app) and "<tool_response>\n5\n</tool_response>" in script.prompts[-1]

            await send("/own:greet Ada Lovelace language=German")
            await until(pilot, lambda: "Say hello to Ada Lovelace in German." in app.chat.prompt.text)
            await send("what is in @own:notes://today ?")
            await until(pilot, lambda: "Milk." in text_of(app))
            assert "Buy milk." in script.prompts[-1] and app.chat.controller.conversation.turns[-2].files
            app.chat.prompt.put("")
            await pilot.press(*"/own:")
            await until(pilot, lambda: "/own:greet NAME" in text_of(app))

        script = Script(["Hello, Ada.", "Milk."])
        lines = "/mcp\n/own:greet Ada language=German\nwhat is in @own:notes://today ?\n"
        plainly(servers, script, lines, monkeypatch)
        said = capfd.readouterr().err
        assert "own: ready\nown_add: Adds two numbers." in said and "bad: off" in said
        assert "/own:greet NAME [language=…]: " in said and "Say hello to Ada in German." in said
        assert "Say hello to Ada in German." in script.prompts[0] and "Buy milk." in script.prompts[1]
    finally:
        servers.close()


def test_arguments_of_a_prompt() -> None:
    prompt = ServerPrompt("s", "p", "", ("name", "language"), ("name",))
    assert usage(prompt) == "/s:p NAME [language=…]"
    assert arguments_of(prompt, "Ada") == {"name": "Ada"}
    assert arguments_of(prompt, "'Ada L' in German") == {"name": "Ada L", "language": "in German"}
    assert arguments_of(prompt, "language=x Ada it's") == {"language": "x", "name": "Ada it's"}
    with pytest.raises(TinychatError, match="no argument"):
        arguments_of(ServerPrompt("s", "p", "", (), ()), "x")
