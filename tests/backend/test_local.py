"""The local backend: loading without losing what is loaded, cancelling, errors, saved caches, prompts that go on."""

import errno
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support import tiny
from tinychat.backend import saved
from tinychat.backend.engine_thread import EngineThread
from tinychat.backend.instruments import JobDone
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import Failed, Finished, OldModelLost, Piece, Request, Sampling, Usage
from tinychat.engine import engine as engine_module
from tinychat.engine import kvstore
from tinychat.engine.devices import has_cuda
from tinychat.errors import TinychatError

HELLO = Request(({"role": "user", "content": "hello"},), sampling=Sampling(temperature=0.0), max_tokens=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("local") / "tiny.gguf", "deepseek2_glm", "Q8_0")


@pytest.fixture(scope="module")
def thread() -> EngineThread:
    return EngineThread()


@pytest.fixture
def backend(model: Path, thread: EngineThread, speculation: str) -> Iterator[LocalBackend]:
    backend = LocalBackend.open(model, device="cpu", thread=thread)
    yield backend
    backend.close()


def reason(backend: LocalBackend, request: Request = HELLO) -> str:
    last = list(backend.answer(request))[-1]
    assert isinstance(last, Finished), last
    return last.reason


@pytest.mark.parametrize("what", ["missing", "no model", "context", "memory"])
def test_a_model_that_does_not_load_costs_nothing(
    what: str, backend: LocalBackend, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = {"missing": tmp_path / "none.gguf", "no model": tmp_path / "text.gguf"}.get(what, model), {}
    (tmp_path / "text.gguf").write_text("this is not a model")
    if what == "context":
        options["max_context"] = 0
    if what == "memory":
        monkeypatch.setattr(engine_module, "available_memory", lambda: 1 << 20)
        monkeypatch.setattr(engine_module, "has_cuda", lambda: False)
    with pytest.raises(TinychatError) as failed:
        LocalBackend.open(path, replaces=backend, device="cpu", **options)
    assert not isinstance(failed.value, OldModelLost) and "\n" not in str(failed.value)
    assert reason(backend) in ("length", "eos")


def test_the_first_token_counts_what_the_user_waited_for(backend: LocalBackend, thread: EngineThread) -> None:
    """As behind the saving of a large KV cache, which the engine's thread does after an answer."""
    saved = threading.Event()
    thread.submit(lambda: saved.wait(60) and None)
    answer = backend.answer(HELLO)
    time.sleep(0.3)
    saved.set()
    end = list(answer)[-1]
    assert isinstance(end, Finished)
    s = end.stats
    assert (
        s.wait_s >= 0.29 and s.ttft_s >= s.wait_s + s.template_s + s.tokenise_s + s.prefill_s + s.first_token_s - 1e-6
    )


@pytest.mark.skipif(has_cuda(), reason="a device that fails is needed")
def test_what_fails_with_the_weights_says_that_the_old_model_is_gone(backend: LocalBackend, model: Path) -> None:
    with pytest.raises(OldModelLost):
        LocalBackend.open(model, replaces=backend, device="cuda")
    assert isinstance(list(backend.answer(HELLO))[-1], Failed)


def test_another_model_takes_the_thread_over_and_the_place(backend: LocalBackend, model: Path) -> None:
    stages: list[tuple[str, float]] = []
    other = LocalBackend.open(
        model, replaces=backend, device="cpu", max_context=64, progress=lambda *said: stages.append(said)
    )
    assert other.info.max_context == 64 and {"reading the header", "loading weights"} <= {s for s, _ in stages}
    assert reason(other) in ("length", "eos") and isinstance(list(backend.answer(HELLO))[-1], Failed)
    other.close()


def test_a_waiting_request_that_is_cancelled_ends_while_another_runs(backend: LocalBackend) -> None:
    go = threading.Event()

    def job(engine: object, report, cancel: threading.Event) -> None:  # type: ignore[no-untyped-def]
        while not go.wait(0.001):
            report("still running", 0.0)

    running = backend.run_job(job, threading.Event())
    waiting = Request(HELLO.messages)
    stream = backend.answer(waiting)
    waiting.cancel.set()
    last = list(stream)[-1]  # ends although the job goes on
    assert isinstance(last, Finished) and last.reason == "stopped" and not running.ended
    go.set()
    assert isinstance(list(running)[-1], JobDone)


def raised(e: Exception, *job: object) -> None:
    raise e


def test_the_thread_survives_what_a_job_does(backend: LocalBackend) -> None:
    failed = list(backend.run_job(lambda *job: 1 / 0, threading.Event()))
    assert [e.message for e in failed if isinstance(e, Failed)] == [
        "internal error: ZeroDivisionError: division by zero"
    ]
    for e in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        failed = list(backend.run_job(partial(raised, e), threading.Event()))
        assert [event.message for event in failed if isinstance(event, Failed)] == [
            "out of memory; try a smaller model or context"
        ]
    bad = list(backend.answer(Request(({"role": "user"},))))[-1]
    assert isinstance(bad, Failed) and "\n" not in bad.message
    with pytest.raises(TinychatError):
        backend.measure(Request(({"role": "nobody", "content": "x"},)))
    assert reason(backend) in ("length", "eos")


def test_a_saved_cache_serves_a_later_process(
    model: Path, thread: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore, "user_cache_dir", lambda *args, **options: str(tmp_path))
    for reused in (False, True):
        backend = LocalBackend.open(model, device="cpu", thread=thread, store_bytes=1 << 30)
        request = Request(({"role": "user", "content": "hello " * 20},), max_tokens=2)
        last = list(backend.answer(request))[-1]
        assert isinstance(last, Finished) and (last.usage.cached == last.usage.prompt - 1) == reused
        backend.measure(HELLO)  # behind the saving
        backend.close()


def test_thinking_that_goes_on_and_thinking_that_is_over(backend: LocalBackend) -> None:
    thought = {"role": "assistant", "reasoning_content": "let me see"}
    prompts = []
    for last in (thought, thought | {"content": ""}):
        list(backend.answer(Request((*HELLO.messages, last), continue_final=True, max_tokens=1)))
        prompts.append("".join(t.text for t in backend.token_texts(backend.last_prompt())))
    still, over = prompts
    assert still.endswith("let me see") and over == still + "\n</think>\n\n"


def test_the_parts_of_the_context(backend: LocalBackend) -> None:
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two", "reasoning_content": "three four five"},
        {"role": "user", "content": "six"},
        {"role": "assistant", "content": "seven eight"},
    )
    usage = backend.measure(Request(messages, continue_final=True))
    text = {name: len(backend._loaded().tokenizer.encode(name)) for name in ("Be brief.", "seven eight")}
    assert usage.system == text["Be brief."] and usage.answer == text["seven eight"] and usage.history > 0
    assert usage.used == len(backend._prompts.make(Request(messages, continue_final=True)).ids)  # type: ignore[union-attr]
    assert usage == Usage(usage.system, usage.history, usage.thinking, answer=usage.answer, limit=usage.limit)


