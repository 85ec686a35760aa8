"""The CUDA kernels of gpu_session's check and verify sets under compute-sanitizer, on a GPU machine:

    python -m scripts.gpu_sanitize memcheck initcheck racecheck [--limit SECONDS --jobs N --models VARIANT:QUANT ...]
        [--of-each-kind N] [--done FILE] [--ahead]

Each model runs one step of every form (prompts of each width, decode steps of each depth, verify steps and drafts of
each number of tokens). Under memcheck and initcheck every model runs all of it, on its weights; the models are divided
over processes so that few kernels are in two of them, since a tool's time goes into each kernel that a process loads.
racecheck, which logs every access of shared memory, runs each kernel once in all, on memory of zeros: which accesses
are made depends on the kernel, not on the values. `--of-each-kind N` leaves it with N kernels of each
kind (file, type, size of block and cluster, number of columns, and set of options), and the others with the models
that have them.

Models are taken in rounds, those with the most kinds first. In each round the kernels are compiled without a tool;
then a few lines per tool say what ran, where the time went and what was found. Everything ends at the limit. FILE has
a line for each kernel that ran clean under a tool, a digest of its source without comments: what is in it is left
out, also when it comes from another session or tree, and what runs clean is added. `none` runs all models without a
tool. `--ahead` compiles what is due and runs nothing: that needs no GPU, and the cache of compiled kernels can be
carried to one. The compute-sanitizer on the PATH should be of 2026.3 or later (package nvidia-cuda-sanitizer-api):
older ones report mbarriers whose accesses are in order.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence, Set
from ctypes import c_size_t, c_ubyte, c_uint64
from dataclasses import dataclass
from hashlib import sha1
from itertools import chain
from multiprocessing.pool import Pool
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from scripts.gpu_session import CHECKED, FILES, SAMPLINGS, VERIFIED, randomise_cache
from tests.support import tiny
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.cuda import binaries, executor, load
from tinychat.kernels.cuda.builder import Builder
from tinychat.kernels.cuda.device import GPU, LoadedKernel
from tinychat.kernels.cuda.driver import check
from tinychat.kernels.cuda.executor import CUDAExecutor
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.prefill import SIZES, Chip, Prefill
from tinychat.kernels.cuda.step import decode, depths
from tinychat.kernels.cuda.verify import cycles, drafting, verifying
from tinychat.kernels.ops import Plan

CONTEXT = 2112  # beyond the position from which on latent attention is of its last kind
PROMPT_AT = 300  # position of prompts
LONGEST = 130  # tokens of a prompt, at most: two tiles, the second nearly empty
CHIP, ARCH = Chip(warpgroups=True, max_shared=227 << 10), "sm_90a"  # of the H200
MODELS = tuple(dict.fromkeys((*CHECKED, *VERIFIED, "deepseek2_nextn:Q4_K_M")))
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck", "none")
EXPECTED = re.compile(r"(ran|did|spent) |========= (COMPUTE-SANITIZER|(ERROR|RACECHECK) SUMMARY: 0 )")  # of a clean run
CUT = re.compile(r"========= (Error: process didn't terminate|    The application may|Target application)")  # killed
ROUTING = ("router.cu", "group_pairs.cu")  # experts' kernels have nothing to do without them
BRANCHES = re.compile(r"COLUMNS = \d+|\w+ = true")  # of the constants, those that change what a kernel does most
COMMENT = re.compile(r"\s*//.*")
CLEAN = " SUMMARY: 0 "  # a tool's last line, where it found nothing
PIECE = 16  # kernels that a process compiles at a time
ROUND = 2  # models of a process between two looks at what has run; each costs a start of it under each tool
STARTED = 20_000  # threads of a kernel that cost as much as its launch, roughly
CLOSING = 5.0  # seconds before the end in which no kernel begins: a tool's own end takes that long
LEAST = 10.0  # seconds left with which a tool is begun: its processes take that long to their first kernel

Kind = tuple[str | int, ...]


class OneGPU(GPU):
    """Models of a process share the kernels that they have loaded. A step's kernels are loaded when it runs."""

    programs: dict[str, LoadedKernel] = {}
    binaries: dict[str, bytes] = {}
    zeros = False  # memory is zeros, not what was left there

    def __init__(self, number: int | None = None) -> None:
        super().__init__(number)
        self._programs, self._binaries = self.programs, self.binaries

    def compile(self, launches: Iterable[Launch]) -> None:
        return None

    def program(self, launch: Launch) -> LoadedKernel:
        super().compile([launch])
        return super().program(launch)

    def allocate(self, name: str, nbytes: int) -> None:
        super().allocate(name, nbytes)
        if self.zeros:
            self.enter()
            check(self.cuda.cuMemsetD8_v2(c_uint64(self.address(name)), c_ubyte(0), c_size_t(nbytes)))

    def sequence(
        self, launches: Sequence[Launch], names: dict[str, str] | None = None, *, few: bool = False
    ) -> Callable[..., None]:
        return lambda *args: super(OneGPU, self).sequence(launches, names, few=few)(*args)

    def graph(self, launches: Sequence[Launch], chained: bool = True, count: int = 1, keys: int = 1) -> Graph:
        return cast(Graph, SimpleNamespace(kernels=len(launches)))  # never launched


