"""tinychat's CPU executor beside llama.cpp and ik_llama.cpp: the same files, machine and thread counts, alternating
runs, medians.

    python -m scripts.bench_peer [--llama PEER] [--ik PEER] [-t THREADS ...] [-n 64] [-p 128 512] [--depth 0]
        [--rounds 3] FILE...

PEER is a folder with the peer's sources, which are built with cmake into PEER/build-bench, or a llama-bench that is
built already. Prints a Markdown table of tok/s with the ratio to the faster peer; nothing else may run meanwhile.
ik_llama.cpp repacks its weights (`-rtr 1`), as tinychat does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np

from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels.cpu.bandwidth import read_bandwidth
from tinychat.kernels.cpu.executor import CPUExecutor, default_threads
from tinychat.kernels.sampling import GREEDY

PEERS = {"llama": (), "ik": ("-rtr", "1")}  # what llama-bench is told more
OFF = ("LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER", "LLAMA_CURL", "LLAMA_OPENSSL", "BUILD_SHARED_LIBS")
QUIET = ("-DCMAKE_C_FLAGS=-w", "-DCMAKE_CXX_FLAGS=-w")  # ik_llama.cpp has 100 MB of warnings
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *QUIET, *(f"-D{name}=OFF" for name in OFF))


def built(peer: Path) -> Path:
    """llama-bench of `peer`. Raises SystemExit where it does not build."""
    if peer.is_file():
        return peer
    build = peer / "build-bench"
    configure = ["cmake", "-S", str(peer), "-B", str(build), *OPTIONS]
    for command in configure, ["cmake", "--build", str(build), "--target", "llama-bench", "-j", str(os.cpu_count())]:
        try:
            status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        except FileNotFoundError:
            raise SystemExit("cmake is not there: install it (pip install cmake), or name a llama-bench") from None
        if status:
            raise SystemExit(f"{peer} does not build (status {status} of {' '.join(command)}): cmake says why above")
    return build / "bin" / "llama-bench"


def ours(
    path: Path, threads: int, prompts: list[int], generate: int, depth: int
) -> Generator[tuple[float, ...], None, None]:
    """Endless runs: tok/s of each prompt, then of decode behind `depth`, each from an empty cache."""
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    context = max(*prompts, depth + generate + 2)
    executor = CPUExecutor(plan, gguf, context, threads)
    ids = np.random.default_rng(0).integers(0, plan.vocab, context).tolist()
    executor.forward(ids[:16], 0, "last")
    try:
        while True:
            speeds = []
            for prompt in prompts:
                start = time.perf_counter()
                executor.forward(ids[:prompt], 0, "last")
                speeds.append(prompt / (time.perf_counter() - start))
            if depth:
                executor.forward(ids[:depth], 0)
            next(executor.decode(ids[depth], depth, GREEDY, []))
            start = time.perf_counter()
            for pos in range(depth + 1, depth + 1 + generate):  # random tokens, as llama-bench takes them
                next(executor.decode(ids[pos], pos, GREEDY, []))
            yield *speeds, generate / (time.perf_counter() - start)
    finally:
        executor.close()


def theirs(command: list[str], prompts: list[int], generate: int, depth: int) -> tuple[float, ...]:
    """The same of one run of llama-bench. Raises SystemExit where it fails."""

    def speeds(*shape: object) -> dict[int, float]:  # tok/s by tokens of the prompt, 0: decode
        done = subprocess.run([*command, *map(str, shape)], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-300:].strip()}")
        rows = json.loads(done.stdout[done.stdout.index("[") :])  # words may stand before them
        return {r["n_prompt"]: r["avg_ts"] for r in rows}

    lengths = ",".join(map(str, prompts))
    if not depth:
        found = speeds("-p", lengths, "-n", generate)
    else:
        found = speeds("-p", lengths, "-n", 0) | speeds("-p", 0, "-n", generate, "-d", depth)
    return tuple(found[n] for n in (*prompts, 0))


def main() -> None:
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("files", nargs="+", type=Path)
    for peer in PEERS:
        arg.add_argument(f"--{peer}", type=Path)
    arg.add_argument("-t", "--threads", type=int, nargs="+", default=[default_threads()])
    arg.add_argument("-n", "--generate", type=int, default=64)
    arg.add_argument("-p", "--prompts", type=int, nargs="+", default=[128, 512])
    arg.add_argument("--depth", type=int, default=0, help="decode behind this many tokens")
    arg.add_argument("--rounds", type=int, default=3)
    a = arg.parse_args()
    peers = {name: built(path) for name in PEERS if (path := getattr(a, name))}
    limits = read_bandwidth(a.threads, rounds=3)
    print(f"medians of {a.rounds} alternating runs, tok/s\n\n| file | threads | what | tinychat |", end="")
    print("".join(f" {name} |" for name in peers), "to the faster | of the memory limit |")
    print("|---" * (6 + len(peers)) + "|")
    for path in a.files:
        gguf = GGUF.open(path)
        bytes_of_token = build_plan(gguf, ModelConfig.from_gguf(gguf)).bytes_per_token(a.depth)
        for threads in a.threads:
            mine, runs = ours(path, threads, a.prompts, a.generate, a.depth), []
            for _ in range(a.rounds):
                run = [next(mine)]
                for name, bench in peers.items():
                    command = [str(bench), "-m", str(path), "-t", str(threads), "-r", "1", "-o", "json", *PEERS[name]]
                    run.append(theirs(command, a.prompts, a.generate, a.depth))
                runs.append(run)
            mine.close()
            whats = [*(f"prompt {n}" for n in a.prompts), f"decode behind {a.depth}"]
            for i, what in enumerate(whats):
                speeds = [statistics.median(run[who][i] for run in runs) for who in range(1 + len(peers))]
                share = f"{bytes_of_token * speeds[0] / 1e9 / limits[threads]:.0%}" if i == len(a.prompts) else ""
                cells = [f"{speed:.1f}" for speed in speeds]
                ratio = f"{speeds[0] / max(speeds[1:]):.2f}" if peers else ""
                print("|", " | ".join([path.stem, str(threads), what, *cells, ratio, share]), "|", flush=True)
    print(f"\nmemory, GB/s by threads: {', '.join(f'{n}: {limit:.1f}' for n, limit in limits.items())}")


if __name__ == "__main__":
    try:
        main()
    except TinychatError as e:
        raise SystemExit(str(e)) from None
