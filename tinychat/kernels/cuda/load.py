"""Weights from the file to the GPU: bytes read into page-locked memory, repacked into planes on the device, by threads
of its own while the executor is made."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.layout import REPACK_PARAMS, Layout, PackedTensor, repack, repack_params, transpose
from tinychat.kernels.cuda.quants import FLOATS
from tinychat.kernels.executor import Weights
from tinychat.kernels.quant_types import GGML_QUANT_SIZES

UPLOAD_BYTES = 16 << 20  # of one upload
THREADS = 12  # that read, at most
LOOK_S = 0.02  # seconds between two reports of the progress


class Upload:
    """The upload of all tensors of `layout`, which begins at once. Who makes one calls `wait` or `stop`."""

    def __init__(self, gpu: GPU, layout: Layout, weights: Weights) -> None:
        self._gpu, self._layout, self._weights = gpu, layout, weights
        self._total, self._done = sum(t.file_bytes for t in layout.tensors.values()), 0
        self._work = self._pieces()
        self._lock = threading.Lock()  # one thread takes a piece, or enqueues one through `staging` and `params`
        self._failure: BaseException | None = None
        self._repacks = {t.kind: (repack(t), t) for t in layout.tensors.values() if t.kind not in FLOATS}
        gpu.compile(launch for launch, _ in self._repacks.values())
        gpu.allocate("staging", UPLOAD_BYTES)
        gpu.allocate("params", REPACK_PARAMS)
        count = max(1, min(THREADS, (os.cpu_count() or 1) - 1, -(-self._total // UPLOAD_BYTES)))
        self._threads = [threading.Thread(target=self._run, name=f"upload {n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def wait(self, progress: Callable[[float], None] | None) -> None:
        """Returns when all weights are on the device; raises what a thread raised."""
        for thread in self._threads:
            alive = True
            while alive:
                thread.join(LOOK_S)
                alive = thread.is_alive()
                if progress:
                    progress(self._done / self._total)
        if self._failure is not None:
            raise self._failure
        for w, source in self._layout.transposed.values():
            self._gpu.run(transpose(w, source, self._layout[w].tensor))
        self._gpu.free("staging")
        self._gpu.free("params")

    def stop(self) -> None:
        """Ends the threads; what is uploaded then is of no use."""
        with self._lock:
            self._work = iter(())
        for thread in self._threads:
            thread.join()

    def _pieces(self) -> Iterator[tuple[PackedTensor, int, int, Callable[..., None] | None]]:
        """A tensor, the first of some of its bytes in the file and their number, and what repacks them."""
        for t in self._layout.tensors.values():
            unit = GGML_QUANT_SIZES[t.kind][1] * 8  # 8 blocks share a plane's scale
            step = UPLOAD_BYTES // unit * unit
            repacked = None
            if t.kind not in FLOATS:
                launch, first = self._repacks[t.kind]
                repacked = self._gpu.sequence([launch], {first.buffer: t.buffer}, few=True)
            for at in range(0, t.file_bytes, step):
                yield t, at, min(step, t.file_bytes - at), repacked

    def _run(self) -> None:
        try:
            pinned, copied = self._gpu.pinned(UPLOAD_BYTES), None
            while True:
                with self._lock:
                    if self._failure or (piece := next(self._work, None)) is None:
                        break
                t, at, nbytes, repacked = piece
                data = pinned[:nbytes]
                if copied:
                    self._gpu.wait(copied)
                self._weights.read(t.name, at, data)
                with self._lock:
                    if repacked is None:
                        self._gpu.upload(t.buffer, data, at)
                    else:
                        block, size = GGML_QUANT_SIZES[t.kind]
                        count = nbytes // size * block // 32
                        self._gpu.upload("staging", data)
                        self._gpu.upload("params", repack_params(t, at // size * block // 32, count))
                        repacked(count)
                    copied = self._gpu.event()
                    self._done += nbytes
            if copied:
                self._gpu.wait(copied)
            self._gpu.unpin(pinned)
        except BaseException as e:
            self._failure = e
