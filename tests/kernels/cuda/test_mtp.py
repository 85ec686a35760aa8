"""Multi-token prediction in the CUDA executor, on an emulated GPU."""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_mtp import IDS, logits
from tests.support import tiny
from tests.support.cuda_emulated import EmulatedGPU
from tests.support.exactness import relative
from tests.support.forward64 import Model
from tinychat.engine import Engine, devices
from tinychat.kernels.cuda import executor, verify
from tinychat.kernels.sampling import GREEDY


def test_logits_drafts_answers_and_steps_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the float64 forward, for rows in pieces as for a prompt; drafts behind a row and behind two; the answer
    of single steps."""
    monkeypatch.setattr(executor, "GPU", EmulatedGPU)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    monkeypatch.setattr(verify, "COLUMNS", (2,))  # more are compiled for long
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_nextn", "Q8_0")
    want = Model(path).mtp(IDS)
    engine = Engine.load(path, max_context=32, device="cuda", speculate=1)
    got = logits(engine.executor, 1, len(IDS) - 1)
    assert np.median(relative(got, want)) < 0.02
    for first in (6, 5, 3):
        drafted = engine.executor.draft(IDS[first:7], first)
        assert want[6].max() - want[6][drafted] < 0.05 * want[6].std()
    steps = list(engine.executor.verify(IDS[7], [drafted], 7, GREEDY, IDS[:8]))
    accepted = [token for token, _ in steps]
    behind = engine.executor.draft(accepted, 8)  # enqueued by the step; the second time it is not
    assert behind == engine.executor.draft(accepted, 8)
    ex, answers = engine.executor, []
    with engine.speculating(0):
        for _ in ("from the logits that the prompt leaves", "from those of a step"):
            answers.append([(t.id, t.logprob) for t in engine.generate(IDS, GREEDY, 8, raw=True)])
            ex.forward(IDS[-1:], len(IDS) - 1)
    left, alone = answers
    answer = [token or 0 for token, _ in alone]
    for rights in ((True, True, True, False, True), (False, False, True, True), ()):  # of drafts that stand in
        ids = list(IDS)
        ex.forward(ids[:-1], 0)
        ex.forward(ids[:-1], 0, mtp=True)
        ex.stand_in([t if right else t + 1 for t, right in zip(answer, rights)], len(ids))
        rows = len(ids) - 1
        while len(ids) < len(IDS) + len(rights) - 1:  # rows of the last draft's guess fit too
            own, place = ex.draft(ids[rows:], rows), len(ids) - len(IDS)
            draft, rows = answer[place] + (not rights[place]), len(ids)
            made = list(ex.verify(ids[-1], [draft], len(ids) - 1, GREEDY, ids, ahead=True))
            assert [token for token, _ in made] == answer[place : place + 1 + rights[place]] and own >= 0
            ids += [token for token, _ in made]
    assert [(t.id, t.logprob) for t in engine.generate(IDS, GREEDY, 8, raw=True)] == alone
    s = engine.stats
    assert s.mtp_drafted_tokens >= 3 and s.generated_tokens == s.decode_steps + s.accepted_tokens
    engine.session.cut(0)
    assert [(t.id, t.logprob) for t in engine.generate(IDS, GREEDY, 8, raw=True)] == left
    engine.close()
