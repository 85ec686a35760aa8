"""Models of random shapes on the CPU executor: heads, widths, experts, layouts and quant types that nobody thought
of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.support import tiny
from tests.support.exactness import relative
from tests.support.forward64 import forward
from tests.support.shapes import MLA, MoE, Shape, q6_k
from tinychat.engine import Engine

FLOAT, BLOCK32 = ("F32", "F16", "BF16"), ("Q8_0", "Q4_0", "Q5_1", "IQ4_NL", "MXFP4")


class Dice:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def pick(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def width(self, quant: str, most: int) -> int:
        """A row length: whole blocks of `quant`, anything at all for float types."""
        blocks = 32 * int(self.rng.integers(1, most // 32 + 1))
        return blocks if quant not in FLOAT else self.pick(blocks, int(self.rng.integers(3, most)))


def random_model(d: Dice) -> tuple[Shape, str]:
    arch = d.pick("llama", "qwen2", "qwen3", "qwen3moe", "olmoe", "deepseek2", "deepseek2", "deepseek2")
    quant = d.pick(*FLOAT, *BLOCK32)
    heads, head_dim, layers = (
        d.pick(1, 2, 3, 4, 5, 6, 8, 12),
        d.pick(2, 4, 8, 16, 20, 24, 32, 40, 64, 72, 128),
        d.pick(1, 2, 3),
    )
    kv_heads = heads if arch == "olmoe" else d.pick(*(n for n in range(1, heads + 1) if heads % n == 0))
    dim, ffn = heads * head_dim if arch in ("qwen2", "olmoe") else d.width(quant, 224), d.width(quant, 256)
    experts = d.pick(2, 3, 4, 8, 16, 20, 40)
    used = int(d.rng.integers(1, min(experts, 8) + 1))
    mla, moe = None, MoE(experts, used, ffn) if arch in ("qwen3moe", "olmoe") else None
    if arch == "deepseek2":
        mla = MLA(
            d.pick(0, 32, 96),
            d.width(quant, 160),
            d.width(quant, 128),
            d.pick(2, 4, 8, 16, 32, 64),
            d.pick(4, 8, 16, 24, 32, 40, 64, 128),
            d.pick(True, False),
        )
        if d.pick(True, True, False):
            groups = d.pick(*(n for n in (1, 2, 4) if n == 1 or (experts // n >= 2 and experts % n == 0)))
            groups_used = int(d.rng.integers(1, groups)) if groups > 1 else 0
            used = min(used, groups_used * experts // groups) if groups > 1 else used
            moe = MoE(
                experts,
                used,
                ffn,
                d.pick(0, 1, 2),
                int(d.rng.integers(0, layers)),
                d.pick(None, 1, 2, 3, 4),
                d.pick(None, 0.0, 1.0, 2.5),
                d.pick(None, True, False),
                d.pick(True, False),
                groups,
                groups_used,
                d.pick(True, False),
            )
    return Shape(
        arch,
        layers,
        dim,
        heads,
        kv_heads,
        head_dim,
        ffn,
        d.pick(291, 300, 301, 304, 512),
        arch != "olmoe" and d.pick(True, False),
        d.pick(1e4, 1e6),
        1e-5,
        64,
        "llama-bpe",
        {260: "<|a|>", 261: "<|b|>"},
        260,
        261,
        mla,
        moe,
        qkv_bias=arch == "qwen2",
        fused_qkv=mla is None and d.pick(True, False),
        qk_norm={"qwen3": head_dim, "qwen3moe": head_dim, "olmoe": dim}.get(arch, 0),
        rope_freqs=8 if arch == "llama" and d.pick(True, False) else 0,
        value_dim=d.pick(0, 8, 24, 40, 128) if mla is None else 0,
    ), quant


def test_rows_written_as_q6_k() -> None:
    values = np.clip(np.random.default_rng(0).standard_normal((5, 512)), -2.5, 2.5)
    got = dequantize(q6_k(values, 0.05), GGMLQuantizationType.Q6_K)
    assert np.abs(got / 0.05 - values).max() < 0.5 / 12 + 1e-3


@pytest.mark.parametrize("seed", range(40))
def test_random_shape(seed: int, tmp_path: Path) -> None:
    dice = Dice(seed)
    shape, quant = random_model(dice)
    path = tiny.write(tmp_path / "m.gguf", shape, quant, seed)
    ids = dice.rng.integers(0, shape.vocab, 10).tolist()
    engine = Engine.load(path, max_context=16, device="cpu")
    error = relative(engine.logits(ids), forward(path, ids))
    engine.close()
    assert np.median(error) < 2e-3, (shape, quant)  # the median token: for one of them two experts may be all but equal
