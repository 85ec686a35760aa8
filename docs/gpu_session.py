"""Checks and times the CUDA executor on a GPU machine. Needs tinygrad, gguf, numpy; llama-bench where it is to be compared.

python docs/gpu_session.py check [VARIANT:QUANT ...]      tiny models against the float64 forward
python docs/gpu_session.py time MODEL QUANT [--layers N --kernels --depth D ...]    exact shapes, random weights
python docs/gpu_session.py peer MODEL QUANT               llama-bench (LLAMA_BENCH) on the same file
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests import shapes, tiny
from tests.forward64 import forward
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.kernels.cuda.executor import CUDAExecutor
from tinychat.kernels.ops import Sampling

FILES = Path(os.environ.get("FILES", "/dev/shm"))
IDS = np.random.default_rng(3).integers(0, 300, 150).tolist()
QUANTS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M")
VARIANTS = (
    "llama",
    "llama_rope_freqs",
    "llama_mha",
    "qwen2_untied_fused",
    "qwen3",
    "qwen3moe",
    "olmoe",
    "deepseek2_lite_legacy",
    "deepseek2_moonlight",
    "deepseek2_softmax_weight",
    "deepseek2_groups",
    "deepseek2_fused_experts",
    "deepseek2_no_shared",
)
GREEDY = Sampling(temperature=0.0, repeat_penalty=1.0)


def load(path: Path, context: int) -> CUDAExecutor:
    gguf = GGUF.open(path)
    return CUDAExecutor(build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, context)


def check(specs: list[str]) -> bool:
    """Prints one line per model: median relative error of decode and prefill logits, and whether decode() repeats the argmax."""
    good = True
    for spec in specs or [
        *(f"deepseek2_glm:{q}" for q in QUANTS),
        *(f"{v}:F16" for v in VARIANTS),
        *(f"{v}:Q4_0" for v in VARIANTS),
        "llama:Q6_K",
    ]:
        variant, quant = spec.split(":")
        try:
            path = tiny.write(FILES / "tiny.gguf", variant, quant)
            want, e = forward(path, IDS), load(path, 192)
            single = np.concatenate([e.forward([t], i, "last") for i, t in enumerate(IDS)])
            prefill = e.forward(IDS, 0, "all")
            steps, greedy = e.decode(IDS[-1], len(IDS) - 1, GREEDY, IDS), []
            for _ in range(5):
                greedy.append(next(steps)[0])
            steps.close()
            follow = e.forward([*IDS, *greedy[:-1]], 0, "all")[len(IDS) - 1 :].argmax(-1).tolist()
            # the median over the tokens: a close routing decision may fall the other way, and changes much for one token
            err = [float(np.median(np.linalg.norm(x - want, axis=1) / np.linalg.norm(want, axis=1))) for x in (single, prefill)]
            ok = (
                max(err) < (0.003 if quant in ("F32", "F16", "BF16") else 0.04) and single[-1][greedy[0]] > single[-1].max() - 0.3
            )
            good &= bool(ok)
            print(
                f"{'ok  ' if ok else 'BAD '} {spec:36} decode {err[0]:.5f} prefill {err[1]:.5f} greedy {greedy} {'=' if follow == greedy else follow}",
                flush=True,
            )
            e.close()
        except Exception:
            good = False
            print(f"BAD  {spec}\n{traceback.format_exc(limit=-4)}", flush=True)
    return good


def model_file(model: str, quant: str, layers: int | None = None) -> Path:
    path = FILES / f"{model}-{quant}-{layers or 'all'}.gguf"
    if not path.exists():
        began = time.perf_counter()
        size = shapes.write(path, model, quant, layers)
        print(f"# wrote {path} {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    return path


def randomise_cache(e: CUDAExecutor) -> None:
    rng = np.random.default_rng(0)
    for name, width in e._caches():
        e.gpu.upload(name, (rng.standard_normal(e.max_context * width, np.float32) * 0.5).astype(np.float16))


def step_seconds(e: CUDAExecutor, depth: int, n: int = 128) -> tuple[float, float]:
    """(seconds per decode step on the GPU, seconds of host work to enqueue one)."""
    e._know([1] * (depth + 1), 0)
    e._set_state(GREEDY, depth, 1, 0)
    for _ in range(8):
        e._decode()
    e.gpu.synchronize()
    start, began = e.gpu.event(), time.perf_counter()
    for _ in range(n):
        e._decode()
    host = time.perf_counter() - began
    return e.gpu.elapsed(start, e.gpu.event()) / n, host / n


def kernel_table(e: CUDAExecutor, depth: int) -> None:
    """Time of each kernel as a chain of its own launches of all layers (rotating weights), with and without early launch."""
    groups = defaultdict(list)
    for launch in e.launches:
        groups[launch.name].append(launch)
    total = 0.0
    e._set_state(GREEDY, depth, 1, 0)
    for name, launches in groups.items():
        times = []
        for chained in (True, False):
            many = launches * max(1, 40 // len(launches))
            if "choose_token" in name:
                many = launches * 2
            graph = e.gpu.graph(many, chained=chained)
            for _ in range(2):
                graph()
            e.gpu.synchronize()
            start = e.gpu.event()
            for _ in range(8):
                graph()
            times.append(e.gpu.elapsed(start, e.gpu.event()) / 8 / len(many))
            e._set_state(GREEDY, depth, 1, 0)
        total += times[0] * len(launches)
        gbs = launches[0].bytes / times[0] / 1e9
        print(
            f"{name:44} x{len(launches):3} {times[0] * 1e6:7.2f} us (plain edges {times[1] * 1e6:7.2f}) {launches[0].bytes / 1e6:8.2f} MB {gbs:7.0f} GB/s "
            f"sum {times[0] * len(launches) * 1e6:7.0f} us",
            flush=True,
        )
    print(f"sum of kernels {total * 1e3:.3f} ms", flush=True)


def times(model: str, quant: str, layers: int | None, kernels: bool, depths: list[int], plain: bool) -> None:
    path = model_file(model, quant, layers)
    began = time.perf_counter()
    e = load(path, max(depths) + 1024)
    print(
        f"# {model} {quant}: load {time.perf_counter() - began:.1f} s, {e.kernels_per_token} kernels/token, {e.jit_batches} batch, "
        f"weights {e.weight_bytes / 1e9:.2f} GB of {e.device_bytes / 1e9:.2f} GB on the device (cache {e.cache_bytes / 1e9:.2f}), file {path.stat().st_size / 1e9:.2f} GB, {e.device}",
        flush=True,
    )
    randomise_cache(e)
    out = {"model": model, "quant": quant, "layers": layers}
    for depth in depths:
        best = min(step_seconds(e, depth) for _ in range(3))
        out[f"tok_s@{depth}"] = round(1 / best[0], 1)
        out["host_us"] = round(best[1] * 1e6, 1)
        out[f"GB/s@{depth}"] = round(e.plan.bytes_per_token(depth) / best[0] / 1e9)
    if plain:
        kept, e._decode = e._decode, e.gpu.graph(e.launches, chained=False)
        out["tok_s without early launch"] = round(1 / min(step_seconds(e, 0) for _ in range(3))[0], 1)
        e._decode = kept
    steps = e.decode(1, 0, GREEDY, [1])
    for _ in range(8):
        next(steps)
    began = time.perf_counter()
    for _ in range(128):
        next(steps)
    out["decode() tok_s"] = round(128 / (time.perf_counter() - began), 1)
    steps.close()
    steps = e.decode(1, 0, Sampling(), [1])
    for _ in range(8):
        next(steps)
    began = time.perf_counter()
    for _ in range(128):
        next(steps)
    out["sampling tok_s"] = round(128 / (time.perf_counter() - began), 1)
    steps.close()
    for n in (512,):
        ids = np.random.default_rng(1).integers(0, 1000, n).tolist()
        speeds = []
        for _ in range(3):
            began = time.perf_counter()
            e.forward(ids, 0, "last")
            speeds.append(n / (time.perf_counter() - began))
        out[f"pp{n}"] = round(max(speeds))
    print(json.dumps(out), flush=True)
    if kernels:
        kernel_table(e, depths[0])
        if len(depths) > 1:
            for depth in depths[1:]:
                print(f"# attention at depth {depth}")
                kept, e.launches = (
                    e.launches,
                    [x for x in e.launches if x.kind == "attention" or "value_up" in x.name or "combine" in x.name],
                )
                kernel_table(e, depth)
                e.launches = kept
    e.close()


def peer(model: str, quant: str) -> None:
    cmd = [
        os.environ["LLAMA_BENCH"],
        "-m",
        str(model_file(model, quant)),
        "-fa",
        "1",
        "-ngl",
        "99",
        "-p",
        "512",
        "-n",
        "128",
        "-r",
        "3",
        "-o",
        "json",
    ]
    for depth in ("0", "4096"):
        done = subprocess.run([*cmd, "-d", depth], capture_output=True, text=True)
        try:
            for row in json.loads(done.stdout):
                print(
                    f"llama.cpp {model} {quant} pp{row['n_prompt']} tg{row['n_gen']} depth {depth}: {row['avg_ts']:.1f} tok/s",
                    flush=True,
                )
        except ValueError:
            print(done.stdout[-300:], done.stderr[-600:], flush=True)


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("what", choices=["check", "time", "peer"])
    args.add_argument("names", nargs="*")
    args.add_argument("--layers", type=int)
    args.add_argument("--kernels", action="store_true")
    args.add_argument("--plain", action="store_true")
    args.add_argument("--depth", type=int, nargs="*", default=[0, 4096])
    a = args.parse_args()
    if a.what == "check":
        sys.exit(not check(a.names))
    try:
        if a.what == "time":
            times(a.names[0], a.names[1], a.layers, a.kernels, a.depth, a.plain)
        else:
            peer(*a.names)
    except Exception:
        traceback.print_exc(limit=-5)
        sys.exit(1)


if __name__ == "__main__":
    main()
