"""Runs CUDA launches on the CPU: the kernels' own sources, compiled as C++ with tests/cuda_emulator.h in place of
ptx.cuh."""

import ctypes
import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tinychat.kernels.cuda.launch import Launch, place

_HEADER = Path(__file__).with_name("cuda_emulator.h")
_BUILT = Path(tempfile.gettempdir()) / "tinychat-cuda-emulator"
_functions: dict[str, Any] = {}  # by source


def _unit(n: int, launch: Launch) -> str:
    """One kernel in a namespace of its own, and a C function that runs its grid."""
    casts = ", ".join(f"({kind})args[{i}]" for i, (kind, _, _) in enumerate(launch.args))
    return f"""namespace k{n} {{
#undef THREADS
#undef EMULATED_SECTION
#define EMULATED_SECTION "shared{n}"
namespace {{
{launch.source("")}
}}
static void **args;
extern "C" char __start_shared{n}[] __attribute__((weak)), __stop_shared{n}[] __attribute__((weak));
extern "C" void launch_{n}(void **a, int gx, int gy, int gz) {{
  args = a;
  emu::body = [] {{ {launch.name}({casts}); }};
  gridDim.x = gx; gridDim.y = gy; gridDim.z = gz; blockDim.x = {launch.threads};
  for (int z = 0; z < gz; z++) for (int y = 0; y < gy; y++) for (int x = 0; x < gx; x += {launch.cluster}) {{
    blockIdx.x = x; blockIdx.y = y; blockIdx.z = z;
    if (__start_shared{n}) memset(__start_shared{n}, 0xFF, __stop_shared{n} - __start_shared{n});
    emu::run_blocks({launch.threads}, {launch.cluster});
  }}
}}
}}
"""


def compile_all(launches: Iterable[Launch]) -> None:
    """Compiles what is new among `launches` as one library (kept in the temporary directory). The header's functions,
    tensor cores among them, are optimised; the kernels are not, for they run once or twice."""
    new = {launch.source(): launch for launch in launches if launch.source() not in _functions}
    if not new:
        return
    text = f'#include "{_HEADER}"\n#pragma clang optimize off\n' + "".join(
        _unit(n, launch) for n, launch in enumerate(new.values())
    )
    _BUILT.mkdir(exist_ok=True)
    lib = _BUILT / f"{hashlib.sha256((text + _HEADER.read_text()).encode()).hexdigest()[:24]}.so"
    if not lib.exists():
        with tempfile.NamedTemporaryFile(dir=_BUILT, suffix=".so", delete=False) as made:
            pass
        cmd = [
            sys.executable,
            "-m",
            "ziglang",
            "c++",
            "-x",
            "c++",
            "-std=c++17",
            "-O1",
            "-w",
            "-shared",
            "-fPIC",
            "-fno-exceptions",
            "-fno-rtti",
            "-fno-sanitize=all",
            "-U_FORTIFY_SOURCE",
            "-nostdlib",
            "-",
            "-o",
            made.name,
        ]
        done = subprocess.run(cmd, input=text, text=True, capture_output=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        Path(made.name).rename(lib)
    loaded = ctypes.CDLL(str(lib))
    for n, source in enumerate(new):
        _functions[source] = getattr(loaded, f"launch_{n}")


def run(launch: Launch, buffers: dict[str, np.ndarray], count: int = 1, keys: int = 1) -> None:
    """Runs one launch over NumPy arrays, in place; for `count` tokens, behind which the cache holds `keys` rows."""
    compile_all([launch])
    places = map(place, launch.buffers)
    pointers = (ctypes.c_void_p * len(launch.args))(*[buffers[name].ctypes.data + at for name, at in places])
    _functions[launch.source()](pointers, *launch.grid_of(count, keys))
