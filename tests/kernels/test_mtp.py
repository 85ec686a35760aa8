"""The block of multi-token prediction against the float64 forward, and its cache rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.test_exactness import CPU, IDS, REFERENCE
from tests.support import tiny
from tests.support.forward64 import Model
from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import make_executor
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.executor import MeasurableExecutor

_NEXTN = tiny.VARIANTS["deepseek2_nextn"]
OWN = replace(_NEXTN, layers=1, nextn_own=True, moe=replace(_NEXTN.moe, dense=0))  # its own embedding and output


@contextmanager
def executor(path: Path, device: str = "cpu") -> Iterator[MeasurableExecutor]:
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf), mtp=True)
    ex, _ = make_executor(plan, gguf, 64, device, 2, lambda text, fraction: None)
    try:
        yield ex
    finally:
        ex.close()


def logits(ex: MeasurableExecutor, *lengths: int) -> np.ndarray:
    """Of the block behind every token of IDS, run in pieces of these lengths."""
    ex.forward(IDS, 0)
    rows, at = [], 0
    for n in lengths:
        rows.append(ex.forward(IDS[at : at + n], at, "all", mtp=True))
        at += n
    return np.concatenate([r for r in rows if r is not None])


@pytest.mark.parametrize(
    ("device", "shape", "quant"),
    [
        ("reference", OWN, "F32"),
        ("cpu", "deepseek2_nextn", "Q4_K_M"),
        ("cpu", "glm4moe_qk_norm", "Q8_0"),
        ("cpu", OWN, "F32"),
    ],
)
def test_exactness(device: str, shape: str | tiny.Shape, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", shape, quant)
    want = Model(path).mtp(IDS)
    with executor(path, device) as ex:
        got = logits(ex, 1, 4, len(IDS) - 5)
        assert np.linalg.norm(got - want) < (CPU if device == "cpu" else REFERENCE) * np.linalg.norm(want)
        assert ex.draft(IDS[3:7], 3) == want[6].argmax()


def test_same_bits_in_any_pieces_and_behind_a_saved_cache(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_nextn", "Q4_K")
    with executor(path) as ex, executor(path) as other:
        whole = logits(ex, len(IDS))
        np.testing.assert_array_equal(logits(ex, *[1] * len(IDS)), whole)
        np.testing.assert_array_equal(logits(ex, 7, 1, 4), whole)
        other.write_cache(ex.read_cache(0, len(IDS)), 0, len(IDS))
        rest = other.forward(IDS[8:], 8, "all", mtp=True)
        np.testing.assert_array_equal(rest, whole[8:])  # type: ignore[arg-type]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    shape = tiny.VARIANTS["deepseek2_nextn"]
    short = GGUF.open(tiny.write(tmp_path / "m.gguf", shape, only=lambda name: name != "blk.2.nextn.hnorm.weight"))
    config = ModelConfig.from_gguf(short)
    assert build_plan(short, config).mtp is None
    with pytest.raises(TinychatError, match=r"blk\.2\.nextn\.hnorm\.weight is missing"):
        build_plan(short, config, mtp=True)
    name = "blk.2.nextn.eh_proj.weight"
    wide = tiny.write(tmp_path / "w.gguf", shape, edit=lambda n, values: values[:, :-32] if n == name else values)
    with pytest.raises(TinychatError, match=r"eh_proj.weight: expected shape \(64, 128\), found \(64, 96\)"):
        build_plan(GGUF.open(wide), config, mtp=True)
