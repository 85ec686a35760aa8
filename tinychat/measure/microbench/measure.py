"""Measures one kernel, or one layer of each kind that a model has, by running a real plan on the real executor."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import numpy as np

from tinychat import __version__
from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import make_executor
from tinychat.engine.gguf import GGUF
from tinychat.engine.memory_limit import limit_of
from tinychat.engine.plan import build_plan
from tinychat.kernels.executor import MeasurableExecutor
from tinychat.kernels.ops import Experts, Plan, weights_of
from tinychat.kernels.profile import Calls, bytes_of, quant_of
from tinychat.measure.bench import machine_lock
from tinychat.measure.microbench.plans import (
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
from tinychat.measure.microbench.results import Rung

Report = Callable[[str, float], None]


def kernel(
    spec: str,
    steps: int = 10,
    report: Report | None = None,
    stop: threading.Event | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    wait: bool = True,
) -> list[Rung]:
    """Measures OP[:QUANT[:ROWSxK]] on random weights. Holds the benchmark lock. Raises TinychatError for a spec that is
    none."""
    op, quant, rows, cols = parse(spec)
    source = RandomWeights()
    with machine_lock(report, stop, wait=wait):
        plan = kernel_plan(source, op, quant, rows, cols)
        wanted = [[i] for i in measured_ops(plan, op)]
        with _running(plan, source, device, threads, DEPTH + 2 * steps + 16, report) as ex:
            calls = ex.seconds_of(wanted, DEPTH if op == "attention" else 0, steps)
            name = quant.name if op != "attention" else "F16"
            return [_rung("kernel", f"{op}:{name}:{rows}x{cols}", "", "", name, calls, wanted, plan, ex)]


def block(
    path: Path,
    model: str,
    steps: int = 10,
    report: Report | None = None,
    stop: threading.Event | None = None,
    *,
    device: str | None = None,
    threads: int | None = None,
    wait: bool = True,
) -> list[Rung]:
    """Measures one layer of each kind that a model has. Loads no more of it than it needs. Holds the benchmark lock."""
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    with machine_lock(report, stop, wait=wait):
        return [_layer(gguf, plan, model, layers, steps, report, device, threads) for layers in layer_kinds(plan)]


def _layer(
    gguf: GGUF,
    plan: Plan,
    model: str,
    numbers: list[int],
    steps: int,
    report: Report | None,
    device: str | None,
    threads: int | None,
) -> Rung:
    """Measures the layers `numbers`, which are of one kind."""
    source, n, kind = PartOfFile(gguf), len(numbers), plan.ops_of_layers[numbers[0]]
    count = copies(sum(w.nbytes for w in weights_of(plan.layers[numbers[0]])))
    made = around(source, plan.dim, [renamed(plan.layers[numbers[i % n]], i // n) for i in range(count)])
    wanted = [[1 + i * len(kind) + j for j in range(len(kind))] for i in range(count)]
    where = f"layer {numbers[0]}" if n == 1 else f"{n} layers from {numbers[0]}"
    quant = "+".join(dict.fromkeys(q for op in kind if (q := quant_of(op)) and q != "F32"))
    with _running(made, source, device, threads, 2 * steps + 16, report) as ex:
        calls = ex.seconds_of(wanted, 0, steps)
        routed = isinstance(plan.layers[numbers[0]].feed_forward, Experts)
        what = f"{'experts' if routed else 'dense'} ({where})"
        return _rung("block", what, model, gguf.fingerprint(), quant, calls, wanted, made, ex)


@contextlib.contextmanager
def _running(
    plan: Plan, source: RandomWeights, device: str | None, threads: int | None, context: int, report: Report | None
) -> Iterator[MeasurableExecutor]:
    """An executor of `plan`, closed afterwards."""
    if report:
        report("packing weights", 0.0)
    source.nbytes = sum(w.nbytes for w in plan.weights)
    made, _ = make_executor(plan, source, context, device, threads, lambda stage, fraction: None)  # type: ignore[arg-type]
    with contextlib.closing(made):
        yield made


def _rung(
    kind: str,
    what: str,
    model: str,
    fingerprint: str,
    quant: str,
    calls: Calls,
    wanted: Sequence[Sequence[int]],
    plan: Plan,
    ex: MeasurableExecutor,
) -> Rung:
    """The result for groups of plan ops: each group is one call."""
    low, middle, high = (float(v) for v in np.percentile(calls.seconds, (25, 50, 75)))
    nbytes = sum(bytes_of(plan, plan.ops[i], calls.depth) for i in wanted[0])
    gb_s, limit = nbytes / middle / 1e9, limit_of(ex, thorough=True)
    return Rung(
        kind,
        what,
        model,
        fingerprint,
        quant,
        ex.device,
        calls.threads,
        calls.how,
        len(wanted),
        calls.seconds.shape[-1],
        middle,
        low,
        high,
        nbytes,
        gb_s,
        limit,
        gb_s / limit if limit else 0.0,
        {"tinychat": __version__, "tinygrad": metadata.version("tinygrad"), "python": platform.python_version()},
        f"{platform.system()} {platform.machine()}",
        datetime.now(UTC).isoformat(timespec="seconds"),
    )
