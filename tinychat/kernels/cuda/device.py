"""What we use of tinygrad's CUDA device: buffers, the compiler and its cache, programs; and a few driver calls."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tinygrad import Device, dtypes
from tinygrad.device import Buffer, BufferSpec, TinyELF
from tinygrad.helpers import diskcache_get, diskcache_put

from tinychat.errors import TinychatError
from tinychat.kernels.cuda.graph import Graph, KernelCall, enqueuer
from tinychat.kernels.cuda.launch import Launch, place


def unusable(e: Exception) -> TinychatError:
    """What to raise for an exception that a driver, a compiler or tinygrad raised before the first step."""
    return TinychatError(f"CUDA does not work here: {next(iter(str(e).splitlines()), '') or type(e).__name__}")


class GPU:
    """One CUDA device, its named buffers and compiled kernels. Raises TinychatError where there is none that works."""

    def __init__(self) -> None:
        try:
            self.dev: Any = Device["CUDA"]
            from tinygrad.runtime.autogen import cuda
            from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

            self.cuda: Any = cuda
            self.warpgroups = self.dev.arch == "sm_90"  # has wgmma, which binaries for sm_90a alone may use
            arch = "sm_90a" if self.warpgroups else self.dev.arch
            self.compiler = NVRTCCompiler(arch, ptx=False, cache_key="tinychat_cubin")
        except Exception as e:  # no driver, no compiler, no device: tinygrad raises what it meets
            raise unusable(e) from e
        if int(self.dev.arch[3:]) < 80:
            raise TinychatError(f"the CUDA kernels need compute capability 8.0 or newer, this GPU has {self.dev.arch}")
        self.overlaps = int(self.dev.arch[3:]) >= 90  # kernels may start while the one before still runs
        self.target = self.dev.renderer.target
        self.buffers: dict[str, Buffer] = {}
        self._binaries: dict[str, bytes] = {}
        self.found, self.compiled, self.compile_s = 0, 0, 0.0  # kernels from the disk cache, compiled; seconds of both
        self._programs: dict[str, Any] = {}
        self._aside: Any = None  # a stream that waits for no other
        self._pinned: dict[int, Any] = {}  # page-locked memory by address

    @property
    def name(self) -> str:
        """The GPU's name, for people."""
        text = ctypes.create_string_buffer(100)
        self._check(self.cuda.cuDeviceGetName(text, 100, self.dev.cu_device))
        return text.value.decode(errors="replace")

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(b.nbytes for b in self.buffers.values())

    @property
    def max_shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        value = ctypes.c_int()
        which = self.cuda.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        self._check(self.cuda.cuDeviceGetAttribute(ctypes.byref(value), which, self.dev.cu_device))
        return value.value

    @property
    def free_bytes(self) -> int:
        """Bytes of its memory that are free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        self._check(self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def _check(self, status: int) -> None:
        if status:
            raise TinychatError(f"CUDA error {self.cuda.enum_cudaError_enum.get(status, status)}")

    # --- buffers

    def allocate(self, name: str, nbytes: int) -> None:
        """A device buffer of `nbytes` (uninitialised) under `name`."""
        try:
            self.buffers[name] = Buffer("CUDA", nbytes, dtypes.uint8, options=BufferSpec(nolru=True)).allocate()
        except (MemoryError, RuntimeError) as e:
            raise TinychatError(
                f"the GPU's memory is too small: no room for {nbytes / 1e6:,.0f} MB more; use a "
                f"smaller context or model"
            ) from e

    def free(self, name: str) -> None:
        """Gives a buffer's memory back, after everything enqueued before."""
        self.synchronize()
        buffer: Any = self.buffers.pop(name)
        buffer.deallocate()

    def pinned(self, nbytes: int, name: str | None = None) -> np.ndarray:
        """Page-locked host memory: uint8 (nbytes,); with a `name` also a buffer that kernels write into."""
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        ptr = ctypes.c_void_p()
        self._check(self.cuda.cuMemHostAlloc(ctypes.byref(ptr), nbytes, 1))
        self._pinned[ptr.value or 0] = ptr
        if name:
            external = BufferSpec(external_ptr=ptr.value)
            self.buffers[name] = Buffer("CUDA", nbytes, dtypes.uint8, options=external).allocate()
        return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(ptr.value or 0))

    def unpin(self, data: np.ndarray) -> None:
        """Frees page-locked memory, after everything enqueued before."""
        self.synchronize()
        self._check(self.cuda.cuMemFreeHost(self._pinned.pop(data.ctypes.data)))

    def address(self, name: str) -> Any:
        """Of a buffer, or of "name+offset" in one."""
        name, offset = place(name)
        return self.cuda.CUdeviceptr_v2(self.buffers[name]._buf.value + offset)

    def upload(self, name: str, data: np.ndarray, offset: int = 0) -> None:
        """Puts `data` (contiguous) at byte `offset` of a buffer, behind everything enqueued before. Page-locked data
        must stay."""
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        pointer = self.cuda.CUdeviceptr_v2(self.address(name).value + offset)
        self._check(self.cuda.cuMemcpyHtoDAsync_v2(pointer, ctypes.c_void_p(data.ctypes.data), data.nbytes, None))

    def download(self, name: str, nbytes: int, offset: int = 0) -> np.ndarray:
        """uint8 (nbytes,) from a buffer, after everything enqueued before."""
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        out = np.empty(nbytes, np.uint8)
        pointer = self.cuda.CUdeviceptr_v2(self.address(name).value + offset)
        self._check(self.cuda.cuMemcpyDtoH_v2(ctypes.c_void_p(out.ctypes.data), pointer, nbytes))
        return out

    def peek(self, name: str, nbytes: int, offset: int) -> np.ndarray:
        """uint8 (nbytes,) from a buffer as it is now, without waiting for what is enqueued."""
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        if self._aside is None:
            self._aside = self.cuda.CUstream()
            self._check(self.cuda.cuStreamCreate(ctypes.byref(self._aside), self.cuda.CU_STREAM_NON_BLOCKING))
        out = np.empty(nbytes, np.uint8)
        pointer = self.cuda.CUdeviceptr_v2(self.address(name).value + offset)
        self._check(self.cuda.cuMemcpyDtoHAsync_v2(ctypes.c_void_p(out.ctypes.data), pointer, nbytes, self._aside))
        self._check(self.cuda.cuStreamSynchronize(self._aside))
        return out

    def copy(self, target: str, source: str, nbytes: int) -> None:
        """Copies bytes between two places in buffers, "name" or "name+offset", behind everything enqueued before."""
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        self._check(self.cuda.cuMemcpyDtoDAsync_v2(self.address(target), self.address(source), nbytes, None))

    def synchronize(self) -> None:
        """Waits for everything enqueued; raises TinychatError for what failed on the device."""
        try:
            self.dev.synchronize()
        except RuntimeError as e:
            raise TinychatError(f"the GPU stopped: {e}") from e

    def event(self) -> Any:
        """Marks this point of the enqueued work (for `wait`)."""
        e = self.cuda.CUevent()
        self._check(self.cuda.cuEventCreate(ctypes.byref(e), 0))
        self._check(self.cuda.cuEventRecord(e, None))
        return e

    def wait(self, event: Any) -> None:
        """Waits for an event once, then drops it."""
        self._check(self.cuda.cuEventSynchronize(event))
        self._check(self.cuda.cuEventDestroy_v2(event))

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two events."""
        self._check(self.cuda.cuEventSynchronize(end))
        ms = ctypes.c_float()
        self._check(self.cuda.cuEventElapsedTime(ctypes.byref(ms), start, end))
        return ms.value * 1e-3

    # --- kernels

    def compile(self, launches: Iterable[Launch]) -> None:
        """Compiles what the disk cache does not hold, in parallel."""
        sources = {source: None for source in (launch.source() for launch in launches) if source not in self._binaries}
        if not sources:
            return
        key, started = self.compiler.cachekey, time.perf_counter()
        for source in sources:
            if key and (found := diskcache_get(key, source)) is not None:
                self._binaries[source] = found
        missing = [s for s in sources if s not in self._binaries]
        with ThreadPoolExecutor(8) as pool:
            for source, binary in zip(missing, pool.map(self.compiler.compile, missing)):
                self._binaries[source] = diskcache_put(key, source, binary) if key else binary
        self.found, self.compiled = self.found + len(sources) - len(missing), self.compiled + len(missing)
        self.compile_s += time.perf_counter() - started

    def _program(self, launch: Launch) -> Any:
        source = launch.source()
        if source not in self._programs:
            self.compile([launch])
            made = self._programs[source] = self.dev.runtime(
                TinyELF(self._binaries[source], launch.name, self.target, ())
            )
            self._allow_shared(made, launch.shared)
        return self._programs[source]

    def _call(self, launch: Launch, names: dict[str, str]) -> KernelCall:
        addresses = tuple(self.address(names.get(b, b)).value for b in launch.buffers)
        return KernelCall(self._program(launch).prg, launch.grid_of, launch.threads, launch.shared, addresses)

    def sequence(self, launches: Sequence[Launch], names: dict[str, str] | None = None) -> Callable[..., None]:
        """A function that enqueues the launches one by one, outside any graph, for a number of tokens and of cache
        rows; `names` replaces buffers."""
        self.compile(launches)
        enqueue = enqueuer([self._call(x, names or {}) for x in launches], self.overlaps)

        def within(count: int = 1, keys: int = 1) -> None:
            self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
            enqueue(count, keys)

        return within

    def run(self, launch: Launch, names: dict[str, str] | None = None) -> None:
        """Enqueues one launch."""
        self.sequence([launch], names)()

    def _allow_shared(self, runtime: Any, nbytes: int) -> None:
        runtime.smem = nbytes
        if nbytes:  # with its static shared memory a kernel may need more than 48 KB
            attribute = self.cuda.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(self.cuda.cuFuncSetAttribute(runtime.prg, attribute, nbytes))

    def graph(self, launches: Sequence[Launch], chained: bool = True, count: int = 1, keys: int = 1) -> Graph:
        """All launches as one graph, in this order, with the grids for a number of tokens and of cache rows. `chained`:
        with programmatic edges (graph.py)."""
        self.compile(launches)
        self._check(self.cuda.cuCtxSetCurrent(self.dev.context))
        return Graph([self._call(x, {}) for x in launches], chained and self.overlaps, count, keys)

    def close(self) -> None:
        """Frees buffers and page-locked memory."""
        self.synchronize()
        for buffer in self.buffers.values():
            buffer.deallocate()
        self.buffers.clear()
        for ptr in self._pinned.values():
            self.cuda.cuMemFreeHost(ptr)
        self._pinned.clear()
