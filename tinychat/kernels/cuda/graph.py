"""Kernel launches: one by one, or a whole step as one CUDA graph, built through the driver.

Both with programmatic edges: kernel i + 1 starts while kernel i still runs, and loads its weights meanwhile. Only for
kernels that call grid_wait() (ptx.cuh) before they touch what another kernel wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tinychat.kernels.cuda import driver
from tinychat.kernels.cuda.driver import check

_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Edge(ctypes.Structure):  # CUgraphEdgeData
    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


_PROGRAMMATIC = _Edge(
    from_port=1, type=1
)  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC


class _Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [
        ("id", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
        ("value", ctypes.c_int32),
        ("rest", ctypes.c_char * 60),
    ]


class _Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    ]


class _KernelNode(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v1
    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint32),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class KernelCall:
    """A kernel with its arguments. `grid`: as Launch.grid_of."""

    function: ctypes.c_void_p
    grid: Callable[[int, int], tuple[int, int, int]]
    threads: int
    shared: int
    addresses: tuple[int, ...]

    def parameters(self) -> tuple[Any, Any]:
        """The driver's list of pointers to the arguments, and what must stay while it is used."""
        values = (ctypes.c_uint64 * len(self.addresses))(*self.addresses)
        start = ctypes.addressof(values)
        return (ctypes.c_void_p * len(self.addresses))(*range(start, start + 8 * len(self.addresses), 8)), values


def enqueuer(cuda: ctypes.CDLL, calls: Sequence[KernelCall], chained: bool = True) -> Callable[[int, int], None]:
    """A function that enqueues the calls one by one, for a number of tokens and of cache rows, through the driver's
    functions `cuda`."""
    attribute = _Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)
    made = []
    for call in calls:
        config = _Config((0, 0, 0), (call.threads, 1, 1), call.shared, None, ctypes.pointer(attribute), int(chained))
        parameters, values = call.parameters()
        made.append((config, ctypes.byref(config), call.function, parameters, call.grid, values))
    launch = cuda.cuLaunchKernelEx

    def enqueue(count: int, keys: int) -> None:
        for config, pointer, function, parameters, grid, _ in made:
            config.grid[:] = grid(count, keys)
            if status := launch(pointer, function, parameters, None):
                check(status)

    return enqueue


class Graph:
    """The calls with the grids for a number of tokens and of cache rows. `edges`: (a call, one that waits for it), by
    their places; `chained`: programmatic ones."""

    def __init__(
        self,
        calls: Sequence[KernelCall],
        edges: Sequence[tuple[int, int]],
        chained: bool = True,
        count: int = 1,
        keys: int = 1,
    ) -> None:
        self.kernels = len(calls)
        self._cuda = cuda = driver.library()
        self._graph, self._instance = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuGraphCreate(ctypes.byref(self._graph), 0))
        nodes, kept = [], []
        for call in calls:
            parameters, values = call.parameters()
            kept.append(values)
            node, grid, start = ctypes.c_void_p(), call.grid(count, keys), ctypes.addressof(parameters)
            made = _KernelNode(call.function, grid, (call.threads, 1, 1), call.shared, start, None)
            check(cuda.cuGraphAddKernelNode(ctypes.byref(node), self._graph, None, 0, ctypes.byref(made)))
            nodes.append(node)
        if n := len(edges):
            before, after = ((ctypes.c_void_p * n)(*[nodes[i] for i in ends]) for ends in zip(*edges))
            kinds = (_Edge * n)(*[_PROGRAMMATIC if chained else _Edge()] * n)
            check(cuda.cuGraphAddDependencies_v2(self._graph, before, after, kinds, n))
        check(cuda.cuGraphInstantiate_v2(ctypes.byref(self._instance), self._graph, None, None, 0))

    def __call__(self) -> None:
        """Enqueues all kernels and returns."""
        check(self._cuda.cuGraphLaunch(self._instance, None))

    def __del__(self) -> None:
        if self._instance:
            self._cuda.cuGraphExecDestroy(self._instance)
        if self._graph:
            self._cuda.cuGraphDestroy(self._graph)
