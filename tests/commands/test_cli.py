"""The command line as its users meet it: what goes to stdout, what to stderr, exit codes."""

import gc
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFWriter

from tests.support import tiny
from tests.support.server import File, Server, make_gguf
from tests.support.terminal import TINYCHAT, started, terminal
from tinychat import process
from tinychat.chat.history import History
from tinychat.cli import DEVICES, main, parse
from tinychat.commands import cache as cache_command
from tinychat.commands import loading, run
from tinychat.engine import devices
from tinychat.errors import TinychatError
from tinychat.models import cache
from tinychat.models.registry import Model, resolve

STATS = {
    "decode_tok_s",
    "prefill_tok_s",
    "ttft_s",
    "load_s",
    "kernels_per_token",
    "jit_batches",
    "bytes_per_token",
    "gb_s",
    "limit_gb_s",
    "limit_share",
    "kv_bytes_per_token",
    "rss_bytes",
}

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as s:
        yield s


def output(capsys: Captured, *argv: object) -> str:
    """stdout of a command that succeeds."""
    code = main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def failure(capsys: Captured, *argv: object) -> str:
    """The one line on stderr of a command that fails."""
    assert main([str(a) for a in argv]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tinychat: ") and err.count("\n") == 1
    return err


# Arguments


@pytest.mark.parametrize(
    "argv", [["--help"], ["run", "--help"], ["cache", "--help"], ["cache", "add", "--help"], ["--version"]]
)
def test_help(capsys: Captured, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 0 and "tinychat" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ["run"],
        ["run", "m"],
        ["run", "m", "p", "--temperature", "hot"],
        ["run", "m", "p", "--temperature", "-1"],
        ["run", "m", "p", "--max-tokens", "0"],
        ["bench", "m", "-n", "x"],
        ["cache"],
        ["cache", "add", "f"],
        ["m", "extra"],
        ["cache", "add", "f", "--model", "a", "--url", "b"],
        ["info", "m", "--template", "--tensors"],
        ["--nonsense"],
        ["bench"],
        ["bench", "--block"],
        ["bench", "m", "--block", "--accept", "0.5"],
        ["bench", "m", "--accept", "1.5"],
        ["bench", "--no-wait", "-n", "3"],
        ["bench", "m", "--kernel", "head"],
        ["run", "m", "p", "--device", "tpu"],
        ["run", "m", "p", "--device", "cuda:x"],
        ["bench", "m", "--threads", "0"],
        ["info", "m", "--device", "cpu"],
    ],
)
def test_wrong_usage(capsys: Captured, argv: list[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2 and "usage: tinychat" in capsys.readouterr().err


def test_every_command_that_runs_a_model_takes_a_device(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEVICES == devices.DEVICES
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: tmp_path / "bench.lock")
    path, text = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), tmp_path / "text.txt"
    text.write_text("a long enough text " * 20)
    for argv, found in (
        (["run", path, "hi", "--max-tokens", 2], lambda shown: shown["device"]),
        (["bench", path, "-n", 2, "-p", 2], lambda shown: shown["device"]),
        (["profile", path, "-n", 2], lambda shown: shown["device"]),
        (["kernels", path], lambda shown: shown["device"]),
        (["smoke", path], lambda shown: shown["results"][0]["device"]),
    ):
        assert "· 1 thread ·" in found(
            json.loads(output(capsys, *argv, "--json", "--device", "cpu", "--threads", 1))
        ), argv
    assert json.loads(
        output(capsys, "perplexity", path, text, "--ctx", 16, "--chunks", 1, "--device", "cpu", "--json")
    )["ppl"]
    assert "plain tinygrad" in json.loads(output(capsys, "kernels", path, "--json", "--device", "reference"))["device"]


def test_an_unknown_command_gets_the_nearest_known_one(capsys: Captured) -> None:
    for argv, line in (
        (["runn", "smollm2", "hi"], "'runn' is no command; did you mean 'run'?"),
        (["xyzzy", "smollm2"], "'xyzzy' is no command (unexpected: smollm2)"),
        (["smollm2", "--context", "99"], "error: unexpected: --context 99"),
        (["info", "m", "more"], "unexpected: more"),
    ):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2 and line in capsys.readouterr().err


def test_the_chat_takes_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(["m", "--device", "cuda:1"])["device"] == "cuda:1"
    for argv in (["--device", "cpu", "m"], ["m", "--device", "cpu"], ["--threads", "3", "m", "--device", "cpu"]):
        args = parse(argv)
        assert (args["text"], args["device"]) == ("m", "cpu") and args["threads"] in (None, 3)


def test_variables_that_tinygrad_would_not_understand(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    odd = {"DEBUG": "true", "TC": "/sbin/tc", "NO_COLOR": "yes"}
    argv = ["run", str(path), "hi", "--max-tokens", "1", "--device", "reference", "--json"]
    done = subprocess.run([*TINYCHAT, *argv], env={**os.environ, **odd}, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["stop_reason"] in ("length", "eos")
    environ = {**odd, "DEBUG": "2", "BEAM": ""}
    process.clean(environ)
    assert environ == {"DEBUG": "2", "NO_COLOR": "1"}


def test_what_a_start_does_not_wait_for(tmp_path: Path) -> None:
    """Modules of which none is needed for an answer; together they took half of the time of all imports."""
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    argv = ["run", str(path), "hi", "--max-tokens", "1", "--device", "cpu"]
    done = subprocess.run([sys.executable, "-X", "importtime", *TINYCHAT[1:], *argv], capture_output=True, text=True)
    imported = {line.split()[-1] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert {"numpy", "tinychat.backend.local", "tinychat.kernels.cpu.executor"} <= imported, done.stderr[-500:]
    slow = {"asyncio", "gguf", "httpx", "llguidance", "multiprocessing", "sqlite3", "textual", "tinygrad", "yaml"}
    assert not imported & slow


def test_collections_of_garbage_go_on_behind_a_start() -> None:
    with pytest.raises(KeyError), process.starting():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_debug_shows_where(capsys: Captured) -> None:
    for argv in (["--debug", "info", "nosuch"], ["info", "nosuch", "--debug"]):
        with pytest.raises(Exception, match="unknown model 'nosuch'"):
            main(argv)


def test_errors_are_one_line(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("not a model\n" * 100)
    data = make_gguf(tmp_path / "short.gguf")
    (tmp_path / "short.gguf").write_bytes(data[:-100])
    assert "did you mean smollm2" in failure(capsys, "run", "smolm2", "hi")
    assert "not a GGUF" in failure(capsys, "run", tmp_path / "text.gguf", "hi")
    assert "truncated" in failure(capsys, "run", tmp_path / "short.gguf", "hi")
    assert "no such file" in failure(capsys, "run", tmp_path / "none.gguf", "hi")
    assert "prompt is empty" in failure(capsys, "run", "smollm2", " ")
    assert "needs a terminal" in failure(capsys, "smollm2")
    assert list(cache.downloads_dir().glob("*")) == []


@pytest.mark.parametrize("kind", [ZeroDivisionError, TinychatError])
def test_the_unexpected_is_one_line_too(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def broken(model: Model) -> None:
        raise kind("one\ntwo \x1b[31m")

    monkeypatch.setattr(cache, "path_of", broken)
    assert r": one\ntwo \x1b[31m" in failure(capsys, "info", "smollm2")


def test_what_is_wrong_in_the_settings_is_said_once(capsys: Captured) -> None:
    folder = Path(os.environ["XDG_CONFIG_HOME"]) / "tinychat"
    folder.mkdir()
    (folder / "settings.toml").write_text('nonsense = 1\n[models."mine"]\npath = "/nowhere/m.gguf"\n')
    assert main(["cache", "list", "--all"]) == 0
    out, err = capsys.readouterr()
    assert err.count("nonsense") == 1 and "mine" in out
    assert main(["info", "mine"]) == 1
    assert "/nowhere/m.gguf" in capsys.readouterr().err


# The model at work


def test_run_json(smollm2_path: Path, capsys: Captured) -> None:
    argv = ("run", smollm2_path, "What is the capital of France?", "--temperature", 0, "--max-tokens", 16, "--json")
    answer = json.loads(output(capsys, *argv))
    assert STATS | {"text", "thinking", "token_ids", "prompt_tokens", "stop_reason"} <= set(answer)
    assert answer["text"] and answer["thinking"] == ""
    assert answer["stop_reason"] in ("eos", "length") and 0 < len(answer["token_ids"]) <= 16
    assert answer["prompt_tokens"] == 37 and answer["decode_tok_s"] > 0


def test_run_knows_paris(smollm2_path: Path, capsys: Captured) -> None:
    """Raw, because as a chat this question is a near tie of this small model: rounding decides, in llama.cpp as
    here."""
    argv = ("run", smollm2_path, "The capital of France is", "--raw", "--temperature", 0, "--max-tokens", 3)
    assert "Paris" in output(capsys, *argv)


def test_run_in_a_pipe_writes_the_answer_and_nothing_else(
    smollm2_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = "The first three letters are A, B and"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(prompt.encode())))
    options = ("--raw", "--temperature", 1, "--seed", 5, "--max-tokens", 8)
    streamed = output(capsys, "run", smollm2_path, "-", *options)
    answer = json.loads(output(capsys, "run", smollm2_path, prompt, *options, "--json"))
    assert streamed == answer["text"] + "\n"
    assert len(answer["token_ids"]) == 8 and answer["stop_reason"] == "length" and answer["seed"] == 5
    assert answer["prompt_tokens"] == len(json.loads(output(capsys, "tokenize", smollm2_path, prompt, "--json"))["ids"])


def test_run_takes_files_stdin_and_parameters(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, notes = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), tmp_path / "notes.txt"
    notes.write_text("the file says 42")
    argv = ("run", model, "summarise", "--max-tokens", 1, "--json")

    def pipe(text: str) -> None:  # a file, which `run` treats as a pipe
        (tmp_path / "stdin").write_text(text)
        monkeypatch.setattr(sys, "stdin", (tmp_path / "stdin").open())

    def tokens(*options: object, stdin: str = "") -> int:
        pipe(stdin)
        return int(json.loads(output(capsys, *argv, *options))["prompt_tokens"])

    plain = tokens()
    assert tokens(stdin="some text of a pipe " * 5) > plain + 80
    assert tokens("--file", notes) > plain
    assert tokens("--system", "You are a pirate. " * 5) > plain + 50
    pipe("word " * 200)
    assert main([str(a) for a in (*argv, "--context", 64, "--top-p", 0.5, "--file", notes)]) == 1
    failed = capsys.readouterr().err.splitlines()[-1]
    assert "the context holds 64" in failed and "--context" in failed
    monkeypatch.setattr(loading, "MAX_TEXT", 999)  # of a log of gigabytes no more is read
    for prompt in ("summarise", "-"):
        pipe("word " * 200)
        assert "stdin has more than 999 bytes" in failure(capsys, "run", model, prompt)
    assert "/dev/zero has more than 999 bytes" in failure(capsys, "perplexity", model, "/dev/zero")


def test_run_continues_a_conversation_of_the_history(capsys: Captured, tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    (tmp_path / "schema.json").write_text('{"enum": [7]}')
    argv = ["run", model, "--conversation", "My  talk", "--json", "--device", "cpu", "--max-tokens", 3]
    first = json.loads(
        output(capsys, *argv, "hello there", "--system", "Be brief.", "--schema", tmp_path / "schema.json")
    )
    second = json.loads(output(capsys, *argv, "and again"))
    assert second["prompt_tokens"] > first["prompt_tokens"] + 3, "the first question and answer are read too"
    history = History()
    (only,) = history.find()
    talk = history.load(only.id)
    assert (only.title, talk.model, talk.parameters.system) == ("My talk", "m.gguf", "Be brief.")
    assert [(t.role, t.text) for t in talk.turns[::2]] == [("user", "hello there"), ("user", "and again")]
    assert talk.turns[1].text == first["text"] == "7" and talk.parameters.schema is None
    assert talk.turns[3].stats["seed"] == second["seed"] and talk.turns[3].text == second["text"]
    assert "needs a name" in failure(capsys, "run", model, "hi", "--conversation", " ")
    history.close()


def test_a_terminal_obeys_nothing_that_a_model_says(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = run._Printer(quiet=False)
    for text, kind in (("plan\x1b]0;x\x07", "thinking"), ("Hello\n", "answer"), ("\x1b[2J", "answer")):
        shown.add(text, kind)
    shown.end()
    out, err = capsys.readouterr()
    assert out == "Hello\n\\x1b[2J\n"
    assert err == "\x1b[2mplan\\x1b]0;x\\x07\x1b[0m\n"


def test_a_long_prompt_gets_a_context_to_match(smollm2_path: Path) -> None:
    model = resolve(str(smollm2_path))
    assert run._needed_context(model, "short", 100) is None
    assert run._needed_context(model, "word " * 5000, 100) == 5000 + 256 + 100 + 1
    assert run._needed_context(model, "word " * 50_000, None) == 8192  # all the model can; the engine says the rest


def test_bench_json(smollm2_path: Path, capsys: Captured) -> None:
    result = json.loads(output(capsys, "bench", smollm2_path, "-n", 3, "-p", 4, "--json"))
    assert STATS | {"model", "device", "threads", "n_prompt", "n_gen"} <= set(result)
    assert (result["n_prompt"], result["n_gen"]) == (4, 3) and result["decode_tok_s"] > 0


def test_perplexity(smollm2_path: Path, capsys: Captured) -> None:
    prose = Path(__file__).parents[1] / "data" / "prose.txt"
    options = ("perplexity", smollm2_path, prose, "--ctx", 64, "--chunks", 1)
    result = json.loads(output(capsys, *options, "--json"))
    assert set(result) == {"model", "ppl", "ppl_err", "tokens", "chunks"} and (result["tokens"], result["chunks"]) == (
        31,
        1,
    )
    assert 5 < result["ppl"] < 100
    assert output(capsys, *options).startswith(f"perplexity {result['ppl']:.4f} ± ")
    assert "cannot be read: no such file" in failure(capsys, "perplexity", smollm2_path, "nothing.txt")


# Looking into files


def test_tokenize(smollm2_path: Path, capsys: Captured) -> None:
    assert json.loads(output(capsys, "tokenize", smollm2_path, "Hello world", "--json")) == {
        "ids": [19556, 905],
        "tokens": ["Hello", " world"],
    }
    assert output(capsys, "tokenize", smollm2_path, "a\nb").splitlines()[1].endswith(r"  \n")


def test_info(smollm2_path: Path, capsys: Captured) -> None:
    facts = json.loads(output(capsys, "info", smollm2_path, "--json"))
    assert facts["architecture"] == "llama" and facts["parameters"] == 134_515_008 and facts["problem"] is None
    assert facts["types"]["Q4_1"] == {"tensors": 210, "bytes": 66_355_200} and facts["kv_bytes_per_token"] == 23_040
    assert facts["fit"]["verdict"] == "fits" and facts["metadata"]["llama.block_count"] == 30
    assert facts["metadata"]["tokenizer.ggml.tokens"]["length"] == 49152
    text = output(capsys, "info", smollm2_path)
    assert "30 of width 576" in text and "23.0 kB per token" in text and "Q8_0: 1 tensor" in text
    assert "llama.rope.freq_base" in output(capsys, "info", smollm2_path, "--grep", "ROPE")
    assert "<|im_start|>" in output(capsys, "info", smollm2_path, "--template")
    assert "49152×576" in output(capsys, "info", smollm2_path, "--tensors")
    assert "no key" in failure(capsys, "info", smollm2_path, "--grep", "nonsense")


def test_info_of_delta_rules(tmp_path: Path, capsys: Captured) -> None:
    path = tiny.write(tmp_path / "m.gguf", "qwen35")
    facts = json.loads(output(capsys, "info", path, "--json"))
    assert facts["config"]["delta_rule"]["layers"] == [0] and facts["snapshots"] == 16
    text = output(capsys, "info", path)
    assert "in 1 of the layers instead: 4 heads of 24 x 24" in text and "up to 16 snapshots" in text


def test_info_of_a_model_that_is_not_here(server: Server, capsys: Captured, tmp_path: Path) -> None:
    sent: list[int] = []
    server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf", size=20_000_000), pace=sent.append)
    assert main(["info", server.url("/m.gguf"), "--json"]) == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert facts["bytes"] > 20_000_000 and facts["path"] == server.url("/m.gguf") and "not here" in err
    assert "token_embd" in facts["problem"]  # not a model that the engine could run
    assert max(sent) < 10_000_000 and cache.entries() == []


def test_info_of_a_hostile_file(capsys: Captured, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba\x1b[2J")
    writer.add_chat_template("{{ x }}\x1b]0;owned\x07")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    for argv in ([], ["--template"], ["--grep", "general"]):
        out = output(capsys, "info", tmp_path / "m.gguf", *argv)
        assert "\\x1b" in out and "\x1b" not in out and "\x07" not in out


# The cache


def test_the_life_of_a_file(server: Server, capsys: Captured, tmp_path: Path) -> None:
    data = make_gguf(tmp_path / "m.gguf")
    server.files["/m.gguf"] = File(data)
    url = server.url("/m.gguf")
    assert "not in the cache" in failure(capsys, "cache", "path", url)
    path = output(capsys, "cache", "pull", url).strip()
    assert Path(path).read_bytes() == data
    assert output(capsys, "cache", "path", url).strip() == path
    assert output(capsys, "cache", "path").strip() == str(Path(path).parent)
    assert url in output(capsys, "cache", "list") and "complete" in output(capsys, "cache", "list")
    assert output(capsys, "cache", "verify") == f"{url}: unchanged since it came (SHA-256)\n"
    with open(path, "r+b") as f:
        f.seek(-1, os.SEEK_END)
        f.write(bytes([data[-1] ^ 1]))
    assert main(["cache", "verify", url]) == 1
    assert "1 of 1 damaged" in capsys.readouterr().err
    assert "deleted" in output(capsys, "cache", "rm", Path(path).name)  # by the file name that `list` shows
    assert "not in the cache" in failure(capsys, "cache", "rm", url)
    assert output(capsys, "cache", "add", tmp_path / "m.gguf", "--url", url, "--move").strip() == path
    assert not (tmp_path / "m.gguf").exists()
    Path(path + ".part").write_bytes(b"123")
    assert "partial" in output(capsys, "cache", "list")
    assert output(capsys, "cache", "prune") == f"deleted {Path(path).name}.part, 3 bytes\n"
    assert "glm-4.7:flash" in output(capsys, "cache", "list", "--all")


def test_no_command_shows_credentials(server: Server, capsys: Captured, tmp_path: Path) -> None:
    server.files["/m.gguf?key=secret"] = server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf"))
    url = server.url("/m.gguf?key=secret").replace("://", "://me:secret@")
    for argv in (
        ("info", url),
        ("info", url, "--json"),
        ("cache", "pull", url),
        ("cache", "list"),
        ("cache", "verify"),
    ):
        assert main([*argv]) == 0
        out, err = capsys.readouterr()
        assert ("secret" not in out + err and "m.gguf" in out + err) or argv == ("cache", "pull", url)


def test_a_download_is_announced_with_size_and_place(server: Server, capsys: Captured, tmp_path: Path) -> None:
    server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf"))
    assert main(["cache", "pull", server.url("/m.gguf")]) == 0
    assert f"to {cache.downloads_dir()}, where" in capsys.readouterr().err


def test_nothing_is_downloaded_that_cannot_run(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*args: object) -> None:
        raise AssertionError("it downloads")

    monkeypatch.setattr(cache, "pull", unwanted)
    huge = Model("huge", ("http://127.0.0.1:9/m",), size=10**15, architecture="llama")
    odd = Model("odd", ("http://127.0.0.1:9/o",), architecture="mamba")
    monkeypatch.setattr(cache_command, "MODELS", (huge, odd))
    monkeypatch.setattr("tinychat.models.registry.MODELS", (huge, odd))
    assert "does not fit into this machine's memory" in failure(capsys, "run", "huge", "hi")
    assert "architecture 'mamba', which needs state-space layers, is not supported" in failure(
        capsys, "run", "odd", "hi"
    )


def test_a_reader_that_has_seen_enough(smollm2_path: Path) -> None:
    with started([*TINYCHAT, "info", str(smollm2_path), "--tensors"], stdout=-1, stderr=-1) as p:
        assert p.stdout and p.stderr
        p.stdout.close()
        err = p.stderr.read()
    assert p.returncode == 141 and err == b""


def test_a_reader_that_has_seen_enough_of_a_remote_header(server: Server, tmp_path: Path) -> None:
    server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf"))
    with started([*TINYCHAT, "info", server.url("/m.gguf"), "--tensors"], stdout=-1, stderr=-1) as p:
        assert p.stdout and p.stderr
        p.stdout.close()
        err = p.stderr.read().decode()
    assert p.returncode == 141 and err.count("\n") == 1 and "reading its header" in err


def test_a_bar_in_a_terminal(server: Server, tmp_path: Path) -> None:
    server.files["/m.gguf"] = File(make_gguf(tmp_path / "m.gguf"), block=10_000, pace=lambda sent: time.sleep(0.05))
    with terminal("cache", "pull", server.url("/m.gguf")) as t:
        seen = t.read(None)
    assert t.process.returncode == 0 and "downloading" in seen and "of 303.1 kB" in seen and "kB/s" in seen


def test_the_chat_opens_on_a_model_and_quits(smollm2_path: Path) -> None:
    with terminal(str(smollm2_path)) as t:
        t.read(f"Ask {smollm2_path.name[:8]}")
        t.read("]2;tinychat")
        t.write(b"\x11")  # ctrl+q
        t.read(None)
        assert t.process.returncode == 0 and t.restored and b"\x1b]2;tinychat\x07" in t.seen


def test_a_dumb_terminal_gets_the_plain_chat():
    with terminal(environ={**os.environ, "TERM": "dumb"}) as t:
        t.read("/model NAME loads one")
        t.read("\n> ")
        t.write(b"\x04")
        assert t.read(None) and b"\x1b" not in t.seen
        assert t.process.wait(120) == 0
