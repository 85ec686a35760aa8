"""The CPU executor against the float64 forward, and against itself: chunks, threads, saved caches."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from tests.support import tiny
from tests.support.blocks import MODEL_QUANTS, QUANTS, random_blocks
from tests.support.forward64 import Model, forward
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError
from tinychat.kernels import sampler
from tinychat.kernels.cpu.executor import CPUExecutor
from tinychat.kernels.cpu.library import CSource, Library
from tinychat.kernels.sampling import GREEDY, Sampling

IDS = [290, 17, 204, 99, 3, 256, 258, 64, 131, 64, 17, 280, 5, 77, 31, 8, 120, 240, 19, 66, 201, 14, 9]
# Relative L2 of a token's logits: only the F16 cache is inexact. The median over tokens, since a tiny change may pick
# another expert for one of them.
NOISE = 2e-3
NATIVE = ("-march=native",)
VECTORS = (*NATIVE, "-DTILES=0", "-DWORDS=0")  # prompts have the arithmetic of decode steps, as on ARM
DENSE = ("llama", "llama_fused_qkv", "qwen2", "gemma3_keys")  # experts take another way where many tokens choose them


@contextmanager
def executor(path: Path, threads: int = 2, context: int = 512, flags: Sequence[str] = NATIVE) -> Iterator[CPUExecutor]:
    gguf = GGUF.open(path)
    ex = CPUExecutor(build_plan(gguf, ModelConfig.from_gguf(gguf)), gguf, context, threads, flags=flags)
    try:
        yield ex
    finally:
        ex.close()


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.median(np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)))


@pytest.mark.parametrize("kind", QUANTS, ids=lambda q: q.name)
def test_packed_rows_decode_to_the_same_bits(kind: tiny.Q) -> None:
    library = Library()
    library.prepare([kind])
    lib = library.lib
    block, _ = GGML_QUANT_SIZES[kind]
    rng, rows, cols = np.random.default_rng(3), 32, 3 * block if block > 1 else 37
    raw = random_blocks(rng, kind, rows * cols // block, 1.0).reshape(rows, -1)
    context = lib.tc_alloc(library.context_bytes)
    lib.tc_open(context, 2)
    packed = lib.tc_alloc(lib.tc_group_bytes(kind, cols) * 2)
    assert (
        lib.tc_load(context, ctypes.byref(CSource(-1, kind, rows, cols, 1, rows, 0, raw.ctypes.data, packed)), 1) == 1
    )
    for g in range(2):
        out = np.empty((cols, 16), np.float32)
        lib.tc_dequantise(packed + g * lib.tc_group_bytes(kind, cols), kind, cols, out.ctypes.data)
        want = dequantize(raw[16 * g : 16 * g + 16], kind).astype(np.float32)
        np.testing.assert_array_equal(out.T.view(np.uint32), want.view(np.uint32))
    assert lib.tc_group_bytes(kind, cols) - raw.nbytes // 2 < 64
    lib.tc_close(context)


def test_a_file_that_cannot_be_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = GGUF.open(path := tiny.write(tmp_path / "m.gguf", "deepseek2_glm"))
    plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
    with monkeypatch.context() as patch:  # what only reading without Python finds
        patch.setattr(GGUF, "place", lambda self, name: (self._files[0].fd, 1 << 40))
        with pytest.raises(TinychatError, match=r"\.weight could not be read$"):
            CPUExecutor(plan, gguf, 64, 2)
    os.truncate(path, gguf.tensors["blk.1.ffn_down_exps.weight"].offset + 1)
    with pytest.raises(TinychatError, match="has become shorter"):
        CPUExecutor(plan, gguf, 64, 2)


@pytest.mark.parametrize("variant", tiny.NAMES)
def test_every_architecture(variant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant)
    with executor(path) as ex:
        got = ex.forward(IDS, 0, "all")
        assert got is not None
        assert relative(got, forward(path, IDS)) < NOISE


@pytest.mark.parametrize("quant", MODEL_QUANTS)
@pytest.mark.parametrize("variant", ["llama", "deepseek2_glm"])
def test_every_quant(variant: str, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, quant)
    with executor(path) as ex:
        got = ex.forward(IDS, 0, "all")
        assert got is not None
        assert relative(got, forward(path, IDS)) < NOISE


@pytest.mark.parametrize(
    ("variant", "quant"),
    [
        ("llama", "Q4_1"),
        ("llama_fused_qkv", "Q6_K"),
        ("olmoe", "Q4_0"),
        ("qwen2", "F16"),
        ("deepseek2_glm", "Q4_K_M"),
        ("deepseek2_lite_legacy", "Q8_0"),
        ("gpt-oss", "MXFP4"),
        ("gemma3_keys", "Q4_0"),
        ("mistral4", "Q8_0"),
    ],
)
def test_chunks_and_threads_change_no_bit(variant: str, quant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant, quant)
    ids = (IDS * 14)[:300]  # over one chunk of attention and one batch
    flags = NATIVE if variant in DENSE else VECTORS
    with executor(path, threads=1, flags=flags) as ex:
        want = np.concatenate([ex.forward([t], i, "all") for i, t in enumerate(ids)])  # type: ignore[misc]
    for threads, chunk in ((1, 300), (2, 300), (2, 7), (3, 50)):
        with executor(path, threads, flags=flags) as ex:
            got = [ex.forward(ids[i : i + chunk], i, "all") for i in range(0, len(ids), chunk)]
            np.testing.assert_array_equal(np.concatenate(got), want)  # type: ignore[arg-type]


def test_layers_that_store_nothing_run_for_the_last_token_alone(tmp_path: Path) -> None:
    path, ids = tiny.write(tmp_path / "m.gguf", "gemma4_layer_embeddings", "Q4_0"), (IDS * 14)[:300]
    with executor(path) as ex:
        assert ex.plan.storing == 3 and 0 < ex._program.whole < ex._program.steps
        every = ex.forward(ids, 0, "all")
        ex.forward(IDS, 0)
        ex.forward(ids[:200], 0)
        last = ex.forward(ids[200:], 200, "last")
        assert every is not None and last is not None
        np.testing.assert_array_equal(last[0], every[-1])
        with path.open("r+b") as file:  # the loaded model needs nothing of it any more
            file.write(bytes(path.stat().st_size))
        np.testing.assert_array_equal(ex.forward(ids, 0, "all"), every)
        assert ex.plan.layer_table and ex.weight_bytes >= ex.plan.nbytes - 10_000


def test_decode_is_forward(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_K_M")
    with executor(path, flags=VECTORS) as ex:
        ex.forward(IDS[:-1], 0)
        out, ids, pos = [], list(IDS), len(IDS) - 1
        for (token, logprob), _ in zip(ex.decode(IDS[-1], pos, GREEDY, IDS), range(8)):
            rows = ex.forward([[IDS[-1], *out][-1]], pos + len(out), "last")
            assert rows is not None
            out.append(token)
            logits = rows[0].astype(np.float64)
            assert token == logits.argmax()
            assert logprob == pytest.approx(logits[token] - np.logaddexp.reduce(logits), abs=1e-5)
        for token in out:
            last = ex.forward(ids, 0, "last")
            assert last is not None and last.shape == (1, tiny.VOCAB) and last.argmax() == token
            ids.append(token)


def test_more_threads_than_cores_decode_the_same(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_0")
    answers = []
    for threads in (1, 5):
        with executor(path, threads) as ex:
            ex.forward(IDS, 0)
            answers.append(list(ex.decode(7, len(IDS), GREEDY, [])))
    assert len(answers[0]) == 512 - len(IDS)
    assert answers[0] == answers[1]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's account of each thread")
def test_idle_threads_sleep(tmp_path: Path) -> None:
    def threads() -> set[str]:
        return {p.name for p in Path("/proc/self/task").iterdir()}

    def account(thread: str) -> tuple[str, str]:
        """(state, nanoseconds on a core and of waiting for one and the number of turns)."""
        task = Path("/proc/self/task") / thread
        return task.joinpath("stat").read_text().rpartition(")")[2].split()[0], task.joinpath("schedstat").read_text()

    others = threads()
    with executor(tiny.write(tmp_path / "m.gguf", "llama"), 3) as ex:
        ex.forward(IDS, 0)
        for _ in range(1000):  # until no thread has run between two looks; what loaded the model may still be ending
            ours = threads() - others
            with suppress(OSError):
                before = {t: account(t) for t in ours}
                time.sleep(0.05)
                if all(a == account(t) and a[0] == "S" for t, a in before.items()):
                    break
        else:
            pytest.fail("the threads of the pool never sleep")
        assert len(ours) == 2


def test_saved_cache_continues_as_before(tmp_path: Path) -> None:
    for variant in ("llama", "deepseek2_glm"):
        path = tiny.write(tmp_path / "m.gguf", variant, "Q8_0")
        with executor(path) as ex:
            ex.forward(IDS, 0)
            want = ex.forward([1, 2], len(IDS), "all")
            data, more = ex.read_cache(0, 16), ex.read_cache(16, len(IDS) - 16)
        with executor(path, context=64) as ex:
            ex.write_cache(data, 0, 16)
            ex.write_cache(more, 16, len(IDS) - 16)
            np.testing.assert_array_equal(ex.forward([1, 2], len(IDS), "all"), want)  # type: ignore[arg-type]
            with pytest.raises(TinychatError, match="does not fit"):
                ex.write_cache(data[:-1], 0, 16)
            with pytest.raises(TinychatError, match="does not fit"):
                ex.write_cache(data, 56, 16)


def test_limits(tmp_path: Path) -> None:
    with executor(tiny.write(tmp_path / "m.gguf", "llama"), context=40) as ex:
        assert len(list(ex.decode(1, 35, GREEDY, [1]))) == 5
        for ids, pos in (([1] * 41, 0), ([], 0), ([1], 40), ([tiny.VOCAB], 0), ([-1], 0)):
            with pytest.raises(TinychatError):
                ex.forward(ids, pos)
        ex.close()
        with pytest.raises(TinychatError, match="closed"):
            ex.forward([1], 0)


def tied(name: str, values: np.ndarray) -> np.ndarray:
    """Tokens 2i and 2i+1 have equal logits."""
    return np.repeat(values[: len(values) // 2 + 1], 2, 0)[: len(values)] if name == "output.weight" else values


def test_decode_samples_as_the_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with executor(tiny.write(tmp_path / "m.gguf", "llama", edit=tied), flags=VECTORS) as ex:
        for i in range(400):
            s = Sampling(
                temperature=float(rng.choice([0, 0.3, 1.0, 2.0])),
                top_k=int(rng.choice([0, 1, 5, 40, 400])),
                top_p=float(rng.choice([0.1, 0.5, 0.95, 1.0])),
                min_p=float(rng.choice([0, 0.05, 0.5])),
                repeat_penalty=float(rng.choice([1.0, 1.3])),
                repeat_last_n=8,
                presence_penalty=float(rng.choice([0, 0.6])),
                frequency_penalty=float(rng.choice([0, -0.3])),
                logit_bias=((int(rng.integers(tiny.VOCAB)), 3.0),) * (i % 3 == 0),
                dry_multiplier=float(rng.choice([0, 0.8, 4])),
                dry_base=float(rng.choice([1.0, 1.75])),
                dry_allowed_length=int(rng.choice([0, 1, 2])),
                dry_penalty_last_n=int(rng.choice([-1, 0, 20])),
                dry_breakers=(3,),
                seed=int(rng.integers(2**40)),
            )
            pos, token = i % 60, int(rng.integers(0, tiny.VOCAB))
            rows = ex.forward([token], pos, "last")
            assert rows is not None
            likely = np.argsort(rows[0])[-2:]  # among the tokens so far, so that the penalties decide
            recent = [*rng.choice([1, 2, 3, *likely], 40).tolist(), token]
            allowed = rng.random(tiny.VOCAB) < rng.choice([0.02, 0.5])
            allowed[rng.integers(tiny.VOCAB)] = True
            words = np.zeros((tiny.VOCAB + 31) // 32 * 4, np.uint8)
            bits = np.packbits(allowed, bitorder="little")
            words[: len(bits)] = bits
            mask = words.view(np.uint32) if i % 2 else None
            for got, logprob in ex.decode(token, pos, s, recent, partial(np.asarray, mask) if i % 2 else None):
                want, want_logprob = sampler.sample(rows[0], s, pos, recent, mask)
                assert i % 2 == 0 or allowed[got]
                assert got == want, (i, s)
                assert logprob == pytest.approx(want_logprob, abs=1e-5)
                break


def test_penalties_follow_what_was_sampled(tmp_path: Path) -> None:
    s = Sampling(temperature=0.0, repeat_penalty=1.2, repeat_last_n=5, dry_multiplier=2.0, dry_allowed_length=1)
    with executor(tiny.write(tmp_path / "m.gguf", "llama")) as ex:
        ex.forward(IDS[:-1], 0)
        ids, pos = list(IDS), len(IDS) - 1
        for (token, _), _ in zip(ex.decode(ids[-1], pos, s, ids), range(60)):
            rows = ex.forward([ids[-1]], len(ids) - 1, "last")
            assert rows is not None and token == sampler.sample(rows[0], s, len(ids) - 1, ids)[0]
            ids.append(token)


@pytest.mark.parametrize("variant", ["qwen3moe", "deepseek2_glm", "deepseek2_groups", "deepseek2_fused_experts"])
def test_routes_are_those_of_the_float64_forward(variant: str, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", variant)
    with executor(path) as ex:
        ex.forward(IDS[:-1], 0)
        steps = [
            (token, ex.routes()) for (token, _), _ in zip(ex.decode(IDS[-1], len(IDS) - 1, GREEDY, IDS), range(12))
        ]
    ids = [*IDS, *(token for token, _ in steps[:-1])]
    model = Model(path)
    model(ids)
    want = np.array([chosen for chosen, _ in model.routing]).reshape(-1, len(ids), steps[0][1].shape[1])  # type: ignore[union-attr]
    np.testing.assert_array_equal(np.stack([routes for _, routes in steps], 1), want[:, len(IDS) - 1 :])  # type: ignore[arg-type]


def test_a_dense_model_has_no_routes(tmp_path: Path) -> None:
    with executor(tiny.write(tmp_path / "m.gguf", "llama")) as ex:
        ex.forward(IDS, 0)
        assert ex.routes() is None


SHORT = """
import resource, sys
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF
from tinychat.engine.plan import build_plan
from tinychat.errors import TinychatError, shortage
from tinychat.kernels.cpu.executor import CPUExecutor

gguf = GGUF.open(sys.argv[1])
plan = build_plan(gguf, ModelConfig.from_gguf(gguf))
CPUExecutor(plan, gguf, 64, threads=1).close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
done = 0
for more in range(0, 24 << 20, 64 << 10):  # ever more room: it ends in another allocation each time
    if done == 24:
        break  # enough
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))
    try:
        ex = CPUExecutor(plan, gguf, 512, threads=1)
        ex.forward([1, 2, 3], 0)
        ex.close()
        done += 1
    except TinychatError as e:
        done = 0
        assert "not enough memory" in str(e), e
    except Exception as e:  # Python's or NumPy's own
        done = 0
        assert shortage(e), e
print("done", done)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS as Linux has it")
def test_too_little_memory_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q8_0")
    ran = subprocess.run([sys.executable, "-c", SHORT, str(path)], capture_output=True, text=True)
    assert ran.returncode == 0 and int(ran.stdout.split()[1]) > 0, ran.stderr
