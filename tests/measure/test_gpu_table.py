"""scripts/gpu_table.py without a GPU: an engine and a llama-bench that are made up."""

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import gpu_table
from scripts.gpu_table import Clock

PROGRAM = """#!/bin/sh
case "$*" in
  *"-d 16384"*) echo '{"n_prompt": 0, "n_gen": 64, "n_depth": 16384, "avg_ts": 150.0}' ;;
  *-no-warmup*) echo '{"n_prompt": 16384, "n_gen": 0, "n_depth": 0, "avg_ts": 5000.0}'; echo '{"n_prom' ;;
  *) echo '{"n_prompt": 16, "n_gen": 0, "n_depth": 0, "avg_ts": 800.0}'
     echo '{"n_prompt": 0, "n_gen": 64, "n_depth": 0, "avg_ts": 200.0}' ;;
esac
"""


def test_both_take_turns_and_the_table_has_their_ratios(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, model, runs = tmp_path / "llama-bench", tmp_path / "m.gguf", defaultdict[int, int](int)
    program.write_text(PROGRAM)
    program.chmod(0o755)
    model.touch()

    def run(engine: object, n: int, generated: int, repeats: int) -> SimpleNamespace:
        runs[n] += 1
        return SimpleNamespace(ttft_s=n / (1600 if n == 16 else 20000) * runs[n], decode_tok_s=900.0)

    monkeypatch.setattr(gpu_table, "model_file", lambda *spec: model)
    monkeypatch.setattr(gpu_table.Engine, "load", lambda path, max_context: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(gpu_table.bench, "run", run)
    clock = Clock(100, 1)
    clock.next_model()
    gpu_table.measure("glm-4.7-flash:Q4_0", (16, 16384), program, clock)
    assert capsys.readouterr().out.splitlines() == [
        "| glm-4.7-flash Q4_0 | 16 | 13.33 ms | 1,200 | 800.0 | 1.50 | 900 | 200.0 | 4.50 |",
        "| glm-4.7-flash Q4_0 | 16,384 | 819 ms | 20,000 | 5,000.0 | 4.00 | 900 | 150.0 | 6.00 |",
    ]
    assert runs == {16: 2, 16384: 1} and not model.exists()
