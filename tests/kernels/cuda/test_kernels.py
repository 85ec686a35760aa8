"""The CUDA kernels without a GPU: their sources run on the emulator and compile with NVRTC."""

import ctypes
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf.quants import dequantize

from tests.support import cuda_emulator, tiny
from tests.support.cuda_emulated import EmulatedCUDA, aligned
from tests.support.forward64 import forward
from tests.support.shapes import MLA, MoE
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels import blocks, ops
from tinychat.kernels.cuda.builder import RING, Builder, Depth
from tinychat.kernels.cuda.launch import Launch
from tinychat.kernels.cuda.launches import embed, head
from tinychat.kernels.cuda.launches import sample as sampling
from tinychat.kernels.cuda.layout import Layout, repack, repack_params
from tinychat.kernels.cuda.prefill import Chip, Prefill, padded
from tinychat.kernels.cuda.quants import FLOATS, QUANTS, packed_bytes
from tinychat.kernels.cuda.selfcheck import COLS, ROWS, TABLE, check_data, check_logits, check_plan
from tinychat.kernels.cuda.state import WORDS, bias_values, breaker_bits, state_words
from tinychat.kernels.cuda.step import decode, depths
from tinychat.kernels.sampler import dry, sample
from tinychat.kernels.sampling import Sampling

Q = tiny.Q
IDS = [290, 17, 204, 99, 3, 256, 258, 64, 131, 64, 17, 280] * 9
# rows long enough that a kernel's result goes to the next one as int8 blocks
WIDE = replace(
    tiny.VARIANTS["deepseek2_glm"],
    layers=2,
    dim=1024,
    ffn=64,
    heads=2,
    mla=MLA(96, 256, 96, 32, 64),
    moe=MoE(8, 2, 64, 1, 1, 2, 1.8, True, bias=True),
)


def emulated(path: Path, context: int = 192) -> EmulatedCUDA:
    gguf = GGUF.open(path)
    return EmulatedCUDA(build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, context)


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def check_products(kind: Q) -> np.ndarray:
    """What the check at load expects, of gguf's values."""
    packed, x = check_data(kind)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean())
    return dequantize(packed.reshape(ROWS, -1), kind).reshape(ROWS, COLS).astype(np.float64) @ normed


Matvec = tuple[Builder, Launch, Launch, Launch, Launch]


@pytest.fixture(scope="module")
def matvecs() -> dict[Q, Matvec]:
    """Of each type: its builder, mat-vec, that of two columns, repacking and look-up of a row; compiled together."""
    made: dict[Q, Matvec] = {}
    for kind in QUANTS:
        plan = check_plan(kind)
        builder = Builder(plan, Layout(plan, {"check": check_data(kind)[0].nbytes, "gain": 4 * COLS}), 1)
        tensor = builder.layout.tensors["check"]
        two, row = head(builder.of(2), plan.head), embed(builder, plan.embed, 1)
        with pytest.MonkeyPatch.context() as few:  # blocks that take rows in turns, beside tiles
            few.setattr("tinychat.kernels.cuda.launches.STREAMED_ROWS", 1)
            few.setattr("tinychat.kernels.cuda.launches.MULTIPROCESSORS", 1)
            few.setattr("tinychat.kernels.cuda.launches.STREAMS", 1)
            one = head(builder, plan.head)
        made[kind] = builder, one, two, repack(tensor), row
    cuda_emulator.compile_all(
        launch
        for kind, (_, *all_of) in made.items()
        for each in all_of
        for launch in (*each.before, each)
        if launch.file != "repack.cu" or kind not in FLOATS
    )
    return made


