"""The CUDA driver through ctypes: its library, the GPUs and their contexts, and its errors.

tinygrad's device does the same, behind 0.1 s of imports and the libraries of two compilers; kernels are compiled
through it (binaries.py) when one is not in the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any

from tinychat.errors import TinychatError

LIBRARY = "libcuda.so.1"
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, c_void_p),
    "cuDeviceGetCount": (c_void_p,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (c_void_p, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuEventDestroy_v2": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_char_p),
    "cuModuleUnload": (c_void_p,),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuFuncGetAttribute": (c_void_p, c_int, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuGraphCreate": (c_void_p, c_uint),
    "cuGraphAddKernelNode": (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p),
    "cuGraphAddDependencies_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphInstantiate_v2": (c_void_p, c_void_p, c_void_p, c_void_p, c_size_t),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}
_CLOCK, _BUS, _MAJOR, _MINOR = 36, 37, 75, 76  # CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, ..., COMPUTE_CAPABILITY_...
CAPABILITY = 8, 0  # that the kernels need
_starting = threading.Lock()


@dataclass(frozen=True)
class Found:
    """A GPU. `number`: of those that CUDA_VISIBLE_DEVICES lets the driver see; `device`: its handle; `bandwidth`: of
    its memory, GB/s by its data sheet, 0 where the driver does not say."""

    number: int
    device: int
    name: str
    capability: tuple[int, int]
    bandwidth: float


@cache
def library() -> ctypes.CDLL:
    """The driver's functions. Raises OSError where there is no NVIDIA driver, AttributeError where one lacks some."""
    return _with_arguments(ctypes.CDLL(LIBRARY))


@cache
def brief() -> ctypes.CDLL:
    """The same functions, for calls that return at once: they keep the interpreter, which others call get back only
    when the thread that took it lets it go (after SWITCH_INTERVAL in process.py)."""
    return _with_arguments(ctypes.PyDLL(LIBRARY))


def _with_arguments(found: Any) -> Any:
    for name, types in _ARGUMENTS.items():
        getattr(found, name).argtypes = types
    return found


def check(status: int) -> None:
    """Raises TinychatError for what a function of the driver returned, unless it is success."""
    if status:
        text = c_char_p()
        library().cuGetErrorString(status, ctypes.byref(text))
        raise TinychatError(f"CUDA error {status}, {(text.value or b'unknown').decode(errors='replace')}")


@cache
def _gpus() -> Sequence[Found]:
    cuda, value, text, found = library(), c_int(), ctypes.create_string_buffer(100), list[Found]()

    def attribute(which: int) -> int:
        check(cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device))
        return value.value

    check(cuda.cuInit(0))
    check(cuda.cuDeviceGetCount(ctypes.byref(value)))
    for number in range(value.value):
        check(cuda.cuDeviceGet(ctypes.byref(value), number))
        device = value.value
        check(cuda.cuDeviceGetName(text, 100, device))
        bandwidth = attribute(_CLOCK) * 1e3 * 2 * attribute(_BUS) / 8 / 1e9  # a bit of each line per edge of the clock
        capability = attribute(_MAJOR), attribute(_MINOR)
        found.append(Found(number, device, text.value.decode(errors="replace"), capability, bandwidth))
    return sorted(found, key=lambda g: (g.capability >= CAPABILITY, g.bandwidth, g.capability), reverse=True)


def gpus() -> Sequence[Found]:
    """The GPUs that the driver sees, the fastest of those that can run the kernels first: by the bandwidth of its
    memory, which decides the speed of an answer. Raises OSError, AttributeError, TinychatError."""
    with _starting:
        return _gpus()


@cache
def _context(gpu: Found) -> c_void_p:
    made = c_void_p()
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(made), gpu.device))
    return made


def context(number: int | None = None) -> tuple[Found, c_void_p]:
    """A GPU, by default the first of `gpus`, and its primary context, made once. Raises as `gpus`."""
    with _starting:
        found = _gpus()
        for gpu in found:
            if number in (None, gpu.number):
                return gpu, _context(gpu)
    there = ", ".join(f"cuda:{gpu.number} ({gpu.name})" for gpu in sorted(found, key=lambda gpu: gpu.number))
    raise TinychatError(f"there is no GPU {number or 0}; there are {there or 'none'}")


def start(device: str | None) -> None:
    """Makes the context on a thread, unless another `device` is wanted: 0.2 to 0.4 s in the driver, where there is one,
    while this thread imports the engine and reads the header."""
    kind, _, number = (device or "cuda").partition(":")

    def make() -> None:
        with contextlib.suppress(OSError, AttributeError, TinychatError):  # raised again for who needs the GPU
            context(int(number) if number else None)

    if kind == "cuda":
        threading.Thread(target=make, name="CUDA driver").start()


@cache
def exists() -> bool:
    """Whether there is an NVIDIA driver, perhaps one that is too old: whose functions are missing is said to who needs
    the GPU."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True
