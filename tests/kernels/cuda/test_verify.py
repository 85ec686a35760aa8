"""The verify step of the whole CUDA executor, on an emulated GPU: the bits of single steps. Every variant and quant
type on a GPU: scripts/gpu_session.py verify."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_verify import AFTER, IDS, SAMPLINGS, alone, verified
from tests.kernels.test_verify import executor as opened
from tests.support import tiny
from tests.support.cuda_emulated import EmulatedGPU
from tinychat.engine import devices
from tinychat.kernels.cuda import executor, verify
from tinychat.kernels.cuda.executor import CUDAExecutor


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "GPU", EmulatedGPU)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    monkeypatch.setattr(verify, "COLUMNS", (2, 4))  # more are compiled for long


@pytest.mark.parametrize(
    ("variant", "quant", "near", "drafts"),
    [("llama", "Q4_K", 512, 2), ("deepseek2_glm", "Q8_0", AFTER + 2, 3)],
)
def test_bits_of_single_steps(
    variant: str, quant: str, near: int, drafts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a padded column, several tiles for a block and heads as int8 blocks; with experts, in clusters of blocks,
    from which the step comes to the other kernels."""
    monkeypatch.setattr("tinychat.kernels.cuda.step.NEAR", near)
    monkeypatch.setattr("tinychat.kernels.cuda.tiles.MULTIPROCESSORS", 5)  # halves of int8 blocks
    monkeypatch.setattr("tinychat.kernels.cuda.launches.MULTIPROCESSORS", 4)
    monkeypatch.setattr("tinychat.kernels.cuda.launches.STREAMED_ROWS", tiny.VOCAB)
    own = {"dim": 1024, "layers": 1, "ffn": 768, "head_dim": 64} if variant == "llama" else {"layers": 2}
    monkeypatch.setitem(tiny.VARIANTS, variant, replace(tiny.VARIANTS[variant], **own))
    with opened(tiny.write(tmp_path / "m.gguf", variant, quant), "cuda") as ex:
        assert isinstance(ex, CUDAExecutor) and ex.limits.verified == 4
        steps = alone(ex, SAMPLINGS["penalised"], drafts + 2)
        ids = [IDS[-1], *(token for token, _ in steps)]
        logits = [ex.forward([token], AFTER + i, "last") for i, token in enumerate(ids[: drafts + 1])]
        assert verified(ex, SAMPLINGS["penalised"], steps, drafts, wrong=drafts - 1) == steps
        told = [ex.forward([token], AFTER + i) or ex.routes() for i, token in enumerate(ids[: drafts + 1])]
        made = [
            (step, ex.routes()) for step in ex.verify(ids[0], ids[1 : drafts + 1], AFTER, SAMPLINGS["penalised"], IDS)
        ]
        assert [step for step, _ in made] == steps[: drafts + 1]
        for (_, routes), single in zip(made, told):
            np.testing.assert_array_equal(routes, single)  # type: ignore[arg-type]
        assert told[0] is None if variant == "llama" else len({str(routes) for routes in told}) > 1
        together = min(drafts + 1, AFTER + drafts + 1 - near) if near < AFTER + drafts else drafts + 1
        got = ex.gpu.download("logits", 4 * ex.plan.vocab * together).view(np.float32)
        np.testing.assert_array_equal(got, np.concatenate(logits[-together:]).ravel())  # type: ignore[arg-type]


def test_columns_with_other_splits_of_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one block of attention: the first ones have all keys in one split, or splits of fewer keys."""
    monkeypatch.setattr("tinychat.kernels.cuda.launches.SPLITS", 2)
    monkeypatch.setattr("tinychat.kernels.cuda.launches.MULTIPROCESSORS", 1)  # else each column has blocks of its own
    wide = {"dim": 512, "heads": 8, "layers": 1, "ffn": 64, "head_dim": 64}  # heads as int8 blocks
    monkeypatch.setitem(tiny.VARIANTS, "llama", replace(tiny.VARIANTS["llama"], **wide))
    ids = np.random.default_rng(3).integers(0, tiny.VOCAB, 132).tolist()
    with opened(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), "cuda", context=132) as ex:
        assert isinstance(ex, CUDAExecutor)
        for at in (61, 126):
            ex.forward(ids[:at], 0)
            logits = [ex.forward([token], i, "last") for i, token in enumerate(ids[at : at + 4], at)]
            list(ex.verify(ids[at], ids[at + 1 : at + 4], at, SAMPLINGS["greedy"], ids[: at + 1]))
            got = ex.gpu.download("logits", 16 * ex.plan.vocab).view(np.float32)
            np.testing.assert_array_equal(got, np.concatenate(logits).ravel())  # type: ignore[arg-type]


def test_steps_with_masks_and_steps_enqueued_ahead(tmp_path: Path) -> None:
    """Whatever the next call is, it gets what it asks for."""
    with opened(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0"), "cuda") as ex:
        greedy, seeded = SAMPLINGS["greedy"], SAMPLINGS["seeded"]
        steps, other = alone(ex, greedy, 5), alone(ex, seeded, 1)
        ex.forward(IDS[:-1], 0)
        ids = list(IDS)
        for i, step in enumerate(steps):
            assert list(ex.verify(ids[-1], (), AFTER + i, greedy, ids, ahead=True)) == [step]
            ids.append(step[0])
        assert list(ex.verify(IDS[-1], (), AFTER, greedy, IDS, ahead=True)) == steps[:1]
        assert list(ex.verify(ids[AFTER + 1], [steps[1][0]], AFTER + 1, greedy, ids[: AFTER + 2])) == steps[1:3]
        assert list(ex.verify(IDS[-1], (), AFTER, greedy, IDS, ahead=True)) == steps[:1]
        rows = ex.read_cache(0, 16)
        ex.write_cache(rows, 0, 16)
        assert list(ex.verify(IDS[-1], (), AFTER, seeded, IDS)) == other
        masks = np.random.default_rng(2).integers(0, 2**32, (4, (tiny.VOCAB + 31) // 32), np.uint32)
        steps = list(islice(ex.decode(IDS[-1], AFTER, seeded, IDS, partial(next, iter(masks))), 3))
        drafts = [token for token, _ in steps[:2]]
        assert list(ex.verify(IDS[-1], drafts, AFTER, seeded, IDS, partial(next, iter(masks)))) == steps
