"""Checks and times the CUDA executor on a GPU machine. Needs tinygrad, gguf, numpy; llama-bench where it is to be
compared. `python scripts/gpu_session.py` and:

check [VARIANT:QUANT ...] [--tokens N]: tiny models against the float64 forward, over 150 tokens (few for a sanitizer)
time MODEL QUANT [--layers N --kernels --depth D ...]: decode; exact shapes, random weights
compare FILE | MODEL QUANT [--layers N --follow F]: 64 greedy tokens and their logits, CUDA against the CPU executor
masked MODEL QUANT [--tokens N]: decode under schemas and with penalties against plain decode, through the engine
app MODEL QUANT: a long answer in the headless app: decoded and painted tok/s
fallback: a kernel with a wrong sign: what the engine says and takes
verify [VARIANT:QUANT ...]: tiny models, logits and tokens of verify steps against those of single steps, bit for bit
verify-time MODEL QUANT [--layers N --kernels --depth D ...]: verify steps of 1 to 16 tokens in single steps
speculate MODEL QUANT [--layers N --follow F --cycle N --tokens N]: decode through Engine, with speculation and without
accept MODEL QUANT [--layers N]: multi-token prediction of which 67 % is right by construction, against single steps
"""

import argparse
import asyncio
import os
import sys
import time
import traceback
from collections import defaultdict
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support import shapes, tiny
from tests.support.cuda_emulated import miscomputed
from tests.support.exactness import relative
from tests.support.forward64 import forward
from tests.support.screens import text_of
from tinychat.chat.parameters import Parameters
from tinychat.chat.settings import Settings
from tinychat.engine import Engine
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.grammar import Grammar, Matcher
from tinychat.engine.plan import build_plan
from tinychat.engine.speculation import Speculate
from tinychat.engine.stats import Stats
from tinychat.engine.tokenizer import Tokenizer
from tinychat.errors import TinychatError
from tinychat.kernels.cpu.executor import CPUExecutor
from tinychat.kernels.cuda import launch, quants
from tinychat.kernels.cuda.executor import CUDAExecutor
from tinychat.kernels.executor import Executor
from tinychat.kernels.sampling import GREEDY, Sampling
from tinychat.measure import bench, tables
from tinychat.ui.app import TinychatApp

FILES = Path(os.environ.get("FILES", "/dev/shm"))
IDS = np.random.default_rng(3).integers(0, 300, 150).tolist()
QUANTS = (*(kind.name for kind in quants.QUANTS), "Q4_K_M", "IQ_MIX")
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
    "deepseek2_temperature",
    "glm4moe",
    "olmo2_windows",
    "gpt-oss",
    "gemma3",
    "gemma4_layer_embeddings",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "lfm2",
    "lfm2moe",
    "kimi-linear",
    "bailingmoe3",
)
STATES, CHANNEL_STATES, WIDE_HEADS, CLUSTER, GATED_CLUSTER = tiny.LARGER
CHECKED = (
    *(f"deepseek2_glm:{q}" for q in QUANTS),
    *(f"{v}:F16" for v in VARIANTS),
    *(f"{v}:Q4_0" for v in VARIANTS),
    *(f"{v}:{q}" for v in (CLUSTER, GATED_CLUSTER) for q in ("Q4_0", "Q4_K", "Q8_0")),
    *(f"{v}:{q}" for v in (STATES, CHANNEL_STATES) for q in ("F16", "Q8_0", "Q4_K_M")),
    "gpt-oss:MXFP4",
    "llama:Q6_K",
    f"{WIDE_HEADS}:Q4_K",
)
VERIFIED = (
    *(f"{v}:{q}" for v in ("llama", "deepseek2_glm", CLUSTER) for q in QUANTS),
    *(f"{v}:{q}" for v in VARIANTS[1:] for q in ("F16", "Q4_0")),
    f"{WIDE_HEADS}:Q4_K",
)
SAMPLINGS = {"greedy": GREEDY, "seeded": Sampling(temperature=0.9, repeat_penalty=1.1, dry_multiplier=0.8, seed=5)}
VERBS = ["check", "time", "file", "compare"]
VERBS += ["masked", "app", "fallback", "verify", "verify-time", "speculate", "accept"]
STEPS = 64  # tokens that are compared
# a margin between the two largest logits that int8 activations do not turn over: SmolLM2's moves by 0.14 (rms), at most
# 0.53
CLEAR = 1.0
WORDS = [
    "winter",
    "rocket",
    "castle",
    "island",
    "river",
    "garden",
    "thunder",
    "window",
    "horse",
    "pepper",
    "ocean",
    "dragon",
    "cloud",
    "silver",
    "violin",
    "bridge",
    "apple",
    "stone",
    "tiger",
    "candle",
]
OTHERS = [
    "cloud",
    "bridge",
    "pencil",
    "candle",
    "apple",
    "castle",
    "yellow",
    "doctor",
    "island",
    "rocket",
    "mirror",
    "violin",
    "dragon",
    "forest",
    "window",
    "pepper",
]
CITIES = [
    "Paris",
    "London",
    "Madrid",
    "Berlin",
    "Rome",
    "Vienna",
    "Oslo",
    "Lisbon",
    "Athens",
    "Dublin",
    "Warsaw",
    "Prague",
]


