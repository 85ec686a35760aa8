"""`serve`, and the commands that speak to a server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.support import tiny
from tests.support.serving import Replay, finished, pieces, replaying, serving
from tinychat.backend.address import Server
from tinychat.backend.factory import open_backend
from tinychat.chat.controller import Controller
from tinychat.chat.conversation import Turn
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.cli import main, parse
from tinychat.commands.serve import served_model
from tinychat.kernels.sampling import Sampling
from tinychat.server.security import Policy

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark lock of the test's own, and no key."""
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: tmp_path / "bench.lock")
    monkeypatch.delenv("TINYCHAT_API_KEY", raising=False)


@pytest.fixture
def url() -> Iterator[str]:
    with serving(replaying([*pieces("hm", kind="thinking"), *pieces(*"Hello"), finished(answer=6)])) as found:
        yield found


def wait(controller: Controller, condition: Callable[[], bool]) -> None:
    """Until `condition`: the controller gets on when it is polled."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        controller.poll()
        time.sleep(0.001)


def test_run_asks_a_server(url: str, capsys: Captured) -> None:
    assert main(["run", "--server", url, "Hi"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert main(["run", "--server", f"{url}/v1", "--model", "replay", "--json", "Hi", "--temperature", "0"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["text"], said["thinking"], said["model"]) == ("Hello", "hm", "replay")
    assert said["stop_reason"] == "eos" and said["generated_tokens"] == 6


def test_a_server_is_measured_from_the_outside(url: str, capsys: Captured) -> None:
    assert main(["bench", "--server", url, "-n", "6", "-p", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["generated_tokens"] == 6 and len(result["decode_runs"]) == 3
    assert result["decode_tok_s"] > 0 and result["ttft_s"] > 0
    assert main(["bench", "--server", url]) == 0
    assert "tok/s" in capsys.readouterr().out


def test_the_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    file = tmp_path / "key"
    file.write_text("secret")
    file.chmod(0o600)
    with serving(replaying([*pieces("ok"), finished()]), Policy(key="secret")) as url:
        assert main(["run", "--server", url, "Hi"]) == 1
        err = capsys.readouterr().err
        assert "API key" in err and len(err.splitlines()) == 1
        assert main(["run", "--server", url, "--key-file", str(file), "Hi"]) == 0
        monkeypatch.setenv("TINYCHAT_API_KEY", "secret")
        assert main(["run", "--server", url, "Hi"]) == 0


def test_the_models_own_sampling_where_neither_request_nor_user_sets_it() -> None:
    replay = Replay([*pieces("ok"), finished()])
    replay.info = replace(replay.info, sampling={"temperature": 0.6, "top_k": 20, "min_p": 0.0})
    own = Settings(parameters=Parameters(sampling=Sampling(top_p=0.9, top_k=30)))
    with serving(served_model("replay", replay, own)) as url:  # type: ignore[arg-type]
        params = httpx.get(f"{url}/props").json()["default_generation_settings"]["params"]
        assert [params[k] for k in ("temperature", "top_p", "top_k", "min_p")] == [0.6, 0.9, 30, 0.0]
        chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "min_p": 0.2}
        httpx.post(f"{url}/v1/chat/completions", json=chat).raise_for_status()
        httpx.post(f"{url}/api/chat", json=chat | {"min_p": None, "stream": False}).raise_for_status()
        assert main(["run", "--server", url, "Hi", "--temperature", "1"]) == 0
    got = [(s.temperature, s.top_p, s.top_k, s.min_p) for s in (r.sampling for r in replay.requests)]
    assert got == [(0.6, 0.9, 30, 0.2), (0.6, 0.9, 30, 0.0), (1.0, 0.9, 30, 0.0)]
    assert served_model("qwen3:8b", replaying([]).backend, Settings()).sampling.top_k == 20  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--server", "http://a", "model", "prompt"],
        ["run", "--server", "http://a"],
        ["run", "model"],
        ["run", "--model", "m", "prompt"],
        ["run", "--key-file", "k", "model", "prompt"],
        ["bench", "--server", "http://a", "model"],
        ["bench", "--server", "http://a", "--block"],
        ["--server", "http://a", "model"],
        ["serve", "m", "--port", "70000"],
        ["serve", "m", "--no-key", "--api-key", "f"],
    ],
)
def test_wrong_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse(argv)
    assert raised.value.code == 2


def test_a_port_that_is_taken(url: str, tmp_path: Path, capsys: Captured) -> None:
    tiny.write(tmp_path / "m.gguf", "llama", "F16", seed=1)
    assert main(["serve", str(tmp_path / "m.gguf"), "--port", url.rpartition(":")[2]]) == 1
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_a_chat_over_a_server() -> None:
    """The controller of the chat, with what `tinychat --server` gives it."""
    served = replaying([*pieces("hm", kind="thinking"), *pieces(*"Hello"), finished(answer=6)])
    with serving(served) as url:
        controller = Controller(open_backend)
        controller.load("replay", Path(url), server=Server(url))
        wait(controller, lambda: controller.ready)
        assert controller.info is not None and controller.info.name == "replay" and controller.instruments is None
        controller.ask(Turn("user", "Hi"))
        wait(controller, lambda: not controller.busy and len(controller.conversation.turns) == 2)
        answer = controller.conversation.turns[-1]
        assert (answer.text, answer.thinking) == ("Hello", "hm")
        controller.leave()
    assert isinstance(served.backend, Replay)
    assert served.backend.requests[-1].messages[-1]["content"] == "Hi"
