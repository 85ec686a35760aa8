"""What every Backend does alike: the scripted one of the tests and the local one over a tiny real model."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.scripted import INFO, Script, ScriptedBackend
from tinychat.backend.instruments import Instrumented, JobDone, JobProgress
from tinychat.backend.local import LocalBackend
from tinychat.backend.protocol import (
    END,
    DoesNotFit,
    Event,
    Failed,
    Finished,
    Piece,
    Prefilling,
    Prompted,
    Queued,
    Request,
    text_of,
)
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import GREEDY, Sampling

CONTEXT = 256


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def talk(n: int) -> tuple[dict[str, str], ...]:
    """`n` exchanges and a question; each takes some tokens of any vocabulary."""
    turns = (m for i in range(n) for m in (user(f"question {i}"), {"role": "assistant", "content": f"answer {i}"}))
    return (*turns, user("and now?"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("backend") / "tiny.gguf", "qwen3", "Q8_0", seed=3)


@pytest.fixture(params=["scripted", "local"])
def backend(request: pytest.FixtureRequest, model: Path, speculation: str) -> Iterator[Instrumented]:
    if request.param == "scripted":
        made: Instrumented = ScriptedBackend(
            Script(["word and more " * 200], rate=2000, info=replace(INFO, max_context=CONTEXT))
        )
    else:
        made = LocalBackend.open(model, device="cpu", max_context=CONTEXT)
    yield made
    made.close()


def check(events: list[Event]) -> list[Event]:
    """The order that the protocol promises."""
    ends = [e for e in events if isinstance(e, END)]
    assert ends == events[-1:], events
    order = {Queued: 0, Prompted: 1, Prefilling: 2, Piece: 3}
    places = [order[type(e)] for e in events[:-1]]
    assert places == sorted(places) and places.count(0) <= 1 and places.count(1) <= 1
    return events


def run(backend: Instrumented, request: Request) -> list[Event]:
    return check(list(backend.answer(request)))


def test_an_answer_and_its_figures(backend: Instrumented) -> None:
    request = Request(talk(1), sampling=GREEDY, max_tokens=5)
    events = run(backend, request)
    prompted, finished = events[0], events[-1]
    assert isinstance(prompted, Prompted) and isinstance(finished, Finished)
    tokens = [t for e in events if isinstance(e, Piece) for t in e.tokens]
    assert finished.reason == "length" and len(tokens) == 5 == finished.usage.answer == finished.stats.generated_tokens
    assert finished.usage.prompt == prompted.usage.prompt == len(backend.last_prompt())
    assert "".join(t.text for t in tokens) == text_of(events) and all(t.logprob < 0 for t in tokens)
    assert backend.measure(request) == prompted.usage and prompted.usage.limit == CONTEXT == backend.info.max_context
    prefills = [e for e in events if isinstance(e, Prefilling)]
    assert prefills[0].done == 0 and prefills[-1].done == prefills[-1].total
    again = run(backend, request)[-1]
    assert isinstance(again, Finished) and again.usage.cached == again.usage.prompt - 1


def test_figures_are_values(backend: Instrumented) -> None:
    run(backend, Request(talk(1), max_tokens=3))
    before = backend.snapshot()
    assert before is not None and before.generated_tokens == 3 and before.phase == "idle"
    run(backend, Request(talk(1), max_tokens=7))
    assert before.generated_tokens == 3


def test_each_request_has_its_own_cancel(backend: Instrumented, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first answer waits in its second step until all of them were asked for."""
    asked = threading.Event()

    def held(
        steps: Callable[..., Iterator[tuple[int, float]]], *args: object, **options: object
    ) -> Iterator[tuple[int, float]]:
        for step in steps(*args, **options):
            yield step
            asked.wait(120)

    if isinstance(backend, LocalBackend):
        executor = backend._loaded().executor
        for name in ("decode", "verify"):
            monkeypatch.setattr(executor, name, partial(held, getattr(executor, name)))
    else:
        backend.script.rate = 20  # type: ignore[attr-defined]
    first = Request(talk(1), sampling=GREEDY)
    second = Request((user("second"),), max_tokens=3, sampling=GREEDY)
    third = Request((user("third"),), max_tokens=3, sampling=GREEDY)
    running = backend.answer(first)
    begun = [next(running)]
    while not isinstance(begun[-1], Piece):
        begun.append(next(running))
    streams = [backend.answer(r) for r in (second, third)]
    second.cancel.set()
    first.cancel.set()
    asked.set()
    ends = [check(e)[-1] for e in ([*begun, *running], *map(list, streams))]
    assert [e.reason for e in ends if isinstance(e, Finished)] == ["stopped", "stopped", "length"]


