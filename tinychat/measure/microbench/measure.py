"""Measures one kernel, or one layer of each kind that a model has, by running a real plan on the real executor."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tinychat import __version__
from tinychat.engine.config import ModelConfig
from tinychat.engine.devices import make_executor
from tinychat.engine.gguf import GGUF
from tinychat.engine.memory_limit import limit_of
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.executor import Executor
from tinychat.kernels.ops import Op, Plan, Route, weights_of
from tinychat.kernels.profile import StepProfile, bytes_of, name_of, quant_of
from tinychat.measure.bench import machine_lock
from tinychat.measure.microbench.plans import (
    DEPTH,
    VOCAB,
    PartOfFile,
    RandomWeights,
    around,
    copies,
    kernel_plan,
    layer_kinds,
    layer_of,
    moved,
    parse,
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
        wanted = [[i] for i, o in enumerate(plan.ops) if name_of(o) == op]
        with _running(plan, source, device, threads, DEPTH + 2 * steps + 16, report) as ex:
            calls = _calls(ex, wanted, DEPTH if op == "attention" else 0, steps)
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
    layers: list[list[Op]],
    steps: int,
    report: Report | None,
    device: str | None,
    threads: int | None,
) -> Rung:
    """Measures layers of one kind."""
    source, n = PartOfFile(gguf), copies(sum(w.nbytes for op in layers[0] for w in weights_of(op)))
    chosen = [[moved(op, i, i // len(layers)) for op in layers[i % len(layers)]] for i in range(n)]
    ops = around(source, plan.dim, [op for copy in chosen for op in copy])
    made = Plan(ops, plan.buffers, n, plan.k_width, plan.v_width, plan.dim, VOCAB)
    wanted = [[1 + i * len(copy) + j for j in range(len(copy))] for i, copy in enumerate(chosen)]
    experts = any(isinstance(op, Route) for op in layers[0])
    numbers = sorted(layer_of(op[0]) for op in layers)
    where = f"layer {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} layers from {numbers[0]}"
    quant = "+".join(dict.fromkeys(q for op in layers[0] if (q := quant_of(op)) and q != "F32"))
    with _running(made, source, device, threads, 2 * steps + 16, report) as ex:
        calls = _calls(ex, wanted, 0, steps)
        what = f"{'experts' if experts else 'dense'} ({where})"
        return _rung("block", what, model, gguf.fingerprint(), quant, calls, wanted, made, ex)


@contextlib.contextmanager
def _running(
    plan: Plan, source: RandomWeights, device: str | None, threads: int | None, context: int, report: Report | None
) -> Iterator[Any]:
    """An executor with `profile`, closed afterwards."""
    if report:
        report("packing weights", 0.0)
    source.nbytes = sum({w: w.nbytes for op in plan.ops for w in weights_of(op)}.values())
    made, _ = make_executor(plan, source, context, device, threads, lambda stage, fraction: None)  # type: ignore[arg-type]
    with contextlib.closing(made):
        if not hasattr(made, "profile"):
            raise TinychatError(f"{made.device} cannot measure kernels; `tinychat bench MODEL` measures all of a model")
        yield made


@dataclass(frozen=True)
class Calls:
    """How long a call took: seconds (..., steps), on how many threads, measured how, with how many rows in the KV
    cache."""

    seconds: np.ndarray
    how: str
    threads: int
    depth: int


def _calls(ex: Any, wanted: Sequence[Sequence[int]], pos: int, steps: int) -> Calls:
    """Measures groups of plan ops, each of which is one call."""
    if hasattr(ex, "seconds_of"):  # a GPU: all calls in a row, since its clock is coarser than one
        seconds = ex.seconds_of([i for group in wanted for i in group], pos, steps)
        return Calls(seconds / len(wanted), f"{len(wanted)} in a row", 1, pos)
    p: StepProfile = ex.profile(0, pos, steps)
    of = dict[int, np.ndarray]()
    for part in p.parts:  # an op may be several kernels
        of[part.index] = of.get(part.index, 0.0) + part.seconds
    calls = np.stack([sum((of[i] for i in group if i in of), np.zeros(len(p.tokens))) for group in wanted])
    return Calls(calls, p.how, p.parts[0].work.shape[1], p.depth)


def _rung(
    kind: str,
    what: str,
    model: str,
    fingerprint: str,
    quant: str,
    calls: Calls,
    wanted: Sequence[Sequence[int]],
    plan: Plan,
    ex: Executor,
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