@pytest.mark.parametrize("kind", QUANTS, ids=lambda k: k.name)
def test_matvec_of_every_quant_type(kind: Q, matvecs: dict[Q, Matvec]) -> None:
    """Products to the rounding of activations, those of two columns with the bits of each; a row's values to the last
    bit."""
    packed, x = check_data(kind)
    builder, launch, two, packing, row = matvecs[kind]
    tensor = builder.layout.tensors["check"]
    buffers = {name: aligned(size) for name, size in builder.buffers.items()} | {"staging": packed}
    buffers["params"] = repack_params(tensor, 0, tensor.blocks)
    buffers["state"].view(np.int32)[: len(WORDS)] = state_words(Sampling(), 0, 1, 0)
    columns = buffers["x"].view(np.float32).reshape(2, -1)
    columns[:] = x, x[::-1] * 3
    buffers["w:gain"].view(np.float32)[:] = 1
    if kind in FLOATS:
        buffers["w:check"][:] = packed
    else:
        cuda_emulator.run(packing, buffers, tensor.blocks)
        assert len(buffers["w:check"]) == packed_bytes(kind, tensor.values)
    logits = buffers["logits"].view(np.float32).reshape(2, ROWS)
    for each in (*two.before, two):
        cuda_emulator.run(each, buffers)
    both = logits.copy()
    for column, wanted in zip(columns[::-1].copy(), both[::-1]):
        columns[0] = column
        cuda_emulator.run(launch, buffers)
        np.testing.assert_array_equal(logits[0], wanted)
    products = check_products(kind)
    assert error(logits[0], products) < (1e-5 if kind in FLOATS else 0.01)
    known = f"{kind.name}," in TABLE.read_text() and error(check_logits(kind), products) < 1e-6
    assert known, ",".join([kind.name, *(f"{v:.8g}" for v in products)])
    buffers["history"].view(np.int32)[0] = ROWS - 1
    cuda_emulator.run(row, buffers)
    want = dequantize(packed.reshape(ROWS, -1)[-1:], kind).reshape(-1)
    np.testing.assert_array_equal(columns[0], want)


@pytest.mark.parametrize(
    ("variant", "tokens"),
    [
        ("llama", 70),
        ("deepseek2_glm", 70),
        ("olmoe", 9),
        ("deepseek2_lite_legacy", 9),
        ("olmo2_windows", 9),
        ("smollm3", 9),
        ("glm4", 9),
        ("glm4moe", 9),
        ("mistral4", 9),
        ("gpt-oss", 70),
        ("gemma3", 70),
        ("gemma4_experts", 9),
        ("kimi-linear", 22),
        ("gemma4_layer_embeddings", 70),
    ],
)
def test_models_in_float(variant: str, tokens: int, tmp_path: Path) -> None:
    """Prefill over several tiles, then decode over several splits of the keys."""
    path = tiny.write(tmp_path / "m.gguf", variant, "F16")
    want, e = forward(path, IDS[: tokens + 2]), emulated(path)
    assert error(e.prefill(IDS[:tokens], 0), want[:tokens]) < 2e-3
    for pos in (tokens, tokens + 1):
        assert error(e.step(IDS[pos], pos)[0], want[pos]) < 1.5e-3


