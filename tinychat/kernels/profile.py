"""What an executor measures of its own decode step (executor.MeasurableExecutor), and the names of ops and their
shapes. measure/profile puts the figures in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tinychat.kernels.ops import (
    Absorb,
    Attention,
    Convolve,
    Delta,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GatedConvolve,
    GateInput,
    GateUp,
    Head,
    Join,
    LatentStore,
    LayerInputs,
    LinearAdd,
    NormAdd,
    NormLinear,
    Op,
    Plan,
    RopeStore,
    Route,
    StoreHidden,
    ValueUp,
    matrices_of,
)

How = Literal["in the batch", "alone"]
ONE_BY_ONE = "one by one"  # a batch's name where there is no batch: the host starts every kernel


@dataclass(frozen=True)
class Part:
    """One op or kernel of a step, called once or `calls` times. `work` and `wait`: seconds of all calls, float64
    (steps, threads); a device without clocks inside the step has one "thread" and no waiting. `nbytes` is what the
    calls have to read; `tasks` how many pieces one can be divided into (0: not known); `index` the plan op it belongs
    to (-1: none, and `category` says what it is)."""

    name: str
    index: int
    nbytes: int
    tasks: int
    work: np.ndarray
    wait: np.ndarray
    calls: int = 1
    category: str = "other"

    @property
    def seconds(self) -> np.ndarray:
        """(steps,): from the start of the calling thread to the end of the barrier behind it."""
        return self.work[:, 0] + self.wait[:, 0]

    @property
    def waited(self) -> np.ndarray:
        """(steps,): mean over the threads of the time in `seconds` without work: waiting for other threads, late
        starts."""
        return np.maximum(0, self.seconds - self.work.mean(1))


@dataclass(frozen=True)
class Batch:
    """Work that the host starts with one call: a native call, a graph. `seconds` (steps,) of the whole batch, measured
    without clocks inside it."""

    name: str
    kernels: int
    seconds: np.ndarray


@dataclass(frozen=True)
class CacheUse:
    """Use of a schedule or compile cache since the model was loaded; `seconds`: lookups and compilations. None: not
    measured."""

    name: str
    hits: int | None
    misses: int | None
    seconds: float | None
    place: str = ""


@dataclass(frozen=True)
class Kernel:
    """A kernel as it runs on the device. `launch`: grid and block; `resources`: registers, local memory, where
    known."""

    name: str
    calls: int  # per token
    launch: str
    resources: str
    source: str


@dataclass(frozen=True)
class StepProfile:
    """Decode steps, measured. `tokens` and `sampling`: seconds (steps,) of the steps in which the parts were measured;
    `plain`: seconds (steps,) of steps without clocks, between the others. `how` the parts were measured: "in the batch"
    by clocks inside the running step, or each "alone", waited for."""

    how: How
    parts: tuple[Part, ...]
    tokens: np.ndarray
    plain: np.ndarray
    sampling: np.ndarray
    batches: tuple[Batch, ...]
    first: tuple[float, ...]  # seconds of the first steps, before the steady state
    caches: tuple[CacheUse, ...]
    depth: int  # cache rows of the step in the middle
    cores: int  # threads, or what corresponds to them, that this machine could use
    kernels: tuple[Kernel, ...]
    deeper: tuple[str, ...] = ()  # commands that show more


@dataclass(frozen=True)
class Calls:
    """The time of calls: seconds (..., steps), with the number of threads, the way of measuring, and the number of rows
    in the KV cache."""

    seconds: np.ndarray
    how: str
    threads: int
    depth: int


def name_of(op: Op) -> str:
    """GateUp -> gate_up."""
    return re.sub(r"(?<!^)([A-Z])", r"_\1", type(op).__name__).lower()


def quant_of(op: Op) -> str:
    """The types of its matrices: "Q4_1", "Q4_K+Q6_K"; "" where it has none."""
    return "+".join(dict.fromkeys(w.type.name for w in matrices_of(op)))


def shape_of(op: Op) -> str:
    """Its matrices as rows x columns, or heads and widths of an attention."""
    match op:
        case Attention():
            return f"{op.heads}/{op.kv_heads} heads × {op.key_dim}" + (
                "" if op.key_dim == op.value_dim else f", {op.value_dim}"
            )
        case RopeStore() | LatentStore():
            return f"{op.heads} heads"
        case Delta():
            return f"{op.heads} heads × {op.key_dim}×{op.value_dim}"
        case Convolve():
            return f"{sum(w.rows for w in op.weights)}×{op.weights[0].cols}"
        case GatedConvolve():
            return f"{op.weight.rows}×{op.weight.cols}"
        case Embed():
            return f"1 of {op.weight.rows}×{op.weight.cols}"
        case LayerInputs():
            return f"1 of {op.table.weight.rows}×{op.table.weight.cols}"
        case GateInput():
            return f"{op.width}"
        case NormLinear():
            return f"{'+'.join(str(w.rows) for w in op.weights)}×{op.weights[0].cols}"
        case GateUp():
            return f"2×{op.gate.rows}×{op.gate.cols}"
        case ExpertsUp():
            shared = f" + 2×{op.shared_gate.rows}" if op.shared_gate else ""
            return f"{op.top_k}×2×{op.gate.rows}{shared}×{op.gate.cols}"
        case ExpertsDown():
            shared = f" + {op.shared_down.cols}" if op.shared_down else ""
            return f"{op.down.rows}×({op.top_k}×{op.down.cols}{shared})"
        case Route():
            return f"{op.router.rows}×{op.router.cols}, top {op.top_k}"
        case Absorb() | ValueUp():
            return f"{op.weight.groups} heads × {op.weight.rows}×{op.weight.cols}"
        case NormAdd() | StoreHidden():
            return f"{op.norm.cols}"
        case Join():
            return f"2×{op.embed.weight.cols}"
        case LinearAdd() | Head():
            return f"{op.weight.rows}×{op.weight.cols}"
    raise AssertionError(op)


def category_of(op: Op) -> str:
    """Mat-vec by quant type, attention, routing, experts, embedding."""
    match op:
        case Attention() | RopeStore() | LatentStore():
            return "attention"
        case Convolve() | Delta():
            return "delta rule"
        case GatedConvolve():
            return "convolution"
        case Route():
            return "routing"
        case ExpertsUp() | ExpertsDown():
            return f"experts {quant_of(op)}"
        case Embed() | LayerInputs() | GateInput():
            return "embedding"
        case NormAdd() | StoreHidden() | Join():
            return "norm"
        case _:
            return f"mat-vec {quant_of(op)}"


def bytes_of(plan: Plan, op: Op, depth: int) -> int:
    """Bytes that one decode step with `depth` cache rows has to read for `op`: its weights, or the layer's cache."""
    return plan.weight_bytes(op) + plan.cache_bytes(op, depth)


def calls_of(p: StepProfile, groups: Sequence[Sequence[int]]) -> Calls:
    """The seconds of groups of plan ops, out of a profile; an op may be several parts."""
    of = dict[int, np.ndarray]()
    for part in p.parts:
        of[part.index] = of.get(part.index, 0.0) + part.seconds
    seconds = np.stack([sum((of[i] for i in group if i in of), np.zeros(len(p.tokens))) for group in groups])
    return Calls(seconds, p.how, p.parts[0].work.shape[1], p.depth)


def function_source(text: str, name: str) -> str:
    """The definition of function `name` in C source `text`, with the comment lines above it; "" where there is none."""
    lines = text.splitlines()
    starts = (i for i, line in enumerate(lines) if re.match(rf"^(?!\s|//).*\b{re.escape(name)}\(.*(\{{|\}})$", line))
    if (first := next(starts, None)) is None:
        return ""
    last = (
        first if lines[first].endswith("}") else next(i for i in range(first, len(lines)) if lines[i].startswith("}"))
    )
    while first and lines[first - 1].startswith("//"):
        first -= 1
    return "\n".join(lines[first : last + 1]) + "\n"
