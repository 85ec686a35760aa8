"""tinychat's CPU executor beside llama.cpp: the same files, machine and thread count, alternating runs, medians.

    python scripts/bench_peer.py --llama BUILD_DIR [-t THREADS] [-n 64] [-p 128] [--depth 0] [--rounds 3] FILE...

BUILD_DIR is where llama.cpp was built with `cmake -B build -DGGML_NATIVE=ON && cmake --build build --target
llama-bench`. Prints a Markdown table of tok/s with ratios; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import numpy as np

from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.cpu.bandwidth import read_bandwidth
from tinychat.kernels.cpu.executor import CPUExecutor, default_threads
from tinychat.kernels.sampling import GREEDY


class Ours:
    def __init__(self, path: Path, threads: int, context: int) -> None:
        gguf = GGUF.open(path)
        self.plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
        self.executor = CPUExecutor(self.plan, gguf, context, threads)
        self.ids = np.random.default_rng(0).integers(0, self.plan.vocab, context).tolist()

    def run(self, prompt: int, generate: int, depth: int) -> tuple[float, float]:
        """(prefill, decode) in tok/s: `prompt` tokens, and `generate` tokens behind `depth`, each from an empty
        cache."""
        self.executor.forward(self.ids[:16], 0, "last")
        start = time.perf_counter()
        self.executor.forward(self.ids[:prompt], 0, "last")
        prefill = prompt / (time.perf_counter() - start)
        if depth:
            self.executor.forward(self.ids[:depth], 0)
        steps = self.executor.decode(self.ids[0], depth, GREEDY, [])
        next(steps)
        start = time.perf_counter()
        for _ in zip(range(generate), steps, strict=False):
            pass
        return prefill, generate / (time.perf_counter() - start)


def theirs(bench: Path, path: Path, threads: int, prompt: int, generate: int, depth: int) -> tuple[float, float]:
    command = [bench, "-m", path, "-t", threads, "-r", 1, "-o", "json"]
    shape = ["-p", prompt, "-n", generate] if not depth else ["-p", 0, "-n", generate, "-d", depth]
    rows = json.loads(
        subprocess.run([str(a) for a in [*command, *shape]], capture_output=True, text=True, check=True).stdout
    )
    speed = {bool(r["n_gen"]): r["avg_ts"] for r in rows}
    return speed.get(False, float("nan")), speed[True]


def main() -> None:
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("files", nargs="+", type=Path)
    arg.add_argument("--llama", type=Path, required=True, help="build directory of llama.cpp")
    arg.add_argument("-t", "--threads", type=int, default=default_threads())
    arg.add_argument("-n", "--generate", type=int, default=64)
    arg.add_argument("-p", "--prompt", type=int, default=128)
    arg.add_argument("--depth", type=int, default=0, help="decode behind this many tokens")
    arg.add_argument("--rounds", type=int, default=3)
    a = arg.parse_args()
    bench = a.llama / "bin" / "llama-bench"
    limit = read_bandwidth([a.threads], rounds=3)[a.threads]
    print(
        f"{a.threads} threads, {limit:.1f} GB/s; prompt {a.prompt}, {a.generate} tokens at depth {a.depth}, "
        f"medians of {a.rounds} alternating runs\n"
    )
    print(
        "| file | prefill | llama.cpp | ratio | decode | llama.cpp | ratio | GB/s | of the limit |\n" + "|---" * 9 + "|"
    )
    for path in a.files:
        ours = Ours(path, a.threads, max(a.prompt, a.depth + a.generate + 2))
        runs = [
            (*ours.run(a.prompt, a.generate, a.depth), *theirs(bench, path, a.threads, a.prompt, a.generate, a.depth))
            for _ in range(a.rounds)
        ]
        prefill, decode, their_prefill, their_decode = (statistics.median(r[i] for r in runs) for i in range(4))
        gb = ours.plan.bytes_per_token(a.depth) * decode / 1e9
        print(
            f"| {path.stem} | {prefill:.0f} | {their_prefill:.0f} | {prefill / their_prefill:.2f} | {decode:.1f} "
            f"| {their_decode:.1f} | {decode / their_decode:.2f} | {gb:.1f} | {gb / limit:.0%} |",
            flush=True,
        )
        ours.executor.close()


if __name__ == "__main__":
    main()
