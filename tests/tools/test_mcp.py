"""MCP servers as real processes: what they offer, and what they do on bad days."""

from __future__ import annotations

import codecs
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tinychat.errors import TinychatError
from tinychat.tools import mcp, mcp_lines
from tinychat.tools.mcp import McpServers
from tinychat.tools.mcp_config import ServerConfig, read_servers, switch
from tinychat.tools.protocol import CallContext, Question, Result
from tinychat.tools.toolbox import LIMIT, Toolbox

HOSTILE = pytest.importorskip("tests.support.mcp_server", reason="needs the package mcp").HOSTILE
ROOT = str(Path(__file__).parents[2])
OWN = ServerConfig("own", sys.executable, ("-m", "tests.support.mcp_server"), cwd=ROOT)


class Used:
    """Started servers, and calls of their tools."""

    def __init__(self, *configs: ServerConfig) -> None:
        self.servers = McpServers(configs)
        self.servers.start()
        self.servers.wait()
        self.box = Toolbox(more=lambda: self.servers.tools)
        self.questions: list[Question] = []
        self.cancel = threading.Event()

    def __call__(self, name: str, **arguments: Any) -> Result:
        return self.box.call(name, json.dumps(arguments), CallContext(self.questions.append, self.cancel))


@pytest.fixture
def use() -> Iterator[Callable[..., Used]]:
    made: list[Used] = []

    def start(*configs: ServerConfig) -> Used:
        made.append(Used(*configs))
        return made[-1]

    yield start
    for used in made:
        used.servers.close()


@pytest.fixture(scope="module")
def own() -> Iterator[Used]:
    used = Used(ServerConfig(**{**vars(OWN), "env": {"SECRET": "42"}}))
    yield used
    used.servers.close()


def test_what_a_server_offers(own: Used) -> None:
    (status,) = own.servers.status
    assert status.stage == "ready" and not status.why
    assert "own_add" in own.box.names and len(own.box.names) == 9
    (definition,) = (d["function"] for d in own.box.definitions if d["function"]["name"] == "own_add")
    assert definition["description"] == "Adds two numbers." and set(definition["parameters"]["properties"]) == {
        "a",
        "b",
    }
    assert own("own_add", a=2, b=3).text == "5"
    question = own.questions[-1]
    assert question.kind == "call" and question.title == "Call add of the server own?" and '"a": 2' in question.detail
    assert own("own_secret").text == "42"
    assert own("own_picture").text == "[image: not text, left out]"


def test_prompts_and_resources(own: Used) -> None:
    (status,) = own.servers.status
    (prompt,), (resource,) = status.prompts, status.resources
    assert (prompt.name, prompt.arguments, prompt.required) == ("greet", ("name", "language"), ("name",))
    assert own.servers.prompt(prompt, {"name": "Ada"}) == "Say hello to Ada in English."
    with pytest.raises(TinychatError, match="needs name"):
        own.servers.prompt(prompt, {})
    assert resource.uri == "notes://today" and own.servers.read(resource) == f"Buy milk. {HOSTILE}"


def test_failures_and_wrong_arguments_are_results(own: Used) -> None:
    assert own("own_fail").state == "failed" and "Error executing tool fail" in own("own_fail").text
    assert own("own_add", a=1).state == "failed" and own("own_add", a="x", b=1).state == "failed"
    assert own("own_add", a=2, b=2).text == "4"


def test_huge_and_hostile_results_stay_text(own: Used) -> None:
    huge = own("own_huge")
    assert huge.text.startswith("begin xxx") and huge.text.endswith("xxx end") and "characters left out" in huge.text
    assert len(huge.text) < LIMIT + 100
    assert own("own_hostile").text == HOSTILE
    (hostile,) = (d["function"] for d in own.box.definitions if d["function"]["name"] == "own_hostile")
    assert len(hostile["description"]) < 100