@dataclass(frozen=True)
class Form:
    """The launches of one kind of step, of `count` tokens at position `pos`."""

    launches: list[Launch]
    pos: int
    count: int


def forms(plan: Plan, weights: GGUF) -> list[Form]:
    """Every kind of step that an executor has for the plan."""
    layout = Layout(plan, {name: t.nbytes for name, t in weights.tensors.items()})
    builder = Builder(plan, layout, CONTEXT, CHIP.warpgroups)
    gpu = cast(GPU, CHIP)  # of which the shared memory alone is asked
    kinds, mtp = depths(builder, True, plan.layers), plan.mtp
    prompts = [Prefill(builder, n, CHIP) for n in (*SIZES, CONTEXT)]
    prompts += [Prefill(builder, p.tokens, CHIP, fresh=True) for p in prompts if p.absorbs]
    out = [Form(p.layers(), PROMPT_AT, min(p.tokens - 3, LONGEST)) for p in prompts]
    out.append(Form(prompts[1].head(plan.head), PROMPT_AT, SIZES[1] - 3))
    out += [Form([launch for launch, _ in decode(builder, kind)], pos + 9, 1) for pos, kind in kinds.items()]
    steps = [(verifying(builder, gpu, kinds), kinds)]
    if mtp:
        out += [Form(p.mtp(), PROMPT_AT, min(p.tokens - 3, LONGEST)) for p in prompts]
        drafts = depths(builder, True, [mtp.layer])
        steps += [(drafting(builder, gpu, drafts), drafts), (cycles(builder, gpu, kinds, drafts), kinds)]
    return out + [Form(s.launches(n, pos), pos + 9, n) for s, ks in steps for n in s.counts for pos in ks]


def written(model: str, folder: str) -> GGUF:
    variant, quant = model.split(":")
    return GGUF.open(tiny.write(Path(folder) / f"{model}.gguf", variant, quant))


def planned(gguf: GGUF) -> tuple[Plan, list[Form]]:
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf), mtp=True)
    return plan, forms(plan, gguf)