@pytest.mark.parametrize(
    ("kind", "warpgroups", "depth"), [(16, False, "middle"), (64, True, "deep"), (2048, True, "deep")]
)
def test_prompts_of_every_kind(
    kind: int, warpgroups: bool, depth: Depth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt in two pieces through the kernels for few and for many tokens, of latent attention without absorbed
    queries and then with them, then steps for few and for many keys; with rows of whole tiles, two of them in one part
    of the keys, and without."""
    if depth == "deep":
        wide = replace(tiny.VARIANTS["deepseek2_glm"], mla=MLA(96, 256, 48, 64, 80))
        monkeypatch.setitem(tiny.VARIANTS, "deepseek2_glm", wide)
        monkeypatch.setattr("tinychat.kernels.cuda.launches.DEEP_SPLITS", 1)
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_K")
    gguf, pieces = GGUF.open(path), (IDS[:16], IDS[16:28]) if kind == 16 else (IDS[: min(kind, 70)], IDS[70:100])
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    e = EmulatedCUDA(plan, gguf, 128, kind, warpgroups, depth)
    tiled = [launch for launch in e.launches if launch.file == "latent_attention.cu"]
    assert bool(tiled) == (depth == "deep")
    absorbed = {launch.file: launch for launch in e.prefill_launches}.get("prompt_latent_attention.cu")
    assert bool(absorbed) == (kind == 64)
    tiled += [absorbed] if absorbed else []
    if lib := nvrtc():
        for launch in tiled:
            compile_with(lib, launch, "sm_90a")
    tokens = [*pieces[0], *pieces[1]]
    want, got = (
        forward(path, [*tokens, 17]),
        np.concatenate([e.prefill(pieces[0], 0), e.prefill(pieces[1], len(pieces[0]))]),
    )
    errors = np.linalg.norm(got - want[:-1], axis=1) / np.linalg.norm(want[:-1], axis=1)
    assert np.median(errors) < 3e-3  # halves; a close routing decision may fall the other way
    assert error(e.step(17, len(tokens))[0], want[-1]) < 0.05


def test_types_with_tables_or_without_nibbles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one model: a prompt, then steps."""
    mixed = [kind for kind, planes in QUANTS.items() if kind not in FLOATS and (planes.table or not planes.lo)]
    monkeypatch.setattr(tiny, "MIXED", mixed)
    path = tiny.write(tmp_path / "m.gguf", replace(tiny.shape("llama", "IQ_MIX"), head_dim=64), "IQ_MIX")
    assert {t.type for t in GGUF.open(path).tensors.values()} == {Q.F32, *mixed}
    want, e = forward(path, IDS[:11]), emulated(path, 64)
    assert error(e.prefill(IDS[:9], 0), want[:9]) < 3e-3
    for pos in (9, 10):
        assert error(e.step(IDS[pos], pos)[0], want[pos]) < 0.05


@pytest.mark.parametrize(
    ("quant", "mla", "rows"),
    [
        ("Q4_0", MLA(256, 256, 64, 64, 128), 100),
        ("IQ_MIX", MLA(256, 256, 64, 64, 64), 9),
        ("Q8_0", MLA(0, 128, 32, 32, 128), 70),
    ],
)
def test_latent_attention_in_clusters(
    quant: str, mla: MLA, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a low rank of q, with results as int8 blocks and as floats, behind few and many keys, with a
    temperature."""
    shape = replace(tiny.VARIANTS["deepseek2_glm"], layers=2, heads=3, mla=mla, temperature=(0.7, 3))
    monkeypatch.setitem(tiny.VARIANTS, "cluster", shape)
    monkeypatch.setattr(tiny, "MIXED", (Q.IQ2_XS, Q.Q2_K, Q.IQ4_XS))
    path = tiny.write(tmp_path / "m.gguf", "cluster", quant)
    gguf = GGUF.open(path)
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    e = EmulatedCUDA(plan, gguf, 128, depth="near")
    clusters = [launch for launch in e.launches if launch.file == "mla_cluster.cu"]
    assert len(clusters) == 2
    if lib := nvrtc():
        compile_with(lib, clusters[0], "sm_90a")
    want = forward(path, IDS[:rows])
    for pos in range(3):
        assert error(e.step(IDS[pos], pos)[0], want[pos]) < 0.05
    e.prefill(IDS[3 : rows - 1], 3)
    assert error(e.step(IDS[rows - 1], rows - 1)[0], want[-1]) < 0.05


def test_clusters_only_where_they_fit(tmp_path: Path) -> None:
    """A model of float weights, a GPU without clusters: the kernels for any number of keys."""
    for quant, clusters in (("F16", True), ("Q8_0", False)):
        gguf = GGUF.open(tiny.write(tmp_path / f"{quant}.gguf", "deepseek2_glm", quant))
        plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
        layout = Layout(plan, {name: t.nbytes for name, t in gguf.tensors.items()})
        assert depths(Builder(plan, layout, 512), clusters, plan.layers) == {0: "middle"}


@pytest.mark.parametrize(("experts", "chosen"), [(72, 64), (160, 3)])
def test_many_experts(experts: int, chosen: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that may be chosen, more than a warp has lanes; more experts than a block compares with one another."""
    many = replace(tiny.VARIANTS["olmoe"], layers=1, moe=MoE(experts, chosen, 64))
    monkeypatch.setitem(tiny.VARIANTS, "many", many)
    path = tiny.write(tmp_path / "m.gguf", "many", "F16")
    want, e = forward(path, IDS[:4]), emulated(path, 64)
    assert error(e.prefill(IDS[:3], 0), want[:3]) < 2e-3
    assert error(e.step(IDS[3], 3)[0], want[3]) < 1.5e-3


def test_values_of_another_length_than_keys() -> None:
    """GQA, 4 heads over 2, keys of 32 values and values of 24: the cache and attention, as prefill and as steps."""
    heads, kv_heads, key, value, tokens = 4, 2, 32, 24, 9

    def weight(name: str, rows: int, cols: int) -> blocks.Weight:
        return blocks.Weight(name, Q.F16, rows, cols)

    gain, table = blocks.Weight("gain", Q.F32, 1, 8), weight("table", 8, 8)
    rope = blocks.Rope(2, "norm", (0.0,))  # which turns nothing
    q, k, v = weight("q", heads * key, 8), weight("k", kv_heads * key, 8), weight("v", kv_heads * value, 8)
    output, scale = weight("output", 8, heads * value), 0.2
    block = blocks.GQA(
        gain, 0.0, q, k, v, None, None, None, None, None, None, rope, heads, kv_heads, key, value, scale, output, None
    )
    plan = ops.Plan(ops.Embed(table), (blocks.Layer(block, None),), ops.Head(gain, 0.0, table))
    b = Builder(plan, Layout(plan, {w.tensor: w.nbytes for w in plan.weights}), 64)
    steps = [launch for launch, _ in decode(b) if launch.name.startswith("attention")]
    prompt = [
        x
        for x in Prefill(b, 16, Chip(False, 163 << 10)).layers()
        if x.name.startswith(("store_kv", "prompt_attention"))
    ]
    buffers = {name: aligned(size) for name, size in b.buffers.items()}
    buffers["tickets"][:] = 0
    for name in b.ropes.values():
        buffers[name].view(np.float32)[:] = rope.table(64).ravel()
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((tokens, w.rows)).astype(np.float32) for n, w in (("q", q), ("k", k), ("v", v))}
    keys, values = (np.repeat(x[n].reshape(tokens, kv_heads, -1), 2, axis=1) for n in "kv")
    scores = np.einsum("thd,shd->hts", x["q"].reshape(tokens, heads, key), keys) * scale
    scores += np.where(np.tri(tokens), 0, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    want = np.einsum("hts,shd->thd", p / p.sum(-1, keepdims=True), values).reshape(tokens, -1)

    def run(launches: list[Launch], first: int, count: int) -> None:
        buffers["state"].view(np.int32)[: len(WORDS)] = state_words(Sampling(), first, count, 0)
        for name, rows in x.items():
            buffers[name].view(np.float32)[: rows[0].size * count] = rows[first : first + count].ravel()
        for launch in launches:
            cuda_emulator.run(launch, buffers, count, first + count)

    run(prompt, 0, 5)
    got = buffers["attended"].view(np.float16)[: 16 * padded(heads * value)].reshape(16, -1)[:5]
    n = np.arange(heads * value)
    place = (n & ~127) | (n & 30) << 2 | (n & 96) >> 4 | (n & 1)  # halves.cuh
    assert error(got[:, place], want[:5]) < 2e-3
    for pos in range(5, tokens):
        run(steps, pos, 1)
        assert error(buffers["heads"].view(np.float32)[: heads * value], want[pos]) < 2e-3


def test_model_in_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.VARIANTS, "wide", WIDE)
    path = tiny.write(tmp_path / "m.gguf", "wide", "Q4_0")
    want, e = forward(path, IDS[:4]), emulated(path)
    assert "ffn_q" in e.buffers
    assert error(e.prefill(IDS[:3], 0), want[:3]) < 0.05
    assert error(e.step(IDS[3], 3)[0], want[3]) < 0.05


VOCAB = 9000  # three stretches, the last one short


@pytest.fixture(scope="module")
def sampler() -> tuple[list[Launch], dict[str, int]]:
    table = blocks.Weight("table", Q.F16, VOCAB, 8)
    plan = ops.Plan(ops.Embed(table), (), ops.Head(blocks.Weight("gain", Q.F32, 1, 8), 0.0, table))
    builder = Builder(plan, Layout(plan, {"table": 16 * VOCAB, "gain": 32}), 128)
    builder.buffer("logits", 4 * VOCAB)
    return sampling(builder), builder.buffers


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repeat_penalty": 1.5},
        {},
        {"seed": 2**63 + 5, "temperature": 1.5},
        {"top_k": 1},
        {"top_p": 0.3, "min_p": 0.0},
        {"top_k": 0, "top_p": 0.9},
        {"top_k": 100, "top_p": 1.0, "min_p": 0.2},
        {"repeat_penalty": 1.3, "repeat_last_n": 5, "top_k": 3},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 0.0, "dry_multiplier": 3.0},
        {
            "dry_multiplier": 2.0,
            "dry_base": 1.0,
            "dry_allowed_length": 1,
            "dry_penalty_last_n": 20,
            "repeat_penalty": 1.2,
        },
        {"top_k": 0, "dry_multiplier": 4.0, "dry_allowed_length": 3, "dry_breakers": (7, 8000)},
        {"temperature": 0.0, "dry_multiplier": 50.0, "dry_base": 50.0},
        {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 0.7, "repeat_penalty": 1.1},
        {"frequency_penalty": -1.5, "top_k": 0, "temperature": 2.0},
        {"presence_penalty": 1.5, "repeat_last_n": 3, "dry_multiplier": 3.0, "logit_bias": ((7, 12.0), (8999, 11.0))},
        {"logit_bias": ((4999, 5.5), (17, 6.0), (4097, -100.0)), "temperature": 1.2},
    ],
    ids=str,
)
def test_sampling_as_numpy_does(sampler: tuple[list[Launch], dict[str, int]], settings: dict[str, float]) -> None:
    s = Sampling(**({"repeat_penalty": 1.0} | settings))  # type: ignore[arg-type]
    launches, sizes = sampler
    for seed, allowed in enumerate((0, 0, 12, 4000)):  # tokens of the mask; 0: none
        rng = np.random.default_rng(seed)
        logits = (rng.standard_normal(VOCAB) * 3).astype(np.float32)
        buffers = {name: aligned(size) for name, size in sizes.items()}
        best, repeated = np.argsort(logits)[::-1][:4], rng.integers(0, VOCAB, 4)
        other = [*rng.integers(0, VOCAB, 3), 7, 4999, 8000]
        recent = [int(i) for i in [*repeated, best[0], *other, *best[1:], *repeated[2:], best[1], *repeated]]
        pos = 40 + seed
        mask = breaker_bits(tuple(rng.choice(VOCAB, allowed)), VOCAB) if allowed else None
        buffers["state"].view(np.int32)[: len(WORDS)] = state_words(s, pos, 1, pos + 1 - len(recent), bool(allowed))
        buffers["history"].view(np.int32)[pos + 1 - len(recent) : pos + 1] = recent
        buffers["logits"].view(np.float32)[:] = logits
        buffers["breakers"].view(np.uint32)[:] = breaker_bits(s.dry_breakers, VOCAB)
        if s.logit_bias:
            buffers["bias"].view(np.float32)[:] = bias_values(s.logit_bias, VOCAB)
        if mask is not None:
            buffers["allowed"].view(np.uint32)[:] = mask
        for launch in launches:
            cuda_emulator.run(launch, buffers)
        assert (s.dry_multiplier > 0) == bool(len(dry(s, recent)[0]))
        token, logprob = sample(logits, s, pos, recent, mask)
        word = int(buffers["ring"].view(np.uint64)[(pos + 1) % RING])
        assert word & 0xFFFFFFFF == token == buffers["history"].view(np.int32)[pos + 1]
        assert float(np.uint32(word >> 32).view(np.float32)) == pytest.approx(logprob, abs=1e-4)
        assert buffers["state"].view(np.int32)[0] == pos + 1


