"""tinygrad's CUDA graph with programmatic edges: kernel i + 1 starts while kernel i still runs, and loads its weights
meanwhile.

Only for graphs in which every kernel calls grid_wait() (ptx.cuh) before it touches what another kernel wrote.
"""

from __future__ import annotations

import ctypes
from typing import Any

import tinygrad.runtime.autogen.cuda as cuda
from tinygrad.runtime.graph.cuda import CUDAGraph
from tinygrad.runtime.ops_cuda import check
from tinygrad.runtime.support.c import init_c_var
from tinygrad.uop.ops import UOp


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


class ChainedGraph(CUDAGraph):
    """The kernels in order, each after the one before."""

    def __init__(self, linear: UOp, input_uops: tuple[UOp, ...] = ()) -> None:
        super().__init__(linear, input_uops)  # makes the nodes without edges
        nodes, n = [node[0] for node in self.nodes], len(self.nodes) - 1
        before, after = ((cuda.CUgraphNode * n)(*part) for part in (nodes[:-1], nodes[1:]))
        driver = ctypes.CDLL("libcuda.so.1")
        check(
            driver.cuGraphAddDependencies_v2(
                self.graph, before, after, (_Edge * n)(*[_PROGRAMMATIC] * n), ctypes.c_size_t(n)
            )
        )
        check(cuda.cuGraphExecDestroy(self.instance))
        self.instance = init_c_var(
            cuda.CUgraphExec, lambda x: check(cuda.cuGraphInstantiate_v2(ctypes.byref(x), self.graph, None, None, 0))
        )

    def new_node(self, bufs: Any, write: Any) -> tuple[None, Any]:
        return None, cuda.CUgraphNode()
