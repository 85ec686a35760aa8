"""Block codecs on tinygrad tensors: packed bytes -> float32, bit-exact with `gguf.quants.dequantize`.

One function per quant type: `b` is uint8 (..., n_blocks, bytes per block), the result float32 (..., n_blocks, values
per block). Layouts: ggml-common.h of https://github.com/ggml-org/ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, dtypes

from tinychat.kernels.grids import grid
from tinychat.kernels.quant_types import GGML_QUANT_SIZES
from tinychat.kernels.quant_types import GGMLQuantizationType as Q

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _f16(b: Tensor, at: int) -> Tensor:
    """The half at byte `at`: float32 (..., n_blocks, 1)."""
    return _u16(b, at).bitcast(dtypes.half).float()


def _u16(b: Tensor, at: int) -> Tensor:
    return b[..., at : at + 1].cast(dtypes.uint16) + b[..., at + 1 : at + 2].cast(dtypes.uint16) * 256


def _s8(b: Tensor) -> Tensor:
    return b.bitcast(dtypes.int8).float()


def _shifts(b: Tensor, step: int, n: int) -> Tensor:
    """(..., 1, w) -> (..., n, w): `b` shifted right by 0, step, 2*step, ..."""
    return Tensor.stack(*[b.rshift(step * i) if i else b for i in range(n)], dim=-2)


def _nibbles(b: Tensor, group: int = 16) -> Tensor:
    """(..., k*group bytes) -> (..., 2*k*group): of every `group` bytes first the low nibbles, then the high ones."""
    g = b.reshape(*b.shape[:-1], -1, group)
    return (_shifts(g, 4, 2) & 15).reshape(*b.shape[:-1], -1)


def _bits32(b: Tensor) -> Tensor:
    """4 bytes -> their 32 bits, lowest first."""
    return _shifts(b.reshape(*b.shape, 1), 1, 8).bitwise_and(1).reshape(*b.shape[:-1], 32)


def _lookup(codes: tuple[int, ...], index: Tensor) -> Tensor:
    return Tensor(list(codes), dtype=dtypes.float32, device=index.device)[index.cast(dtypes.int32)]


def _grid(kind: Q, index: Tensor) -> Tensor:
    """The values of an IQ type's grid: (..., n) -> float32 (..., n * values of an entry)."""
    entries = Tensor(grid(kind), device=index.device)
    return entries[index.cast(dtypes.int32)].reshape(*index.shape[:-1], -1)


def _signs(b: Tensor) -> Tensor:
    """A bit for each value, lowest first, set where it is negative: (..., w) -> 1 or -1, float32 (..., 8 * w)."""
    return 1 - _shifts(b.unsqueeze(-2), 1, 8).transpose(-1, -2).bitwise_and(1).float().mul(2).reshape(*b.shape[:-1], -1)


def _sevens(b: Tensor) -> Tensor:
    """Seven sign bits of 8 values, in bits 0 to 6; the eighth makes the number of them even."""
    parity = b ^ (b >> 4)
    parity = parity ^ (parity >> 2)
    return _signs(b | (((parity ^ (parity >> 1)) & 1) << 7))


def _words(b: Tensor, size: int) -> Tensor:
    """(..., n * size) -> (..., n): little-endian unsigned integers of `size` bytes."""
    parts = b.reshape(*b.shape[:-1], -1, size).cast(dtypes.uint32)
    return sum((parts[..., i] << (8 * i) for i in range(1, size)), parts[..., 0])


def _fields(b: Tensor, step: int, n: int, bits: int) -> Tensor:
    """`n` fields of every integer, `step` bits apart and `bits` bits wide: (..., w) -> (..., w * n)."""
    return Tensor.stack(*[(b >> (step * i)) & ((1 << bits) - 1) for i in range(n)], dim=-1).reshape(*b.shape[:-1], -1)


