"""The benchmark screen over a real backend and a tiny real model."""

import threading
from dataclasses import replace

import pytest

from tests.measure.test_bench import RESULT
from tests.support import tiny
from tests.support.screens import UNSET, Host, text_of, until
from tinychat.backend.instruments import JobDone
from tinychat.backend.local import LocalBackend
from tinychat.measure import log, tables
from tinychat.ui.screens.bench import BenchScreen, compared, summary
from tinychat.ui.screens.profile import ProfileScreen


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    path = tiny.write(tmp_path_factory.mktemp("m") / "tiny.gguf", "llama", "Q4_0", seed=1)
    backend = LocalBackend.open(path, device="cpu")
    yield backend
    backend.close()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """A lock of the test's own."""
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: tmp_path / "bench.lock")


@pytest.mark.parametrize("size", [(80, 24), (140, 40)])
async def test_measure_compare_copy(backend, size):
    mark = backend.info.fingerprint
    log.save(replace(RESULT, fingerprint=mark, n_prompt=16, n_gen=4, decode_tok_s=0.5, decode_runs=(0.5,)))
    log.save(replace(RESULT, fingerprint="another file", model="unrelated"))
    app = Host(BenchScreen(backend, n_gen=4, n_prompt=16, repeats=2, name="my [b]model"))
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: "2026-01-02" in text_of(app))  # earlier ones at once
        screen = app.screen
        await until(pilot, lambda: screen._result)
        await pilot.pause()
        text = text_of(app)
        assert "my [b]model" in text and "measured and saved" in text
        assert "faster than the run of 2026-01-02 03:04 (0.5 tok/s)" in text
        assert "unrelated" not in text and "100%" in text
        assert [r.model for r in log.history(mark)] == ["m", "my [b]model"]
        await pilot.press("c")
        assert app.clipboard == tables.markdown_row(screen._result)
        await pilot.press("t")
        assert app.clipboard.count("\n") == 4
        await pilot.press("r")
        await until(pilot, lambda: len(log.history(mark)) == 3)
        await until(pilot, lambda: not screen.running)
        await pilot.press("escape")
        await until(pilot, lambda: app.result is not UNSET)


async def test_profile_shows_where_the_time_goes(backend):
    app = Host(ProfileScreen(backend, steps=4, name="my [b]model"))
    async with app.run_test(size=(120, 60)) as pilot:
        await until(pilot, lambda: "kernels per token" in text_of(app))
        assert "my [b]model" in text_of(app)
        await pilot.press("escape")
        await until(pilot, lambda: app.result is not UNSET)


async def test_stop_then_close(backend):
    app = Host(BenchScreen(backend, n_gen=4, n_prompt=16, repeats=100_000))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "of 100000" in text_of(app))
        await until(pilot, lambda: "stop" in text_of(app) and "again" not in text_of(app))
        await pilot.press("escape")
        await until(pilot, lambda: "was stopped" in text_of(app))
        assert app.result is UNSET and not log.history()
        await pilot.press("escape")
        await until(pilot, lambda: app.result is not UNSET)


async def test_what_cannot_be_measured_is_one_line(backend):
    app = Host(BenchScreen(backend, n_gen=4, n_prompt=100_000))
    async with app.run_test(size=(140, 40)) as pilot:
        await until(pilot, lambda: "do not fit the context" in text_of(app))


async def test_a_stop_given_before_the_benchmark_begins_is_not_lost(backend):
    begun, go = threading.Event(), threading.Event()
    first = backend.run_job(lambda *job: (begun.set(), go.wait(120)), threading.Event())
    begun.wait(120)
    app = Host(BenchScreen(backend, n_gen=4, n_prompt=16, repeats=100_000))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "starting" in text_of(app))
        await pilot.press("escape")
        go.set()
        await until(pilot, lambda: "stopped before it began" in text_of(app))
    assert [type(e) for e in first] == [JobDone] and not log.history()


def test_comparisons():
    slow, other = replace(RESULT, decode_tok_s=95.0), replace(RESULT, n_gen=20)
    assert compared(slow, RESULT) == "−5%" and compared(RESULT, RESULT) == "·" and compared(other, RESULT) == "·"
    assert "within the spread of" in str(summary(RESULT, [replace(RESULT, decode_tok_s=99.0), RESULT]))
    assert "50% slower than" in str(
        summary(RESULT, [replace(RESULT, decode_tok_s=200.0, decode_runs=(200.0,)), other, RESULT])
    )
    assert "than" not in str(summary(RESULT, [other, RESULT]))