def test_raw_prompts_are_neither_rendered_nor_split(backend: LocalBackend) -> None:
    events = list(backend.answer(Request(raw="once <think> upon", max_tokens=8)))
    assert {e.kind for e in events if isinstance(e, Piece)} == {"answer"}
    texts = [t.text for t in backend.token_texts(backend.last_prompt())]
    assert "".join(texts).endswith("once <think> upon") and "<think>" in texts


def test_a_forgotten_conversation_leaves_nothing_on_the_disk(
    model: Path, thread: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvstore, "user_cache_dir", lambda *args, **kwargs: str(tmp_path))
    backend = LocalBackend.open(model, device="cpu", thread=thread, store_bytes=1 << 26)

    def ask(conversation: str) -> None:
        messages = ({"role": "user", "content": f"{conversation} of the sea " * 12},)
        reason(backend, Request(messages, sampling=Sampling(temperature=0.0), max_tokens=4, conversation=conversation))
        thread.call(lambda: None)  # what is saved behind the answer is on the disk now

    ask("first")
    one = saved.usage()
    ask("second")
    both = saved.usage()
    assert 0 < one[1] < both[1]
    backend.forget("second")
    assert saved.usage() == one
    ask("second")
    backend.close()
    thread.call(lambda: None)
    assert saved.usage() == one  # neither the next answer nor the exit wrote it again
    assert saved.clear() == one[1] and saved.usage() == (0, 0)
