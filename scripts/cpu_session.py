"""Checks and times the CPU executor on a machine with many cores or with AMX. Needs numpy, gguf and a C compiler (the
ziglang package). `python3 -m scripts.cpu_session` and:

check: prompts in AMX tiles against prompts of one token each, bit for bit but where there are experts, and against
    vectors, near them in the first tokens (behind a choice of another expert all differ); every quant type
speed MODEL QUANT [--layers N --threads T ... --lengths N ... --tokens N]: prompt and decode tok/s (exact shapes, random
    weights), in tiles where the machine has them and in vectors
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import numpy as np

from tests.support import shapes, tiny
from tests.support.blocks import MODEL_QUANTS
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.cpu.executor import CPUExecutor
from tinychat.kernels.cpu.library import Library
from tinychat.kernels.sampling import GREEDY

FILES = Path(os.environ.get("FILES", "/dev/shm"))
NATIVE = ("-march=native",)
VECTORS = (*NATIVE, "-DTILES=0")  # prompts as words
ROUNDS = 3
NEAR = 1e-3  # relative L2 of the median token; both round weights and columns


def executor(path: Path, threads: int, context: int, flags: tuple[str, ...]) -> CPUExecutor:
    gguf = GGUF.open(path)
    return CPUExecutor(build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, context, threads, flags=flags)


def check(threads: int) -> bool:
    """Prints a line per model; False where a logit of a prompt depends on how it is divided, or one of the first is too
    far from that of the vectors."""
    good, path = True, FILES / "tiny.gguf"
    ids = np.random.default_rng(3).integers(0, tiny.VOCAB, 300).tolist()
    for quant in MODEL_QUANTS:
        for variant in ("llama", "deepseek2_glm"):
            tiny.write(path, variant, quant)
            logits, devices = list[np.ndarray](), list[str]()
            for flags, step in ((NATIVE, 300), (NATIVE, 1), (VECTORS, 300)):
                ex = executor(path, threads, 320, flags)
                parts = [ex.forward(ids[i : i + step], i, "all") for i in range(0, len(ids), step)]
                logits.append(np.concatenate([part for part in parts if part is not None]))
                devices.append(ex.device)
                ex.close()
            prompt, single, vectors = logits
            away = float(np.median((np.linalg.norm(prompt - vectors, axis=1) / np.linalg.norm(vectors, axis=1))[:64]))
            fine = away <= NEAR and (np.array_equal(prompt, single) or variant != "llama")
            print("ok " if fine else "BAD", f"{variant:14} {quant:6} {devices[0]} {away:.1e} from vectors", flush=True)
            good &= fine
    return good


def speed(path: Path, threads: list[int], lengths: list[int], tokens: int) -> None:
    """Prints a line for each number of threads and form of the products: medians of ROUNDS runs in tok/s."""
    forms = {Library(flags).simd: flags for flags in (VECTORS, NATIVE)}
    for n in threads:
        for simd, flags in forms.items():
            ex = executor(path, n, max(lengths) + tokens + 1, flags)
            ids = np.random.default_rng(5).integers(0, ex.plan.vocab, max(lengths)).tolist()
            ex.forward(ids[:16], 0)
            prompts, steps = dict[int, list[float]](), list[float]()
            for _ in range(ROUNDS):
                for length in lengths:
                    began = time.perf_counter()
                    ex.forward(ids[:length], 0, "last")
                    prompts.setdefault(length, []).append(length / (time.perf_counter() - began))
                stepper = ex.decode(ids[0], lengths[0], GREEDY, [])
                next(stepper)
                began = time.perf_counter()
                for _ in range(tokens):
                    next(stepper)
                steps.append(tokens / (time.perf_counter() - began))
            ex.close()
            figures = [f"prompt {length} {statistics.median(runs):.1f}" for length, runs in prompts.items()]
            print(f"{n} threads, {simd}: {', '.join(figures)}, decode {statistics.median(steps):.1f} tok/s", flush=True)


def main() -> None:
    args = argparse.ArgumentParser(prog="python3 -m scripts.cpu_session")
    modes = args.add_subparsers(dest="mode", required=True)
    modes.add_parser("check")
    mode = modes.add_parser("speed")
    mode.add_argument("model", choices=shapes.SHAPES)
    mode.add_argument("quant")
    mode.add_argument("--layers", type=int)
    mode.add_argument("--threads", type=int, nargs="+", default=[os.cpu_count() or 1])
    mode.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    mode.add_argument("--tokens", type=int, default=32)
    a = args.parse_args()
    if a.mode == "check":
        raise SystemExit(not check(4))
    path = FILES / f"{a.model}-{a.quant}-{a.layers or 'all'}.gguf"
    if not path.exists():
        shapes.write(path, a.model, a.quant, a.layers)
    print(f"# {path}, {path.stat().st_size / 1e9:.2f} GB")
    speed(path, a.threads, a.lengths, a.tokens)


if __name__ == "__main__":
    main()
