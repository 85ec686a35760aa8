"""Profiles a decode step of plain tinygrad: the times of scheduling, compiling and capture, then of each kernel
alone."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from tinygrad import Device
from tinygrad.engine.jit import _prepare_jit_inputs
from tinygrad.engine.realize import ExecContext, estimate_uop, pm_exec
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops, UOp, sym_infer

from tinychat.errors import TinychatError
from tinychat.kernels.cpu.cores import default_threads
from tinychat.kernels.profile import ONE_BY_ONE, Batch, Kernel, Part, StepProfile
from tinychat.kernels.sampler import sample
from tinychat.kernels.sampling import GREEDY
from tinychat.kernels.tinygrad.step import Step


def profile(step: Step, token: int, pos: int, steps: int) -> StepProfile:
    """See kernels/profile.py. Captures the decode step again and runs `token` at `pos` repeatedly."""
    if pos >= step.max_context:
        raise TinychatError(f"position {pos} does not fit the context of {step.max_context}")
    step.forget_decode()
    first = _seconds(lambda: step.run([token], pos, True))
    plain, chosen = np.zeros(steps), np.zeros(steps)
    for i in range(steps):
        start = time.perf_counter()
        logits = step.run([token], pos, True)
        assert logits is not None
        middle = time.perf_counter()
        sample(logits[0], GREEDY, pos, [token])
        chosen[i] = time.perf_counter() - middle
        plain[i] = time.perf_counter() - start
    calls, context = _captured(step, token, pos)
    flat = list(_flat(calls))
    alone = np.array([[_alone(call, context) for call in flat] for _ in range(steps)])  # (steps, kernels)
    owners = _owners(step, token, pos)
    if len(owners) != len(flat):
        owners = [-1] * len(flat)
    serial = step.device.startswith(("CPU", "PYTHON"))
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
        (first,),
        step.compile_caches.used(),
        pos + 1,
        default_threads() if serial else 1,
        tuple(kernels(step, token, pos)),
        ("VIZ=-1 tinychat run MODEL PROMPT --device reference",),
    )


def kernels(step: Step, token: int = 0, pos: int = 0) -> list[Kernel]:
    """The generated kernels of the captured decode step, in order of first use; captures it if need be."""
    while (jit := step.decode_jit) is None or jit.captured is None:
        step.run([token], pos, True)
    calls, context = _captured(step, token, pos)
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


def _captured(step: Step, token: int, pos: int) -> tuple[tuple[UOp, ...], ExecContext]:
    """The calls of the captured decode step and the context to run them in."""
    inputs, values, _, _ = _prepare_jit_inputs(step.inputs([token], pos), {})
    calls = step.decode_jit.captured.linear.src
    return calls, ExecContext(values, tuple(inputs), update_stats=False, jit=True, wait=True)


def _flat(calls: tuple[UOp, ...]) -> Iterator[UOp]:
    """All kernels, including those inside graphs."""
    for call in calls:
        yield from call.src[0].src[0].src if call.src[0].op is Ops.CUSTOM_FUNCTION else (call,)


def _alone(call: UOp, context: ExecContext) -> float:
    """Seconds of one call, until it has ended: by the device's clock, or by the host's if the device has none."""
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


def _owners(step: Step, token: int, pos: int) -> list[int]:
    """The op of the plan to which each kernel of a step belongs, found by counting kernels op by op in an uncaptured
    step."""
    inputs = step.inputs([token], pos)
    counts = [GlobalCounters.kernel_count]
    counts += [GlobalCounters.kernel_count for _ in step.ops(*inputs)]
    return [i for i, (before, after) in enumerate(pairwise(counts)) for _ in range(after - before)]
