"""Every CUDA kernel of gpu_session's check and verify sets once under compute-sanitizer, on a GPU machine:

    python -m scripts.gpu_sanitize memcheck racecheck initcheck [--limit SECONDS --jobs N --models VARIANT:QUANT ...]

Each model runs one step of every form: prompts of each width, decode steps of each depth, a masked one, verify steps of
each number of tokens. The kernels are compiled first, without the tool. The models are divided over processes so that
few kernels are in two of them, since a tool's time goes into each kernel that a process loads: a process keeps those
that it has. One line per tool says what ran, what was found, and which models were left at the limit. `none` runs them
without a tool.
"""

import argparse
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path

import numpy as np

from scripts.gpu_session import CHECKED, FILES, SAMPLINGS, VERIFIED, randomise_cache
from tests.support import tiny
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.cuda import executor, load
from tinychat.kernels.cuda.builder import Builder
from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.executor import CUDAExecutor
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.prefill import SIZES, Chip, Prefill
from tinychat.kernels.cuda.step import decode, depths
from tinychat.kernels.cuda.verify import Verifying
from tinychat.kernels.sampling import GREEDY

CONTEXT = 2112  # beyond the position from which on latent attention is of its last kind
POSITIONS = (9, 600, 2060)  # one in each kind
WIDTHS = (9, 40, 200)  # tokens of prompts, one for each kind of graph
LONGEST = 130  # tokens through the kernels for the longest prompts: two tiles, the second nearly empty
CHIP = Chip(warpgroups=True, max_shared=227 << 10)  # of the H200: what is compiled ahead
MODELS = tuple(dict.fromkeys((*CHECKED, *VERIFIED)))
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck", "none")
EXPECTED = re.compile(r"ran |========= (COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY: 0 )")  # lines of a clean run


class OneGPU(GPU):
    """Models of a process share the kernels that they have loaded."""

    programs: dict[str, object] = {}
    binaries: dict[str, bytes] = {}

    def __init__(self) -> None:
        super().__init__()
        self._programs, self._binaries = self.programs, self.binaries


def kernels(path: Path) -> dict[str, Launch]:
    """The launches of one step of every form by their source."""
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    builder = Builder(plan, Layout(plan, {name: t.nbytes for name, t in gguf.tensors.items()}), CONTEXT)
    kinds = depths(builder, clusters=True)
    prompts = (Prefill(builder, n, CHIP) for n in (*SIZES, CONTEXT))
    parts = [*(prompt.layers() for prompt in prompts), Prefill(builder, SIZES[1], CHIP).head()]
    parts += [[launch for launch, _ in decode(builder, kind)] for kind in kinds.values()]
    verifying = Verifying(builder, CHIP, kinds)  # type: ignore[arg-type]  # of a GPU it reads the same field
    parts += [verifying.launches(columns, pos) for columns in verifying.counts for pos in kinds]
    return {launch.source(): launch for launch in chain.from_iterable(parts)}


def divided(models: dict[str, dict[str, Launch]], jobs: int) -> list[list[str]]:
    """The models in `jobs` lists: each goes, the largest first, to where the fewest kernels are after it."""
    lists: list[list[str]] = [[] for _ in range(jobs)]
    loaded: list[set[str]] = [set() for _ in range(jobs)]
    for model in sorted(models, key=lambda m: -len(models[m])):
        i = min(range(jobs), key=lambda i: len(loaded[i] | models[model].keys()) + 10 * len(lists[i]))
        lists[i].append(model)
        loaded[i] |= models[model].keys()
    return lists


def compile_all(launches: list[Launch], jobs: int) -> None:
    """Puts the kernels into the cache of compiled ones, in as many processes."""

    def part(i: int) -> None:
        GPU().compile(launches[i::jobs])

    fork = multiprocessing.get_context("fork")
    children = [fork.Process(target=part, args=(i,)) for i in range(jobs)]
    for child in children:
        child.start()
    for child in children:
        child.join()