def thrice(words: list[str]) -> str:
    """A numbered list, again, and the beginning of a third."""
    whole = "\n".join(f"{i}. {w}" for i, w in enumerate(words, 1)) + "\n\nThe same list again:\n"
    return f"{whole}{whole}1. {words[0]}"


PROMPTS = (  # SmolLM2-135M goes on with clear margins at all 64 tokens, but in the last two
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,",
    ", ".join(map(str, range(30, 42))) + ",",
    "\n".join(f"print({i})" for i in range(10, 22)) + "\nprint(",
    thrice(CITIES),
    thrice(OTHERS),
    thrice(WORDS),
    f"{', '.join(WORDS)}\n" * 3 + ", ".join(WORDS[:3]),
    "\n".join(
        [
            "The cat sat on the mat and looked at the old red door. "
            "A man in a blue coat came by and gave it some fish to eat."
        ]
        * 4
    )
    + "\nThe cat",
    "When the harbour master climbed the tower that morning, the fog lay so thick over the water that",
)


def load(path: Path, context: int) -> CUDAExecutor:
    gguf = GGUF.open(path)
    return CUDAExecutor(build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, context)


def check(specs: list[str], tokens: int) -> bool:
    """Prints one line per model: median relative error of decode and prefill logits over so many tokens, and whether
    decode() repeats the argmax."""
    good, ids = True, IDS[:tokens]
    for spec in specs or CHECKED:
        variant, quant = spec.split(":")
        try:
            path = tiny.write(FILES / "tiny.gguf", variant, quant)
            want, e = forward(path, ids), load(path, 192)
            single = np.concatenate([e.forward([t], i, "last") for i, t in enumerate(ids)])
            prefill = e.forward(ids, 0, "all")
            e.forward(ids[:-1], 0)
            greedy = [token for token, _ in islice(e.decode(ids[-1], len(ids) - 1, GREEDY, ids), 5)]
            logits = e.forward([*ids, *greedy[:-1]], 0, "all")
            assert logits is not None
            follow = logits[len(ids) - 1 :].argmax(-1).tolist()
            # the median over the tokens: a close routing decision may fall the other way, and changes much for one
            # token
            err = [
                float(np.median(np.linalg.norm(x - want, axis=1) / np.linalg.norm(want, axis=1)))
                for x in (single, prefill)
            ]
            ok = (
                max(err) < (0.003 if quant in ("F32", "F16", "BF16") else 0.04)
                and single[-1][greedy[0]] > single[-1].max() - 0.3
            )
            ok &= state_holds(e, ids)
            good &= bool(ok)
            print(
                f"{'ok  ' if ok else 'BAD '} {spec:36} decode {err[0]:.5f} prefill {err[1]:.5f} "
                f"greedy {greedy} {'=' if follow == greedy else follow}",
                flush=True,
            )
            e.close()
        except Exception:
            good = False
            print(f"BAD  {spec}\n{traceback.format_exc(limit=-4)}", flush=True)
    return good


