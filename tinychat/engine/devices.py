"""Chooses the executor for a plan: the fastest that can run it on this machine, or else plain tinygrad
("reference")."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable

from tinychat.engine.fit import context_bytes, fit
from tinychat.errors import SLOW, TinychatError
from tinychat.kernels.cpu.compiler import NoCompiler, tinygrad_cc
from tinychat.kernels.cuda import driver
from tinychat.kernels.executor import ExecutorKind, MeasurableExecutor, Weights
from tinychat.kernels.ops import Plan

_WAY_OUT = "this runs on plain tinygrad, some 40 times slower than the CPU kernels; {}"
_OLD = "this CPU has no AVX2 (or is an ARM CPU without dot products): plain C computes, ten times slower than with it"
_REINSTALL = "the compiler that tinychat brings does not work, install it again: pip install --force-reinstall ziglang"

DEVICES: tuple[ExecutorKind, ...] = ("cuda", "cpu", "reference")
OnProgress = Callable[[str, float], None]
"""What is being done, and how much of it is done (0..1)."""


def make_executor(
    plan: Plan, weights: Weights, max_context: int, device: str | None, threads: int | None, progress: OnProgress
) -> tuple[MeasurableExecutor, list[str]]:
    """(executor, notes for the user). `device` None tries CUDA if there is an NVIDIA driver, then the CPU, then plain
    tinygrad; "cuda" of several GPUs the fastest first, "cuda:1" this one alone. A note says why a device was not used,
    and which of several GPUs is.

    Raises TinychatError when `device` does not work or cannot run this plan.
    """
    if device is not None and not re.fullmatch("|".join((*DEVICES, r"cuda:[0-9]{1,3}")), device):
        raise TinychatError(f"device '{device}' is unknown; there are {', '.join(DEVICES)}, and cuda:1 for GPU 1")
    places, notes, way_out = _places(device), list[str](), ""
    for place in places:
        kind, _, number = place.partition(":")
        try:
            if kind != "cuda":  # the CUDA executor checks the memory of its GPU
                needs = fit(plan.nbytes, context_bytes(plan, max_context), max_context)
                if needs.verdict == "does not fit":  # raised before anything large is allocated
                    raise TinychatError(f"not enough memory: {needs.explanation}; take a smaller quant or context")
            executor = _MAKERS[kind](plan, weights, max_context, number, threads, progress)
        except TinychatError as e:
            if place == places[-1]:
                if device and notes:
                    raise TinychatError("; ".join([*notes, f"{place.upper()}: {e}"])) from e
                raise
            notes.append(f"{place.upper()} is not used: {e}")
            if place == "cpu":
                way_out = _WAY_OUT.format(_REINSTALL if isinstance(e, NoCompiler) else "what to change is said above")
        else:
            if number and place != device:
                notes.append(f"{executor.device} is used, {place} of {sum('cuda' in p for p in places)} GPUs")
            old = executor.device.endswith("plain C")
            return executor, notes + [_OLD] * old + [SLOW + way_out] * (place == "reference" and not device)
    raise AssertionError("unreachable: the last place returns or raises")


def _places(device: str | None) -> list[str]:
    """What `device` means, in the order in which it is tried: of several GPUs each by its number."""
    if device not in (None, "cuda"):
        return [device]
    gpus = ["cuda"]
    with contextlib.suppress(OSError, AttributeError, TinychatError):  # said by the executor
        if len(found := driver.gpus()) > 1:
            gpus = [f"cuda:{gpu.number}" for gpu in found]
    return gpus if device else [*(gpus if has_cuda() else ()), "cpu", "reference"]


def has_cuda() -> bool:
    """Whether there is an NVIDIA driver."""
    return driver.exists()


def _cuda(
    plan: Plan, weights: Weights, max_context: int, number: str, threads: int | None, progress: OnProgress
) -> MeasurableExecutor:
    from tinychat.kernels.cuda.executor import CUDAExecutor

    return CUDAExecutor(
        plan,
        weights,
        max_context,
        number=int(number) if number else None,
        progress=lambda fraction: progress("loading weights", fraction),
    )


def _cpu(
    plan: Plan, weights: Weights, max_context: int, number: str, threads: int | None, progress: OnProgress
) -> MeasurableExecutor:
    from tinychat.kernels.cpu.executor import CPUExecutor

    return CPUExecutor(
        plan,
        weights,
        max_context,
        threads=threads,
        notice=lambda line: progress(line, 0.0),
        progress=lambda fraction: progress("loading weights", fraction),
    )


def _reference(
    plan: Plan, weights: Weights, max_context: int, number: str, threads: int | None, progress: OnProgress
) -> MeasurableExecutor:
    device = "CPU" if tinygrad_cc() else "PYTHON"  # PYTHON: an interpreter, without a compiler, at minutes per token
    os.environ.setdefault("DEV", device)  # read when tinygrad is imported
    from tinychat.kernels.tinygrad.executor import ReferenceExecutor

    try:
        return ReferenceExecutor(
            plan, weights, max_context, device=device, progress=lambda f: progress("loading weights", f)
        )
    except RuntimeError as e:
        raise TinychatError(f"tinygrad cannot run here: {e}") from e


_MAKERS: dict[str, Callable[[Plan, Weights, int, str, int | None, OnProgress], MeasurableExecutor]] = {
    "cuda": _cuda,
    "cpu": _cpu,
    "reference": _reference,
}