def step_of_every_form(path: Path) -> None:
    """One launch at least of every kernel of the model."""
    gguf = GGUF.open(path)
    e = CUDAExecutor(build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, CONTEXT)
    rng = np.random.default_rng(7)
    randomise_cache(e)
    for n in WIDTHS:
        e.forward(rng.integers(0, 300, n).tolist(), 300, "all" if n == WIDTHS[1] else "last")
    ids = rng.integers(0, 300, LONGEST).tolist()
    e._place(ids, 300, GREEDY, LONGEST)
    e._prefill[max(e._prefill)](LONGEST, 300 + LONGEST)
    everything = np.full(-(-e.plan.vocab // 32), 2**32 - 1, np.uint32)
    for pos in POSITIONS:
        seen = rng.integers(0, 300, pos + 1).tolist()
        for columns in (1, *e._verifying.counts):
            list(e.verify(seen[-1], [0] * (columns - 1), pos, SAMPLINGS["seeded"], seen))
    list(e.verify(seen[-1], (), pos, GREEDY, seen, lambda: everything))
    e.close()


def run(models: list[str]) -> None:
    """Writes and runs the models; a line for each."""
    executor.GPU = OneGPU  # type: ignore[misc]
    load.UPLOAD_BYTES, load.UPLOADS = 1 << 20, 2
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        for model in models:
            began = time.perf_counter()
            step_of_every_form(tiny.write(Path(folder) / "tiny.gguf", *model.split(":")))
            print(f"ran {model} {time.perf_counter() - began:.1f} s", flush=True)


def sanitize(tool: str, lists: list[list[str]], end: float) -> bool:
    """Runs a process under the tool for each list until the time `end`, and prints what it found."""
    began, found = time.time(), shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = [] if tool == "none" else [found, "--tool", tool, "--print-limit", "5"]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(i) for i in range(len(lists))]
        children = [
            subprocess.Popen(
                [*options, sys.executable, "-u", "-m", "scripts.gpu_sanitize", "--run", *models],
                stdout=output.open("wb"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for models, output in zip(lists, outputs)
        ]
        for child in children:
            try:
                child.wait(max(0.1, end - time.time()))
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        texts = [output.read_text(errors="replace") for output in outputs]
    ran = dict(re.findall(r"^ran (\S+) (\S+) s$", "\n".join(texts), re.MULTILINE))
    left = [name for name in chain.from_iterable(lists) if name not in ran]
    reports = [line for text in texts for line in text.splitlines() if line and not EXPECTED.match(line)]
    print(
        f"{tool}: {len(ran)} models ran within {time.time() - began:.0f} s, "
        f"{f'{len(reports)} lines of reports' if reports else 'nothing reported'}; left: {' '.join(left) or 'none'}",
        "seconds: " + ", ".join(f"{name} {seconds}" for name, seconds in ran.items()),
        *reports[:60],
        sep="\n",
        flush=True,
    )
    return not left and not reports


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("tools", nargs="*", choices=[*TOOLS, []])
    args.add_argument("--models", nargs="*", default=MODELS)
    args.add_argument("--jobs", type=int, default=14)
    args.add_argument("--limit", type=float, default=600)
    args.add_argument("--run", nargs="*")
    a = args.parse_args()
    if a.run:
        return run(a.run)
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        models = {m: kernels(tiny.write(Path(folder) / "tiny.gguf", *m.split(":"))) for m in a.models}
    lists = [models for models in divided(models, a.jobs) if models]
    launches = {source: launch for each in models.values() for source, launch in each.items()}
    compile_all(list(launches.values()), a.jobs)
    print(
        f"{len(launches)} kernels of {len(models)} models, compiled within {time.time() - began:.0f} s; "
        f"{sum(len(set().union(*(models[m] for m in part))) for part in lists)} loaded by {len(lists)} processes",
        flush=True,
    )
    good = [sanitize(tool, lists, began + a.limit) for tool in a.tools]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