def test_a_cancel_before_the_call_is_not_lost(backend: Instrumented) -> None:
    request = Request(talk(1))
    request.cancel.set()
    events = run(backend, request)
    assert isinstance(events[-1], Finished) and events[-1].reason == "stopped" and not text_of(events)
    assert events[-1].stats.generated_tokens == 0


def test_stop_strings_end_an_answer_before_them(backend: Instrumented) -> None:
    whole = text_of(run(backend, Request(talk(1), sampling=GREEDY, max_tokens=20)))
    stop = whole[5:9]
    events = run(backend, Request(talk(1), sampling=GREEDY, max_tokens=20, stop=("never said", stop)))
    finished = events[-1]
    assert isinstance(finished, Finished) and (finished.reason, finished.stop_string) == ("stop", stop)
    assert text_of(events) == whole[: whole.index(stop)]


def test_a_prompt_that_does_not_fit_is_refused_with_its_figures(backend: Instrumented) -> None:
    events = run(backend, Request(talk(60)))
    refused = events[-1]
    assert isinstance(refused, DoesNotFit) and len(events) == 1 and refused.droppable == 60
    assert refused.usage.prompt + refused.reserve > CONTEXT and refused.reserve == CONTEXT // 4
    alone = (*talk(3), {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "word " * 500})
    for hopeless in (Request(alone), Request(raw="word " * 500)):  # nothing that can be left out makes room
        refused = run(backend, hopeless)[-1]
        assert isinstance(refused, DoesNotFit) and refused.droppable == 0


def test_the_oldest_turns_are_left_out_so_that_the_next_fit_too(backend: Instrumented) -> None:
    request = Request(({"role": "system", "content": "Be brief."}, *talk(60)), overflow="oldest", max_tokens=2)
    prompted = run(backend, request)[0]
    assert isinstance(prompted, Prompted) and prompted.dropped % 2 == 0 and prompted.usage.system > 0
    kept = (request.messages[0], *request.messages[1 + prompted.dropped :])
    assert prompted.usage.prompt == backend.measure(replace(request, messages=kept)).prompt <= CONTEXT * 3 // 4
    one_more = (request.messages[0], *request.messages[prompted.dropped - 1 :])
    assert backend.measure(replace(request, messages=one_more)).prompt > CONTEXT * 3 // 4, "no more than needed"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling": Sampling(logit_bias=((1 << 30, 5.0),))}, "logit_bias"),
        ({"logprobs": 3}, "top_logprobs"),
        ({"tools": ({},)}, "tool"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(backend: Instrumented, changes: dict, says: str) -> None:
    failed = run(backend, replace(Request(talk(1)), **changes))[-1]
    assert isinstance(failed, Failed) and failed.cause == "invalid" and says in failed.message


def test_jobs_run_between_requests(backend: Instrumented) -> None:
    begun, go = threading.Event(), threading.Event()

    def wait(engine: object, report: Callable[[str, float], None], cancel: threading.Event) -> str:
        report("waiting", 0.5)
        begun.set()
        go.wait(120)
        return "done"

    def broken(*job: object) -> None:
        raise TinychatError("the job failed")

    first, stopped = backend.run_job(wait, threading.Event()), threading.Event()
    begun.wait(120)
    second, third = backend.run_job(wait, stopped), backend.run_job(broken, threading.Event())
    stopped.set()
    go.set()
    assert list(first) == [JobProgress("waiting", 0.5), JobDone("done")]
    assert [e.message for e in (*second, *third) if isinstance(e, Failed)] == [
        "stopped before it began; nothing was measured",
        "the job failed",
    ]
    assert isinstance(run(backend, Request(talk(1), max_tokens=1))[-1], Finished)


def test_a_closed_backend_answers_no_more(backend: Instrumented) -> None:
    stream = backend.answer(Request(talk(1)))
    backend.close()
    ended = list(stream)[-1]
    assert isinstance(ended, Finished) and ended.reason == "stopped"
    assert isinstance(list(backend.answer(Request(talk(1))))[-1], Failed) and backend.snapshot() is not None