def test_a_call_can_be_stopped_and_has_a_time_limit(own: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    threading.Timer(0.3, own.cancel.set).start()
    assert own("own_wait", seconds=30).state == "stopped"
    own.cancel.clear()
    monkeypatch.setattr(mcp, "CALL_S", 0.3)
    late = own("own_wait", seconds=30)
    assert late.state == "failed" and "did not answer within" in late.text


def test_a_crash_starts_it_again_but_not_for_ever(
    use: Callable[..., Used], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "STARTS", 1)
    used = use(ServerConfig(**{**vars(OWN), "env": {"MCP_STATE": str(tmp_path)}}))
    for n in range(1, mcp.STARTS + 1):
        crashed = used("own_crash")
        assert crashed.state == "failed" and "has been started again" in crashed.text, crashed
        assert used("own_add", a=n, b=0).text == str(n) and len(list(tmp_path.iterdir())) == n + 1
    assert "cannot be started" in used("own_crash").text
    assert used.servers.status[0].stage == "failed" and "within a minute" in used.servers.status[0].why


def test_a_server_that_dies_between_calls(use: Callable[..., Used], tmp_path: Path) -> None:
    used = use(ServerConfig(**{**vars(OWN), "env": {"MCP_STATE": str(tmp_path)}}))
    (pid,) = (int(p.name) for p in tmp_path.iterdir())
    os.kill(pid, 9)
    texts = [used("own_add", a=1, b=1).text for _ in range(2)]
    assert texts[-1] == "2"


OLD_SERVER = """
import json, sys
tools = [{"name": "grow", "description": "", "inputSchema": {"type": "object"}}]
def say(**message): print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    match asked.get("method"):
        case "initialize":
            info = {"name": "old", "version": "1"}
            can = {"tools": {"listChanged": True}}
            say(id=asked["id"], result={"protocolVersion": "2025-06-18", "capabilities": can, "serverInfo": info})
        case "tools/list":
            say(id=asked["id"], result={"tools": tools})
        case "tools/call":
            tools.append({**tools[0], "name": "newer"})
            say(method="notifications/tools/list_changed")
            say(id=asked["id"], result={"content": [{"type": "text", "text": "grown"}]})
        case _ if "id" in asked:
            say(id=asked["id"], error={"code": -32601, "message": "not known"})
"""


@pytest.mark.parametrize("config", [OWN, ServerConfig("own", sys.executable, ("-c", OLD_SERVER))], ids=["new", "old"])
def test_what_a_server_adds_later(use: Callable[..., Used], config: ServerConfig) -> None:
    used = use(config)
    assert used("own_grow").text == "grown"
    wanted = ("own_newer", 2, 2) if config is OWN else ("own_newer", 0, 0)
    end = time.monotonic() + 120
    while True:
        (status,) = used.servers.status
        if (used.box.names[-1], len(status.prompts), len(status.resources)) == wanted:
            break
        assert time.monotonic() < end, status
        time.sleep(0.02)


def test_it_is_switched_off_and_on_and_leaves_no_process(use: Callable[..., Used], tmp_path: Path) -> None:
    used = use(ServerConfig(**{**vars(OWN), "env": {"MCP_STATE": str(tmp_path)}}))
    used.servers.switch("own", False)
    assert used.servers.status[0].stage == "off" and used.box.names == ()
    assert used("own_add", a=1, b=1).state == "failed"
    used.servers.switch("own", True)
    used.servers.wait()
    assert used("own_add", a=1, b=1).text == "2"
    used.servers.close()
    for process in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(process.name), 0)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (ServerConfig("x", "/no/such/program"), "No such file"),
        (ServerConfig("x", sys.executable, ("-c", "import sys; sys.exit('it is broken')")), "it is broken"),
        (ServerConfig("x", url="http://127.0.0.1:9/mcp"), ""),
    ],
)
def test_servers_that_cannot_be_started(use: Callable[..., Used], config: ServerConfig, why: str) -> None:
    used = use(config, OWN)
    bad, good = used.servers.status
    assert bad.stage == "failed" and bad.why and why in bad.why and "\n" not in bad.why
    assert good.stage == "ready"


