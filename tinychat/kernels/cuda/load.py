"""Weights from the file to the GPU: bytes through page-locked memory, repacked into planes there. Threads copy, so that
page faults overlap. The file's pages stay mapped: giving them back took a third of the loading time (madvise holds the
interpreter), and the kernel takes them when it needs memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES

from tinychat.kernels.cuda.device import GPU
from tinychat.kernels.cuda.layout import REPACK_PARAMS, Layout, PackedTensor, repack, repack_params, transpose
from tinychat.kernels.cuda.quants import FLOATS
from tinychat.kernels.executor import Weights

UPLOAD_BYTES = 16 << 20  # of one upload
UPLOADS = 12  # in flight


def load(gpu: GPU, layout: Layout, weights: Weights, progress: Callable[[float], None] | None) -> None:
    """All tensors of `layout`. The buffers `staging` and `params` stay (for repack) until the caller frees them."""
    pinned = [gpu.pinned(UPLOAD_BYTES) for _ in range(UPLOADS)]
    total, done = sum(weights.raw(t.name).nbytes for t in layout.tensors.values()), 0
    gpu.allocate("staging", UPLOAD_BYTES)
    gpu.allocate("params", REPACK_PARAMS)
    busy: list[Any] = [None] * UPLOADS
    work: list[tuple[PackedTensor, np.ndarray, int]] = []
    for t in layout.tensors.values():
        raw, unit = weights.raw(t.name), GGML_QUANT_SIZES[t.kind][1] * 8  # so that 8 blocks share a plane's scale
        step = UPLOAD_BYTES // unit * unit
        work += [(t, raw[i : i + step], i) for i in range(0, raw.nbytes, step)]

    def fill(n: int) -> None:
        part = work[n][1]
        np.copyto(pinned[n % UPLOADS][: part.nbytes], part)

    with ThreadPoolExecutor(UPLOADS - 1) as pool:
        filling: list[Future[None]] = []
        for n in range(len(work) + UPLOADS - 1):
            if n < len(work):
                if busy[n % UPLOADS] is not None:
                    gpu.wait(busy[n % UPLOADS])
                filling.append(pool.submit(fill, n))
            if (m := n - (UPLOADS - 1)) < 0:
                continue
            filling[m].result()
            t, part, offset = work[m]
            data = pinned[m % UPLOADS][: part.nbytes]
            if t.kind in FLOATS:
                gpu.upload(t.buffer, data, offset)
            else:
                block, size = GGML_QUANT_SIZES[t.kind]
                count = part.nbytes // size * block // 32
                gpu.upload("staging", data)
                gpu.upload("params", repack_params(t, offset // size * block // 32, count))
                gpu.run(repack(t, count))
            busy[m % UPLOADS] = gpu.event()
            done += part.nbytes
            if progress:
                progress(done / total)
    for w, source in layout.transposed.values():
        gpu.run(transpose(w, source, layout[w].tensor))
    gpu.synchronize()
    for data in pinned:
        gpu.unpin(data)
