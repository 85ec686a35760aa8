"""Commands: what they may touch, how they end, and what is read of their output."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from tinychat.errors import TinychatError
from tinychat.tools.folder import Folder
from tinychat.tools.protocol import CallContext, CallRefused, CallStopped, Question
from tinychat.tools.shell import KEPT, Confinement, confinement, run, running
from tinychat.tools.toolbox import Toolbox

confined = pytest.mark.skipif(
    not (confinement().files and confinement().network), reason="this kernel has no Landlock or no user namespaces"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "secret.txt").write_text("outside")
    (tmp_path / "in" / "a.txt").write_text("alpha\n")
    return tmp_path / "in"


def sh(folder: Path, command: str, seconds: float = 20) -> str:
    return run(command, folder, confinement(), seconds, threading.Event())


def test_output_and_exit_code(folder: Path) -> None:
    assert sh(folder, "cat a.txt") == "alpha"
    assert sh(folder, "cat a.txt; echo bad >&2; exit 3") == "alpha\nbad\n[exit code 3]"
    assert sh(folder, "true") == "[no output, exit code 0]"
    assert sh(folder, "cat") == "[no output, exit code 0]"
    assert sh(folder, "pwd") == str(folder)
    assert sh(folder, "echo x > b.txt && cat b.txt && echo $HOME | grep -c tinychat-") == "x\n1"
    assert sh(folder, "kill -9 $$").startswith("[exit code")


def test_secrets_of_the_environment_are_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYCHAT_API_KEY", "hunter2")
    assert "hunter2" not in sh(folder, "env") and "PATH=" in sh(folder, "env")


@confined
@pytest.mark.parametrize(
    "command",
    [
        "cat ../secret.txt",
        "cat {above}/secret.txt",
        "ln -s {above}/secret.txt link && cat link",
        "cp a.txt {above}/stolen.txt",
        "echo x > {above}/secret.txt",
        "rm {above}/secret.txt",
        "mv a.txt ..",
        "ls {home}",
        "tr '\\0' '\\n' < /proc/{pid}/environ | grep PATH",
        "kill -0 {pid}",
    ],
)
def test_nothing_leaves_the_folder(folder: Path, command: str) -> None:
    above, home = folder.parent, Path.home()
    out = sh(folder, command.format(above=above, home=home, pid=os.getpid()))
    assert "[exit code" in out and "outside" not in out, out
    assert sorted(os.listdir(above)) == ["in", "secret.txt"] and (above / "secret.txt").read_text() == "outside"


@confined
def test_there_is_no_network_but_its_own(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
        out = sh(folder, f'{sys.executable} -c "{connect}"')
    assert "ConnectionRefusedError" in out or "unreachable" in out, out
    own = (
        "import socket as s; a = s.create_server(('127.0.0.1', 0)); s.create_connection(a.getsockname()); print('own')"
    )
    assert sh(folder, f'{sys.executable} -c "{own}"') == "own"


@confined
def test_nothing_is_left_behind(folder: Path) -> None:
    assert sh(folder, "(setsid sh -c 'sleep 0.5; echo late > late.txt' &) ; echo started") == "started"
    time.sleep(1)
    assert not (folder / "late.txt").exists()


def test_what_was_promised_and_cannot_be_kept_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinychat.tools.shell.confine.CANNOT", 0)  # any command that ends with 0 and says nothing
    with pytest.raises(TinychatError, match="not run"):
        run("true", folder, Confinement(False, False), 20, threading.Event())


def test_it_ends_in_time_and_when_it_is_stopped(folder: Path) -> None:
    out = sh(folder, "echo begin; sleep 30", seconds=1)
    assert out in ("begin\n[stopped after 1 s]", "[stopped after 1 s]")  # a busy machine may take a second to begin
    cancel = threading.Event()
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(CallStopped):
        run("sleep 30", folder, confinement(), 60, cancel)


def test_endless_output_is_kept_from_both_ends(folder: Path) -> None:
    out = sh(folder, "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert out.startswith("first\nxx") and out.endswith("\nlast") and "bytes left out" in out
    assert len(out) < 2 * KEPT + 100


def test_the_question_shows_the_whole_command(folder: Path) -> None:
    asked: list[Question] = []

    def ask(question: Question) -> None:
        asked.append(question)
        raise CallRefused("no")

    box = Toolbox(running(Folder(folder)))
    command = "rm -rf x\n\n\n; echo " + "y" * 5000
    result = box.call(
        "run_command", f'{{"command": {command!r}}}'.replace("'", '"'), CallContext(ask, threading.Event())
    )
    assert result.state == "refused" and asked[0].detail.endswith(command) and asked[0].kind == "run"
    assert str(confinement()) in asked[0].detail and str(folder) in asked[0].detail
    assert box.call("run_command", '{"command": " "}', CallContext(ask, threading.Event())).state == "failed"


def test_an_unconfined_system_says_so() -> None:
    assert "Not confined" in str(Confinement(False, False)) and "network" in str(Confinement(True, False))
