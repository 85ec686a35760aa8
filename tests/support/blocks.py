"""Random quantised blocks with chosen statistics, for test files: any byte pattern in the codes, sane values in the
scales.

`gguf.quants.quantize` cannot write K-quants and IQ types, and is slow; a block of random codes under a chosen scale
tests a codec better (every code occurs) and takes no time.
"""

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

Q = GGMLQuantizationType
QUANTS = (
    Q.F32,
    Q.F16,
    Q.BF16,
    Q.Q4_0,
    Q.Q4_1,
    Q.Q5_0,
    Q.Q5_1,
    Q.Q8_0,
    Q.Q2_K,
    Q.Q3_K,
    Q.Q4_K,
    Q.Q5_K,
    Q.Q6_K,
    Q.IQ4_NL,
    Q.IQ4_XS,
    Q.MXFP4,
    Q.IQ1_S,
    Q.IQ1_M,
    Q.IQ2_XXS,
    Q.IQ2_XS,
    Q.IQ2_S,
    Q.IQ3_XXS,
    Q.IQ3_S,
    Q.TQ1_0,
    Q.TQ2_0,
)
MIXED = QUANTS[QUANTS.index(Q.IQ1_S) :]  # of a tiny file of the mix "IQ_MIX", in turn
MODEL_QUANTS = (*(q.name for q in QUANTS if q not in MIXED), "Q4_K_M", "IQ_MIX")  # tests of whole models

# type -> (byte offset of the fp16 scale d, byte offset of the fp16 minimum, |minimum| / d that makes the mean value
# zero)
_FIELDS: dict[Q, tuple[int, int | None, float]] = {
    Q.Q4_0: (0, None, 0),
    Q.Q4_1: (0, 2, -7.5),
    Q.Q5_0: (0, None, 0),
    Q.Q5_1: (0, 2, -15.5),
    Q.Q8_0: (0, None, 0),
    Q.Q2_K: (80, 82, 1.5),
    Q.Q3_K: (108, None, 0),
    Q.Q4_K: (0, 2, 7.5),
    Q.Q5_K: (0, 2, 15.5),
    Q.Q6_K: (208, None, 0),
    Q.IQ1_S: (0, None, 0),
    Q.IQ2_XXS: (0, None, 0),
    Q.IQ2_XS: (0, None, 0),
    Q.IQ2_S: (0, None, 0),
    Q.IQ3_XXS: (0, None, 0),
    Q.IQ3_S: (0, None, 0),
    Q.IQ4_NL: (0, None, 0),
    Q.IQ4_XS: (0, None, 0),
    Q.TQ1_0: (52, None, 0),
    Q.TQ2_0: (64, None, 0),
}


def _codes(rng: np.random.Generator, qtype: Q, n: int) -> np.ndarray:
    """Random bytes of `n` blocks: uint8 (n, type size)."""
    raw = rng.integers(0, 256, (n, GGML_QUANT_SIZES[qtype][1]), np.uint8)
    if qtype == Q.TQ2_0:  # no file has the code 3, whose value is 2
        raw ^= (raw & raw >> 1 & 0x55) << 1
    return raw


def _with_scales(raw: np.ndarray, qtype: Q, unit: np.ndarray, scale: float) -> np.ndarray:
    """`raw` (blocks, type size) with its scale fields set to `unit` (blocks,) times `scale`."""
    if qtype == Q.MXFP4:  # the scale is a power of two: 2^(e - 128)
        raw[:, 0] = np.clip(np.round(np.log2(unit * scale)) + 128, 0, 254).astype(np.uint8)
        return raw
    if qtype == Q.IQ1_M:  # the half lies in the upper 4 bits of four 16-bit words
        half = (unit * scale).astype(np.float16).view(np.uint16)
        words = raw[:, 48:56].view(np.uint16)
        words[:] = words & 0x0FFF | (half[:, None] >> np.array([0, 4, 8, 12], np.uint16)) << 12
        return raw
    at, at_min, ratio = _FIELDS[qtype]
    raw[:, at : at + 2] = (unit * scale).astype(np.float16)[:, None].view(np.uint8)
    if at_min is not None:
        raw[:, at_min : at_min + 2] = (unit * scale * ratio).astype(np.float16)[:, None].view(np.uint8)
    return raw


def random_blocks(rng: np.random.Generator, qtype: Q, n: int, std: float, negative: float = 0.25) -> np.ndarray:
    """`n` blocks of `qtype` as uint8 (n, type size), whose values have mean about 0 and standard deviation about `std`.

    `negative` is the share of blocks with a negative scale. Codes from -8 to 7 have a mean of -0.5, which long rows add
    up; with one half of each sign they do not.
    """
    block, size = GGML_QUANT_SIZES[qtype]
    if qtype in (Q.F32, Q.F16, Q.BF16):
        values = rng.standard_normal(n * block, np.float32) * np.float32(std)
        if qtype == Q.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(n, size)
        return values.astype(np.float32 if qtype == Q.F32 else np.float16).view(np.uint8).reshape(n, size)
    raw = _codes(rng, qtype, n)
    unit = rng.uniform(0.6, 1.4, n).astype(np.float32) * np.where(rng.random(n) < negative, -1, 1).astype(np.float32)
    if qtype == Q.MXFP4:
        unit = np.abs(unit)
    sample = _with_scales(_codes(rng, qtype, 512), qtype, np.ones(512, np.float32), 2.0**-6)
    return _with_scales(raw, qtype, unit, std / float(dequantize(sample, qtype).std()) * 2.0**-6)
