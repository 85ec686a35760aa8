"""States that are not addressed by position, on CUDA: prompts in pieces, steps enqueued ahead, states put back."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.kernels.cuda.test_kernels import IDS, error
from tests.kernels.test_verify import executor as opened
from tests.support import cuda_emulator, tiny
from tests.support.cuda_emulated import EmulatedGPU, aligned
from tests.support.forward64 import forward
from tests.support.shapes import DeltaRule
from tinychat.engine import devices
from tinychat.errors import TinychatError
from tinychat.kernels import blocks, ops
from tinychat.kernels.cuda import executor, verify
from tinychat.kernels.cuda.builder import SLOTS, Builder
from tinychat.kernels.cuda.executor import FEW, CUDAExecutor
from tinychat.kernels.cuda.layout import Layout
from tinychat.kernels.cuda.prefill import Chip, Prefill
from tinychat.kernels.cuda.state import WORDS, state_words
from tinychat.kernels.cuda.step import decode
from tinychat.kernels.sampling import GREEDY

Q = tiny.Q


def test_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is that behind the last id: not of the steps that decode() and verify() enqueue ahead. It can be put back
    at any position. Prompts come in pieces of odd and even lengths, within chunks of tokens and over them, and shorter
    than the convolution. The rule's results are int8 blocks."""
    monkeypatch.setattr(executor, "GPU", EmulatedGPU)
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    monkeypatch.setattr(verify, "COLUMNS", (2, 8))  # for 8 there are too few slots
    monkeypatch.setattr(executor, "FEW", 0)  # every piece goes through the kernels of prompts
    monkeypatch.setattr(executor, "SIZES", (96,))  # of one kind
    shape = replace(tiny.VARIANTS["qwen35"], delta=DeltaRule(2, 6, 32, every=2))
    monkeypatch.setitem(tiny.VARIANTS, "states", shape)
    path, pieces = tiny.write(tmp_path / "m.gguf", "states", "Q8_0"), (70, 2, 1)
    want, at = forward(path, IDS[:74]), 0
    with opened(path, "cuda", context=96) as ex:
        assert isinstance(ex, CUDAExecutor) and ex.limits.verified == 2
        assert ex.state_bytes == ex.plan.state_bytes == len(ex.read_state().tobytes())
        kept, end = ex.forward_keeping(IDS[:70], 0, 64).tobytes(), ex.read_state().tobytes()
        assert ex.forward_keeping(IDS[:70], 0, 63).tobytes() != kept  # in two calls
        assert error(*(np.frombuffer(state, np.float32) for state in (ex.read_state().tobytes(), end))) < 1e-3
        ex.forward(IDS[:64], 0)
        assert ex.read_state().tobytes() == kept
        for n in pieces:
            logits = ex.forward(IDS[at : at + n], at, "last")
            at += n
            assert logits is not None and error(logits[0], want[at - 1]) < 0.01  # the head: int8
        start = ex.read_state()
        monkeypatch.setattr(executor, "FEW", FEW)
        logits = ex.forward(IDS[at : at + 1], at, "last")
        assert logits is not None and error(logits[0], want[at]) < 0.05
        states, steps = [ex.read_state().tobytes()], []
        ex.write_state(start)
        for step in islice(ex.decode(IDS[at], at, GREEDY, IDS[: at + 1]), 3):
            steps.append(step)
            states.append(ex.read_state().tobytes())
        assert states[0] == states[1] != states[2]
        ex.write_state(start)
        again = ex.verify(IDS[at], (), at, GREEDY, IDS[: at + 1], ahead=True)
        assert next(again) == steps[0] and ex.read_state().tobytes() == states[1]
        for wrong in (0, 1):  # behind a right draft and behind a wrong one
            ids, draft = [*IDS[: at + 1], steps[0][0]], (steps[1][0] + wrong) % tiny.VOCAB
            made = list(ex.verify(steps[0][0], [draft], at + 1, GREEDY, ids))
            assert made == steps[1 : 3 - wrong] and ex.read_state().tobytes() == states[3 - wrong]
        for i in (1, 2):  # behind the step that was enqueued ahead, and from there on
            ex.forward([steps[i - 1][0]], at + i)
            assert ex.read_state().tobytes() == states[i + 1]
        for data in (states[2], states[1]):  # of whatever position
            ex.write_state(memoryview(data))
            assert ex.read_state().tobytes() == data
        ex.forward([steps[0][0]], at + 1)
        assert ex.read_state().tobytes() == states[2]
        ex.forward(IDS[:1], 0)  # begins with none
        first = ex.read_state().tobytes()
        ex.write_state(start)
        ex.forward(IDS[:1], 0)
        assert ex.read_state().tobytes() == first and np.isfinite(np.frombuffer(first, np.float32)).all()
        with pytest.raises(TinychatError, match="a saved state of 3 bytes"):
            ex.write_state(memoryview(b"123"))


def test_short_convolutions() -> None:
    """As prompts and as steps, against NumPy: the results as halves and as floats, and the inputs that stay."""
    dim, taps, tokens = 40, 3, 13
    gain, table = blocks.Weight("gain", Q.F32, 1, 8), blocks.Weight("table", Q.F16, 8, 8)
    project, output = blocks.Weight("in", Q.F16, 3 * dim, 8), blocks.Weight("out", Q.F16, 8, dim)
    block = blocks.ShortConvolution(gain, 0.0, project, blocks.Weight("conv", Q.F32, dim, taps), output)
    plan = ops.Plan(ops.Embed(table), (blocks.Layer(block, None),), ops.Head(gain, 0.0, table))
    b = Builder(plan, Layout(plan, {w.tensor: w.nbytes for w in plan.weights}), 64)
    launches = [*(launch for launch, _ in decode(b)), *Prefill(b, 16, Chip(False, 163 << 10)).layers()]
    step, prompt = (next(x for x in launches if x.file == f"{name}short_convolution.cu") for name in ("", "prompt_"))
    buffers, rng = {name: aligned(size) for name, size in b.buffers.items()}, np.random.default_rng(0)
    weights = rng.standard_normal((dim, taps)).astype(np.float32)
    buffers["w:conv"].view(np.float32)[:] = weights.ravel()
    bcz = rng.standard_normal((tokens, 3, dim)).astype(np.float32)
    inputs = np.concatenate([np.zeros((taps - 1, dim), np.float32), bcz[:, 0] * bcz[:, 2]])
    want = bcz[:, 1] * sum(inputs[j : j + tokens] * weights[:, j] for j in range(taps))
    n, at = np.arange(dim), 0
    place = (n & ~127) | (n & 30) << 2 | (n & 96) >> 4 | (n & 1)  # halves.cuh
    for count in (9, 1, 2, 1):
        buffers["state"].view(np.int32)[: len(WORDS)] = state_words(GREEDY, at, count, 0, kept=8 if count == 9 else 0)
        buffers["bcz"].view(np.float32)[: count * 3 * dim] = bcz[at : at + count].ravel()
        cuda_emulator.run(prompt if at < 12 else step, buffers, count, at + count)
        if at < 12:
            got = buffers["attended"].view(np.float16).reshape(16, -1)[:count, place]
        else:
            got = buffers["heads"].view(np.float32)[None, :dim]
        at += count
        assert error(got, want[at - count : at]) < 1e-3
        kept = buffers["carried:0"].view(np.float32).reshape(SLOTS + 1, taps - 1, dim)
        np.testing.assert_array_equal(kept[at % SLOTS], inputs[at : at + taps - 1])
    np.testing.assert_array_equal(kept[SLOTS], inputs[8 : 8 + taps - 1])
