"""A decode step of plain tinygrad, taken apart: how long scheduling, compiling and capture take, then every kernel
alone."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from tinygrad import Device, Tensor
from tinygrad.engine.jit import _prepare_jit_inputs
from tinygrad.engine.realize import ExecContext, estimate_uop, pm_exec
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops, UOp, sym_infer

from tinychat.errors import TinychatError
from tinychat.kernels.cpu.executor import default_threads
from tinychat.kernels.ops import Head, Sampling
from tinychat.kernels.profile import ONE_BY_ONE, Batch, Kernel, Part, StepProfile
from tinychat.kernels.sampling import sample

if TYPE_CHECKING:
    from tinychat.kernels.tinygrad.executor import ReferenceExecutor

GREEDY = Sampling(temperature=0.0)


def profile(ex: ReferenceExecutor, token: int, pos: int, steps: int) -> StepProfile:
    """See kernels/profile.py. Captures the decode step anew and runs `token` at `pos` again and again."""
    if pos >= ex.max_context:
        raise TinychatError(f"position {pos} does not fit the context of {ex.max_context}")
    ex._jits.pop((1, True), None)
    first, capture = (_seconds(lambda: ex._run([token], pos, True)) for _ in range(2))
    plain, chosen = np.zeros(steps), np.zeros(steps)
    for i in range(steps):
        start = time.perf_counter()
        logits = ex._run([token], pos, True)
        assert logits is not None
        middle = time.perf_counter()
        sample(logits[0], GREEDY, pos, [token])
        chosen[i] = time.perf_counter() - middle
        plain[i] = time.perf_counter() - start
    calls, context = _captured(ex, token, pos)
    flat = list(_flat(calls))
    alone = np.array([[_alone(call, context) for call in flat] for _ in range(steps)])  # (steps, kernels)
    owners = _owners(ex, token, pos)
    if len(owners) != len(flat):
        owners = [-1] * len(flat)
    serial = ex.tiny_device.startswith(("CPU", "PYTHON"))
    parts = tuple(
        Part(
            _name(call),
            owners[i],
            int(sym_infer(estimate_uop(call).mem, context.var_vals)),
            0 if serial else _grid(call, context),
            alone[:, i : i + 1],
            np.zeros((steps, 1)),
        )
        for i, call in enumerate(flat)
    )
    graphs = [call for call in calls if call.src[0].op is Ops.CUSTOM_FUNCTION]
    batches = [
        Batch(f"graph {i + 1}", len(call.src[0].src[0].src), np.array([_alone(call, context) for _ in range(steps)]))
        for i, call in enumerate(graphs)
    ]
    return StepProfile(
        "alone",
        parts,
        alone.sum(1),
        plain,
        chosen,
        tuple(batches) or (Batch(ONE_BY_ONE, len(flat), plain - chosen),),
        (first, capture),
        ex.caches.used(),
        pos + 1,
        default_threads() if serial else 1,
        tuple(kernels(ex, token, pos)),
        ("VIZ=-1 tinychat run MODEL PROMPT --device reference",),
    )


def kernels(ex: ReferenceExecutor, token: int = 0, pos: int = 0) -> list[Kernel]:
    """The generated kernels of the captured decode step, in order of first use; captures it if need be."""
    while (jit := ex._jits.get((1, True))) is None or jit.captured is None:
        ex._run([token], pos, True)
    calls, context = _captured(ex, token, pos)
    found, counts = dict[str, Kernel](), Counter[str]()
    for call in _flat(calls):
        counts[_name(call)] += 1
        program = call.src[0]
        if program.op is Ops.PROGRAM and _name(call) not in found:
            grid, block = program.arg.launch_dims(context.var_vals)
            source = next((u.arg for u in program.src if u.op is Ops.SOURCE), "")
            launch = "×".join(map(str, grid)) + (" · " + "×".join(map(str, block)) if block else "")
            found[_name(call)] = Kernel(_name(call), 0, launch, "", source)
    return [Kernel(k.name, counts[k.name], k.launch, k.resources, k.source) for k in found.values()]


def _seconds(run: Any) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _captured(ex: ReferenceExecutor, token: int, pos: int) -> tuple[tuple[UOp, ...], ExecContext]:
    """The calls of the captured decode step and what they need to run."""
    tokens = Tensor(np.asarray([token], np.int32), device=ex.tiny_device).realize()
    inputs, values, _, _ = _prepare_jit_inputs((tokens, ex._pos.bind(pos)), {})
    return ex._jits[1, True].captured.linear.src, ExecContext(
        values, tuple(inputs), update_stats=False, jit=True, wait=True
    )


def _flat(calls: tuple[UOp, ...]) -> Iterator[UOp]:
    """Kernels, those inside graphs too."""
    for call in calls:
        yield from call.src[0].src[0].src if call.src[0].op is Ops.CUSTOM_FUNCTION else (call,)


def _alone(call: UOp, context: ExecContext) -> float:
    """Seconds of one call, waited for: by the device's clock, or ours where it has none."""
    start = time.perf_counter()
    times = pm_exec.rewrite(call, context)
    if times and all(t is not None for t in times):
        return float(sum(times))
    Device[call.src[1].device].synchronize()
    return time.perf_counter() - start


def _name(call: UOp) -> str:
    program = call.src[0]
    return str(program.arg.function_name if program.op is Ops.PROGRAM else program.op.name.lower())


def _grid(call: UOp, context: ExecContext) -> int:
    return math.prod(call.src[0].arg.launch_dims(context.var_vals)[0]) if call.src[0].op is Ops.PROGRAM else 0


def _owners(ex: ReferenceExecutor, token: int, pos: int) -> list[int]:
    """For each kernel of a step the plan op it belongs to: a step without capture, counting kernels op by op."""
    counts, ops = list[int](), ex.plan.ops
    buffers = {"tokens": Tensor(np.asarray([token], np.int32), device=ex.tiny_device).realize()}
    for op in ops:
        counts.append(GlobalCounters.kernel_count)
        if isinstance(op, Head):
            ex._linear(ex._norm(buffers["x"], op.norm, op.eps), op.weight).realize()
        else:
            getattr(ex, "_" + type(op).__name__)(op, buffers, ex._pos.bind(pos))
            Tensor.realize(*buffers.values())
    counts.append(GlobalCounters.kernel_count)
    return [i for i, (before, after) in enumerate(pairwise(counts)) for _ in range(after - before)]
