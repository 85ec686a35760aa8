"""Layers with a sliding window keep the last rows of a long context: the bits of a cache that keeps all."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.cuda_emulated import EmulatedGPU
from tinychat.engine import devices
from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import make_executor
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.cuda import executor as cuda
from tinychat.kernels.cuda import verify
from tinychat.kernels.executor import MeasurableExecutor
from tinychat.kernels.ops import Plan
from tinychat.kernels.sampling import GREEDY
from tinychat.kernels.window_rows import WindowRows

ROWS, CONTEXT, BLOCK, SAVED = 192, 448, 64, 256


def read(path: Path) -> tuple[Plan, GGUF]:
    gguf = GGUF.open(path)
    return build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf


@contextmanager
def executor(path: Path, device: str, rows: int = ROWS) -> Iterator[MeasurableExecutor]:
    plan, gguf = read(path)
    ex, _ = make_executor(replace(plan, window_rows=rows), gguf, CONTEXT, device, 2, lambda text, fraction: None)
    try:
        yield ex
    finally:
        ex.close()


def test_whatever_is_run_sees_its_rows(tmp_path: Path) -> None:
    """A model of an executor: it runs some tokens, or goes back to where it may."""
    plan, _ = read(tiny.write(tmp_path / "m.gguf", "gpt-oss"))
    windows, rng = WindowRows(replace(plan, window_rows=ROWS), 4096), random.Random(3)
    rows, pos, bases = [-1] * ROWS, 0, set[int]()
    for _ in range(2000):
        back = max(0, pos - rng.choice((0, 1, 3, 16, 60, 300)))
        if rng.random() < 0.3 and windows.reaches(back):
            pos = back
        count = min(rng.choice((1, 1, 1, 5, windows.together)), 4096 - pos)
        base = windows.base_for(pos, count)
        by, windows.base = base - windows.base, base
        bases.add(base)
        if by > 0:
            rows = rows[by:] + [-1] * min(by, ROWS)
        rows[pos - base : pos - base + count] = range(pos, pos + count)
        seen = range(max(0, pos + 1 - windows.window), pos + count)
        assert [rows[p - base] for p in seen] == list(seen) and len(rows) == ROWS
        pos = 0 if pos + count >= 4000 else pos + count
        assert windows.reaches(pos) and windows.reaches(max(0, pos - count))
    assert len(bases) > 50 and 0 in bases


@pytest.mark.parametrize(
    ("device", "variant"),
    [
        ("cpu", "gpt-oss"),
        ("cpu", "gemma4"),
        ("cpu", "olmo2_windows"),
        ("reference", "gemma3_keys"),
        ("cuda", "gpt-oss"),
    ],
)
def test_bits_of_a_whole_cache(device: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are put in as a saved cache is, and moved to the front by that and by what is run behind them."""
    monkeypatch.setattr(cuda, "GPU", EmulatedGPU)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    monkeypatch.setattr(verify, "COLUMNS", (2,))  # more are compiled for long
    monkeypatch.setitem(tiny.VARIANTS, "gemma3_keys", replace(tiny.VARIANTS["gemma3_keys"], layers=1))
    path, rng = tiny.write(tmp_path / "m.gguf", variant, "Q4_0"), np.random.default_rng(1)
    more = {"cpu": 100, "cuda": 12, "reference": 1}[device]
    ids, pos = rng.integers(0, 250, more + 1).tolist(), SAVED + more
    with executor(path, device, CONTEXT) as whole, executor(path, device) as ex:
        assert ex.cache_bytes == whole.cache_bytes * ex.plan.kv_bytes(CONTEXT) // whole.plan.kv_bytes(CONTEXT)
        size, kind = len(whole.read_cache(0, BLOCK)), np.dtype(np.float32 if device == "reference" else np.float16)
        for first in range(0, SAVED, BLOCK):
            rows = rng.standard_normal(size // kind.itemsize).astype(kind).tobytes()
            whole.write_cache(rows, first, BLOCK)
            ex.write_cache(rows, first, BLOCK)
        assert ex.reaches(SAVED) and not ex.reaches(BLOCK) and ex.reaches(0) and whole.reaches(BLOCK)
        want = whole.forward(ids[:more], SAVED, "all")
        np.testing.assert_array_equal(ex.forward(ids[:more], SAVED, "all"), want)  # type: ignore[arg-type]
        last = pos // 16 * 16 - 16
        assert len(ex.read_cache(0, BLOCK)) < size and ex.read_cache(last, 16) == whole.read_cache(last, 16)
        saved = [ex.read_cache(first, BLOCK) for first in range(0, SAVED, BLOCK)]
        for n, rows in enumerate(saved):
            ex.write_cache(rows, n * BLOCK, BLOCK)
        assert [ex.read_cache(first, BLOCK) for first in range(0, SAVED, BLOCK)] == saved
        assert ex.reaches(SAVED) and not ex.reaches(BLOCK)
        with pytest.raises(TinychatError, match="does not fit"):
            ex.write_cache(saved[-1][:-2], 0, BLOCK)
        if device == "reference":  # whose steps are all alike, and compiled for long
            return
        np.testing.assert_array_equal(ex.forward(ids[:more], SAVED, "all"), want)  # type: ignore[arg-type]
        steps = list(islice(whole.decode(ids[more], pos, GREEDY, ids), 2))
        assert list(islice(ex.decode(ids[more], pos, GREEDY, ids), 2)) == steps
        assert list(ex.verify(ids[more], [steps[0][0]], pos, GREEDY, ids)) == steps


def test_verify_steps_and_prompts_across_a_move(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "olmo2_windows", "Q4_0")
    ids = np.random.default_rng(1).integers(0, 250, 400).tolist()
    with executor(path, "cpu", CONTEXT) as whole, executor(path, "cpu") as ex:
        np.testing.assert_array_equal(ex.forward(ids, 0, "all"), whole.forward(ids, 0, "all"))  # type: ignore[arg-type]
        whole.forward(ids[:180], 0)
        ex.forward(ids[:180], 0)  # another sequence
        seen, base = ids[:181], set[bool]()
        while len(seen) < 300:
            steps = list(islice(whole.decode(seen[-1], len(seen) - 1, GREEDY, seen), 12))
            drafts = [token for token, _ in steps[:11]]
            right = len(seen) % 11  # then a wrong one
            guess = [*drafts[:right], *((token + 1) % 250 for token in drafts[right:])]
            assert list(ex.verify(seen[-1], guess, len(seen) - 1, GREEDY, seen)) == steps[: right + 1]
            seen += [token for token, _ in steps[: right + 1]]
            base.add(ex.reaches(100))
        assert base == {True, False}
