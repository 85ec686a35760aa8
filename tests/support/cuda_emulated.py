"""The CUDA kernels on the emulator, with NumPy arrays for device buffers: single steps, and a GPU for the whole
executor."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tests.support import cuda_emulator
from tinychat.engine.gguf import GGUF
from tinychat.kernels.cuda.builder import RING, Builder, Depth
from tinychat.kernels.cuda.launch import Launch, place, text
from tinychat.kernels.cuda.layout import Layout, repack, repack_params, transpose
from tinychat.kernels.cuda.prefill import Chip, Prefill
from tinychat.kernels.cuda.quants import FLOATS
from tinychat.kernels.cuda.state import WORDS, state_words
from tinychat.kernels.cuda.step import decode
from tinychat.kernels.ops import Plan
from tinychat.kernels.quant_types import GGML_QUANT_SIZES
from tinychat.kernels.sampling import Sampling

RUNNING = threading.Lock()  # the emulator runs one kernel at a time
PREFILL = 96  # tokens of a prefill step: more than one tile, fewer than two


class EmulatedCUDA:
    """Buffers start poisoned (NaN), so that whatever a kernel reads too early shows."""

    def __init__(
        self,
        plan: Plan,
        gguf: GGUF,
        max_context: int,
        prefill_tokens: int = PREFILL,
        warpgroups: bool = True,
        depth: Depth = "middle",
    ) -> None:
        self.prefill_tokens = prefill_tokens
        self.plan, layout = plan, Layout(plan, {name: t.nbytes for name, t in gguf.tensors.items()})
        self.builder = Builder(plan, layout, max_context, warpgroups)
        self.launches = [launch for launch, _ in decode(self.builder, depth)]
        chip = Chip(warpgroups, 227 << 10)
        prefill, fresh = (Prefill(self.builder, prefill_tokens, chip, fresh=fresh) for fresh in (False, True))
        self.prefill_launches, self.fresh_launches = (
            [*p.layers(), *p.head(plan.head)] for p in (prefill, fresh if prefill.absorbs else prefill)
        )
        self.buffers = {name: aligned(size) for name, size in self.builder.buffers.items()}
        if "tickets" in self.buffers:
            self.buffers["tickets"][:] = 0
        packed = [repack(t) for t in layout.tensors.values() if t.kind not in FLOATS]
        cuda_emulator.compile_all([*packed, *self.launches, *self.prefill_launches, *self.fresh_launches])
        for t in layout.tensors.values():
            raw = gguf.raw(t.name)
            out = self.buffers.setdefault(t.buffer, aligned(t.nbytes))
            if t.kind in FLOATS:
                out[: raw.size] = raw
            else:
                self.buffers["staging"] = aligned(raw.size)
                self.buffers["params"] = repack_params(t, 0, t.blocks)
                self.buffers["staging"][: raw.size] = raw
                block, size = GGML_QUANT_SIZES[t.kind]
                assert raw.size == t.values // block * size
                cuda_emulator.run(repack(t), self.buffers, t.blocks)
        for w, source in layout.transposed.values():
            self.buffers.setdefault(layout[w].tensor.buffer, aligned(layout[w].tensor.nbytes))
            cuda_emulator.run(transpose(w, source, layout[w].tensor), self.buffers)
        for rope, name in self.builder.ropes.items():
            self.buffers[name].view(np.float32)[:] = rope.table(max_context).ravel()

    def step(
        self, token: int, pos: int, sampling: Sampling | None = None, recent: Sequence[int] = ()
    ) -> tuple[np.ndarray, int, float]:
        """Runs `token` at `pos`: (logits, the sampled token, its log-probability)."""
        self.buffers["state"].view(np.int32)[: len(WORDS)] = state_words(
            sampling or Sampling(temperature=0.0), pos, 1, pos + 1 - len(recent)
        )
        history = self.buffers["history"].view(np.int32)
        history[pos] = token
        if recent:
            history[pos + 1 - len(recent) : pos + 1] = recent
        for launch in self.launches:
            cuda_emulator.run(launch, self.buffers)
        word = self.buffers["ring"].view(np.uint64)[(pos + 1) % RING]
        assert history[pos + 1] == int(word) & 0xFFFFFFFF
        return (
            self.buffers["logits"].view(np.float32).copy(),
            int(word) & 0xFFFFFFFF,
            float(np.uint32(int(word) >> 32).view(np.float32)),
        )

    def prefill(self, ids: Sequence[int], pos: int) -> np.ndarray:
        """Runs `ids` at pos, pos + 1, ...: logits of each."""
        self.buffers["state"].view(np.int32)[: len(WORDS)] = state_words(Sampling(temperature=0.0), pos, len(ids), 0)
        self.buffers["history"].view(np.int32)[pos : pos + len(ids)] = ids
        for launch in self.prefill_launches if pos else self.fresh_launches:
            cuda_emulator.run(launch, self.buffers, len(ids), pos + len(ids))
        return self.buffers["logits_all"].view(np.float32).reshape(self.prefill_tokens, -1)[: len(ids)].copy()


class EmulatedGPU:
    """In place of kernels/cuda/device.GPU, for the executor as it is: launches run at once, a graph is its launches in
    order."""

    name = "emulator"

    def __init__(self, number: int | None = None) -> None:
        self.buffers: dict[str, np.ndarray] = {}
        self.page_locked = 0  # bytes that no kernel writes into

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buffers.values())

    def allocate(self, name: str, nbytes: int) -> None:
        self.buffers[name] = aligned(nbytes)

    def free(self, name: str) -> None:
        del self.buffers[name]

    def pinned(self, nbytes: int, name: str | None = None) -> np.ndarray:
        data = aligned(nbytes)
        if name:
            self.buffers[name] = data
        else:
            self.page_locked += nbytes
        return data

    def unpin(self, data: np.ndarray) -> None:
        self.page_locked -= data.nbytes

    def upload(self, name: str, data: np.ndarray, offset: int = 0) -> None:
        raw = data.reshape(-1).view(np.uint8)
        self.buffers[name][offset : offset + raw.size] = raw

    def download(self, name: str, nbytes: int, offset: int = 0) -> np.ndarray:
        name, start = place(name)
        return self.buffers[name][start + offset : start + offset + nbytes].copy()

    peek = download

    def copy(self, target: str, source: str, nbytes: int) -> None:
        name, at = place(target)
        self.buffers[name][at : at + nbytes] = self.download(source, nbytes)

    free_bytes = 1 << 33
    warpgroups, overlaps, max_shared = True, True, 227 << 10

    def event(self) -> float:
        return time.perf_counter()

    def wait(self, event: float) -> None:
        return None

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        return None

    def compile(self, launches: Iterable[Launch]) -> None:
        """Nothing: a graph or a sequence is compiled when it is made, so that those that no test runs are not."""

    def sequence(
        self, launches: Sequence[Launch], names: dict[str, str] | None = None, *, few: bool = False
    ) -> Callable[..., None]:
        with RUNNING:
            cuda_emulator.compile_all(launches)

        def enqueue(count: int = 1, keys: int = 1) -> None:
            for launch in launches:
                buffers = {b: self.buffers[n] for b, n in (names or {}).items()}
                with RUNNING:
                    cuda_emulator.run(launch, self.buffers | buffers, count, keys)

        return enqueue

    def run(self, launch: Launch, names: dict[str, str] | None = None) -> None:
        self.sequence([launch], names)()

    def graph(self, launches: Sequence[Launch], chained: bool = True, count: int = 1, keys: int = 1) -> "EmulatedGraph":
        enqueue = self.sequence(launches)
        return EmulatedGraph(lambda: enqueue(count, keys), len(launches))

    def close(self) -> None:
        self.buffers.clear()


@dataclass
class EmulatedGraph:
    enqueue: Callable[[], None]
    kernels: int

    def __call__(self) -> None:
        self.enqueue()


def miscomputed(name: str) -> str:
    """The CUDA source file `name` with one wrong sign: a GPU that gets Q4_0 and Q5_0 wrong. For `launch.text`."""
    source = text(name)
    wrong = source.replace("- offset_of(T) * sum", "+ offset_of(T) * sum")
    assert name != "quants.cuh" or wrong != source
    return wrong


def aligned(nbytes: int) -> np.ndarray:
    """uint8 (nbytes,) of NaNs on a 256-byte boundary."""
    raw = np.full(nbytes + 256, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + nbytes]
