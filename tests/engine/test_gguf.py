"""The header reader: right on good files, one clear line on every bad one."""

import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from tinychat.engine.gguf import GGUF
from tinychat.errors import TinychatError


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    w = GGUFWriter(path, "llama")
    w.add_block_count(2)
    w.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    w.add_bool("llama.flag", True)
    w.add_array("llama.numbers", [1, 2, 3])
    w.add_token_list(["a", "b", "Ġé"])
    w.add_tensor("one.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    w.add_tensor("two.weight", np.ones((4, 8), np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_agrees_with_the_gguf_package(small: Path) -> None:
    ours, theirs = GGUF.open(small), GGUFReader(small)
    assert ours.metadata["llama.block_count"] == 2
    assert ours.metadata["llama.flag"] is True
    assert list(ours.metadata["llama.numbers"]) == [1, 2, 3]
    assert ours.metadata["tokenizer.ggml.tokens"] == ["a", "b", "Ġé"]
    for t in theirs.tensors:
        info = ours.tensors[t.name]
        assert (info.type, info.offset, info.nbytes) == (t.tensor_type, t.data_offset, t.n_bytes)
        assert info.shape == tuple(reversed([int(n) for n in t.shape]))
        assert ours.raw(t.name).tobytes() == t.data.tobytes()
    assert ours.raw("one.weight").view(np.float32)[63] == 63 and ours.size("one.weight") == ours.raw("one.weight").size


def test_a_file_that_another_program_cuts_short(small: Path) -> None:
    """Mapped into memory it would end the process."""
    opened = GGUF.open(small)
    (name, info), *_ = opened.tensors.items()
    os.truncate(small, info.offset + 1)
    for read in (lambda: opened.raw(name), opened.fingerprint):
        with pytest.raises(TinychatError, match=r"has become shorter; download it again$"):
            read()
    os.truncate(small, 0)
    with pytest.raises(TinychatError, match="is empty"):
        GGUF.open(small)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    for path, kind in (
        (tmp_path / "m.gguf", "pipe or device"),
        (Path("/dev/zero"), "pipe or device"),
        (tmp_path, "folder"),
    ):
        with pytest.raises(TinychatError, match=f"a {kind}, not a .gguf file$"):
            GGUF.open(path)


def test_every_truncation_is_one_clear_line(small: Path, tmp_path: Path) -> None:
    data, cut = small.read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(0, 400, 7), len(data) - 1, len(data) - 64]:
        cut.write_bytes(data[:size])
        with pytest.raises(TinychatError) as e:
            GGUF.open(cut)
        assert "\n" not in str(e.value)


def test_random_damage_never_escapes_as_another_error(small: Path, tmp_path: Path) -> None:
    data, rng, bad = small.read_bytes(), random.Random(0), tmp_path / "bad.gguf"
    caught = 0
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            broken[rng.randrange(4, 420)] = rng.randrange(256)
        bad.write_bytes(broken)
        try:
            GGUF.open(bad)
        except TinychatError:
            caught += 1
    assert caught > 100


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "empty"),
        (b"hello, I am a text file", "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 99, 0, 0), "version 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "the number of tensors is .*, accepted is 0 to 65,536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**16, 0), "truncated"),
    ],
)
def test_no_gguf(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(TinychatError, match=says):
        GGUF.open(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TinychatError, match="no such file"):
        GGUF.open(tmp_path / "none.gguf")
    with pytest.raises(TinychatError, match="folder"):
        GGUF.open(tmp_path)


def test_a_name_with_control_characters_stays_harmless(tmp_path: Path) -> None:
    with pytest.raises(TinychatError) as e:
        GGUF.open(tmp_path / "a\x1b[2Jb.gguf")
    assert "\x1b" not in str(e.value)
