"""Benchmarks: what is measured, one at a time on a machine, what is kept, and how it is shown."""

import contextlib
import io
import json
import os
import stat
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from tests.support import tiny
from tests.support.terminal import started
from tinychat.engine.engine import Engine
from tinychat.errors import TinychatError
from tinychat.kernels.sampling import Sampling
from tinychat.measure import bench, log, results, tables
from tinychat.measure.lock import machine_lock
from tinychat.measure.profile import profile
from tinychat.measure.synthetic import break_even


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny.write(path, "llama", "Q4_0", seed=1)
    engine = Engine.load(path, device="cpu")
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def lock(tmp_path, monkeypatch):
    """A lock of the test's own, so that a benchmark on this machine does not stop the tests."""
    path = tmp_path / "bench.lock"
    monkeypatch.setattr("tinychat.measure.lock.lock_path", lambda: path)
    return path


RESULT = results.ModelResult(
    model="m",
    path="/m.gguf",
    fingerprint="f" * 64,
    quant="Q4_0",
    device="CPU",
    threads=2,
    n_prompt=128,
    n_gen=64,
    decode_tok_s=100.0,
    prefill_tok_s=1234.5,
    ttft_s=0.25,
    load_s=1.0,
    kernels_per_token=1,
    jit_batches=0,
    bytes_per_token=10**8,
    gb_s=10.0,
    limit_gb_s=20.0,
    limit_share=0.5,
    kv_bytes_per_token=100,
    rss_bytes=1,
    decode_runs=(98.0, 100.0, 104.0),
    max_context=4096,
    versions={"tinychat": "0.1.0"},
    machine="Linux",
    date="2026-01-02T03:04:05+00:00",
)


def test_a_real_engine(engine):
    said = []
    r = bench.run(engine, 24, 8, 2, lambda text, f: said.append((text, f)), name="tiny")
    assert (r.model, r.quant, r.n_prompt, r.n_gen, len(r.decode_runs)) == ("tiny", "Q4_0", 24, 8, 2)
    assert r.fingerprint == engine.info.fingerprint and r.device == engine.info.device and r.bytes_per_token > 70_000
    assert min(r.decode_runs) <= r.decode_tok_s <= max(r.decode_runs) and r.prefill_tok_s > 0 < r.ttft_s
    assert r.gb_s == pytest.approx(r.bytes_per_token * r.decode_tok_s / 1e9)
    assert (
        engine.stats.reused_tokens == 0 and engine.stats.prefilled_tokens == 23
    )  # nothing of the run before is reused
    assert [f for _, f in said] == sorted(f for _, f in said) and said[0] == ("warming up", 0.0) and said[-1][1] == 1.0
    assert set(r.versions) == {"tinychat", "tinygrad", "python"}


@pytest.mark.parametrize(("accept", "drafts", "per_step"), [(1.0, 3, 4), (0.5, 1, 1.5), (0.0, 1, 1)])
def test_synthetic_acceptance(tmp_path, accept, drafts, per_step):
    """The drafts are right as often as they shall be, and the answer is the model's own."""
    path = tiny.write(tmp_path / "tiny.gguf", "deepseek2_nextn", "Q4_0")
    with contextlib.closing(Engine.load(path, device="cpu", max_context=256)) as engine:
        assert engine.plan.mtp
        r = bench.run(engine, n_prompt=8, n_gen=120, repeats=1, speculate=drafts, accept=accept)
        assert per_step - 0.25 < r.tokens_per_step < per_step + 0.25
        assert r.speculate == f"SYNTHETIC {accept:.0%} of {drafts}" and r.single_tok_s > 0 and r.break_even > 0
        line = tables.synthetic_line(r, mtp=True)
        assert line.startswith("SYNTHETIC acceptance") and "this is not what the model reaches" in line


def test_break_even():
    assert break_even(1.5, 1) == pytest.approx(0.5) and break_even(1.75, 2) == pytest.approx(0.5)
    assert break_even(1.0, 3) == pytest.approx(0) and break_even(2.4, 1) > 1


def test_an_answer_that_ends_early_is_made_to_go_on(engine, monkeypatch):
    seen = []
    original = Engine.generate

    def generate(self, ids, *args, **kwargs):
        seen.append(len(ids))
        return original(self, ids, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", generate)
    greedy = [t.id for t in engine.generate(bench.prompt(engine, 24, 1), bench.Sampling(temperature=0.0), 8, raw=True)]
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset(greedy[2:3]))
    bench.run(engine, 24, 8, 1)
    assert max(seen) > 24 and max(seen) <= 24 + 8


def test_everything_can_be_a_stop_token(engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset(range(engine.tokenizer.n_vocab)))
    assert bench.run(engine, 8, 4, 1).decode_tok_s == 0.0


@pytest.mark.parametrize("args", [(500, 64, 1), (0, 8, 1), (8, 1, 1), (8, 8, 0)])
def test_what_cannot_be_measured(engine, args):
    with pytest.raises(TinychatError):
        bench.run(engine, *args)


