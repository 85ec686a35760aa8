import os
from pathlib import Path

import pytest

from tinychat.kernels.cuda import binaries


def test_what_was_compiled_is_found_by_the_same_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC, which most test machines lack, is left out: the binary of a source is its bytes."""
    monkeypatch.setattr(binaries, "folder", lambda: tmp_path / "cuda")
    monkeypatch.setattr(binaries, "_compiler", lambda arch: str.encode)
    assert binaries.find("one", "sm_90a") is None
    assert binaries.compile_all(["one", "two"], "sm_90a") == [b"one", b"two"]
    assert binaries.find("two", "sm_90a") == b"two" and binaries.find("two", "sm_80") is None
    for kept in (tmp_path / "cuda").iterdir():
        os.utime(kept, (0, 0))
    assert binaries.find("one", "sm_90a") == b"one"  # used again, so it is kept
    binaries.compile_all(["three"], "sm_90a")
    assert binaries.find("one", "sm_90a") and binaries.find("two", "sm_90a") is None


def test_a_damaged_binary_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "folder", lambda: tmp_path)
    monkeypatch.setattr(binaries, "_compiler", lambda arch: str.encode)
    binaries.compile_all(["one"], "sm_90a")
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + b"?"):
        path.write_bytes(damaged)
        assert binaries.find("one", "sm_90a") is None
