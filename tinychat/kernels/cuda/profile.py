"""The decode step on CUDA, taken apart: the graph as a whole, and each kernel alone, as a chain of its own launches.

The launches of a kernel in all layers run in one graph, one strictly after the other, so that weights come from memory
as in a step and nothing else overlaps; what is told is the time of the chain, never a launch's share of it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad.helpers import CACHEDB

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.ops import Sampling
from tinychat.kernels.profile import Batch, CacheUse, Kernel, Part, StepProfile

if TYPE_CHECKING:
    from tinychat.kernels.cuda.device import GPU
    from tinychat.kernels.cuda.executor import CUDAExecutor

GREEDY = Sampling(temperature=0.0)
LONG = 40  # launches of a chain: fewer are repeated, so that starting the graph does not count
WARM = 4
COPY = 512 << 20  # bytes
_REGISTERS, _LOCAL = 4, 3  # CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


def profile(ex: CUDAExecutor, token: int, pos: int, steps: int) -> StepProfile:
    """See kernels/profile.py."""
    if pos + steps + WARM + 2 > ex.max_context:
        raise TinychatError(f"{steps} profiled tokens at position {pos} do not fit the context of {ex.max_context}")
    plain, first = _tokens(ex, token, pos, steps)
    whole = _timed(ex, token, pos, ex._decode, steps)
    groups: dict[str, list[Launch]] = {}
    for launch in ex.launches:
        groups.setdefault(launch.name, []).append(launch)
    parts = []
    for name, launches in groups.items():
        repeats = 1 if "choose_token" in name else max(1, LONG // len(launches))  # that one moves the position on
        chain = ex.gpu.graph(launches * repeats, chained=False)
        seconds = _timed(ex, token, pos, chain, steps) / repeats
        parts.append(
            Part(
                name,
                -1,
                sum(x.bytes for x in launches),
                math.prod(launches[0].grid),
                seconds[:, None],
                np.zeros((steps, 1)),
                len(launches),
                launches[0].kind or "other",
            )
        )
    gpu = ex.gpu
    caches = (CacheUse("compiled kernels, on disk", gpu.found, gpu.compiled, gpu.compile_s, CACHEDB),)
    graph = Batch("graph", ex.kernels_per_token, whole)
    return StepProfile(
        "alone",
        tuple(parts),
        whole,
        plain,
        np.zeros(steps),
        (graph,),
        (first,),
        caches,
        pos + steps,
        1,
        tuple(kernels(ex)),
        ("ncu tinychat run MODEL PROMPT --device cuda",),
    )


def seconds_of(ex: CUDAExecutor, ops: Sequence[int], pos: int, steps: int) -> np.ndarray:
    """(steps,) seconds of the kernels that compute these ops of the plan, as one graph launched at position `pos` as a
    step is."""
    if pos >= ex.max_context:
        raise TinychatError(f"position {pos} does not fit the context of {ex.max_context}")
    wanted = set(ops)
    return _timed(ex, 0, pos, ex.gpu.graph([x for x, op in zip(ex.launches, ex.computes) if op in wanted]), steps)


def _tokens(ex: CUDAExecutor, token: int, pos: int, steps: int) -> tuple[np.ndarray, float]:
    """((steps,) seconds from token to token as decode() gives them, seconds of the first)."""
    stepper, times = ex.decode(token, pos, GREEDY, [token]), []
    for _ in range(steps + WARM):
        start = time.perf_counter()
        next(stepper)
        times.append(time.perf_counter() - start)
    stepper.close()  # type: ignore[attr-defined]
    return np.array(times[WARM:]), times[0]


def _timed(ex: CUDAExecutor, token: int, pos: int, graph: Any, steps: int) -> np.ndarray:
    """(steps,) seconds between events around one launch of a graph, each from the same state."""
    seconds = np.zeros(steps)
    for i in range(-1, steps):
        ex._know([token] * (pos + 1), 0)
        ex._set_state(GREEDY, pos, 1, pos)
        ex.gpu.synchronize()
        start = ex.gpu.event()
        graph()
        elapsed = ex.gpu.elapsed(start, ex.gpu.event())
        if i >= 0:
            seconds[i] = elapsed
    return seconds


def kernels(ex: CUDAExecutor) -> list[Kernel]:
    """The kernels of the decode step, in order of first use."""
    counts: dict[str, list[Launch]] = {}
    for launch in ex.launches:
        counts.setdefault(launch.name, []).append(launch)
    return [
        Kernel(
            name,
            len(same),
            f"{'×'.join(map(str, same[0].grid))} · {same[0].threads}",
            _resources(ex, same[0]),
            same[0].source(),
        )
        for name, same in counts.items()
    ]


def _resources(ex: CUDAExecutor, launch: Launch) -> str:
    values = []
    for attribute in (_REGISTERS, _LOCAL):
        value = ctypes.c_int()
        ex.gpu._check(ex.gpu.cuda.cuFuncGetAttribute(ctypes.byref(value), attribute, ex.gpu._program(launch).prg))
        values.append(value.value)
    return f"{values[0]} registers, {values[1]} B local, {launch.shared} B shared"


def read_bandwidth(gpu: GPU) -> float:
    """GB/s that the GPU's memory moves, read and written, in a copy (0.0 where there is no room for one)."""
    try:
        gpu.allocate("bandwidth", 2 * COPY)
    except TinychatError:
        return 0.0
    start = gpu.address("bandwidth").value
    source, target = gpu.cuda.CUdeviceptr_v2(start), gpu.cuda.CUdeviceptr_v2(start + COPY)
    seconds = []
    for _ in range(5):
        began = gpu.event()
        gpu._check(gpu.cuda.cuMemcpyDtoDAsync_v2(target, source, COPY, None))
        seconds.append(gpu.elapsed(began, gpu.event()))
    buffer: Any = gpu.buffers.pop("bandwidth")
    buffer.deallocate()
    return 2 * COPY / min(seconds) / 1e9