def _groups(values: Tensor, n: int) -> Tensor:
    """(..., w) -> (..., n, w / n)."""
    return values.reshape(*values.shape[:-1], n, -1)


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and mins of Q4_K and Q5_K (12 bytes at 4): two float32 (..., 8, 1)."""
    lo, mid, hi = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = (lo & 63).cat((hi & 15) | ((lo >> 6) << 4), dim=-1)
    minimum = (mid & 63).cat((hi >> 4) | ((mid >> 6) << 4), dim=-1)
    return scale.float().unsqueeze(-1), minimum.float().unsqueeze(-1)


def _q4_0(b: Tensor) -> Tensor:
    return _f16(b, 0) * (_nibbles(b[..., 2:]).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return _f16(b, 0) * _nibbles(b[..., 4:]).float() + _f16(b, 2)


def _q5_0(b: Tensor) -> Tensor:
    return _f16(b, 0) * ((_nibbles(b[..., 6:]) | (_bits32(b[..., 2:6]) << 4)).float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    return _f16(b, 0) * (_nibbles(b[..., 8:]) | (_bits32(b[..., 4:8]) << 4)).float() + _f16(b, 2)


def _q8_0(b: Tensor) -> Tensor:
    return _s8(b[..., 2:]) * _f16(b, 0)


def _q2_k(b: Tensor) -> Tensor:
    scales, d, dmin = b[..., :16], _f16(b, 80), _f16(b, 82)
    q = (_shifts(b[..., 16:80].reshape(*b.shape[:-1], 2, 32), 2, 4) & 3).reshape(*b.shape[:-1], 16, 16).float()
    return (d * (scales & 15).float()).unsqueeze(-1) * q - (dmin * (scales >> 4).float()).unsqueeze(-1)


def _q3_k(b: Tensor) -> Tensor:
    lead = b.shape[:-1]
    low = _shifts(b[..., 96:104], 4, 2).reshape(*lead, 16) & 15
    high = _shifts(b[..., 104:108], 2, 4).reshape(*lead, 16) & 3
    scale = _f16(b, 108) * ((low | (high << 4)).float() - 32)
    q = (_shifts(b[..., 32:96].reshape(*lead, 2, 32), 2, 4) & 3).reshape(*lead, 16, 16).float()
    missing = (_shifts(b[..., :32], 1, 8) & 1).reshape(*lead, 16, 16).float()  # bit set: nothing to subtract
    return scale.unsqueeze(-1) * (q - (1 - missing) * 4)


def _q4_k(b: Tensor) -> Tensor:
    scale, minimum = _k_scales(b)
    q = _nibbles(b[..., 16:], 32).reshape(*b.shape[:-1], 8, 32).float()
    return (_f16(b, 0).unsqueeze(-1) * scale) * q - _f16(b, 2).unsqueeze(-1) * minimum


def _q5_k(b: Tensor) -> Tensor:
    scale, minimum = _k_scales(b)
    high = _shifts(b[..., 16:48], 1, 8) & 1
    q = (_nibbles(b[..., 48:], 32).reshape(*b.shape[:-1], 8, 32) | (high << 4)).float()
    return (_f16(b, 0).unsqueeze(-1) * scale) * q - _f16(b, 2).unsqueeze(-1) * minimum


def _q6_k(b: Tensor) -> Tensor:
    lead = b.shape[:-1]
    low = _nibbles(b[..., :128], 64)
    high = (_shifts(b[..., 128:192].reshape(*lead, 2, 32), 2, 4) & 3).reshape(*lead, 256)
    q = ((low | (high << 4)).float() - 32).reshape(*lead, 16, 16)
    return (_f16(b, 208) * _s8(b[..., 192:208])).unsqueeze(-1) * q


def _iq2_xxs(b: Tensor) -> Tensor:
    q = _groups(b[..., 2:], 8)
    word = _words(q[..., 4:], 4)
    scale = _f16(b, 0).unsqueeze(-1) * ((word >> 28).float() + 0.5) * 0.25
    return scale * _grid(Q.IQ2_XXS, q[..., :4]) * _sevens(_fields(word, 7, 4, 7))


def _iq2_scales(b: Tensor, packed: Tensor) -> Tensor:
    """Of every 16 values: float32 (..., 16, 1)."""
    return (_f16(b, 0) * (_fields(packed, 4, 2, 4).float() + 0.5) * 0.25).unsqueeze(-1)


def _iq2_xs(b: Tensor) -> Tensor:
    q = _groups(_words(b[..., 2:66], 2), 16)
    return _iq2_scales(b, b[..., 66:]) * _grid(Q.IQ2_XS, q & 511) * _sevens(q >> 9)


def _iq2_s(b: Tensor) -> Tensor:
    index = b[..., 2:34].cast(dtypes.uint32) | (_fields(b[..., 66:74], 2, 4, 2).cast(dtypes.uint32) << 8)
    return _iq2_scales(b, b[..., 74:]) * _grid(Q.IQ2_S, _groups(index, 16)) * _signs(_groups(b[..., 34:66], 16))


def _iq3_xxs(b: Tensor) -> Tensor:
    word = _groups(_words(b[..., 66:], 4), 8)
    scale = _f16(b, 0).unsqueeze(-1) * ((word >> 28).float() + 0.5) * 0.5
    return scale * _grid(Q.IQ3_XXS, _groups(b[..., 2:66], 8)) * _sevens(_fields(word, 7, 4, 7))


def _iq3_s(b: Tensor) -> Tensor:
    index = b[..., 2:66].cast(dtypes.uint32) | (_fields(b[..., 66:74], 1, 8, 1).cast(dtypes.uint32) << 8)
    scale = _f16(b, 0) * (_fields(b[..., 106:], 4, 2, 4).float() * 2 + 1)
    return scale.unsqueeze(-1) * _grid(Q.IQ3_S, _groups(index, 8)) * _signs(_groups(b[..., 74:106], 8))


def _iq1_values(index: Tensor, negative: Tensor) -> Tensor:
    """Values of the grid plus or minus 1/8: (..., n) -> (..., n, 8)."""
    return _grid(Q.IQ1_S, index).reshape(*index.shape, 8) + (0.125 - negative.float() * 0.25).unsqueeze(-1)


def _iq1_s(b: Tensor) -> Tensor:
    high = _groups(_words(b[..., 34:], 2), 8)
    scale = _f16(b, 0).unsqueeze(-1) * ((high >> 12 & 7).float() * 2 + 1)
    index = _groups(b[..., 2:34], 8).cast(dtypes.uint32) | (_fields(high, 3, 4, 3) << 8)
    return scale.unsqueeze(-1) * _iq1_values(index, high >> 15)


def _iq1_m(b: Tensor) -> Tensor:
    words, high = _words(b[..., 48:], 2), _fields(b[..., 32:48], 4, 2, 4)
    top = words >> 12
    d = top[..., 0:1] | (top[..., 1:2] << 4) | (top[..., 2:3] << 8) | (top[..., 3:4] << 12)
    scale = d.cast(dtypes.uint16).bitcast(dtypes.half).float() * (_fields(words, 3, 4, 3).float() * 2 + 1)
    index = b[..., :32].cast(dtypes.uint32) | ((high & 7).cast(dtypes.uint32) << 8)
    values = _iq1_values(index, high >> 3)
    return scale.unsqueeze(-1) * _groups(values.reshape(*b.shape[:-1], -1), 16)


def _tq1_0(b: Tensor) -> Tensor:
    """Digits of base 3, the first one in the highest third of a byte; the next one comes there times 3, modulo 256."""
    parts = ((b[..., :32], 5), (b[..., 32:48], 5), (b[..., 48:52], 4))
    q = [part.cast(dtypes.uint16) * 3**i & 255 for part, digits in parts for i in range(digits)]
    return _f16(b, 52) * (((Tensor.cat(*q, dim=-1) * 3) >> 8).float() - 1)


def _tq2_0(b: Tensor) -> Tensor:
    q = _shifts(_groups(b[..., :64], 2).unsqueeze(-2), 2, 4) & 3
    return _f16(b, 64) * (q.reshape(*b.shape[:-1], -1).float() - 1)


def _iq4_nl(b: Tensor) -> Tensor:
    return _f16(b, 0) * _lookup(_IQ4, _nibbles(b[..., 2:]))


def _iq4_xs(b: Tensor) -> Tensor:
    lead = b.shape[:-1]
    low = (_shifts(b[..., 4:8].reshape(*lead, 4, 1), 4, 2) & 15).reshape(*lead, 8)
    high = Tensor.cat(*[(_u16(b, 2) >> (2 * i)) & 3 for i in range(8)], dim=-1).cast(dtypes.uint8)
    scale = _f16(b, 0) * ((low | (high << 4)).float() - 32)
    return scale.unsqueeze(-1) * _lookup(_IQ4, _nibbles(b[..., 8:]).reshape(*lead, 8, 32))


def _mxfp4(b: Tensor) -> Tensor:
    e = b[..., :1].cast(dtypes.uint32)
    half = (
        (e < 2).where(e * 0x00200000 + 0x00200000, (e.maximum(1) - 1) * 0x00800000).bitcast(dtypes.float32)
    )  # 2**(e-128)
    return half * _lookup(_MXFP4, _nibbles(b[..., 1:]))


def _bf16(b: Tensor) -> Tensor:
    return (_u16(b, 0).cast(dtypes.uint32) * 65536).bitcast(dtypes.float32)


def _f32(b: Tensor) -> Tensor:
    return (_u16(b, 0).cast(dtypes.uint32) + _u16(b, 2).cast(dtypes.uint32) * 65536).bitcast(dtypes.float32)


CODECS: dict[Q, Callable[[Tensor], Tensor]] = {
    Q.F32: _f32,
    Q.F16: lambda b: _f16(b, 0),
    Q.BF16: _bf16,
    Q.Q4_0: _q4_0,
    Q.Q4_1: _q4_1,
    Q.Q5_0: _q5_0,
    Q.Q5_1: _q5_1,
    Q.Q8_0: _q8_0,
    Q.Q2_K: _q2_k,
    Q.Q3_K: _q3_k,
    Q.Q4_K: _q4_k,
    Q.Q5_K: _q5_k,
    Q.Q6_K: _q6_k,
    Q.IQ1_S: _iq1_s,
    Q.IQ1_M: _iq1_m,
    Q.IQ2_XXS: _iq2_xxs,
    Q.IQ2_XS: _iq2_xs,
    Q.IQ2_S: _iq2_s,
    Q.IQ3_XXS: _iq3_xxs,
    Q.IQ3_S: _iq3_s,
    Q.TQ1_0: _tq1_0,
    Q.TQ2_0: _tq2_0,
    Q.IQ4_NL: _iq4_nl,
    Q.IQ4_XS: _iq4_xs,
    Q.MXFP4: _mxfp4,
}


def dequantize(packed: Tensor, kind: Q) -> Tensor:
    """uint8 (..., row bytes) -> float32 (..., columns)."""
    block, size = GGML_QUANT_SIZES[kind]
    rows = packed.shape[:-1]
    blocks = packed.reshape(*rows, -1, size)
    return CODECS[kind](blocks).reshape(*rows, blocks.shape[-2] * block)


def to_tensor(raw: np.ndarray, device: str | None) -> Tensor:
    """A copy of packed bytes on `device`."""
    return Tensor(np.ascontiguousarray(raw), device=device, dtype=dtypes.uint8).realize()
