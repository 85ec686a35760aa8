"""From a launch (source, grid, buffers) to a node of tinygrad's graph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


@cache
def text(name: str) -> str:
    """A source file of this folder."""
    return (_HERE / name).read_text()


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `args` are (C type, parameter, buffer) in order; a buffer whose C type is not const is
    written.

    `body` is the kernel's text, a call into the templates of `file` (names apart by spaces); `bytes` is what it must
    move, for the statistics.
    """

    name: str
    file: str
    body: str
    args: tuple[tuple[str, str, str], ...]
    grid: tuple[int, int, int]
    threads: int = 256
    shared: int = 0  # bytes of dynamic shared memory
    bytes: int = 0
    resident: int = 1  # blocks that must fit on a multiprocessor at once
    kind: str = ""  # category for the profile: "mat-vec Q4_0", "attention", ...

    def source(self, device: str = "ptx.cuh") -> str:
        """The whole translation unit. `device` names the file with the device functions, or is "" for none."""
        params = ", ".join(f"{kind}{name}" for kind, name, _ in self.args)
        head = text(device) if device else ""
        parts = "".join(map(text, self.file.split()))
        kernel = f"KERNEL({self.threads}, {self.resident}) {self.name}({params}) {{\n{self.body}\n}}"
        return f"{head}#define THREADS {self.threads}\n{text('quants.cuh')}{parts}\n{kernel}\n"

    @property
    def buffers(self) -> tuple[str, ...]:
        return tuple(buffer for _, _, buffer in self.args)


def program(launch: Launch, target: Any, binary: bytes | None = None) -> Any:
    """A function for `Tensor.custom_kernel` over launch.buffers: it returns the kernel as a compiled PROGRAM node."""
    from tinygrad.renderer import Estimates
    from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, UOp

    def kernel(*params: UOp) -> UOp:
        n = len(params)
        sink = UOp.sink(
            *params, arg=KernelInfo(name=launch.name, estimates=Estimates(mem=launch.bytes, lds=launch.bytes))
        )
        info = ProgramInfo(
            name=launch.name,
            global_size=launch.grid,
            local_size=(launch.threads, 1, 1),
            globals=tuple(range(n)),
            target=target,
            outs=tuple(i for i, (kind, _, _) in enumerate(launch.args) if not kind.startswith("const")),
            ins=tuple(range(n)),
        )
        src = (sink, UOp(Ops.LINEAR, src=(*sink.src, sink)), UOp(Ops.SOURCE, arg=launch.source()))
        return UOp(Ops.PROGRAM, src=(*src, UOp(Ops.BINARY, arg=binary)) if binary is not None else src, arg=info)

    return kernel