def test_types_without_kernels_are_refused() -> None:
    table = blocks.Weight("w", Q.Q8_K, 8, 256)
    plan = ops.Plan(ops.Embed(table), (), ops.Head(blocks.Weight("gain", Q.F32, 1, 256), 0.0, table))
    with pytest.raises(TinychatError, match="do not read Q8_K"):
        Layout(plan, {"w": 8 * 292, "gain": 1024})


def nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the PyPI wheel (the `dev` extra)."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc") if importlib.util.find_spec("nvidia") else None
    found = (
        sorted(Path(next(iter(spec.submodule_search_locations))).glob("lib/libnvrtc.so.*"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not found:
        return None
    for builtins in found[0].parent.glob("libnvrtc-builtins.so.*"):
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(found[0]))


def compile_with(lib: ctypes.CDLL, launch: Launch, arch: str) -> None:
    """To machine code, so that the inline PTX is checked too; less optimised, which takes a third of the time."""
    wanted = (f"--gpu-architecture={arch}", "--minimal", "--Ofast-compile=mid")
    program, options = ctypes.c_void_p(), (ctypes.c_char_p * len(wanted))(*map(str.encode, wanted))
    assert lib.nvrtcCreateProgram(ctypes.byref(program), launch.source().encode(), b"x.cu", 0, None, None) == 0
    status = lib.nvrtcCompileProgram(program, len(wanted), options)
    log = ctypes.create_string_buffer(20000)
    lib.nvrtcGetProgramLog(program, log)
    assert status == 0, f"{launch.name}: {log.value.decode()[:2000]}"
    lib.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_sources_compile_with_nvrtc(arch: str, tmp_path: Path) -> None:
    """Every kernel of four models once; of those that differ in their dimensions alone, the first. And what Gemma 4 has
    besides, with its heads of 512 values, for which shared memory holds few keys."""
    lib = nvrtc()
    if lib is None:
        pytest.skip("needs the wheel nvidia-cuda-nvrtc-cu12, which exists for Linux and Windows only")
    chip = Chip(True, 227 << 10) if arch == "sm_90a" else Chip(False, 163 << 10)
    columns_of = (1, 4) if arch == "sm_90a" else (1,)
    launches: dict[tuple[int, str, str], Launch] = {}
    wide = replace(tiny.VARIANTS["gemma4_layer_embeddings"], head_dim=512, qk_norm=512)
    models: list[tuple[str | tiny.Shape, str]] = [("deepseek2_glm", "Q4_K_M"), ("llama", "Q8_0")]
    models += [("qwen35", "Q8_0"), ("lfm2", "Q8_0")]
    for i, (variant, quant) in enumerate(models + [(wide, "F16")] * (arch == "sm_90a")):
        gguf = GGUF.open(tiny.write(tmp_path / f"{i}.gguf", variant, quant))
        plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
        layout = Layout(plan, {n: t.nbytes for n, t in gguf.tensors.items()})
        b = Builder(plan, layout, 64)
        columns = (1,) if plan.state_bytes else columns_of
        found = [(n, launch) for n in columns for launch, _ in decode(b.of(n))]
        found += [(0, repack(t)) for t in layout.tensors.values() if t.kind not in FLOATS]
        found += [(tokens, launch) for tokens in (16, 2048) for launch in Prefill(b, tokens, chip).layers()]
        for tokens, launch in found:
            kind = re.sub(r"_[\dx_]+$", "", launch.name)
            if variant is not wide or launch.file in ("layer_inputs.cu", "gate_input.cu"):
                launches.setdefault((tokens, launch.file, kind), launch)
            elif launch.name.endswith("_512") and tokens == 2048:
                launches[tokens, launch.file, launch.name] = launch
    different = {launch.source(): launch for launch in launches.values()}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda x: compile_with(lib, x, arch), different.values()))
