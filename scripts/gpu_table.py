"""The figures of README and docs/cuda.md: tinychat and llama-bench in turn on one GPU, whole models, one table.

    python -m scripts.gpu_table [--llama-bench FILE] [--limit SECONDS] [--lengths N ...] [MODEL:QUANT ...]

Each model is a file of exact shapes and random weights, written to FILES (by default /dev/shm) and removed again.
tinychat measures what `tinychat bench` does, llama.cpp's program its own (-fa 1): prompts of up to 2,048 tokens in two
turns each, of which the table has the mean, then longer ones in one, then llama.cpp's decode behind 16,384. A model
that would take too much of the time that those behind it need ends with its shorter prompts.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.gpu_session import model_file
from tinychat.engine import Engine
from tinychat.measure import bench

MODELS = (  # the most important first
    "glm-4.7-flash:Q4_0",
    "glm-4.7-flash:Q4_K_M",
    "qwen3-30b-a3b:Q4_K_M",
    "deepseek-v2-lite:Q4_0",
    "llama-3.1-8b:Q4_0",
    "youtu-llm-2b:Q4_0",
)
LENGTHS = (16, 64, 512, 2048, 8192, 16384)
FURTHER = {MODELS[0]: (32768,)}
SHORT, DEEP = 2048, 16384  # tokens: prompts up to here have two turns; behind so many llama.cpp decodes, too
DECODED = 64  # tokens
WARM = 1024  # tokens of a prompt in front of llama.cpp's long ones, instead of running each of those twice
HEAD = "model", "prompt", "TTFT", "tok/s by TTFT", "llama.cpp", "ratio", "decode behind it", "llama.cpp", "ratio"

Figures = defaultdict[tuple[str, int], list[float]]  # tok/s of ("prompt" or "decode", tokens), by turn


class Clock:
    """Seconds since the start, and what is left of the limit for the models that are not done."""

    def __init__(self, limit: float, models: int) -> None:
        self.began, self.limit, self.models = time.monotonic(), limit, models
        self.end = 0.0

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def next_model(self) -> None:
        """The model may take as much as two of those behind it."""
        self.end = self.now + 2 * (self.limit - self.now) / (self.models + 1)
        self.models -= 1

    @property
    def left(self) -> float:
        return self.end - self.now

    def say(self, text: str) -> None:
        print(f"# {self.now:.0f} s: {text}", file=sys.stderr, flush=True)


def ours(engine: Engine, lengths: Sequence[int], repeats: int, figures: Figures) -> None:
    """What `tinychat bench` measures: prompts by time to first token, and decode behind them."""
    for n in lengths:
        result = bench.run(engine, n, DECODED, repeats)
        figures["prompt", n].append(n / result.ttft_s)
        figures["decode", n].append(result.decode_tok_s)


def theirs(program: Path | None, path: Path, seconds: float, figures: Figures, *options: object) -> None:
    """llama-bench's averages; none, and why, where there are none within `seconds`."""
    if not program:
        return
    command = [program, "-m", path, "-fa", 1, "-ngl", 99, "-o", "jsonl", *options]
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([str(x) for x in command], stdout=out, stderr=errors, timeout=max(1, seconds))
        out.seek(0)
        for line in out:
            with contextlib.suppress(ValueError):  # the last one may be cut
                rows.append(json.loads(line))
        errors.seek(0)
        if not rows:
            print(f"# llama-bench gave nothing: {errors.read()[-400:]}", file=sys.stderr, flush=True)
    for row in rows:
        what = ("prompt", row["n_prompt"]) if row["n_prompt"] else ("decode", row["n_depth"])
        figures[what].append(row["avg_ts"])


def show(spec: str, lengths: Sequence[int], mine: Figures, peer: Figures) -> None:
    """A line for each length."""
    for n in lengths:
        if not mine["prompt", n]:
            continue
        cells = [spec.replace(":", " "), f"{n:,}"]
        for kind in ("prompt", "decode"):
            own, other = mean(mine[kind, n]), peer[kind, 0 if kind == "decode" and n == LENGTHS[0] else n]
            if kind == "prompt":
                cells.append(f"{1e3 * n / own:.{2 * (n <= SHORT)}f} ms")
            cells.append(f"{own:,.0f}")
            cells += [f"{mean(other):,.1f}", f"{own / mean(other):.2f}"] if other else ["", ""]
        print("|", " | ".join(cells), "|", flush=True)


def measure(spec: str, lengths: Sequence[int], program: Path | None, clock: Clock) -> None:
    """Prints the lines of a model."""
    mine, peer = Figures(list), Figures(list)
    short, long = [n for n in lengths if n <= SHORT], [n for n in lengths if n > SHORT]
    model, quant = spec.split(":")
    path = model_file(model, quant)
    clock.say(f"{path.name} is there")
    try:
        engine = Engine.load(path, max_context=max(lengths) + 2 * DECODED)
        clock.say("loaded")
        for _ in range(2 if short else 0):
            ours(engine, short, 5, mine)
            theirs(program, path, clock.left, peer, "-p", ",".join(map(str, short)), "-n", DECODED, "-r", 2)
        show(spec, short, mine, peer)
        clock.say("prompts in two turns")
        if long and clock.left > 0:
            ours(engine, long, 2, mine)
            listed = ",".join(map(str, (WARM, *long)))
            theirs(program, path, clock.left, peer, "-p", listed, "-n", 0, "-r", 1, "--no-warmup")
            if DEEP in long and clock.left > 0:
                theirs(program, path, clock.left, peer, "-p", 0, "-n", DECODED, "-r", 1, "-d", DEEP)
            show(spec, long, mine, peer)
            clock.say("longer prompts")
        engine.close()
    finally:
        path.unlink()


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("models", nargs="*", default=MODELS)
    args.add_argument("--llama-bench", type=Path)
    args.add_argument("--limit", type=float, default=280.0)
    args.add_argument("--lengths", type=int, nargs="+")
    a = args.parse_args()
    if a.llama_bench and not os.access(a.llama_bench, os.X_OK):
        args.error(f"{a.llama_bench} is no program")
    clock = Clock(a.limit, len(a.models))
    print("|", " | ".join(HEAD), "|\n" + "|---" * len(HEAD) + "|", flush=True)
    for spec in a.models:
        clock.next_model()
        if clock.now < a.limit:
            measure(spec, a.lengths or (*LENGTHS, *FURTHER.get(spec, ())), a.llama_bench, clock)


if __name__ == "__main__":
    main()
