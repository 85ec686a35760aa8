"""The compiled C library: its functions, and the structures it shares with Python, compared when it is loaded."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.blocks import CLAMP, CLAMP_SLOPE, MIN_WEIGHT_SUM
from tinychat.kernels.cpu import compiler
from tinychat.kernels.grids import packed_grid
from tinychat.kernels.quant_types import GGMLQuantizationType

_TABLE = re.compile(r"X\((\w+), \d+, ")  # the rows of QUANTISED and FLOATING in quant.h
_QUANT_H = (compiler.SOURCES / "quant.h").read_text()
QUANTS = frozenset(GGMLQuantizationType[name] for name in _TABLE.findall(_QUANT_H))
_GRIDS = re.findall(r"X\((\w+), (\d+)\)", _QUANT_H)
SAMPLED = dict(re.findall(r"X\((\w+), (double|int32_t)\)", (compiler.SOURCES / "sample.h").read_text()))
"""Fields of Sampling that sample.h uses: name -> C type."""
MAX_GROUP = 1024  # query heads of one kv head
STEP = 16  # tokens of one decode step, at most
STRETCH = 256  # values of a row of the table of per-layer embeddings that are read at a time
TILE = 16  # rows of a weight that lie interleaved, and positions of a tile of the K cache

_i32, _f32, _f64, _u64, _ptr = ctypes.c_int32, ctypes.c_float, ctypes.c_double, ctypes.c_uint64, ctypes.c_void_p


CWatch = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_double)
"""`Watch` of step.c."""


def grids() -> np.ndarray:
    """The tables of the IQ types, one after the other in the order of GRIDS in quant.h, where their form is explained:
    uint16. Raises TinychatError where they have not the size that C reads."""
    tables = []
    for name, entries in _GRIDS:
        table = packed_grid(GGMLQuantizationType[name])
        if len(table) != int(entries):
            raise _differ(f"the grid of {name} has {entries} entries in C, {len(table)} in Python")
        tables.append(table)
    return np.concatenate(tables)


def _all(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class CMatrix(ctypes.Structure):
    """`Matrix` of step.c; groups 0: absent."""

    _fields_ = [*_all(_i32, "type rows cols groups"), ("data", _ptr)]


class COp(ctypes.Structure):
    """`Op` of step.c."""

    _fields_ = [
        *_all(_i32, "tag layer matrices add src"),
        ("dst", _i32 * 4),
        ("at", _i32 * 4),
        *_all(_i32, "heads kv_heads key_dim value_dim nope rope_dims neox q_norm_len k_norm_len"),
        *_all(_i32, "top_k gating normalize route_groups route_groups_used router"),
        *_all(_i32, "window activation temperature_length value_norm gated grouped by_channel taps stores"),
        *_all(_f32, "eps norm_eps scale temperature softcap stream_scale logit_scale lower_bound"),
        *_all(_ptr, "norm q_norm k_norm rope sinks shared_scale"),
        ("bias", _ptr * 4),
        ("routes", _ptr),
        ("w", CMatrix * 4),
    ]


class SampleSpec(ctypes.Structure):
    """`SampleSpec` of sample.h."""

    _fields_ = [
        *((name, _f64 if kind == "double" else _i32) for name, kind in SAMPLED.items()),
        ("n_penalised", _i32),
        ("seed", _u64),
        *_all(_ptr, "penalised divisors amounts mask"),
    ]


class LayerCache(ctypes.Structure):
    """`LayerCache` of step.c."""

    _fields_ = [*_all(_ptr, "k v tail state"), *_all(_i32, "heads k_dim v_dim rows window base")]


class CSource(ctypes.Structure):
    """`Source` of load.h."""

    _fields_ = [*_all(_i32, "fd type rows cols groups stride run"), ("start", _u64), ("to", _ptr)]


class StepContext(ctypes.Structure):
    """The first part of `Ctx` of step.c, which is filled from Python."""

    _fields_ = [
        *_all(_i32, "n_ops n_step n_whole max_context batch vocab layers n_buffers"),
        *_all(_ptr, "ops buffers widths caches ticks expanded"),
        *_all(_u64, "expanded_room sampling"),
    ]


class Library:
    """The library's functions (`tc_...`), the numbers of its enums by name, and its constants.

    Raises TinychatError where it cannot be compiled or does not fit this Python code.
    """

    def __init__(self, flags: Sequence[str] = ("-march=native",), notice: Callable[[str], None] | None = None) -> None:
        self.lib = lib = compiler.load(flags, notice)
        c_int, size = ctypes.c_int, ctypes.c_size_t
        for name, result, args in (
            ("tc_alloc", _ptr, [size]),
            ("tc_free", None, [_ptr, size]),
            ("tc_simd", ctypes.c_char_p, []),
            ("tc_unpacks", c_int, []),
            ("tc_grids", None, [_ptr]),
            ("tc_group_bytes", size, [c_int, c_int]),
            ("tc_sizeof", size, [c_int]),
            ("tc_names", ctypes.c_char_p, [c_int]),
            ("tc_fields", ctypes.c_char_p, [c_int]),
            ("tc_offset", size, [c_int, c_int]),
            ("tc_constant", _f64, [c_int]),
            ("tc_open", c_int, [_ptr, c_int]),
            ("tc_prepare", c_int, [_ptr]),
            ("tc_close", None, [_ptr]),
            ("tc_load", c_int, [_ptr, _ptr, c_int]),
            ("tc_dequantise", None, [_ptr, c_int, c_int, _ptr]),
            ("tc_forward", c_int, [_ptr, _ptr, c_int, c_int, c_int, c_int, _ptr, CWatch, _u64]),
            ("tc_step", None, [_ptr, _ptr, c_int, c_int]),
            ("tc_sample", c_int, [_ptr, c_int, _ptr, _ptr]),
            ("tc_slide", None, [_ptr, c_int]),
            ("tc_cache", size, [_ptr, _ptr, c_int, c_int, c_int]),
            ("tc_bandwidth", _f64, [_ptr, _ptr, size]),
        ):
            function = getattr(lib, name)
            function.restype, function.argtypes = result, args
        for i, struct in enumerate((CMatrix, COp, SampleSpec, LayerCache, CSource, StepContext)):
            if lib.tc_sizeof(i) != ctypes.sizeof(struct):
                raise _differ(f"{struct.__name__} has {lib.tc_sizeof(i)} bytes in C, {ctypes.sizeof(struct)} in Python")
            there = {name: lib.tc_offset(i, at) for at, name in enumerate(lib.tc_fields(i).decode().split())}
            here = {field[0]: getattr(struct, field[0]).offset for field in struct._fields_}
            if wrong := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
                raise _differ(f"the fields {', '.join(wrong)} of {struct.__name__} lie elsewhere in C")
        quants = dict(pair.split("=") for pair in lib.tc_names(2).decode().split())
        if quants != {q.name: str(q.value) for q in QUANTS}:
            raise _differ(f"the quant types are {', '.join(quants)} in C")
        self.tags, self.gatings, self.activations = (
            {name: i for i, name in enumerate(lib.tc_names(what).decode().lower().split())} for what in (0, 1, 3)
        )
        self.context_bytes: int = lib.tc_sizeof(6)
        chunk, *constants = (lib.tc_constant(i) for i in range(7))
        expected = {
            "MAX_GROUP": MAX_GROUP,
            "STEP": STEP,
            "STRETCH": STRETCH,
            "MIN_WEIGHT_SUM": MIN_WEIGHT_SUM,
            "CLAMP": CLAMP,
            "CLAMP_SLOPE": float(np.float32(CLAMP_SLOPE)),
        }
        if constants != list(expected.values()):
            raise _differ(f"{', '.join(expected)} are {constants} in C, {list(expected.values())} in Python")
        self.chunk = int(chunk)  # cache rows of one task of attention
        self.simd: str = lib.tc_simd().decode()
        self.unpacks = bool(lib.tc_unpacks())  # weights, for prompts

    def prepare(self, kinds: Iterable[GGMLQuantizationType]) -> None:
        """To be called before weights of these types are packed: gives C the grids, where they are needed. They come
        from the gguf package, which takes 0.05 s."""
        if any(kind.name.startswith(("IQ1", "IQ2", "IQ3")) for kind in kinds):
            tables = grids()
            self.lib.tc_grids(tables.ctypes.data)


def _differ(what: str) -> TinychatError:
    return TinychatError(f"the C sources and the Python code of the CPU kernels differ: {what}; install tinychat again")
