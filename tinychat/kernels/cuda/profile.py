"""The decode step on CUDA, taken apart: the graph as a whole, and each kernel alone, as a chain of its own launches.

The launches of a kernel in all layers run in one graph, one strictly after the other, so that weights come from memory
as in a step and nothing else overlaps; what is told is the time of the chain, never a launch's share of it.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.cuda import binaries
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.driver import check
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.profile import Batch, CacheUse, Calls, Kernel, Part, StepProfile
from tinychat.kernels.sampling import GREEDY, Sampling

LONG = 40  # launches of a chain: fewer are repeated, so that starting the graph does not count
WARM = 4
COPY = 512 << 20  # bytes
_REGISTERS, _LOCAL = 4, 3  # CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES


@dataclass(frozen=True)
class DecodeStep:
    """The decode step as it runs."""

    gpu: GPU
    parts: tuple[tuple[Launch, int], ...]  # launches, and the index in Plan.ops of the op that each computes
    graph: Graph
    max_context: int
    decode: Callable[[int, int, Sampling, Sequence[int]], Iterator[tuple[int, float]]]  # Executor.decode
    place: Callable[[Sequence[int], int, Sampling], None]  # tokens from a position on; the last is the next step's

    @cached_property
    def layers(self) -> Graph:
        """The step up to its logits."""
        return self.gpu.graph([launch for launch, _ in self.parts if launch.kind != "sampling"])

    @cached_property
    def choice(self) -> Graph:
        """The rest: the next token from the logits."""
        return self.gpu.graph([launch for launch, _ in self.parts if launch.kind == "sampling"])


def profile(step: DecodeStep, token: int, pos: int, steps: int) -> StepProfile:
    """See kernels/profile.py."""
    if pos + steps + WARM + 2 > step.max_context:
        raise TinychatError(f"{steps} profiled tokens at position {pos} do not fit the context of {step.max_context}")
    plain, first = _tokens(step, token, pos, steps)
    whole = _timed(step, token, pos, step.graph, steps)
    groups: dict[str, list[Launch]] = {}
    for launch in (launch for launch, _ in step.parts):
        groups.setdefault(launch.name, []).append(launch)
    parts = []
    for name, launches in groups.items():
        repeats = 1 if "choose_token" in name else max(1, LONG // len(launches))  # that one moves the position on
        chain = step.gpu.graph(launches * repeats, chained=False)
        seconds = _timed(step, token, pos, chain, steps) / repeats
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
    gpu = step.gpu
    caches = (CacheUse("compiled kernels, on disk", gpu.found, gpu.compiled, gpu.compile_s, str(binaries.folder())),)
    graph = Batch("graph", step.graph.kernels, whole)
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
        tuple(kernels(step)),
        ("ncu tinychat run MODEL PROMPT --device cuda",),
    )


def seconds_of(step: DecodeStep, groups: Sequence[Sequence[int]], pos: int, steps: int) -> Calls:
    """The kernels that compute these ops of the plan, as one graph launched at position `pos` as a step is; a group's
    time is its share."""
    if pos >= step.max_context:
        raise TinychatError(f"position {pos} does not fit the context of {step.max_context}")
    wanted = {i for group in groups for i in group}
    graph = step.gpu.graph([launch for launch, op in step.parts if op in wanted])
    seconds = _timed(step, 0, pos, graph, steps)
    return Calls(seconds / len(groups), f"{len(groups)} in a row", 1, pos)


def _tokens(step: DecodeStep, token: int, pos: int, steps: int) -> tuple[np.ndarray, float]:
    """((steps,) seconds from token to token as decode() gives them, seconds of the first)."""
    stepper, times = step.decode(token, pos, GREEDY, [token]), []
    for _ in range(steps + WARM):
        start = time.perf_counter()
        next(stepper)
        times.append(time.perf_counter() - start)
    stepper.close()  # type: ignore[attr-defined]
    return np.array(times[WARM:]), times[0]


def _timed(step: DecodeStep, token: int, pos: int, graph: Graph, steps: int) -> np.ndarray:
    """(steps,) seconds between events around one launch of a graph, each from the same state."""
    seconds = np.zeros(steps)
    for i in range(-1, steps):
        step.place([token] * (pos + 1), 0, GREEDY)
        step.gpu.synchronize()
        start = step.gpu.event()
        graph()
        elapsed = step.gpu.elapsed(start, step.gpu.event())
        if i >= 0:
            seconds[i] = elapsed
    return seconds


def kernels(step: DecodeStep) -> list[Kernel]:
    """The kernels of the decode step, in order of first use."""
    counts: dict[str, list[Launch]] = {}
    for launch in (launch for launch, _ in step.parts):
        counts.setdefault(launch.name, []).append(launch)
    return [
        Kernel(
            name,
            len(same),
            f"{'×'.join(map(str, same[0].grid))} · {same[0].threads}",
            _resources(step, same[0]),
            same[0].source(),
        )
        for name, same in counts.items()
    ]


def _resources(step: DecodeStep, launch: Launch) -> str:
    values = []
    for attribute in (_REGISTERS, _LOCAL):
        value = ctypes.c_int()
        check(step.gpu.cuda.cuFuncGetAttribute(ctypes.byref(value), attribute, step.gpu.program(launch).function))
        values.append(value.value)
    return f"{values[0]} registers, {values[1]} B local, {launch.shared} B shared"


def read_bandwidth(gpu: GPU) -> float:
    """GB/s that the GPU's memory moves, read and written, in a copy (0.0 where there is no room for one)."""
    try:
        gpu.allocate("bandwidth", 2 * COPY)
    except TinychatError:
        return 0.0
    seconds = []
    for _ in range(5):
        began = gpu.event()
        gpu.copy(f"bandwidth+{COPY}", "bandwidth", COPY)
        seconds.append(gpu.elapsed(began, gpu.event()))
    gpu.free("bandwidth")
    return 2 * COPY / min(seconds) / 1e9