def digest(launch: Launch) -> str:
    """Of what is compiled: comments are none of it."""
    return sha1(COMMENT.sub("", launch.source()).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Kernel:
    """What decides where a kernel runs."""

    kind: Kind
    threads: int  # of all blocks of its largest launch


def kernels(model: str) -> dict[str, Kernel]:
    """The kernels of all forms by their source's digest."""
    out: dict[str, Kernel] = {}
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        for form in planned(written(model, folder))[1]:
            for x in form.launches:
                threads = int(np.prod(x.grid_of(form.count, form.pos + form.count))) * x.threads
                key, kind = digest(x), (x.file, x.kind, x.threads, x.cluster, *BRANCHES.findall(x.constants))
                if key not in out or out[key].threads < threads:
                    out[key] = Kernel(kind, threads)
    return out


def divided(models: dict[str, dict[str, Kernel]], jobs: int) -> list[list[str]]:
    """The models in `jobs` lists: each goes, the largest first, to where the fewest kernels are after it."""
    lists: list[list[str]] = [[] for _ in range(jobs)]
    loaded: list[set[str]] = [set() for _ in range(jobs)]
    for model in sorted(models, key=lambda m: -len(models[m])):
        i = min(range(jobs), key=lambda i: len(loaded[i] | models[model].keys()) + 10 * len(lists[i]))
        lists[i].append(model)
        loaded[i] |= models[model].keys()
    return [models[::-1] for models in lists if models]  # small ones first: where time runs out, more have run


def covering(
    models: dict[str, dict[str, Kernel]], of_each_kind: int = 1 << 30, done: Set[str] = frozenset()
) -> dict[str, dict[str, Kernel]]:
    """For each model those of its kernels that no earlier one has and that are not `done`: the model with the most goes
    first. At most `of_each_kind` of a kind, with those that are done."""
    out: dict[str, dict[str, Kernel]] = {}
    every = join(models.values())
    taken, count = set(done), Counter(kernel.kind for key, kernel in every.items() if key in done)

    def new(model: str) -> dict[str, Kernel]:
        within, found = count.copy(), {}
        for key, kernel in models[model].items():
            if key not in taken and within[kernel.kind] < of_each_kind:
                within[kernel.kind] += 1
                found[key] = kernel
        return found

    for _ in models:
        model = max((m for m in models if m not in out), key=lambda m: len(new(m)))
        out[model] = new(model)
        taken |= out[model].keys()
        count.update(kernel.kind for kernel in out[model].values())
    return {model: found for model, found in out.items() if found}


def join(parts: Iterable[dict[str, Kernel]]) -> dict[str, Kernel]:
    return {key: kernel for part in parts for key, kernel in part.items()}


def shared_out(models: dict[str, dict[str, Kernel]], jobs: int) -> list[list[str]]:
    """The models in `jobs` lists of about as many threads."""
    cost = {m: sum(k.threads + STARTED for k in found.values()) for m, found in models.items()}
    lists: list[list[str]] = [[] for _ in range(jobs)]
    for model in sorted(models, key=lambda m: -cost[m]):
        min(lists, key=lambda models: sum(cost[m] for m in models)).append(model)
    return [models[::-1] for models in lists if models]


def compile_some(task: tuple[str, list[str]]) -> int:
    """Puts kernels of a model into the cache of compiled ones; returns how many were not in it."""
    model, some = task
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        every = chain.from_iterable(form.launches for form in planned(written(model, folder))[1])
        sources = {launch.source() for launch in every if digest(launch) in some}
    return len(binaries.compile_all([source for source in sources if binaries.find(source, ARCH) is None], ARCH))


def every_kernel(gguf: GGUF, share: set[str] | None, end: float, spent: dict[str, float]) -> tuple[int, bool]:
    """Runs each form until the time `end`; with a `share` of its launches those alone whose kernel is in it and has not
    run yet. Adds the seconds to the files' in `spent`. Returns how many kernels ran, and whether all did."""
    (plan, every), ran = planned(gguf), set[str]()
    e = CUDAExecutor(plan, gguf, CONTEXT)
    rng = np.random.default_rng(7)
    randomise_cache(e)
    for name, (_, nbytes) in e.gpu.buffers.items():  # states of every slot, as the steps before would have left them
        if name.startswith("carried:"):
            e.gpu.upload(name, rng.standard_normal(nbytes // 4, np.float32) * np.float32(0.1))
    e._upload_penalties(SAMPLINGS["seeded"])
    for form in every:
        seen = rng.integers(0, 300, form.pos + form.count).tolist()
        e._place(seen, 0, SAMPLINGS["seeded"], form.count)
        for launch in form.launches:
            key = digest(launch)
            due = share is None or (key in share and key not in ran)
            if not due and launch.file not in ROUTING:
                continue
            if (began := time.time()) > end:
                return len(ran), False
            e.gpu.sequence([launch])(form.count, form.pos + form.count)
            e.gpu.synchronize()
            spent[launch.file] += time.time() - began
            ran |= {key} if due else set()
    e.close()
    return len(ran), True


def run(work: Path) -> None:
    """Runs a process's models, as sanitize() wrote them; a line for each."""
    end, once, models = json.loads(work.read_text())
    executor.GPU, OneGPU.zeros = OneGPU, once  # type: ignore[misc]
    load.UPLOAD_BYTES, load.THREADS = 1 << 20, 2
    spent = defaultdict[str, float](float)
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        for model, share in models:
            if (began := time.time()) > end:
                break
            count, whole = every_kernel(written(model, folder), set(share) if once else None, end, spent)
            print(f"{'ran' if whole else 'did'} {model} {count} {time.time() - began:.1f}", flush=True)
    print("\n".join(f"spent {file} {seconds:.2f}" for file, seconds in spent.items()), flush=True)


def sanitize(
    tool: str, lists: list[list[str]], shares: dict[str, dict[str, Kernel]], end: float
) -> tuple[list[str], bool]:
    """Runs a process under the tool for each list until the time `end`, and prints what it found. Returns the models
    that have run whole in a process that ended by itself with nothing reported, and whether there was no other."""
    began, path = time.time(), shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = [path, "--tool", tool, "--print-limit", "50", "--show-backtrace", "no"] if tool != "none" else []
    once = tool == "racecheck"
    children = list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory() as folder:
        works = [Path(folder) / f"{i}.json" for i in range(len(lists))]
        outputs = [work.with_suffix(".txt") for work in works]
        killed = set[Path]()  # outputs of processes
        try:
            for work, output, models in zip(works, outputs, lists):
                due = [(m, list(shares[m]) if once else []) for m in models]
                work.write_text(json.dumps([end - CLOSING, once, due]))
                command = [*options, sys.executable, "-u", "-m", "scripts.gpu_sanitize", "--run", str(work)]
                children.append(
                    subprocess.Popen(
                        command, stdout=output.open("wb"), stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.1, end + 5 - time.time()))  # a kernel that has begun may end
        finally:
            for child, output in zip(children, outputs):
                if child.poll() is None:
                    killed.add(output)
                    os.killpg(child.pid, signal.SIGKILL)
                    with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait for its kernel
                        child.wait(1)
        texts = [output.read_text(errors="replace") for output in outputs]
    found = [
        [x for x in text.splitlines() if x and not EXPECTED.match(x) and not (output in killed and CUT.match(x))]
        for text, output in zip(texts, outputs)
    ]
    text, reports = "\n".join(texts), list(chain.from_iterable(found))
    counts = re.findall(r"^(?:ran|did) \S+ (\d+) \S+$", text, re.MULTILINE)
    clean = "\n".join(text for text, lines in zip(texts, found) if not lines and (CLEAN in text or tool == "none"))
    whole = re.findall(r"^ran (\S+) \d+ \S+$", clean, re.MULTILINE)
    spent = defaultdict[str, float](float)
    for file, seconds in re.findall(r"^spent (\S+) (\S+)$", text, re.MULTILINE):
        spent[file] += float(seconds)
    print(
        f"{tool}: {sum(map(int, counts))} kernels in {len(lists)} processes within "
        f"{time.time() - began:.0f} s, {f'{len(reports)} lines of reports' if reports else 'nothing reported'}; "
        f"{len(killed)} processes killed",
        "seconds: "
        + ", ".join(f"{file} {seconds:.1f}" for file, seconds in sorted(spent.items(), key=lambda x: -x[1])[:12]),
        *reports[:200],
        f"clean: {' '.join(whole)}",
        sep="\n",
        flush=True,
    )
    return whole, not reports and not killed


def compile_all(pool: Pool, models: dict[str, dict[str, Kernel]], end: float) -> bool:
    """Compiles the kernels of the models, each once; returns whether all are by the time `end`."""
    began, pieces = time.time(), list[tuple[str, list[str]]]()
    for model, found in covering(models).items():
        pieces += [(model, list(found)[i : i + PIECE]) for i in range(0, len(found), PIECE)]
    made, new = pool.imap_unordered(compile_some, pieces), 0
    try:
        for _ in pieces:
            new += made.next(max(0.1, end - time.time()))
    except multiprocessing.TimeoutError:
        return False
    count = sum(len(some) for _, some in pieces)
    print(f"{new} of {count} kernels compiled within {time.time() - began:.0f} s", flush=True)
    return True


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("tools", nargs="*", choices=[*TOOLS, []])
    args.add_argument("--models", nargs="*", default=MODELS)
    args.add_argument("--jobs", type=int, default=14)
    args.add_argument("--limit", type=float, default=600)
    args.add_argument("--of-each-kind", type=int, default=1 << 30)
    args.add_argument("--done", type=Path)
    args.add_argument("--ahead", action="store_true")
    args.add_argument("--run", type=Path)
    a = args.parse_args()
    if a.run:
        return run(a.run)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process stays behind
    end, good = time.time() + a.limit, True
    done = {tool: set[str]() for tool in TOOLS}
    for line in a.done.read_text().splitlines() if a.done and a.done.exists() else []:
        tool, key = line.split()
        done[tool].add(key)
    with multiprocessing.get_context("fork").Pool(a.jobs) as pool:
        models = dict(zip(a.models, pool.map(kernels, a.models, 1)))
        shares = {tool: covering(models, a.of_each_kind, done[tool]) for tool in a.tools}
        due = list(dict.fromkeys(chain.from_iterable(shares.values())))
        print(f"{len(due)} of {len(models)} models are due", flush=True)
        while due and time.time() < end:
            some, due = due[: ROUND * a.jobs], due[ROUND * a.jobs :]
            parts = {
                tool: {m: share[m] if tool == "racecheck" else models[m] for m in some if m in share}
                for tool, share in shares.items()
            }
            if not compile_all(pool, {m: join(part.get(m, {}) for part in parts.values()) for m in some}, end):
                good = False
                break
            if a.ahead:
                continue
            for tool, part in parts.items():
                if not part or end - time.time() < LEAST:
                    continue
                lists = (shared_out if tool == "racecheck" else divided)(part, a.jobs)
                whole, clean = sanitize(tool, lists, part, end)
                good &= clean
                ran = join(part[m] for m in whole).keys() - done[tool]
                done[tool] |= ran
                if a.done:
                    with a.done.open("a") as file:
                        file.writelines(f"{tool} {key}\n" for key in ran)
    every = join(models.values())
    for tool in a.tools if not a.ahead else ():
        kinds = {every[key].kind for key in done[tool] & every.keys()}
        left = covering(models, a.of_each_kind, done[tool])
        print(
            f"{tool}: {len(done[tool] & every.keys())} of {len(every)} kernels, {len(kinds)} of "
            f"{len({kernel.kind for kernel in every.values()})} kinds; left: {' '.join(left) or 'none'}"
        )
        good &= not left
    sys.exit(not good)


if __name__ == "__main__":
    main()
