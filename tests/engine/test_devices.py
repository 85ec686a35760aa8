"""The whole CUDA executor on an emulated GPU: right as it is; where it computes something wrong, another device is
taken."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.support import tiny
from tests.support.cuda_emulated import EmulatedGPU, miscomputed
from tests.support.exactness import relative
from tests.support.forward64 import forward
from tinychat.engine import Engine, devices
from tinychat.errors import SLOW, TinychatError
from tinychat.kernels.cpu.compiler import NoCompiler
from tinychat.kernels.cpu.executor import CPUExecutor
from tinychat.kernels.cuda import driver, executor, launch
from tinychat.kernels.cuda.executor import CUDAExecutor
from tinychat.kernels.cuda.graph import Graph
from tinychat.kernels.sampler import sample
from tinychat.kernels.sampling import GREEDY, Sampling
from tinychat.kernels.tinygrad.executor import ReferenceExecutor

IDS = [290, 17, 204, 99, 3, 256, 258, 64, 131, 64, 17, 280]


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "GPU", EmulatedGPU)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("fallback") / "m.gguf", "llama", "Q4_0")


def load(model: Path, device: str | None, stages: list[tuple[str, float]] | None = None) -> Engine:
    keep = stages if stages is not None else []
    return Engine.load(model, max_context=48, device=device, progress=lambda *stage: keep.append(stage))


def test_the_executor_as_the_engine_uses_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDAExecutor, "read_bandwidth", lambda self: 1.0)  # of this GPU nobody wants to know it
    stages: list[tuple[str, float]] = []
    engine = load(model, None, stages)
    assert isinstance(engine.executor, CUDAExecutor) and engine.info.device == "CUDA · emulator" and not engine.notes
    gpu = engine.executor.gpu
    assert not gpu.page_locked and not {"staging", "params"} & gpu.buffers.keys()  # what the load took is free again
    loaded = [fraction for name, fraction in stages if name == "loading weights"]
    assert loaded == sorted(loaded) and loaded[-1] == 1 and len(loaded) > 1
    want = forward(model, IDS)
    for decode in (False, True):
        assert np.median(relative(engine.logits(IDS, decode=decode), want)) < 0.05
    first = [t.id for t in engine.generate(IDS, GREEDY, 6, raw=True)]
    follow = engine.logits([*IDS, *first])[len(IDS) - 1 : -1]  # type: ignore[list-item]
    assert (follow.max(1) - follow[range(6), first] < 0.1).all()
    run, sampling = engine.executor, Sampling(temperature=1.5, seed=9)
    run.forward(IDS[:-1], 0, following=IDS[-1])  # leaves the last token's logits, until rows in front of it change
    left = list(islice(run.decode(IDS[-1], len(IDS) - 1, sampling, IDS), 3))
    again = list(run.verify(IDS[-1], [token for token, _ in left[:2]], len(IDS) - 1, sampling, IDS))
    assert again == list(islice(run.decode(IDS[-1], len(IDS) - 1, sampling, IDS), 3)) == left
    logprobs = []
    for _ in ("left", "by a step"):
        logprobs += [logprob for _, logprob in islice(run.decode(IDS[-1], len(IDS) - 1, GREEDY, IDS), 1)]
        run.forward(IDS[-1:], len(IDS) - 1)
    assert logprobs[0] != logprobs[1] == pytest.approx(logprobs[0], abs=0.1)
    biased = replace(GREEDY, logit_bias=((first[1], -1e4), (7, 1e4)))
    assert [t.id for t in engine.generate(IDS, biased, 2, raw=True)] == [7, 7]
    masks = np.random.default_rng(0).integers(0, 2**32, (3, (engine.plan.vocab + 31) // 32), np.uint32)
    ids, sampling = list(IDS), Sampling(temperature=1.5, presence_penalty=1.0, seed=4)
    steps = engine.executor.decode(ids[-1], len(ids) - 1, sampling, ids, partial(next, iter(masks)))
    for mask, (token, logprob) in zip(masks, list(islice(steps, len(masks)))):
        logits = engine.executor.forward(ids[-1:], len(ids) - 1, "last")
        assert logits is not None
        assert (token, pytest.approx(logprob, abs=1e-4)) == sample(logits[0], sampling, len(ids) - 1, ids, mask)
        ids.append(token)
    kept, tail = engine.executor.read_cache(0, len(IDS)), engine.executor.read_cache(8, len(IDS) - 8)
    engine.executor.write_cache(bytes(len(kept)), 0, len(IDS))
    engine.executor.write_cache(kept, 0, len(IDS))
    engine.executor.write_cache(tail, 8, len(IDS) - 8)
    assert engine.executor.read_cache(0, len(IDS)) == kept
    engine.close()


def test_a_gpu_that_computes_wrongly_is_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "text", miscomputed)
    engine = load(model, None)
    assert engine.info.device.startswith("CPU")
    assert engine.notes == ["CUDA is not used: this GPU computes Q4_0 wrongly (self-check failed); please report it"]
    assert np.median(relative(engine.logits(IDS), forward(model, IDS))) < 2e-3
    engine.close()
    with pytest.raises(TinychatError, match="computes Q4_0 wrongly"):
        load(model, "cuda")
    monkeypatch.setattr(EmulatedGPU, "free_bytes", 1000)
    with pytest.raises(
        TinychatError, match=r"^the model needs \d\.\d GB of the GPU's memory .* 0\.0 GB are free for it"
    ):
        load(model, "cuda")


def test_of_several_gpus_the_fastest_with_room_is_taken_and_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Numbered(EmulatedGPU):
        def __init__(self, number: int | None = None) -> None:
            super().__init__()
            self.name, self.free_bytes = f"GPU {number}", free[number]  # type: ignore[misc, index]

    free = {0: 1 << 30, 1: 1 << 30}
    found = [driver.Found(n, n, f"GPU {n}", (9, 0), 1000.0 * n) for n in (1, 0)]
    monkeypatch.setattr(driver, "gpus", lambda: found)
    monkeypatch.setattr(executor, "GPU", Numbered)
    monkeypatch.setattr(CUDAExecutor, "read_bandwidth", lambda self: 1.0)

    def taken(device: str | None) -> tuple[str, list[str]]:
        engine = load(model, device)
        engine.close()
        return engine.info.device, engine.notes

    for device in (None, "cuda"):
        assert taken(device) == ("CUDA · GPU 1", ["CUDA · GPU 1 is used, cuda:1 of 2 GPUs"])
    assert taken("cuda:0") == ("CUDA · GPU 0", [])
    free[1] = 1000
    name, (why, which) = taken(None)
    assert why.startswith("CUDA:1 is not used: the model needs 0.0 GB of the GPU's memory")
    assert (name, which) == ("CUDA · GPU 0", "CUDA · GPU 0 is used, cuda:0 of 2 GPUs")
    with pytest.raises(TinychatError, match=r"^the model needs"):
        load(model, "cuda:1")
    free[0] = 1000
    assert taken(None)[0].startswith("CPU")
    with pytest.raises(TinychatError, match=r"^CUDA:1 is not used: the model needs .*; CUDA:0: the model needs [^;]*;"):
        load(model, "cuda")
    with pytest.raises(TinychatError, match=r"'cuda:' is unknown; there are cuda, cpu, reference, and cuda:1"):
        load(model, "cuda:")


def test_neither_gpu_nor_compiler_leaves_the_reference(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: object, **options: object) -> None:
        raise NoCompiler("no C compiler was found")

    monkeypatch.setattr(launch, "text", miscomputed)
    monkeypatch.setitem(devices._MAKERS, "cpu", no_compiler)  # type: ignore[arg-type]
    engine = load(model, None)
    assert [note.split(":")[0] for note in engine.notes] == ["CUDA is not used", "CPU is not used", "slow"]
    assert engine.notes[-1].startswith(SLOW) and "--force-reinstall ziglang" in engine.notes[-1]
    assert isinstance(engine.executor, ReferenceExecutor)
    engine.close()


def test_an_old_cpu_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        CPUExecutor, "device", property(lambda self: "CPU · 1 thread · plain C", lambda *args: None), raising=False
    )
    engine = load(model, "cpu")
    assert [note for note in engine.notes if "no AVX2" in note and "plain C computes" in note]
    engine.close()


@pytest.mark.parametrize("error", [RuntimeError("CUDA Error 801\nand more"), AttributeError("undefined symbol: x")])
def test_whatever_the_driver_raises_at_load_is_a_reason(
    model: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph(self: EmulatedGPU, launches: object) -> Graph:
        raise error

    monkeypatch.setattr(EmulatedGPU, "graph", graph)
    engine = load(model, None)
    assert engine.info.device.startswith("CPU")
    assert engine.notes == [f"CUDA is not used: CUDA does not work here: {str(error).splitlines()[0]}"]
    engine.close()
