"""Chooses the executor for a plan: the fastest that can run it on this machine, or else plain tinygrad
("reference")."""

from __future__ import annotations

import os
from collections.abc import Callable

from tinychat.engine.fit import context_bytes, fit
from tinychat.errors import SLOW, TinychatError
from tinychat.kernels.cpu.compiler import NoCompiler, tinygrad_cc
from tinychat.kernels.cuda import driver
from tinychat.kernels.executor import ExecutorKind, MeasurableExecutor, Weights
from tinychat.kernels.ops import Plan

_WAY_OUT = "this runs on plain tinygrad, some 40 times slower than the CPU kernels; {}"
_REINSTALL = "the compiler that tinychat brings does not work, install it again: pip install --force-reinstall ziglang"

DEVICES: tuple[ExecutorKind, ...] = ("cuda", "cpu", "reference")
OnProgress = Callable[[str, float], None]
"""What is being done, and how much of it is done (0..1)."""


def make_executor(
    plan: Plan, weights: Weights, max_context: int, device: str | None, threads: int | None, progress: OnProgress
) -> tuple[MeasurableExecutor, list[str]]:
    """(executor, notes for the user). `device` None tries CUDA if there is an NVIDIA driver, then the CPU, then plain
    tinygrad; a note says why a device was not used.

    Raises TinychatError when `device` does not work or cannot run this plan.
    """
    if device not in (None, *DEVICES):
        raise TinychatError(f"device '{device}' is unknown; there are {', '.join(DEVICES)}")
    notes: list[str] = []
    way_out = ""
    for name in (device,) if device else DEVICES:
        if device is None and name == "cuda" and not has_cuda():
            continue
        try:
            if name != "cuda":  # the CUDA executor checks the memory of its GPU
                needs = fit(plan.nbytes, context_bytes(plan, max_context), max_context)
                if needs.verdict == "does not fit":  # raised before anything large is allocated
                    raise TinychatError(f"not enough memory: {needs.explanation}; take a smaller quant or context")
            executor = _MAKERS[name](plan, weights, max_context, threads, progress)
            return executor, notes + [SLOW + way_out] * (name == "reference" and not device)
        except TinychatError as e:
            if device or name == "reference":
                raise
            notes.append(f"{name.upper()} is not used: {e}")
            if name == "cpu":
                way_out = _WAY_OUT.format(_REINSTALL if isinstance(e, NoCompiler) else "what to change is said above")
    raise AssertionError("unreachable: reference returns or raises")


def has_cuda() -> bool:
    """Whether there is an NVIDIA driver."""
    return driver.exists()


def _cuda(
    plan: Plan, weights: Weights, max_context: int, threads: int | None, progress: OnProgress
) -> MeasurableExecutor:
    from tinychat.kernels.cuda.executor import CUDAExecutor

    return CUDAExecutor(plan, weights, max_context, progress=lambda fraction: progress("loading weights", fraction))


def _cpu(
    plan: Plan, weights: Weights, max_context: int, threads: int | None, progress: OnProgress
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
    plan: Plan, weights: Weights, max_context: int, threads: int | None, progress: OnProgress
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


_MAKERS: dict[str, Callable[[Plan, Weights, int, int | None, OnProgress], MeasurableExecutor]] = {
    "cuda": _cuda,
    "cpu": _cpu,
    "reference": _reference,
}
