"""Every CUDA kernel of gpu_session's check and verify sets once under compute-sanitizer, on a GPU machine:

    python -m scripts.gpu_sanitize memcheck racecheck initcheck [--limit SECONDS --jobs N --models VARIANT:QUANT ...]

Each model runs one step of every form (prompts of each width, decode steps of each depth, verify steps and drafts of
each number of tokens), every kernel once. The kernels are compiled first, without the tool. The models are divided over
processes so that few kernels are in two of them, since a tool's time goes into each kernel that a process loads: a
process keeps those that it has. One line per tool says what ran, what was found, and which models were left at the
limit. `none` runs them without a tool.
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
from dataclasses import dataclass
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
from tinychat.kernels.cuda.verify import cycles, drafting, verifying
from tinychat.kernels.ops import Plan

CONTEXT = 2112  # beyond the position from which on latent attention is of its last kind
PROMPT_AT = 300  # position of prompts
LONGEST = 130  # tokens of a prompt, at most: two tiles, the second nearly empty
CHIP = Chip(warpgroups=True, max_shared=227 << 10)  # of the H200: what is compiled ahead
MODELS = tuple(dict.fromkeys((*CHECKED, *VERIFIED, "deepseek2_nextn:Q4_K_M")))
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck", "none")
EXPECTED = re.compile(r"ran |========= (COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY: 0 )")  # lines of a clean run


class OneGPU(GPU):
    """Models of a process share the kernels that they have loaded."""

    programs: dict[str, object] = {}
    binaries: dict[str, bytes] = {}

    def __init__(self) -> None:
        super().__init__()
        self._programs, self._binaries = self.programs, self.binaries


@dataclass(frozen=True)
class Form:
    """The launches of one kind of step, of `count` tokens at position `pos`."""

    launches: list[Launch]
    pos: int
    count: int


def forms(plan: Plan, weights: GGUF) -> list[Form]:
    """Every kind of step that an executor has for the plan."""
    builder = Builder(plan, Layout(plan, {name: t.nbytes for name, t in weights.tensors.items()}), CONTEXT)
    kinds, mtp = depths(builder, True, plan.layers), plan.mtp
    prompts = {n: Prefill(builder, n, CHIP) for n in (*SIZES, CONTEXT)}
    out = [Form(p.layers(), PROMPT_AT, min(n - 3, LONGEST)) for n, p in prompts.items()]
    out.append(Form(prompts[SIZES[1]].head(plan.head), PROMPT_AT, SIZES[1] - 3))
    out += [Form([launch for launch, _ in decode(builder, kind)], pos + 9, 1) for pos, kind in kinds.items()]
    steps = [(verifying(builder, CHIP, kinds), kinds)]
    if mtp:
        out += [Form(p.mtp(), PROMPT_AT, min(n - 3, LONGEST)) for n, p in prompts.items()]
        drafts = depths(builder, True, [mtp.layer])
        steps += [(drafting(builder, CHIP, drafts), drafts), (cycles(builder, CHIP, kinds, drafts), kinds)]
    return out + [Form(s.launches(n, pos), pos + 9, n) for s, ks in steps for n in s.counts for pos in ks]


def kernels(path: Path) -> dict[str, Launch]:
    """The launches of all forms by their source."""
    gguf = GGUF.open(path)
    every = forms(build_plan(gguf, ModelConfig.from_gguf(gguf), mtp=True), gguf)
    return {launch.source(): launch for launch in chain.from_iterable(form.launches for form in every)}


def divided(models: dict[str, dict[str, Launch]], jobs: int) -> list[list[str]]:
    """The models in `jobs` lists: each goes, the largest first, to where the fewest kernels are after it."""
    lists: list[list[str]] = [[] for _ in range(jobs)]
    loaded: list[set[str]] = [set() for _ in range(jobs)]
    for model in sorted(models, key=lambda m: -len(models[m])):
        i = min(range(jobs), key=lambda i: len(loaded[i] | models[model].keys()) + 10 * len(lists[i]))
        lists[i].append(model)
        loaded[i] |= models[model].keys()
    return [models[::-1] for models in lists]  # small ones first: where time runs out, more have run


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


def every_kernel(path: Path) -> None:
    """Runs each form, but of its launches those alone whose kernel has not run yet: racecheck needs long for each."""
    gguf = GGUF.open(path)
    plan, ran = build_plan(gguf, ModelConfig.from_gguf(gguf), mtp=True), set[str]()
    e = CUDAExecutor(plan, gguf, CONTEXT)
    rng = np.random.default_rng(7)
    randomise_cache(e)
    e._upload_penalties(SAMPLINGS["seeded"])
    for form in forms(plan, gguf):
        seen = rng.integers(0, 300, form.pos + form.count).tolist()
        e._place(seen, 0, SAMPLINGS["seeded"], form.count)
        new = dict[str, Launch]()
        for launch in form.launches:
            if (source := launch.source()) not in ran:
                new.setdefault(source, launch)
        ran |= new.keys()
        e.gpu.sequence(list(new.values()))(form.count, form.pos + form.count)
        e.gpu.synchronize()
    e.close()


def run(models: list[str]) -> None:
    """Writes and runs the models; a line for each."""
    executor.GPU = OneGPU  # type: ignore[misc]
    load.UPLOAD_BYTES, load.UPLOADS = 1 << 20, 2
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        for model in models:
            began = time.perf_counter()
            every_kernel(tiny.write(Path(folder) / "tiny.gguf", *model.split(":")))
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
