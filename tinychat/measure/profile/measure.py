"""Measures decode steps of a loaded model; the figures are medians over the steps."""

from __future__ import annotations

import json
import os
import shlex
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import numpy as np

from tinychat.engine.devices import OnProgress
from tinychat.engine.engine import Engine
from tinychat.engine.memory_limit import limit_of
from tinychat.errors import printable
from tinychat.files import replace_file
from tinychat.kernels.ops import Op
from tinychat.kernels.profile import Kernel, Part, StepProfile, category_of, name_of, quant_of, shape_of
from tinychat.measure.bench import prompt
from tinychat.measure.lock import machine_lock
from tinychat.measure.profile.flags import find
from tinychat.measure.profile.report import REST, SAMPLING, STALLS, WAITING, OpTime, Profile
from tinychat.measure.profiles import profiles_dir
from tinychat.measure.results import Conditions


def profile(
    engine: Engine,
    steps: int = 10,
    report: OnProgress | None = None,
    stop: threading.Event | None = None,
    *,
    name: str = "",
    wait: bool = True,
) -> Profile:
    """Measures `steps` greedy tokens after a short prompt; the KV cache is restored afterwards.

    Holds the machine's benchmark lock and writes the raw figures beside the report. Raises TinychatError: a context
    too small, another benchmark runs and not `wait`, `stop` was set.
    """
    with machine_lock(report, stop, wait=wait), engine.cache_kept():
        if report:
            report("measuring", 0.0)
        engine.stats.limit_gb_s = limit_of(engine.executor, thorough=True)
        ids = prompt(engine, min(32, max(1, engine.info.max_context // 4)), 0)
        engine.executor.forward(ids[:-1], 0) if len(ids) > 1 else None
        measured = engine.executor.profile(ids[-1], len(ids) - 1, steps)
    found = explain(measured, engine, name or engine.info.name)
    try:
        found.files.append(str(_save(measured, found)))
    except OSError as e:
        found.deeper.append(f"the raw figures are not kept: {profiles_dir()}: {(e.strerror or str(e)).lower()}")
    return found


def explain(p: StepProfile, engine: Engine, name: str) -> Profile:
    """The report of what was measured."""
    info, limit, ops = engine.info, engine.stats.limit_gb_s, engine.plan.ops
    plain, together = float(np.median(p.plain)), p.how == "in the batch"
    token = float(np.median(p.tokens)) if together else plain
    alone = sum(
        float(np.median(part.seconds)) for part in p.parts
    )  # medians, because a disturbance hits only some runs of a kernel
    base = token if together else alone or token
    rows = sorted(_rows(p, ops, base, limit), key=lambda r: -r.seconds)
    waited = sum(r.waited for r in rows)
    sampling = float(np.median(p.sampling))
    parts = sum((part.seconds for part in p.parts), np.zeros(len(p.tokens)))
    # times of kernels that run alone do not add up to a token, so that no remainder can be computed
    rest = (max(0.0, float(np.median(p.tokens - parts - p.sampling))), token) if together else (0.0, 0.0)
    nbytes, calls = engine.plan.bytes_per_token(p.depth), sum(part.calls for part in p.parts)
    gb_s = nbytes / plain / 1e9
    work, even = alone, alone
    if together:
        work, even = (float(np.median(sum(f(part.work, axis=1) for part in p.parts))) for f in (np.max, np.mean))
    run = Conditions.now(name, info.fingerprint, info.device, p.parts[0].work.shape[1], limit)
    made = Profile(
        **vars(run),
        cores=p.cores,
        how=p.how,
        steps=len(p.tokens),
        depth=p.depth,
        token_s=plain,
        fastest_s=float(p.plain.min()),
        slowest_s=float(p.plain.max()),
        tok_s=1 / plain,
        bytes_per_token=nbytes,
        gb_s=gb_s,
        limit_share=run.share(gb_s),
        clocks=token / plain - 1,
        explained=float(np.median((parts + p.sampling) / p.tokens)) if together else (alone + sampling) / plain,
        kernels=calls,
        batches=[
            {"name": b.name, "kernels": b.kernels, "seconds": float(np.median(b.seconds)), "spread": _spread(b.seconds)}
            for b in p.batches
        ],
        overhead_s=max(0.0, token - sampling - work) / max(1, calls),
        first_s=list(p.first),
        caches=[asdict(c) for c in p.caches],
        rows=rows,
        categories=_categories(rows, waited, sampling, *rest),
        waits=[
            float(np.median(sum(part.wait[:, t] for part in p.parts) / p.tokens))
            for t in range(p.parts[0].wait.shape[1])
        ],
        uneven=(work - even) / token,
        deeper=list(p.deeper),
    )
    made.flags.extend(find(made, p))
    if rows:
        made.deeper.extend(_commands(name, made, engine.executor.kind))
    return made


def _rows(p: StepProfile, ops: Sequence[Op], token: float, limit: float) -> Iterable[OpTime]:
    groups: dict[tuple[str, ...], list[Part]] = {}
    for part in p.parts:
        op = ops[part.index] if part.index >= 0 else None
        key = (
            part.name,
            *((name_of(op), shape_of(op), quant_of(op), category_of(op)) if op else ("", "", "", part.category)),
        )
        groups.setdefault(key, []).append(part)
    for (name, op_name, shape, quant, category), parts in groups.items():
        if p.how == "alone":
            seconds = sum(float(np.median(q.seconds)) for q in parts)
        else:
            seconds = float(np.median(sum(q.seconds for q in parts)))
        work = sum(q.work for q in parts)
        nbytes = sum(q.nbytes for q in parts)
        gb_s = nbytes / seconds / 1e9 if seconds else 0.0
        yield OpTime(
            name,
            op_name,
            shape,
            quant,
            category,
            sum(q.calls for q in parts),
            seconds,
            float(np.median(sum(q.waited for q in parts))),
            seconds / token,
            nbytes,
            gb_s,
            gb_s / limit if limit else 0.0,
            min(q.tasks for q in parts),
            float(np.median(work.max(1) / np.maximum(work.sum(1), 1e-12))),  # type: ignore[union-attr]
        )


def _categories(
    rows: Sequence[OpTime], waited: float, sampling: float, outside: float, token: float
) -> dict[str, float]:
    """Seconds by category, the largest first. The medians of the rows omit disturbances that hit another op in each
    step; the rest of the token's time is a category of its own."""
    found: dict[str, float] = {}
    for r in rows:
        found[r.category] = found.get(r.category, 0.0) + r.seconds - r.waited
    found[WAITING], found[SAMPLING] = waited, found.get(SAMPLING, 0.0) + sampling
    found[REST] = outside
    if (stalls := token - sum(found.values())) > 0.02 * token:
        found[STALLS] = stalls
    return dict(sorted(((k, v) for k, v in found.items() if v), key=lambda item: -item[1]))


def _spread(seconds: np.ndarray) -> float:
    """Half of the difference between the quartiles, as a share of the median."""
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / 2 / middle)


def _commands(name: str, r: Profile, device: str) -> list[str]:
    """Commands that show more about the slowest row."""
    model = f"{shlex.quote(printable(name, newlines=False))} --device {device}"
    return [f"tinychat kernels {model} --source {r.rows[0].name}", f"tinychat bench {model} --block"]


KEPT = 50  # profiles on the disk


def _save(p: StepProfile, r: Profile) -> Path:
    """Writes every measured step of every part as JSON; returns the file. Raises OSError."""
    safe = "".join(c if c.isalnum() or c in "-._" else "-" for c in r.model)[:60]
    path = profiles_dir() / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}-{safe}.json"
    raw = {
        "report": r.as_dict(),
        "tokens": p.tokens.tolist(),
        "plain": p.plain.tolist(),
        "sampling": p.sampling.tolist(),
        "parts": [
            {
                "name": q.name,
                "op": q.index,
                "bytes": q.nbytes,
                "calls": q.calls,
                "work": q.work.tolist(),
                "wait": q.wait.tolist(),
            }
            for q in p.parts
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(raw).encode())
    for old in sorted(path.parent.glob("*.json"))[:-KEPT]:  # their names begin with the date
        old.unlink(missing_ok=True)
    return path


def kernels(engine: Engine) -> list[Kernel]:
    """The kernels of a decode step on this device."""
    return engine.executor.kernels()