def state_holds(e: CUDAExecutor, ids: list[int]) -> bool:
    """Whether the state behind each id of decode() is that of single steps from a state that was put back."""
    if not e.state_bytes:
        return True
    n = len(ids) - 1
    e.forward(ids[: n // 2], 0)
    e.forward(ids[n // 2 : n], n // 2)
    start, token, same = e.read_state(), ids[n], True
    made = [(following, e.read_state().tobytes()) for following, _ in islice(e.decode(token, n, GREEDY, ids), 4)]
    e.write_state(memoryview(bytes(e.state_bytes)))
    e.write_state(start)
    for i, (following, state) in enumerate(made):
        e.forward([token], n + i)
        same &= e.read_state().tobytes() == state
        token = following
    return same


def check_verify(specs: list[str]) -> bool:
    """Prints one line per model: whether verify steps of 2 to 16 tokens give the bits of single steps, behind few and
    many keys and across the positions at which the kind of graph changes."""
    good = True
    for spec in specs or VERIFIED:
        variant, quant = spec.split(":")
        try:
            path = tiny.write(FILES / "tiny.gguf", variant, quant)
            e = load(path, 2112)
            wrong = [
                f"{name} {drafts} drafts at {pos}"
                for pos in ((19, 505, 2043) if e.plan.latent else (19, 300))
                for name, sampling in SAMPLINGS.items()
                for drafts in differing(e, sampling, pos)
            ]
            print(f"{'BAD ' if wrong else 'ok  '} {spec:36} up to {e.limits.verified} {wrong or ''}", flush=True)
            good &= not wrong
            e.close()
        except Exception:
            good = False
            print(f"BAD  {spec}\n{traceback.format_exc(limit=-4)}", flush=True)
    return good


def differing(e: CUDAExecutor, sampling: Sampling, pos: int) -> list[int]:
    """Of 1 to 15 drafts behind a token at `pos`, those numbers at which a verify step differs from single steps."""
    vocab, most = e.plan.vocab, e.limits.verified
    ids = np.random.default_rng(pos).integers(0, 300, pos + 1).tolist()
    e.forward(ids[:-1], 0)
    steps = list(islice(e.decode(ids[-1], pos, sampling, ids), most))
    tokens = [ids[-1], *(token for token, _ in steps)]
    e.forward(ids[:-1], 0)
    logits = [e.forward([token], pos + i, "last") for i, token in enumerate(tokens[:-1])]
    wanted, bad = np.concatenate([row for row in logits if row is not None]), []
    for drafts in range(1, most):
        e.forward(ids[:-1], 0)
        same = list(e.verify(ids[-1], tokens[1 : drafts + 1], pos, sampling, ids)) == steps[: drafts + 1]
        last = drafts + 1 - max([0, *(at - pos for at in e._steps if pos < at <= pos + drafts)])  # of the last graph
        rows = e.gpu.download("logits", 4 * vocab * last).view(np.float32).reshape(last, -1)
        same &= np.array_equal(rows, wanted[drafts + 1 - last : drafts + 1])
        if drafts > 2:  # a wrong draft: what was accepted before it, and the steps behind it
            guess = list(tokens[1 : drafts + 1])
            guess[drafts // 2] = (guess[drafts // 2] + 1) % vocab
            e.forward(ids[:-1], 0)
            made = list(e.verify(ids[-1], guess, pos, sampling, ids))
            done = len(made)
            seen = [*ids, *tokens[1 : done + 1]]
            made += islice(e.decode(seen[-1], pos + done, sampling, seen), 3)
            same &= done == drafts // 2 + 1 and made[:most] == steps[: done + 3]
        if not same:
            bad.append(drafts)
    return bad


def model_file(
    model: str, quant: str, layers: int | None = None, follow: float = 0.0, cycle: int = 0, nextn: int = 0
) -> Path:
    """A file of exact shapes; the options are those of shapes.write()."""
    options = f"{'-follow' if follow else ''}{f'-cycle{cycle}' if cycle else ''}{'-nextn' if nextn else ''}"
    path = FILES / f"{model}-{quant}-{layers or 'all'}{options}.gguf"
    if not path.exists():
        began, part = time.perf_counter(), path.with_suffix(f".{os.getpid()}")
        size = shapes.write(part, model, quant, layers, follow=follow, cycle=cycle, nextn=nextn)
        part.rename(path)
        print(f"# wrote {path} {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    return path


def prompts_of(path: Path, real: bool) -> list[list[int]]:
    if not real:
        return [[11], np.random.default_rng(5).integers(0, 50000, 30).tolist()]
    tokenizer = Tokenizer.from_gguf(path)
    return [tokenizer.encode(text) for text in PROMPTS]


def greedy(e: Executor, prompt: list[int]) -> list[int]:
    """STEPS greedy tokens behind `prompt`."""
    if len(prompt) > 1:
        e.forward(prompt[:-1], 0)
    steps = e.decode(prompt[-1], len(prompt) - 1, GREEDY, prompt)
    tokens = [token for token, _ in (next(steps) for _ in range(STEPS))]
    steps.close()  # type: ignore[attr-defined]
    return tokens


def following_logits(e: Executor, prompt: list[int], tokens: list[int], single: bool) -> np.ndarray:
    """float32 (STEPS, vocab): the logits that chose `tokens`, through prefill or, `single`, decode steps."""
    ids = [*prompt, *tokens[:-1]]
    if not single:
        rows = e.forward(ids, 0, "all")
        assert rows is not None
        return rows[len(prompt) - 1 :]
    if len(prompt) > 1:
        e.forward(prompt[:-1], 0)
    out = [e.forward([token], pos, "last") for pos, token in enumerate(ids) if pos >= len(prompt) - 1]
    return np.concatenate([row for row in out if row is not None])


def compare(path: Path, prompts: list[list[int]]) -> bool:
    """Prints a line per prompt: relative L2 of the median token's logits, and more. False where CUDA chose another
    token although the CPU's margin was clear, or is further off than int8 activations explain."""
    gguf, context = GGUF.open(path), max(map(len, prompts)) + STEPS
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    limit = (
        0.2 if any("_exps." in name for name in gguf.tensors) else 0.06
    )  # of 64 random experts, two often score the same
    cpu = CPUExecutor(plan, gguf, context)
    want = [(tokens := greedy(cpu, p), following_logits(cpu, p, tokens, single=False)) for p in prompts]
    cpu.close()
    e, good = CUDAExecutor(plan, gguf, context), True
    for prompt, (tokens, logits) in zip(prompts, want):
        got = greedy(e, prompt)
        same = next((i for i, (a, b) in enumerate(zip(got, tokens)) if a != b), STEPS)
        low, high = np.partition(logits, -2, axis=1)[:, -2:].T
        margins = high - low
        ok, said = same == STEPS or margins[same] < CLEAR, []
        for name, single in (("prefill", False), ("decode", True)):
            rows = following_logits(e, prompt, tokens, single)
            error, equal = relative(rows, logits), rows.argmax(1) == logits.argmax(1)
            ok &= bool((equal | (margins < CLEAR)).all() and np.median(error) < limit)
            said.append(
                f"{name} L2 {np.median(error):.1e} (worst {error.max():.1e}, "
                f"largest difference {np.abs(rows - logits).max():.2f}) argmax {equal.sum()}"
            )
        print(
            f"{'ok  ' if ok else 'BAD '} {path.name} {len(prompt)} + {STEPS}: greedy tokens equal {same}"
            + (f", then a margin of {margins[same]:.3f}" if same < STEPS else f", margins from {margins.min():.2f}"),
            *said,
            sep="; ",
        )
        print(
            f"# margins {np.sort(margins)[:4].round(2)}, median {np.median(margins):.2f}, "
            f"logits' deviation {logits.std():.2f}; CPU {tokens} CUDA {got}",
            flush=True,
        )
        good &= bool(ok)
    e.close()
    return good


def fallback() -> bool:
    """Prints what the engine says where one kernel computes something wrong."""
    path = tiny.write(FILES / "fallback.gguf", "llama", "Q4_0")
    launch.text = cache(miscomputed)
    engine = Engine.load(path, max_context=64)
    print(f"device None: {engine.info.device}; {engine.notes}", flush=True)
    good = not engine.info.device.startswith("CUDA") and any("self-check failed" in note for note in engine.notes)
    print(f"  it decodes {[t.id for t in engine.generate(IDS[:9], GREEDY, 8, raw=True)]}", flush=True)
    engine.close()
    try:
        Engine.load(path, max_context=64, device="cuda").close()
    except TinychatError as e:
        print(f"device 'cuda': {e}", flush=True)
        return good
    return False


async def app(path: Path, tokens: int, device: str | None) -> None:
    """Prints the panel's decoded and painted tok/s while the headless app shows an answer, and of the whole of it."""
    own = Settings(parameters=Parameters(max_tokens=tokens), kv_cache_gb=0)
    chat = TinychatApp(path.stem, path, own=own, max_context=min(2 * tokens + 512, 4096), device=device)
    decoded, painted = [], []

    def stats() -> Stats:
        found = chat.controller.stats
        assert found is not None  # a model is loaded
        return found

    async with chat.run_test(size=(100, 30)) as pilot:
        while (info := chat.controller.info) is None:
            await pilot.pause(0.1)
        chat.chat.prompt.insert("Tell me a long story about the sea, the fog and the harbour master.")
        await pilot.press("enter")
        while not (chat.controller.busy or stats().generated_tokens):  # a short answer may be over
            await pilot.pause(0.02)
        began = time.perf_counter()
        meter = chat.chat.painter.meter
        while chat.controller.busy:
            await asyncio.sleep(0.1)
            if stats().phase == "decode" and time.perf_counter() - began > 0.5:
                decoded.append(stats().last_tok_s)
                painted.append(meter.rate)
        await pilot.pause(0.5)
        panel = [line.rstrip() for line in text_of(chat).splitlines() if "tok/s" in line or "painted" in line]
    a, b = float(np.median(decoded or [0])), float(np.median(painted or [0]))
    c, d = stats().decode_tok_s, meter.average
    print(
        f"app {path.name}: {stats().generated_tokens} tokens, {info.device}\n"
        f"  while it runs (median of {len(decoded)}): decoded {a:.0f} painted {b:.0f} tok/s, "
        f"{100 * (b / a - 1) if a else 0:+.1f} %\n"
        f"  the whole answer: decoded {c:.0f} painted {d:.0f} tok/s, {100 * (d / c - 1) if c else 0:+.1f} %, "
        f"longest gap {chat.chat.painter.longest_gap * 1e3:.0f} ms\n  " + "\n  ".join(panel),
        flush=True,
    )


def randomise_cache(e: CUDAExecutor) -> None:
    rng = np.random.default_rng(0)
    for name, size, layer in e._caches():
        values = size // 2 * e.plan.rows(layer, e.max_context)
        e.gpu.upload(name, (rng.standard_normal(values, np.float32) * 0.5).astype(np.float16))
    e.write_state((rng.standard_normal(e.state_bytes // 4, np.float32) * 0.1).data)


def step_seconds(e: CUDAExecutor, depth: int, n: int = 128) -> tuple[float, float]:
    """(seconds per decode step on the GPU, seconds of host work to enqueue one)."""
    e._place([1] * (depth + 1), 0, GREEDY)
    e._make_room(depth, 1024)
    graph = e._step(depth).graph
    for _ in range(8):
        graph()
    e.gpu.synchronize()
    start, began = e.gpu.event(), time.perf_counter()
    for _ in range(n):
        graph()
    host = time.perf_counter() - began
    return e.gpu.elapsed(start, e.gpu.event()) / n, host / n


def kernel_table(e: CUDAExecutor, depth: int, columns: int = 1) -> None:
    """Time of each kernel of a decode step of so many tokens as a chain of its own launches of all layers (rotating
    weights), with and without early launch."""
    groups = defaultdict(list)
    step = e._verifying.launches(columns, depth) if columns > 1 else [x for x, _ in e._step(depth).parts]
    for x in step:
        groups[x.name].append(x)
    total = 0.0
    tokens = [1] * depth + list(range(100, 100 + columns))
    e._place(tokens, 0, GREEDY, columns)
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
            e._place(tokens, 0, GREEDY, columns)
        total += times[0] * len(launches)
        gbs = launches[0].bytes / times[0] / 1e9
        print(
            f"{name:44} x{len(launches):3} {times[0] * 1e6:7.2f} us (plain edges {times[1] * 1e6:7.2f}) "
            f"{launches[0].bytes / 1e6:8.2f} MB {gbs:7.0f} GB/s sum {times[0] * len(launches) * 1e6:7.0f} us",
            flush=True,
        )
    print(f"sum of kernels {total * 1e3:.3f} ms", flush=True)


def times(model: str, quant: str, layers: int | None, kernels: bool, depths: list[int]) -> None:
    """Prints decode speed at each of `depths`, on random cache rows."""
    path = model_file(model, quant, layers)
    began = time.perf_counter()
    e = load(path, max(depths) + 1024)
    print(
        f"# {model} {quant}: load {time.perf_counter() - began:.1f} s, {e.kernels_per_token} kernels/token, "
        f"weights {e.weight_bytes / 1e9:.2f} GB of {e.device_bytes / 1e9:.2f} GB on the device "
        f"(cache {e.cache_bytes / 1e9:.2f}), file {path.stat().st_size / 1e9:.2f} GB, {e.device}",
        flush=True,
    )
    randomise_cache(e)
    for depth in depths:
        seconds, host = min(step_seconds(e, depth) for _ in range(3))
        gbs = e.plan.bytes_per_token(depth) / seconds / 1e9
        print(f"depth {depth}: {1 / seconds:.1f} tok/s, {gbs:.0f} GB/s, host {host * 1e6:.1f} us a step", flush=True)
        if kernels:
            kernel_table(e, depth)
    e.close()


def verify_times(model: str, quant: str, layers: int | None, kernels: bool, depths: list[int]) -> None:
    """Prints what verify steps of 1 to 16 random tokens cost at each of `depths`, in single steps."""
    e = load(model_file(model, quant, layers), max(depths) + 1024)
    randomise_cache(e)
    rng = np.random.default_rng(1)
    for depth in depths:
        single = min(step_seconds(e, depth)[0] for _ in range(3))
        said = [f"1: {single * 1e6:.0f} us ({1 / single:.1f} tok/s)"]
        for n in e._verifying.counts:
            graph, tokens = e._verifying.graph(depth, n), rng.integers(0, 50000, n).tolist()
            e._place([1] * depth + tokens, 0, GREEDY, n)
            e._make_room(depth, 1024)
            times = []
            for _ in range(4):
                start = e.gpu.event()
                for _ in range(32):
                    graph()
                times.append(e.gpu.elapsed(start, e.gpu.event()) / 32)
            said.append(f"{n}: {min(times) * 1e6:.0f} us = {min(times) / single:.2f}")
            wall = time.perf_counter()
            for _ in range(20):
                list(e.verify(tokens[0], tokens[1:], depth, GREEDY, tokens))
            said[-1] += f" (with the host {(time.perf_counter() - wall) / 20 * 1e6:.0f} us)"
        wall = time.perf_counter()
        for i in range(100):
            list(e.verify(1, (), depth + i, GREEDY, (1,)))
        said[0] += f" (with the host {(time.perf_counter() - wall) / 100 * 1e6:.0f} us)"
        print(f"verify {model} {quant} depth {depth}: {'; '.join(said)}", flush=True)
        if kernels:
            for n in (1, 2, 4):
                print(f"# {n} tokens", flush=True)
                kernel_table(e, depth, n)
    e.close()


def speculate(path: Path, tokens: int) -> None:
    """Prints decode tok/s of greedy and seeded answers through Engine without speculation and with it, and whether both
    are the same. A model of `--cycle` repeats itself."""
    engine = Engine.load(path, max_context=4096, speculate="auto")
    for name, sampling in (("greedy", GREEDY), ("seeded", Sampling(temperature=0.7, seed=3))):
        answers = {}
        for mode in (0, "auto", 0, "auto"):
            ids, s = bench.prompt(engine, 64, 0), engine.stats
            with engine.speculating(mode):
                answers[mode] = [t.id for t in engine.generate(ids, sampling, tokens, raw=True)]
            print(
                f"speculate {mode:4} {path.stem} {name}: {s.decode_tok_s:.1f} tok/s, {s.generated_tokens} tokens in "
                f"{s.decode_steps} steps, {s.accepted_tokens} of {s.drafted_tokens} drafts accepted",
                flush=True,
            )
        print(f"{'same' if answers[0] == answers['auto'] else 'BAD: another'} answer", flush=True)
    engine.close()


def accept(path: Path) -> None:
    """Prints what `tinychat bench --accept 0.67` does, and what the parts of a step with a guess take."""
    engine = Engine.load(path, max_context=1024, speculate="auto")
    result = bench.run(engine, 64, 256, 3, accept=0.67)
    print(tables.synthetic_line(result, engine.plan.mtp is not None), flush=True)
    e, ids = engine.executor, list(range(100, 164))
    e.forward(ids, 0)
    if engine.plan.mtp:
        e.forward(ids, 0, mtp=True)
    for name, run in {
        "single": lambda: list(e.verify(5, (), 64, GREEDY, ids)),
        "step of 2": lambda: list(e.verify(5, (6,), 64, GREEDY, ids)),
        "guess": lambda: e.draft([5], 64),
        "guess behind an accepted one": lambda: e.draft([5, 6], 64),
    }.items():
        if engine.plan.mtp or "guess" not in name:
            seconds = []
            for _ in range(60):
                began = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - began)
            print(f"accept: {name} {np.median(seconds) * 1e6:.0f} us", flush=True)
    engine.close()


def masked(path: Path, tokens: int) -> bool:
    """Prints decode speed of `tokens` tokens under two schemas, with penalties and a bias, and without any of it; False
    where an answer is not its schema's."""
    text = Grammar.from_schema({"type": "string", "minLength": 100_000})
    integers = Grammar.from_schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000})
    rows: tuple[tuple[str, Grammar | None, Speculate], ...] = (
        ("plain", None, 0),
        ("a string", text, 0),
        ("integers", integers, 0),
        ("penalties", None, 0),
        ("plain, drafts", None, "auto"),
        ("a string, drafts", text, "auto"),
        ("integers, drafts", integers, "auto"),
    )
    penalties: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "logit_bias": ((11, -100.0),)}
    engine, prompt, good, plain = Engine.load(path, max_context=tokens + 128, speculate=0), IDS[:16], True, 0.0
    for name, grammar, mode in rows:
        sampling, rates = Sampling(seed=1, **(penalties if name == "penalties" else {})), []
        with engine.speculating(mode):
            for _ in range(3):
                ids = [t.id for t in engine.generate(prompt, sampling, tokens, raw=True, grammar=grammar)]
                rates.append(engine.stats.decode_tok_s)
        matcher, host = Matcher(engine.vocabulary, grammar) if grammar else None, []
        try:
            for token in ids if matcher else ():
                assert matcher and token is not None
                began = time.perf_counter()
                allowed = matcher.mask()
                host.append(time.perf_counter() - began)
                good &= bool(matcher.done or allowed[token // 32] >> np.uint32(token % 32) & 1)
                matcher.accept(token)
        except TinychatError as e:
            good = False
            print(f"BAD  {e}")
        rate = float(np.median(rates))
        plain = plain or rate
        print(
            f"{path.name} {name:16}: {rate:.1f} tok/s ({rate / plain - 1:+.1%}), {len(ids)} tokens, "
            f"{engine.stats.forced_tokens} forced, ends by {engine.stop_reason}; "
            f"a mask takes the host {np.median(host or [0]) * 1e6:.0f} us",
            flush=True,
        )
    engine.close()
    return good


def main() -> None:
    args = argparse.ArgumentParser()
    args.add_argument("what", choices=VERBS)
    args.add_argument("names", nargs="*")
    args.add_argument("--layers", type=int)
    args.add_argument("--follow", type=float, default=0.0)
    args.add_argument("--cycle", type=int, default=0)
    args.add_argument("--tokens", type=int)
    args.add_argument("--device")
    args.add_argument("--kernels", action="store_true")
    args.add_argument("--depth", type=int, nargs="*", default=[0, 4096])
    a = args.parse_args()
    if a.what == "check":
        sys.exit(not check(a.names, a.tokens or len(IDS)))
    if a.what == "verify":
        sys.exit(not check_verify(a.names))
    if a.what == "fallback":
        sys.exit(not fallback())
    try:
        if a.what in ("file", "compare", "masked", "app", "speculate", "accept"):
            path = Path(a.names[0])
            if len(a.names) == 2:
                path = model_file(a.names[0], a.names[1], a.layers, a.follow, a.cycle, int(a.what == "accept"))
            if a.what == "compare":
                sys.exit(not compare(path, prompts_of(path, len(a.names) == 1)))
            if a.what == "masked":
                sys.exit(not masked(path, a.tokens or 3000))
            if a.what == "speculate":
                speculate(path, a.tokens or 3000)
            if a.what == "accept":
                accept(path)
            if a.what == "app":
                asyncio.run(app(path, a.tokens or 3000, a.device))
            return
        if a.what == "time":
            times(a.names[0], a.names[1], a.layers, a.kernels, a.depth)
        else:
            verify_times(a.names[0], a.names[1], a.layers, a.kernels, a.depth)
    except Exception:
        traceback.print_exc(limit=-5)
        sys.exit(1)


if __name__ == "__main__":
    main()
