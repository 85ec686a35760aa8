"""The memory limit: measured, kept, and what Stats refers to."""

import json
from pathlib import Path

import pytest
from platformdirs import user_cache_dir

from tests.support import tiny
from tinychat.cli import main
from tinychat.engine import Engine
from tinychat.engine import memory_limit as limit
from tinychat.errors import TinychatError
from tinychat.kernels.cpu import bandwidth
from tinychat.kernels.cpu.executor import CPUExecutor
from tinychat.kernels.sampling import Sampling
from tinychat.measure import lock
from tinychat.measure import microbench_plans as plans


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "sub" / "limits.json"
    monkeypatch.setattr(limit, "store_path", lambda: path)
    monkeypatch.setattr(lock, "lock_path", lambda: tmp_path / "bench.lock")  # not that of the whole machine
    return path


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert limit.store_path() == Path(user_cache_dir("tinychat")) / "limits.json"


def test_bandwidth_is_that_of_memory_and_not_of_a_cache() -> None:
    assert bandwidth.block_bytes() >= 4 * bandwidth.cache_bytes() and bandwidth.block_bytes() >= 256 << 20
    found = bandwidth.read_bandwidth([1, 2])
    assert set(found) == {1, 2} and all(0.2 < v < 2000 for v in found.values())


def test_kept_and_found_again(store: Path) -> None:
    assert limit.stored("CPU") is None
    measured = limit.measure([1], 2)
    assert limit.stored("CPU") == measured and measured.quick and measured.of(1) == measured.gb_s[1] > 0
    other = limit.Bandwidth("GPU", {0: 4000.0}, False, "2026-01-01")
    limit.keep(other)
    assert limit.stored("GPU") == other and limit.stored("CPU") == measured
    assert [p.name for p in store.parent.iterdir()] == ["limits.json"]


def test_of_takes_the_nearest_number_of_threads_below() -> None:
    known = limit.Bandwidth("CPU", {1: 9.0, 2: 15.0, 8: 40.0}, False, "")
    assert [known.of(n) for n in (1, 2, 3, 8, 64)] == [9.0, 15.0, 15.0, 40.0, 40.0]
    assert limit.Bandwidth("CPU", {4: 9.0}, False, "").of(2) == 0.0


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', '"'])
def test_a_damaged_store_is_measured_again(store: Path, text: str) -> None:
    store.parent.mkdir()
    store.write_text(text)
    assert limit.stored("CPU") is None
    limit.keep(limit.Bandwidth("CPU", {1: 1.0}, False, ""))
    assert limit.stored("CPU") == limit.Bandwidth("CPU", {1: 1.0}, False, "")
    entry = json.loads(store.read_text())
    for broken in ({"gb_s": 3}, {"gb_s": {"x": 1}}, {}, []):
        store.write_text(json.dumps(dict.fromkeys(entry, broken)))
        assert limit.stored("CPU") is None


def test_a_folder_that_cannot_be_written_costs_nothing(store: Path) -> None:
    store.parent.write_text("a file")
    limit.keep(limit.Bandwidth("CPU", {1: 1.0}, False, ""))
    assert limit.measure([1], 1).gb_s[1] > 0


def test_the_engine_refers_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write(tmp_path / "m.gguf", "llama", "Q4_0")
    engine = Engine.load(path, device="cpu", threads=2)
    try:  # nothing was stored: measured at load
        known = limit.stored("CPU")
        assert known and known.quick and engine.stats.limit_gb_s == known.gb_s[2] > 0
        list(engine.generate([1, 2, 3], Sampling(temperature=0.0), 8, raw=True))
        s = engine.stats
        assert s.limit_share == pytest.approx(s.gb_s / s.limit_gb_s) and s.limit_share > 0
    finally:
        engine.close()
    limit.keep(limit.Bandwidth("CPU", {1: 123.0}, False, ""))
    monkeypatch.setattr(bandwidth, "read_bandwidth", None)  # what is stored is not measured again
    engine = Engine.load(path, device="cpu", threads=1)
    assert engine.stats.limit_gb_s == 123.0
    engine.close()


def test_weights_that_are_larger_than_the_caches_are_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bandwidth, plans):
        monkeypatch.setattr(module, "block_bytes", lambda: 2 << 20)
    source = plans.RandomWeights()
    executor = CPUExecutor(plans.kernel_plan(source, *plans.parse("norm_linear:Q4_0:2048x1024")), source, 16, 2)
    monkeypatch.setattr(bandwidth, "read_bandwidth", None)  # no block beside them
    found = limit.limit_of(executor)
    assert (known := limit.stored("CPU")) and known.quick and known.gb_s == {2: found} and 0.2 < found < 5000
    executor.close()


def test_short_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limit, "available_memory", lambda: 100 << 20)
    with pytest.raises(TinychatError, match="GB"):
        limit.measure()
    engine = Engine.load(tiny.write(tmp_path / "m.gguf", "llama"), device="cpu")
    assert engine.stats.limit_gb_s == 0.0
    engine.close()


def test_command(capsys: pytest.CaptureFixture[str], store: Path) -> None:
    assert main(["limit", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    known = limit.stored("CPU")
    assert known and not known.quick and shown["gb_s"] == {str(n): v for n, v in known.gb_s.items()}
    assert main(["limit"]) == 0
    assert "GB/s" in capsys.readouterr().out
    with lock.machine_lock(wait=False):
        pass  # given back


def test_a_limit_measured_under_load_does_not_replace_a_better_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: Path
) -> None:
    limit.keep(limit.Bandwidth("CPU", {1: 27.0}, False, ""))
    monkeypatch.setattr(bandwidth, "read_bandwidth", lambda threads, rounds: dict.fromkeys(threads, 16.0))
    found = limit.measure([1])
    assert found.gb_s == {1: 27.0} and "41% less" in found.noise
    assert limit.stored("CPU") == found and "noise" not in store.read_text()
    assert main(["limit", "--device", "cpu"]) == 0
    assert "other programs use the memory" in capsys.readouterr().err
