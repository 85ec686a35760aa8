"""From a kernel (a .cu file, its constants, its buffers) to a launch.

A kernel is one .cu file with a `struct Args` of pointers and a function `run(const Args &)`. Its sizes are named
constants, the fields of a dataclass (constants.py); the header with their values stands before the file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from tinychat.kernels.cuda import state
from tinychat.kernels.cuda.constants import Constants, header

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)
_FIELD = re.compile(r"^ +((?:const )?\w+ \*)(\w+)(?:\[\w+\])? = .*;", re.MULTILINE)


@cache
def text(name: str) -> str:
    """A source file of this folder."""
    return (_HERE / name).read_text()


@cache
def expand(read: Callable[[str], str], name: str, known: frozenset[str]) -> str:
    """A source file with the files of its `#include "..."` lines in their place, each once; those `known` are left
    out. `read`: file name -> text."""
    seen = set(known)

    def inline(name: str) -> str:
        def included(m: re.Match[str]) -> str:
            if m[1] in seen:
                return ""
            seen.add(m[1])
            return inline(m[1])

        return _INCLUDE.sub(included, read(name))

    return inline(name)


@cache
def _source(read: Callable[[str], str], device: str, file: str, threads: int, constants: str, kernel: str) -> str:
    head = f"{read(device) if device else ''}#define THREADS {threads}\n{state.header()}{read('quants.cuh')}"
    return f"{head}{constants}{expand(read, file, frozenset((device, 'quants.cuh')))}\n{kernel}"


@cache
def _fields(read: Callable[[str], str], file: str) -> dict[str, str]:
    """The fields of a kernel's Args: name -> C type."""
    return {field: c_type for c_type, field in _FIELD.findall(read(file))}


@cache
def _body(read: Callable[[str], str], file: str, bound: tuple[tuple[str, ...], ...]) -> tuple[str, tuple[str, ...]]:
    """The text of a kernel's function, whose parameter n is the value of the fields bound[n] of its Args, and the C
    types of the parameters."""
    types, chosen, lines = _fields(read, file), [], ["  Args a;"]
    for n, fields in enumerate(bound):
        kinds = [types[f.partition("[")[0]] for f in fields]
        written = [k for k in kinds if not k.startswith("const ")]
        chosen.append((written or kinds)[0])
        lines += [f"  a.{field} = p{n};" for field in fields]
    return "\n".join([*lines, "  run(a);"]), tuple(chosen)


# The grid for a prompt of so many tokens, behind which the cache holds so many rows.
Grid = Callable[[int, int], tuple[int, int, int]]


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `args` are (C type, parameter, buffer) in order, each buffer once; a buffer whose C type is
    not const is written. `body` is the text of the kernel's function; `bytes` is what it must move, for the
    statistics."""

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
    constants: str = ""  # C++ text: the kernel's named constants
    sized: Grid | None = None  # of a prompt's kernel
    cluster: int = 1  # blocks that run at the same time and share memory
    before: tuple[Launch, ...] = ()  # launches that make its input
    aside: bool = False  # in a graph it runs beside the launches behind it, up to the next that joins
    joins: bool = False

    def source(self, device: str = "ptx.cuh") -> str:
        """The whole translation unit. `device` names the file with the device functions, or is "" for none."""
        params = ", ".join(f"{c_type}{name}" for c_type, name, _ in self.args)
        bounds = f"{self.threads}, {self.resident}"
        kind = f"KERNEL({bounds})" if self.cluster == 1 else f"CLUSTER_KERNEL({bounds}, {self.cluster})"
        signature = f"{kind} {self.name}({params})"
        return _source(text, device, self.file, self.threads, self.constants, f"{signature} {{\n{self.body}\n}}\n")

    def grid_of(self, count: int, keys: int) -> tuple[int, int, int]:
        """The grid for `count` tokens, behind which the cache holds `keys` rows."""
        return self.sized(count, keys) if self.sized else self.grid

    def over(self, others: Mapping[str, str]) -> Launch:
        """The launch with `others` in place of some of its buffers."""
        if not others:
            return self
        args = tuple([(c_type, name, others.get(buffer, buffer)) for c_type, name, buffer in self.args])
        return replace(self, args=args, before=tuple([launch.over(others) for launch in self.before]))

    @property
    def buffers(self) -> tuple[str, ...]:
        return tuple(buffer for _, _, buffer in self.args)


def edges(launches: Sequence[Launch]) -> list[tuple[int, int]]:
    """Of a graph: (a launch, one that waits for it), by their places."""
    found, last, aside = list[tuple[int, int]](), -1, -1
    for i, launch in enumerate(launches):
        if launch.aside:
            before, aside = [last if aside < 0 else aside], i
        else:
            before, last = [last, aside] if launch.joins else [last], i
            aside = -1 if launch.joins else aside
        found += [(n, i) for n in before if n >= 0]
    return found


def place(buffer: str) -> tuple[str, int]:
    """A launch's buffer, "name" or "name+offset", as the buffer's name and the offset in bytes."""
    name, _, offset = buffer.partition("+")
    return name, int(offset or 0)


def kernel(
    name: str,
    file: str,
    constants: Constants,
    buffers: Mapping[str, str | None],
    grid: tuple[int, int, int] | Grid,
    kind: str,
    *,
    threads: int = 256,
    shared: int = 0,
    nbytes: int = 0,
    resident: int = 1,
    cluster: int = 1,
    before: tuple[Launch, ...] = (),
) -> Launch:
    """A launch of the kernel in `file`. `buffers`: field of its Args -> buffer; a field without one stays nullptr.

    A buffer that two fields name is one parameter.
    """
    bound: dict[str, list[str]] = {}
    for field, buffer in buffers.items():
        if buffer is not None:
            bound.setdefault(buffer, []).append(field)
    body, types = _body(text, file, tuple(map(tuple, bound.values())))
    args = [(c_type, f"p{n}", buffer) for n, (c_type, buffer) in enumerate(zip(types, bound))]
    sized, fixed = (grid, (1, 1, 1)) if callable(grid) else (None, grid)
    text_of = header(constants)
    return Launch(
        name, file, body, tuple(args), fixed, threads, shared, nbytes, resident, kind, text_of, sized, cluster, before
    )
