"""The CPU kernels of every instruction set: AVX-512 without VNNI, AVX2 and plain C run here, NEON is cross-compiled and
run under qemu-user."""

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize

from tests.kernels.cpu.test_executor import IDS, NOISE, executor, relative
from tests.support import tiny
from tests.support.blocks import QUANTS, random_blocks
from tests.support.forward64 import forward
from tinychat.kernels.cpu import compiler
from tinychat.kernels.cpu.library import Library, grids

QUICK = ("-march=native", "-O0", "-fno-sanitize=all")  # for tests of where the library is kept
HARNESS = Path(__file__).parent / "kernels.c"
FLAGS = ("-O1", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NEON = {
    "NEON SDOT": ("generic+dotprod", "apple_m1"),
    "NEON I8MM": ("generic+dotprod+i8mm", "apple_m2"),
}  # name: (Linux, macOS)
needs_zig = pytest.mark.skipif(compiler.zig() is None, reason="cross-compiling needs the ziglang package")
needs_qemu = pytest.mark.skipif(not shutil.which("qemu-aarch64-static"), reason="needs qemu-user-static")
on_x86 = pytest.mark.skipif(compiler.platform.machine() != "x86_64", reason="x86 instruction sets")


@on_x86
@pytest.mark.parametrize(
    ("march", "name"), [("skylake-avx512", "AVX-512"), ("haswell", "AVX2"), ("nehalem", "plain C")]
)
def test_other_x86(march: str, name: str, tmp_path: Path) -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if name == "AVX-512" and not (cpuinfo.exists() and "avx512bw" in cpuinfo.read_text()):
        pytest.skip("needs a machine with AVX-512")
    flags = (f"-march={march}",)
    assert Library(flags).simd == name
    for variant, quant in (
        ("llama", "Q4_1"),
        ("deepseek2_glm", "Q8_0"),
        ("deepseek2_lite", "Q4_K_M"),
        ("qwen3moe", "F16"),
        ("llama", "IQ_MIX"),
    ):
        path = tiny.write(tmp_path / "m.gguf", variant, quant)
        with executor(path, flags=flags) as ex:
            got = ex.forward(IDS, 0, "all")
            assert got is not None
            assert relative(got, forward(path, IDS)) < NOISE


@on_x86
def test_amx_compiles() -> None:
    """For a machine that this one need not be: loading it runs none of its instructions but the system call."""
    path = compiler.build(("-march=sapphirerapids",))
    assert b"AVX-512 VNNI and AMX" in path.read_bytes()


@pytest.mark.parametrize("name", ["cc", "clang-14"])  # the sources need nothing newer than Debian 12's
def test_any_c_compiler(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (path := shutil.which(name)):
        pytest.skip(f"needs a C compiler named {name}")
    monkeypatch.setattr(compiler, "compilers", lambda: [[path]])
    model = tiny.write(tmp_path / "m.gguf", "deepseek2_glm", "Q4_K_M")
    with executor(model) as ex:
        got = ex.forward(IDS, 0, "all")
        assert got is not None
        assert relative(got, forward(model, IDS)) < NOISE


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is PATH, first with a clang in it that fails; the cache is empty."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "clang").write_text("#!/bin/sh\necho >> $0.asked\necho 'step.c:1: error: no vectors here' >&2\nexit 1\n")
    (folder / "clang").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@needs_zig
def test_a_broken_clang_on_the_path_is_not_even_asked(machine: Path) -> None:
    assert [Path(command[0]).name for command in compiler.compilers()] == ["zig", "clang"]
    assert compiler.build(QUICK).exists() and "clang-" in (compiler.tinygrad_cc() or "")


def test_when_a_compiler_fails_the_next_one_is_tried(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "zig", lambda: str(machine / "zig"))  # cannot run here
    cc, before = shutil.which("cc", path=os.defpath), os.environ["PATH"]
    if not cc:
        pytest.skip("needs a C compiler named cc")
    (machine / "cc").symlink_to(cc)
    monkeypatch.setenv("PATH", f"{before}:{os.defpath}")  # what cc calls
    notices = list[str]()
    path = compiler.build(QUICK, notices.append)
    assert ctypes.CDLL(str(path)).tc_sizeof and len(notices) == 1
    assert compiler.build(QUICK, notices.append) == path and len(notices) == 1
    assert (machine / "clang.asked").read_text() == "\n"  # once, not at every start
    (machine / "clang").write_text('#!/bin/sh\nfor out; do :; done; echo made by clang > "$out"\n')
    assert compiler.build(QUICK).read_text() == "made by clang\n"  # mended: what the first that works makes is used


def test_no_compiler_is_one_clear_line(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "zig", lambda: None)
    monkeypatch.setenv("CC", str(machine / "nosuch"))
    with pytest.raises(compiler.NoCompiler, match=r"^clang cannot compile the CPU kernels: .*no vectors here$"):
        compiler.build(QUICK)
    assert compiler.tinygrad_cc() is None and not compiler.cache_dir().exists()
    (machine / "clang").unlink()
    with pytest.raises(compiler.NoCompiler, match=r"^no C compiler was found$"):
        compiler.build(QUICK)


@needs_zig
@pytest.mark.parametrize("end", [errno.EROFS, errno.ENOSPC])
def test_a_cache_that_takes_nothing(machine: Path, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    """A read-only home, a full disk: compiled for this process only, and said."""

    def fail(*args: object, **options: object) -> None:
        raise OSError(end, os.strerror(end))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", fail)
        notices = list[str]()
        path = compiler.build(QUICK, notices.append)
        assert compiler.build(QUICK, notices.append) == path and not path.is_relative_to(machine.parent)
        assert len(notices) == 2 and f"{compiler.cache_dir()} cannot be written" in notices[1]
        assert ctypes.CDLL(str(path)).tc_sizeof and (compiler.tinygrad_cc() or "").startswith(tempfile.gettempdir())


@needs_zig
def test_no_place_at_all_to_compile_in(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(machine / "nosuch"))
    with pytest.raises(compiler.NoCompiler, match=r"zig does not run: no such file or directory: .*nosuch") as e:
        compiler.build(QUICK)
    assert "\n" not in str(e.value)


def test_libraries_that_nobody_uses_are_deleted(machine: Path) -> None:
    folder = compiler.cache_dir()
    folder.mkdir(parents=True)
    for name, age in (("cpu-old.so", 40), ("cpu-used.so", 20), ("clang-old", 40), ("other", 400)):
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (time.time() - age * 86400,) * 2)
    compiler._prune(folder, time.time() - compiler.UNUSED)
    assert {p.name for p in folder.iterdir()} == {"cpu-used.so", "other"}


def zig(*args: str) -> None:
    exe = compiler.zig()
    assert exe
    subprocess.run([exe, "cc", *FLAGS, *args], check=True)


@needs_zig
@pytest.mark.parametrize(("target", "name"), [*zip(["aarch64-linux-gnu", "aarch64-macos"], NEON, strict=True)])
def test_library_compiles_for_arm(target: str, name: str, tmp_path: Path) -> None:
    cpu = NEON[name]["macos" in target]
    args = compiler._zig_linux(Path(compiler.zig() or ""), "aarch64") if "linux" in target else ["-target", target]
    zig(*args, f"-mcpu={cpu}", "-fPIC", "-shared", str(compiler.SOURCES / "step.c"), "-o", str(tmp_path / "lib"))
    data = (tmp_path / "lib").read_bytes()
    assert data[:4] == (b"\x7fELF" if "linux" in target else b"\xcf\xfa\xed\xfe")
    assert name.encode() in data


def check_kernels(command: list[str], kind: tiny.Q, name: str) -> None:
    rng, block = np.random.default_rng(7), GGML_QUANT_SIZES[kind][0]
    cols = 3 * block if block > 1 else 37
    raw = random_blocks(rng, kind, 16 * cols // block, 1.0).reshape(16, -1)
    x = rng.standard_normal((16, cols)).astype(np.float32)
    rows = 150
    k, v, q = (rng.standard_normal(s).astype(np.float32) for s in ((rows, 48), (rows, 32), (4, 48)))
    data = grids().tobytes() + np.array([kind, cols], np.int32).tobytes() + raw.tobytes() + x.tobytes()
    done = subprocess.run(command, input=b"".join((data, np.int32(rows), k, v, q)), stdout=subprocess.PIPE, check=True)
    said, _, data = done.stdout.partition(b"\n")
    assert said.decode() == name
    out = np.frombuffer(data, np.float32)
    values = dequantize(raw, kind).astype(np.float32)
    np.testing.assert_array_equal(out[: 16 * cols].reshape(cols, 16).T, values)
    products = out[16 * cols : 16 * cols + 1024].reshape(4, 16, 16)
    for p in products[1:]:
        np.testing.assert_array_equal(p, products[0])
    want = x.astype(np.float64) @ values.T.astype(np.float64)
    assert np.linalg.norm(products[0] - want) < 2e-4 * np.linalg.norm(want)
    k16, v16 = (a.astype(np.float16).astype(np.float64) for a in (k, v))
    for got, vv in zip(out[16 * cols + 1024 :].reshape(2, 4, 32), (v16, k16[:, :32])):
        for i, n in enumerate((rows, rows, rows - 5, 1)):
            p = np.exp(k16[:n] @ q[i] - (k16[:n] @ q[i]).max())
            np.testing.assert_allclose(got[i], p / p.sum() @ vv[:n], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module", params=NEON)
def neon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    path = tmp_path_factory.mktemp("arm") / "kernels"
    zig(
        *compiler._zig_linux(Path(compiler.zig() or ""), "aarch64"),
        f"-mcpu={NEON[request.param][0]}",
        "-static",
        "-fno-builtin",
        str(HARNESS),
        "-o",
        str(path),
    )
    return request.param, path


@needs_zig
@needs_qemu
@pytest.mark.parametrize("kind", QUANTS, ids=lambda q: q.name)
def test_neon_under_qemu(kind: tiny.Q, neon: tuple[str, Path]) -> None:
    check_kernels(["qemu-aarch64-static", "-cpu", "max", str(neon[1])], kind, neon[0])
