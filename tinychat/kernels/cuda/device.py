"""A CUDA device: named buffers, programs and graphs, and copies between it and the host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tinychat.errors import TinychatError
from tinychat.kernels.cuda import binaries, driver
from tinychat.kernels.cuda.driver import check
from tinychat.kernels.cuda.graph import Graph, KernelCall, enqueuer
from tinychat.kernels.cuda.launch import Launch, edges, place

BRIEF = 16 << 20  # bytes of an upload that returns at once; the driver copies pageable memory first
_MAX_SHARED = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


def unusable(e: Exception) -> TinychatError:
    """What to raise for an exception that a driver, a compiler or tinygrad raised before the first step."""
    return TinychatError(f"CUDA does not work here: {next(iter(str(e).splitlines()), '') or type(e).__name__}")


class LoadedKernel:
    """A kernel on the device, until it is forgotten. `shared`: bytes of dynamic shared memory."""

    def __init__(self, binary: bytes, name: str, shared: int) -> None:
        self._cuda = cuda = driver.library()
        self._module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(self._module), binary))
        check(cuda.cuModuleGetFunction(ctypes.byref(self.function), self._module, name.encode()))
        if shared:  # with its static shared memory a kernel may need more than 48 KB
            check(cuda.cuFuncSetAttribute(self.function, _DYNAMIC_SHARED, shared))

    def __del__(self) -> None:
        if self._module:
            self._cuda.cuModuleUnload(self._module)


class GPU:
    """A CUDA device (by default the first of `driver.gpus`), its named buffers and compiled kernels. Raises
    TinychatError where it does not work."""

    def __init__(self, number: int | None = None) -> None:
        try:
            self.cuda = driver.library()
            self._gpu, self._context = driver.context(number)
        except Exception as e:  # no driver, one without a function that is needed, no device
            raise unusable(e) from e
        major, minor = self._gpu.capability
        if (major, minor) < driver.CAPABILITY:
            raise TinychatError(f"the CUDA kernels need compute capability 8.0 or newer, this GPU has {major}.{minor}")
        self.overlaps = major >= 9  # kernels may start while the one before still runs
        self.warpgroups = (major, minor) == (9, 0)  # has wgmma, which binaries for sm_90a alone may use
        self.arch = f"sm_{major}{minor}{'a' * self.warpgroups}"
        self.buffers: dict[str, tuple[int, int]] = {}  # address and bytes
        self._binaries: dict[str, bytes] = {}
        self.found, self.compiled, self.compile_s = 0, 0, 0.0  # kernels from the disk cache, compiled; seconds of both
        self._programs: dict[str, LoadedKernel] = {}
        self._aside: Any = None  # a stream that waits for no other
        self._pinned = set[int]()  # addresses of page-locked memory

    @property
    def name(self) -> str:
        """The GPU's name, for people."""
        return self._gpu.name

    @property
    def nbytes(self) -> int:
        """Bytes of all its buffers."""
        return sum(nbytes for _, nbytes in self.buffers.values())

    @property
    def max_shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        value = ctypes.c_int()
        check(self.cuda.cuDeviceGetAttribute(ctypes.byref(value), _MAX_SHARED, self._gpu.device))
        return value.value

    @property
    def free_bytes(self) -> int:
        """Bytes of its memory that are free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.enter()
        check(self.cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
        return free.value

    def enter(self) -> None:
        """Makes the device that of the calling thread."""
        check(driver.brief().cuCtxSetCurrent(self._context))

    # --- buffers

    def allocate(self, name: str, nbytes: int) -> None:
        """A device buffer of `nbytes` (uninitialised) under `name`."""
        self.enter()
        made = ctypes.c_uint64()
        try:
            check(self.cuda.cuMemAlloc_v2(ctypes.byref(made), nbytes))
        except TinychatError as e:
            raise TinychatError(
                f"the GPU's memory is too small: no room for {nbytes / 1e6:,.0f} MB more; use a "
                f"smaller context or model"
            ) from e
        self.buffers[name] = made.value, nbytes

    def free(self, name: str) -> None:
        """Gives a buffer's memory back, after everything enqueued before."""
        self.synchronize()
        check(self.cuda.cuMemFree_v2(self.buffers.pop(name)[0]))

    def pinned(self, nbytes: int, name: str | None = None) -> np.ndarray:
        """Page-locked host memory: uint8 (nbytes,); with a `name` also a buffer that kernels write into."""
        self.enter()
        made = ctypes.c_void_p()
        check(self.cuda.cuMemHostAlloc(ctypes.byref(made), nbytes, _PORTABLE))
        address = made.value or 0
        self._pinned.add(address)
        if name:
            self.buffers[name] = address, nbytes  # kernels see the host's memory at its own addresses
        return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))

    def unpin(self, data: np.ndarray) -> None:
        """Frees page-locked memory, after everything enqueued before."""
        self.synchronize()
        self._pinned.remove(data.ctypes.data)
        check(self.cuda.cuMemFreeHost(data.ctypes.data))

    def address(self, name: str) -> int:
        """Of a buffer, or of "name+offset" in one."""
        name, offset = place(name)
        return self.buffers[name][0] + offset

    def upload(self, name: str, data: np.ndarray, offset: int = 0) -> None:
        """Puts `data` (contiguous) at byte `offset` of a buffer, behind everything enqueued before. Page-locked data
        must stay."""
        self.enter()
        cuda = driver.brief() if data.nbytes <= BRIEF else self.cuda
        check(cuda.cuMemcpyHtoDAsync_v2(self.address(name) + offset, data.ctypes.data, data.nbytes, None))

    def download(self, name: str, nbytes: int, offset: int = 0) -> np.ndarray:
        """uint8 (nbytes,) from a buffer, after everything enqueued before."""
        self.enter()
        out = np.empty(nbytes, np.uint8)
        check(self.cuda.cuMemcpyDtoH_v2(out.ctypes.data, self.address(name) + offset, nbytes))
        return out

    def peek(self, name: str, nbytes: int, offset: int) -> np.ndarray:
        """uint8 (nbytes,) from a buffer as it is now, without waiting for what is enqueued."""
        self.enter()
        if self._aside is None:
            self._aside = ctypes.c_void_p()
            check(self.cuda.cuStreamCreate(ctypes.byref(self._aside), _NON_BLOCKING))
        out = np.empty(nbytes, np.uint8)
        source = self.address(name) + offset
        check(self.cuda.cuMemcpyDtoHAsync_v2(out.ctypes.data, source, nbytes, self._aside))
        check(self.cuda.cuStreamSynchronize(self._aside))
        return out

    def copy(self, target: str, source: str, nbytes: int) -> None:
        """Copies bytes between two places in buffers, "name" or "name+offset", behind everything enqueued before."""
        self.enter()
        check(self.cuda.cuMemcpyDtoDAsync_v2(self.address(target), self.address(source), nbytes, None))

    def synchronize(self) -> None:
        """Waits for everything enqueued; raises TinychatError for what failed on the device."""
        try:
            self.enter()
            check(self.cuda.cuCtxSynchronize())
        except TinychatError as e:
            raise TinychatError(f"the GPU stopped: {e}") from e

    def event(self) -> Any:
        """Marks this point of the enqueued work (for `wait`)."""
        e = ctypes.c_void_p()
        check(driver.brief().cuEventCreate(ctypes.byref(e), 0))
        check(driver.brief().cuEventRecord(e, None))
        return e

    def wait(self, event: Any) -> None:
        """Waits for an event once, then drops it."""
        check(self.cuda.cuEventSynchronize(event))
        check(self.cuda.cuEventDestroy_v2(event))

    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two events."""
        check(self.cuda.cuEventSynchronize(end))
        ms = ctypes.c_float()
        check(self.cuda.cuEventElapsedTime(ctypes.byref(ms), start, end))
        return ms.value * 1e-3

    # --- kernels

    def compile(self, launches: Iterable[Launch]) -> None:
        """Compiles what the disk cache does not hold, in parallel."""
        sources = {source: None for source in (launch.source() for launch in launches) if source not in self._binaries}
        if not sources:
            return
        started = time.perf_counter()
        for source in sources:
            if (found := binaries.find(source, self.arch)) is not None:
                self._binaries[source] = found
        if missing := [s for s in sources if s not in self._binaries]:
            try:
                self._binaries |= zip(missing, binaries.compile_all(missing, self.arch))
            except Exception as e:  # no compiler, or one without this architecture
                raise unusable(e) from e
        self.found, self.compiled = self.found + len(sources) - len(missing), self.compiled + len(missing)
        self.compile_s += time.perf_counter() - started

    def program(self, launch: Launch) -> LoadedKernel:
        """The launch's kernel, loaded."""
        source = launch.source()
        if source not in self._programs:
            self.compile([launch])
            self.enter()
            self._programs[source] = LoadedKernel(self._binaries[source], launch.name, launch.shared)
        return self._programs[source]

    def _call(self, launch: Launch, names: dict[str, str]) -> KernelCall:
        addresses = tuple(self.address(names.get(b, b)) for b in launch.buffers)
        return KernelCall(self.program(launch).function, launch.grid_of, launch.threads, launch.shared, addresses)

    def sequence(
        self, launches: Sequence[Launch], names: dict[str, str] | None = None, *, few: bool = False
    ) -> Callable[..., None]:
        """A function that enqueues the launches one by one, outside any graph, for a number of tokens and of cache
        rows; `names` replaces buffers. `few`: there is always room in the device's queue, so that it returns at
        once."""
        self.compile(launches)
        enqueue = enqueuer(
            driver.brief() if few else self.cuda, [self._call(x, names or {}) for x in launches], self.overlaps
        )

        def within(count: int = 1, keys: int = 1) -> None:
            self.enter()
            enqueue(count, keys)

        return within

    def run(self, launch: Launch, names: dict[str, str] | None = None) -> None:
        """Enqueues one launch."""
        self.sequence([launch], names)()

    def graph(self, launches: Sequence[Launch], chained: bool = True, count: int = 1, keys: int = 1) -> Graph:
        """All launches as one graph, in this order but for those aside, with the grids for a number of tokens and of
        cache rows. `chained`: with programmatic edges (graph.py)."""
        self.compile(launches)
        self.enter()
        calls = [self._call(x, {}) for x in launches]
        return Graph(calls, edges(launches), chained and self.overlaps, count, keys)

    def close(self) -> None:
        """Frees buffers and page-locked memory."""
        self.synchronize()
        for address, _ in self.buffers.values():
            if address not in self._pinned:
                self.cuda.cuMemFree_v2(address)
        self.buffers.clear()
        for address in self._pinned:
            self.cuda.cuMemFreeHost(address)
        self._pinned.clear()
