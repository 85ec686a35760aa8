"""Every block codec on tinygrad tensors is bit-exact with gguf.quants on random bytes."""

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Q

from tinychat.kernels.cpu.compiler import tinygrad_cc

tinygrad_cc()
from tinychat.kernels.tinygrad.dequant import CODECS, dequantize, to_tensor  # noqa: E402


@pytest.mark.parametrize("kind", CODECS, ids=lambda q: q.name)
def test_bit_exact(kind: Q) -> None:
    block, size = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(int(kind)).integers(0, 256, (5, (4 if block > 1 else 96) * size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        views = {Q.F32: np.float32, Q.F16: np.float16}
        expected = quants.dequantize(raw.view(views[kind]) if kind in views else raw, kind).astype(np.float32)
    got = dequantize(to_tensor(raw, "CPU"), kind).numpy()
    same = (expected.view(np.uint32) == got.view(np.uint32)) | (np.isnan(expected) & np.isnan(got))
    assert got.shape == expected.shape and same.all()
