"""The verify step against single steps, bit for bit: every variant, every quant type, every number of drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_exactness import ROWS
from tests.support import tiny
from tests.support.blocks import MODEL_QUANTS
from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import make_executor
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.executor import MeasurableExecutor
from tinychat.kernels.sampling import Sampling

IDS = [290, 17, 204, 99, 3, 256, 258, 64, 131, 64, 17, 280, 5, 77, 31, 8, 120, 240, 19]
AFTER = len(IDS) - 1
CONTEXT = 64
MOST = 16
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "seeded": Sampling(temperature=1.0, top_k=40, top_p=0.95, min_p=0.02, seed=11),
    "penalised": Sampling(
        temperature=0.7, repeat_penalty=1.2, repeat_last_n=6, dry_multiplier=0.9, dry_allowed_length=1, seed=5
    ),
}
Steps = list[tuple[int, float]]


@contextmanager
def executor(path: Path, device: str = "cpu", threads: int = 2, context: int = CONTEXT) -> Iterator[MeasurableExecutor]:
    gguf = GGUF.open(path)
    ex, _ = make_executor(
        build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, context, device, threads, lambda text, fraction: None
    )
    try:
        yield ex
    finally:
        ex.close()


def alone(ex: MeasurableExecutor, sampling: Sampling, n: int) -> Steps:
    """The ids behind IDS and their log-probabilities, a step each."""
    ex.forward(IDS[:-1], 0)
    return list(islice(ex.decode(IDS[-1], AFTER, sampling, IDS), n))


def verified(ex: MeasurableExecutor, sampling: Sampling, steps: Steps, drafts: int, wrong: int | None = None) -> Steps:
    """The same with `drafts` drafts each step, which are right but for number `wrong`."""
    ex.forward(IDS[:-1], 0)
    ids, got = list(IDS), Steps()
    while len(got) < len(steps):
        coming = [token for token, _ in steps[len(got) :]]
        guess = coming[: min(drafts, len(coming) - 1)]
        if wrong is not None and wrong < len(guess):
            guess[wrong] = (guess[wrong] + 1) % tiny.VOCAB
        made = list(ex.verify(ids[-1], guess, len(ids) - 1, sampling, ids))
        assert len(made) == (len(guess) + 1 if wrong is None or wrong >= len(guess) else wrong + 1)
        ids += [token for token, _ in made]
        got += made
    return got


def same(ex: MeasurableExecutor, name: str) -> None:
    sampling = SAMPLINGS[name]
    steps = alone(ex, sampling, MOST + 6)
    for drafts, wrong in ((1, None), (2, 1), (3, None), (6, 4), (9, 8), (MOST - 1, None)):
        if wrong is None or not ex.state_bytes:  # a state cannot go back behind a wrong draft
            assert verified(ex, sampling, steps, drafts, wrong) == steps


@pytest.mark.parametrize(("variant", "quant"), ROWS)
def test_every_variant(variant: str, quant: str, tmp_path: Path) -> None:
    with executor(tiny.write(tmp_path / "m.gguf", variant, quant)) as ex:
        for name in SAMPLINGS:
            same(ex, name)


@pytest.mark.parametrize("quant", MODEL_QUANTS)
@pytest.mark.parametrize("variant", ["llama", "deepseek2_glm"])
def test_every_quant(variant: str, quant: str, tmp_path: Path) -> None:
    """Also the logits: those of a position have the same bits beside up to 15 others."""
    with executor(tiny.write(tmp_path / "m.gguf", variant, quant)) as ex:
        same(ex, "greedy")
        ex.forward(IDS, 0)
        want = [ex.forward([t], len(IDS) + i, "last") for i, t in enumerate(IDS[:MOST])]
        for n in range(2, MOST + 1):
            got = ex.forward(IDS[:n], len(IDS), "all")
            np.testing.assert_array_equal(got, np.concatenate(want[:n]))  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 3, 5])
def test_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    with executor(tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_K_M"), threads=threads) as ex:
        same(ex, "seeded")


def test_the_reference(tmp_path: Path) -> None:
    with executor(tiny.write(tmp_path / "m.gguf", "llama", "Q8_0"), "reference") as ex:
        same(ex, "penalised")


def test_a_mask_is_asked_for_once_per_id(tmp_path: Path) -> None:
    """It holds for the id that comes next, also between drafts."""
    masks = np.random.default_rng(2).integers(0, 2**32, (8, (tiny.VOCAB + 31) // 32), np.uint32)
    with executor(tiny.write(tmp_path / "m.gguf", "llama")) as ex:
        ex.forward(IDS[:-1], 0)
        calls = iter(masks)
        steps = list(islice(ex.decode(IDS[-1], AFTER, SAMPLINGS["greedy"], IDS, partial(next, calls)), 8))
        calls = iter(masks)
        drafts = [token for token, _ in steps[:7]]
        assert list(ex.verify(IDS[-1], drafts, AFTER, SAMPLINGS["greedy"], IDS, partial(next, calls))) == steps
        assert next(calls, None) is None


def test_routes_of_each_token(tmp_path: Path) -> None:
    with executor(tiny.write(tmp_path / "m.gguf", "qwen3moe", "Q4_0")) as ex:
        ex.forward(IDS[:-1], 0)
        steps, routes = Steps(), []
        for step in islice(ex.decode(IDS[-1], AFTER, SAMPLINGS["greedy"], IDS), 6):
            steps.append(step)
            routes.append(ex.routes())
        drafts = [token for token, _ in steps[:5]]
        for i, step in enumerate(ex.verify(IDS[-1], drafts, AFTER, SAMPLINGS["greedy"], IDS)):
            assert step == steps[i]
            np.testing.assert_array_equal(ex.routes(), routes[i])  # type: ignore[arg-type]