def test_stop(engine):
    stop = threading.Event()
    with pytest.raises(TinychatError, match="stopped"):
        bench.run(engine, 8, 8, 100, lambda text, f: stop.set() if "run 2" in text else None, stop)


HOLDER = """
import sys, time
from pathlib import Path
from tinychat.measure import lock
lock.lock_path = lambda: Path(sys.argv[1])
with lock.machine_lock():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_benchmark_waits_or_says_so(engine, lock):
    with started([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE) as p:
        assert p.stdout.readline() == b"held\n"
        with pytest.raises(TinychatError, match="another benchmark"):
            bench.run(engine, 8, 4, 1, wait=False)
        stop = threading.Event()
        with pytest.raises(TinychatError, match="stopped"):
            bench.run(engine, 8, 4, 1, lambda text, f: stop.set(), stop)
        said = []

        def report(text, fraction):
            said.append(text)
            p.kill()  # killed, not ended: the lock must go with it

        bench.run(engine, 8, 4, 1, report)
        assert said[0].startswith("waiting") and said[1] == "warming up"


def test_a_lock_of_another_user_or_a_trap(lock):
    lock.write_text("")
    lock.chmod(0o444)
    with machine_lock(wait=False):
        pass
    lock.unlink()
    os.symlink(lock.parent / "elsewhere", lock)
    with pytest.raises(TinychatError), machine_lock(wait=False):
        pass
    assert not (lock.parent / "elsewhere").exists()


def test_results_come_back(tmp_path):
    file = tmp_path / "data" / "b.jsonl"
    assert log.history(file=file) == []
    other = replace(RESULT, fingerprint="e" * 64, decode_tok_s=50.0, path="/n.gguf")
    newer = replace(RESULT, decode_tok_s=120.0)
    for r in (RESULT, other, newer):
        log.save(r, file)
    assert log.history(file=file) == [RESULT, other, newer]
    assert log.history("f" * 64, file) == [RESULT, newer]
    assert log.speeds(log.history(file=file)) == {"/m.gguf": 120.0, "/n.gguf": 50.0}


def test_the_folder_that_conversations_share_is_private(tmp_path):
    log.save(RESULT, tmp_path / "new" / "b.jsonl")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_damaged_lines_are_left_out_and_do_not_spoil_the_next(tmp_path):
    file = tmp_path / "b.jsonl"
    good = json.dumps(RESULT.as_dict())
    wrong = [{"decode_tok_s": "fast"}, {"decode_runs": []}, {"versions": 1}]
    bad = [*(json.dumps({**RESULT.as_dict(), **w}) for w in wrong), "{}", "3", "\x00\xff", good[:50]]
    file.write_text("\n".join([json.dumps({**RESULT.as_dict(), "of a newer version": 1}), *bad]), "latin-1")
    log.save(RESULT, file)
    assert log.history(file=file) == [RESULT, RESULT]


def test_two_processes_append(tmp_path):
    file = tmp_path / "b.jsonl"
    threads = [threading.Thread(target=lambda: [log.save(RESULT, file) for _ in range(50)]) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(log.history(file=file)) == 200


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(TinychatError):
        log.save(RESULT, tmp_path / "f" / "b.jsonl")


def test_tables():
    evil = replace(RESULT, model="a|b\x1b[31m\n[red]", limit_share=0.0, decode_runs=(100.0,))
    row = tables.markdown_row(RESULT)
    assert row == ("| 2026-01-02 03:04 | m | Q4_0 | CPU | 128+64 | 1,234.5 | 100.0 ±3% | 0.25 | 10.0 | 50% | 0.1.0 |")
    table = tables.markdown_table([RESULT, evil])
    assert table.splitlines()[2] == row and "a\\|b\\\\x1b[31m\\\\n[red]" in table and "\x1b" not in table
    assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(tables.model_table([RESULT, evil]))
    text = console.export_text()
    assert "1,234.5" in text and "[red]" in text and "\x1b" not in text


@pytest.mark.parametrize(
    "measure",
    [
        lambda engine: bench.run(engine, 24, 8, 1),
        lambda engine: profile(engine, 4),
        lambda engine: stopped(engine),
    ],
)
def test_the_conversation_goes_on_behind_it(engine, measure):
    def answer(prompt):
        tokens = engine.generate(prompt, Sampling(temperature=0.0), 6, raw=True)
        return [(t.id, t.logprob) for t in tokens if t.id is not None]

    engine.session.tokens = []
    first = [6, 17, 250, 33, 7, 7, 120]
    asked = [*first, *(i for i, _ in answer(first)), 40, 41]
    answer(asked)
    want, held = answer(asked), list(engine.tokens)
    engine.session.tokens = []
    answer(first)
    answer(asked)
    measure(engine)
    assert engine.tokens == held
    assert answer(asked) == want
    assert engine.stats.reused_tokens == len(asked) - 1


def stopped(engine):
    stop = threading.Event()
    with pytest.raises(TinychatError, match="stopped"):
        bench.run(engine, 24, 8, 3, lambda text, fraction: stop.set(), stop)
