"""Measures one kernel, or one layer of each kind that a model has, by running a real plan on the real executor."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import OnProgress, make_executor
from tinychat.engine.gguf import GGUF
from tinychat.engine.memory_limit import limit_of
from tinychat.engine.plan import build_plan
from tinychat.kernels.blocks import Experts, Layer
from tinychat.kernels.executor import MeasurableExecutor
from tinychat.kernels.ops import Plan, weights_of
from tinychat.kernels.profile import bytes_of, quant_of
from tinychat.measure.lock import machine_lock
from tinychat.measure.microbench_plans import (
    DEPTH,
    PartOfFile,
    RandomWeights,
    around,
    copies,
    kernel_plan,
    layer_kinds,
    measured_ops,
    parse,
    renamed,
)
from tinychat.measure.results import Conditions, PartResult


def kernel(
    spec: str,
    steps: int = 10,
    report: OnProgress | None = None,
    stop: threading.Event | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    wait: bool = True,
) -> list[PartResult]:
    """Measures OP[:QUANT[:ROWSxK]] on random weights. Holds the benchmark lock. Raises TinychatError for a bad spec."""
    op, quant, rows, cols = parse(spec)
    source = RandomWeights()
    with machine_lock(report, stop, wait=wait):
        plan = kernel_plan(source, op, quant, rows, cols)
        calls = [[i] for i in measured_ops(plan, op)]
        name = quant.name if op != "attention" else "F16"
        depth = DEPTH if op == "attention" else 0
        with _running(plan, source, device, threads, DEPTH + 2 * steps + 16, report) as executor:
            labels = {"kind": "kernel", "what": f"{op}:{name}:{rows}x{cols}", "quant": name}
            return [_measured(executor, plan, calls, depth, steps, "", "", labels)]


def layers(
    path: Path,
    model: str,
    steps: int = 10,
    report: OnProgress | None = None,
    stop: threading.Event | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    wait: bool = True,
) -> list[PartResult]:
    """Measures one layer of each kind that a model has, and loads only those. Holds the benchmark lock."""
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    found = []
    with machine_lock(report, stop, wait=wait):
        for same in layer_kinds(plan):
            source = PartOfFile(gguf)
            made = around(source, plan.dim, _copies_of([plan.layers[i] for i in same]))
            with _running(made, source, device, threads, 2 * steps + 16, report) as executor:
                calls, labels = _calls_of_layers(made), _labels(plan, same)
                found.append(_measured(executor, made, calls, 0, steps, model, gguf.fingerprint(), labels))
    return found


def _copies_of(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Copies of layers of one kind, so many that together they are larger than the caches."""
    n = copies(sum(w.nbytes for w in weights_of(layers[0])))
    return tuple(renamed(layers[i % len(layers)], i // len(layers)) for i in range(n))


def _calls_of_layers(plan: Plan) -> list[list[int]]:
    """The indices in plan.ops of each layer's ops."""
    found, at = [], 1  # behind the embedding
    for ops in plan.ops_of_layers:
        found.append(list(range(at, at + len(ops))))
        at += len(ops)
    return found


def _labels(plan: Plan, same: Sequence[int]) -> dict[str, str]:
    """Name and quant types of the measured layers: "experts (2 layers from 1)", "Q4_K+Q6_K"."""
    kind = "experts" if isinstance(plan.layers[same[0]].feed_forward, Experts) else "dense"
    where = f"layer {same[0]}" if len(same) == 1 else f"{len(same)} layers from {same[0]}"
    quants = dict.fromkeys(q for op in plan.ops_of_layers[same[0]] if (q := quant_of(op)) and q != "F32")
    return {"kind": "block", "what": f"{kind} ({where})", "quant": "+".join(quants)}


@contextlib.contextmanager
def _running(
    plan: Plan, source: RandomWeights, device: str | None, threads: int | None, context: int, report: OnProgress | None
) -> Iterator[MeasurableExecutor]:
    """An executor of `plan`, closed afterwards."""
    if report:
        report("packing weights", 0.0)
    executor, _ = make_executor(plan, source, context, device, threads, lambda stage, fraction: None)
    with contextlib.closing(executor):
        yield executor


def _measured(
    executor: MeasurableExecutor,
    plan: Plan,
    calls: Sequence[Sequence[int]],
    depth: int,
    steps: int,
    model: str,
    fingerprint: str,
    labels: dict[str, str],
) -> PartResult:
    """The result for groups of plan ops, each of which is one call."""
    timed = executor.seconds_of(calls, depth, steps)
    low, middle, high = (float(v) for v in np.percentile(timed.seconds, (25, 50, 75)))
    nbytes = sum(bytes_of(plan, plan.ops[i], timed.depth) for i in calls[0])
    run = Conditions.now(model, fingerprint, executor.device, timed.threads, limit_of(executor, thorough=True))
    gb_s = nbytes / middle / 1e9
    return PartResult(
        **vars(run),
        kind=labels["kind"],
        what=labels["what"],
        quant=labels["quant"],
        how=timed.how,
        copies=len(calls),
        steps=timed.seconds.shape[-1],
        seconds=middle,
        low=low,
        high=high,
        nbytes=nbytes,
        gb_s=gb_s,
        limit_share=run.share(gb_s),
    )