def test_a_server_that_never_says_anything(use: Callable[..., Used], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "START_S", 0.5)
    used = use(ServerConfig("x", sys.executable, ("-c", "import time; time.sleep(60)")))
    assert used.servers.status[0].stage == "failed" and "not ready within" in used.servers.status[0].why


def test_a_line_without_an_end_takes_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_lines, "LONGEST", 5)
    read = codecs.getincrementaldecoder(mcp_lines.encoding())().decode
    pieces = (b"12", b"345\n12345", b"\nab\n1234", b"56789", b"0" * 99, b"1\n\xc3", b"\xa9\n123456\n", b"end\n")
    assert [read(piece) for piece in pieces] == [
        "12",
        "345\n12345",
        "\nab\n1234",
        "5\n",  # which is no JSON
        "",
        "",
        "é\n123456\n",  # lines that came whole were in memory anyway
        "end\n",
    ]
    assert "é".encode(mcp_lines.encoding()) == b"\xc3\xa9"


def test_a_server_over_http(use: Callable[..., Used]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tests.support.mcp_server", "http", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
        used = use(ServerConfig("web", url=f"http://127.0.0.1:{port}/mcp", headers={"X-Test": "1"}))
        assert used.servers.status[0].stage == "ready", used.servers.status
        assert used("web_add", a=2, b=3).text == "5"
        process.kill()
        process.wait()
        assert used("web_add", a=2, b=3).state == "failed"
    finally:
        process.kill()
        process.wait()


FIXTURES = Path(os.environ.get("LLAMA_CPP", "/nonexistent")) / "tools/server/tests/fixtures"


@pytest.mark.skipif(not FIXTURES.is_dir(), reason="LLAMA_CPP names no source tree of llama.cpp")
@pytest.mark.parametrize("name", ["echo", "burst", "malformed", "grandchild", "slow", "crash"])
def test_the_servers_of_llama_cpp(use: Callable[..., Used], name: str) -> None:
    used = use(ServerConfig(name, sys.executable, (str(FIXTURES / f"mcp_{name}_server.py"),)))
    assert used.servers.status[0].stage == "ready", used.servers.status
    if name == "slow":
        assert used("slow_sleep", seconds=0.1).state == "done"
    elif name == "crash":
        assert used("crash_crash").text == "crashing..."  # it answers and exits
        texts = [used("crash_echo", message="hi").text for _ in range(2)]
        assert texts[-1] == "echo: hi"
    else:
        assert used(f"{name}_echo", message="hi").text.endswith("hi")


def test_the_file_of_other_clients(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    assert read_servers(file) == ()
    servers = {
        "files": {"command": "npx", "args": ["-y", "server"], "env": {"KEY": "x"}, "autoApprove": ["a"]},
        "web": {"type": "http", "url": "https://example.com/mcp", "headers": {"A": "b"}, "disabled": True},
    }
    file.write_text(json.dumps({"mcpServers": servers, "other": 1}))
    files, web = read_servers(file)
    assert files == ServerConfig("files", "npx", ("-y", "server"), {"KEY": "x"}) and files.where == "npx -y server"
    assert web == ServerConfig("web", url="https://example.com/mcp", headers={"A": "b"}, on=False)
    switch(file, "web", True)
    switch(file, "files", False)
    assert [s.on for s in read_servers(file)] == [False, True]
    data = json.loads(file.read_text())
    assert data["other"] == 1 and data["mcpServers"]["files"]["autoApprove"] == ["a"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"mcpServers": []}',
        '{"mcpServers": {"x": {}}}',
        '{"mcpServers": {"x": {"command": "a", "url": "b"}}}',
        '{"mcpServers": {"x": {"command": 3}}}',
        '{"mcpServers": {"x": {"command": "a", "args": [1]}}}',
        '{"mcpServers": {"x": {"command": "a", "env": {"A": 1}}}}',
        '{"mcpServers": {"x": 3}}',
        "[" * 100_000,
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str) -> None:
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(TinychatError, match=r"mcp\.json"):
        read_servers(tmp_path / "mcp.json")
