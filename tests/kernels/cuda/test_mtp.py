"""Multi-token prediction in the CUDA executor, on an emulated GPU: the logits of the float64 forward, drafts of single
rows and of several, and the answers of single steps."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_mtp import IDS, _NEXTN, executor, logits
from tests.support import tiny
from tests.support.cuda_emulated import EmulatedGPU
from tests.support.exactness import relative
from tests.support.forward64 import Model
from tinychat.engine import Engine, devices
from tinychat.kernels.cuda import executor as cuda
from tinychat.kernels.cuda import verify
from tinychat.kernels.sampling import GREEDY


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "GPU", EmulatedGPU)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    monkeypatch.setattr(verify, "COLUMNS", (2,))  # more are compiled for long


def test_exactness_and_answers(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", _NEXTN, "Q8_0")
    want = Model(path).mtp(IDS)
    with executor(path, "cuda") as ex:
        got = logits(ex, 1, 4, len(IDS) - 5)
        assert np.median(relative(got, want)) < 0.02
        for first in (6, 5):  # a row alone, and two
            drafted = ex.draft(IDS[first:7], first)
            assert want[6].max() - want[6][drafted] < 0.05 * want[6].std()
        rows = ex.read_cache(0, len(IDS))
        assert len(rows) == len(IDS) * ex.plan.kv_bytes_per_token
    answers = {}
    for speculate in (0, 1):
        engine = Engine.load(path, max_context=48, device="cuda", speculate=speculate)
        answers[speculate] = [(t.id, t.logprob) for t in engine.generate(IDS, GREEDY, 12, raw=True)]
        assert engine.stats.mtp_drafted_tokens == (0 if not speculate else engine.stats.decode_steps - 1) or speculate
        print(engine.stats.mtp_drafted_tokens, engine.stats.mtp_accepted_tokens, engine.stats.decode_steps)
        engine.close()
    assert answers[0] == answers[1]
