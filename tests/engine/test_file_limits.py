"""What a file may ask for: each limit is named in one line, and nothing of that size is made first."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts import fuzz
from tests.support import tiny
from tinychat.engine import Engine, file_limits
from tinychat.engine.config import ModelConfig
from tinychat.engine.gguf import GGUF

Change = Callable[[fuzz.Parts], None]


def setting(key: str, kind: int, value: object) -> Change:
    """Metadata `key` = `value` of type `kind` (of GGUF)."""

    def change(parts: fuzz.Parts) -> None:
        parts.values = [v for v in parts.values if v[0] != key.encode()] + [(key.encode(), kind, value)]

    return change


def token(index: int, text: bytes) -> Change:
    def change(parts: fuzz.Parts) -> None:
        for i, (key, kind, value) in enumerate(parts.values):
            if key == b"tokenizer.ggml.tokens":
                parts.values[i] = key, kind, (value[0], [*value[1][:index], text, *value[1][index + 1 :]])

    return change


def dims(name: str, *sizes: int) -> Change:
    def change(parts: fuzz.Parts) -> None:
        next(t for t in parts.tensors if t[0] == name.encode())[1] = list(sizes)

    return change


def changed(path: Path, *changes: Change) -> Path:
    parts = fuzz.take_apart(path.read_bytes())
    for change in changes:
        change(parts)
    path.write_bytes(fuzz.put_together(parts))
    return path


U32, F32, STRING, ARRAY = 4, 6, 8, 9


@pytest.mark.parametrize(
    ("variant", "change", "says"),
    [
        ("llama", setting("llama.rope.dimension_count", U32, 2**31), "rope.dimension_count: expected at most 8,192"),
        (
            "llama",
            setting("llama.attention.key_length", U32, 2**31 - 2),
            "attention.key_length: expected at most 8,192",
        ),
        ("llama", token(291, b"<" + b"x" * 40_000 + b">"), "the length of a string in an array is 40,002"),
        ("llama", token(291, b"<" + b"x" * 4_000 + b">"), "4,002 characters in a control or user-defined token"),
        ("llama", dims("token_embd.weight"), "the number of dimensions is 0, accepted is 1 to 4"),
        ("llama", dims("token_embd.weight", 64), "token_embd.weight: expected shape (vocabulary, embedding_length)"),
        ("llama", dims("token_embd.weight", 64, 2**40), "a dimension is 1,099,511,627,776, accepted is 1 to"),
        ("llama", setting("llama.rope.freq_base", F32, 0.0), "rope.freq_base: expected a number from 1.01 to 1e+12"),
        ("llama", setting("llama.rope.freq_base", F32, float("nan")), "rope.freq_base: expected a number"),
        (
            "llama",
            setting("llama.attention.head_count_kv", ARRAY, (F32, [float("inf")] * 2)),
            "head_count_kv: expected a whole number",
        ),
        ("llama", setting("llama.attention.head_count_kv", ARRAY, (U32, [])), "head_count_kv: expected a whole number"),
        ("llama", setting("llama.context_length", U32, 2**31 - 1), "context_length: expected at most 16,777,216"),
        (
            "llama",
            setting("general.name", STRING, b"n" * (2 << 20)),
            "the length of the value of general.name is",
        ),
        ("llama", setting("a", ARRAY, (ARRAY, [(U32, [1])])), "metadata a is an array of arrays"),
        ("llama", setting("a\nb", ARRAY, (U32, [1] * 2_100_000)), "the length of array a\\nb is 2,100,000"),
        ("qwen3moe", setting("qwen3moe.expert_count", U32, 4_000_000), "expert_count: expected at most 4,096"),
        ("qwen3moe", setting("qwen3moe.expert_used_count", U32, 65), "expert_used_count: expected at most 64"),
        (
            "deepseek2_glm",
            setting("deepseek2.expert_weights_norm", ARRAY, (U32, [])),
            "expert_weights_norm: expected true or false",
        ),
        (
            "llama",
            setting("tokenizer.ggml.tokens", ARRAY, (STRING, [b"\xc4\xa0"])),
            "tokenizer.ggml.bos_token_id is 290, outside the vocabulary of 1",
        ),
    ],
)
def test_a_limit_is_one_line_and_costs_nothing(variant: str, change: Change, says: str, tmp_path: Path) -> None:
    path = changed(tiny.write(tmp_path / "m.gguf", variant), change)
    outcome = fuzz.guarded(lambda: fuzz.the_whole_way(path), fuzz.MEMORY, fuzz.SECONDS)
    assert outcome.how == "refused" and says in outcome.text, outcome
    assert outcome.new_memory < 60 << 20


def test_a_split_model_whose_first_part_has_no_tensors(tmp_path: Path) -> None:
    sound = fuzz.take_apart(tiny.write(tmp_path / "m.gguf", "llama", "Q4_0").read_bytes())
    split = [(b"split.count", U32, 2), (b"split.tensors.count", 5, len(sound.tensors))]
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(fuzz.put_together(fuzz.Parts([*sound.values, *split])))
    second.write_bytes(fuzz.put_together(fuzz.Parts(split, sound.tensors, sound.data)))
    whole, parts = (Engine.load(p, device="cpu", threads=1) for p in (tmp_path / "m.gguf", first))
    np.testing.assert_array_equal(whole.logits([1, 2, 3]), parts.logits([1, 2, 3]))
    assert len({whole.info.fingerprint, parts.info.fingerprint}) == 2


@pytest.mark.parametrize("variant", ["llama", "qwen2_yarn_keys", "qwen3", "qwen3moe", "olmoe", "deepseek2_groups"])
def test_every_number_that_is_read_has_a_limit(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Table(dict[str, file_limits.Bounds]):
        def get(self, key: str, default: object = None) -> file_limits.Bounds:  # type: ignore[override]
            return self[key]

    monkeypatch.setattr(file_limits, "METADATA", Table(file_limits.METADATA))
    ModelConfig.from_gguf(GGUF.open(tiny.write(tmp_path / "m.gguf", variant)))


def test_300_damaged_files(tmp_path: Path) -> None:
    outcomes = list(fuzz.files(300, 11, tmp_path))
    assert [(name, o) for name, _, o in outcomes if o.how == "failed"] == []
    counts = Counter(o.how for _, _, o in outcomes)
    assert counts["answered"] > 20 and counts["refused"] > 100  # neither too mild nor too wild
