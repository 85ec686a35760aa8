"""The tokenizer gives llama.cpp's ids. tests/data/token_ids.json holds what `llama-tokenize` made of the same
vocabularies."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import vocab
from tests.support.vocab import TEXT
from tinychat.engine.tokenizer import Tokenizer
from tinychat.errors import TinychatError

EXPECTED = json.loads((Path(__file__).parents[1] / "data" / "token_ids.json").read_text())
CONTROL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|im_end|>x"]
USER = ["<think>", "</think>", "  ", "    "]
SPECIAL = "<|begin|>a<|im_end|>x<|im_end|> <think>  x</think>\n<|im_end|"
SPM = "Hello the world  and         a  anéß日本語 aaaaa\n\t😀 </s>he<tag> x"
PRES = [name for name in EXPECTED if not name.startswith("spm")]
ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "glm5": "glm4",
    "gpt-2": "olmo",
    "mpt": "olmo",
    "starcoder": "smollm",
    "refact": "smollm",
    "command-r": "smollm",
    "joyai-llm": "deepseek-v3",
    "hunyuan-dense": "deepseek-v3",
    "qwen35": "qwen2",
    "kanana2": "gpt-4o",
    "llama4": "gpt-4o",
    None: "default",
}


def bpe(pre: str | None = "qwen2", **extra: Any) -> dict[str, Any]:
    return vocab.bpe(pre, CONTROL, USER, bos_token_id="<|begin|>", eos_token_id="<|end|>", **extra)


@pytest.mark.parametrize("pre", PRES)
def test_every_pretokenizer_gives_the_ids_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    t = Tokenizer.from_gguf(vocab.write(tmp_path / "v.gguf", bpe(pre)))
    assert t.encode(TEXT) == EXPECTED[pre]["text"]
    assert t.encode_prompt(SPECIAL) == EXPECTED[pre]["special"]
    assert t.decode(t.encode(TEXT)) == TEXT


def test_the_pinned_text_tells_the_pretokenizers_apart() -> None:
    assert len({str(EXPECTED[pre]["text"]) for pre in PRES}) == len(PRES) - 1  # glm4 splits as llama-bpe does


@pytest.mark.parametrize("alias, of", ALIASES.items())
def test_aliases_and_a_missing_name(alias: str | None, of: str) -> None:
    assert Tokenizer(bpe(alias)).encode(TEXT) == EXPECTED[of]["text"]


def test_merges_that_make_no_token_are_left_out() -> None:
    metadata = bpe()
    metadata["tokenizer.ggml.merges"][:0] = ["a unheard-of", "ab", ""]
    assert Tokenizer(metadata).encode(TEXT) == EXPECTED["qwen2"]["text"]


def test_qwen35_keeps_marks_in_words() -> None:
    """All 51 vectors of llama.cpp's ggml-vocab-qwen35.gguf agreed (2026-11-22)."""
    metadata, table = bpe("qwen35"), vocab.byte_tokens()
    joined = "e" + table[0xCC]  # U+0301 is CC 81
    metadata["tokenizer.ggml.tokens"].append(joined)
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.merges"].insert(0, f"e {table[0xCC]}")
    got = [Tokenizer(metadata | {"tokenizer.ggml.pre": pre}).encode("e\u0301") for pre in ("qwen35", "qwen2")]
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    assert got == [[ids[joined], ids[table[0x81]]], [ids["e"], ids[table[0xCC]], ids[table[0x81]]]]


@pytest.mark.parametrize(
    "name, extra", [("spm", {}), ("spm-bare", {"add_space_prefix": False, "add_bos_token": False})]
)
def test_sentencepiece_gives_the_ids_of_llama_cpp(name: str, extra: dict[str, Any], tmp_path: Path) -> None:
    # Runs of spaces share one score there: a tie goes to the leftmost pair.
    metadata = vocab.spm(user=["<tag>"], bos_token_id=1, eos_token_id=2, **extra)
    t = Tokenizer.from_gguf(vocab.write(tmp_path / "v.gguf", metadata))
    assert t.encode(SPM) == EXPECTED[name]["text"]
    assert t.encode_prompt(SPM) == EXPECTED[name]["special"]
    assert t.decode(t.encode("He  said 日本😀")) == "He  said 日本😀"


def test_gemma4_gives_the_ids_of_llama_cpp(tmp_path: Path) -> None:
    """Merges as of byte pairs, on SentencePiece's pieces; nothing merges across the ends of lines."""
    text = "hello world, the land of aaa  and   the\n\n\nHe told\n\nld 日本 ß é!\n <tag> wor ld\n"
    metadata = vocab.gemma4(user=["<tag>"], bos_token_id=1, eos_token_id=2, add_bos_token=False)
    t = Tokenizer.from_gguf(vocab.write(tmp_path / "v.gguf", metadata))
    assert t.encode(text) == EXPECTED["spm-gemma4"]["text"] and t.decode(t.encode(text)) == text
    assert t.encode_prompt("<bos>the <tag>\n\n\nworld") == EXPECTED["spm-gemma4"]["special"]


def test_sentencepiece_merges_across_words_where_the_vocabulary_does() -> None:
    metadata = vocab.spm()
    metadata["tokenizer.ggml.tokens"].append("a▁b")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.scores"] += [9.0]
    t = Tokenizer(metadata)
    assert t.token_id("a▁b") not in t.encode("a b")  # no token leads to it: only neighbours merge
    metadata["tokenizer.ggml.tokens"].append("▁b")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.scores"] += [8.0]
    t = Tokenizer(metadata)
    assert [t.token_text(i) for i in t.encode("xa b")] == [" ", "x", "a b"]


def test_special_tokens_are_text_unless_asked_for() -> None:
    t = Tokenizer(bpe())
    im_end, think = t.token_id("<|im_end|>"), t.token_id("<think>")
    assert im_end not in t.encode("a<|im_end|>b") and t.decode(t.encode("a<|im_end|>b")) == "a<|im_end|>b"
    assert t.encode("a<|im_end|>b", special=True) == [*t.encode("a"), im_end, *t.encode("b")]
    assert think in t.encode("<think>")  # user-defined ones are recognised in any text
    assert t.encode("<|im_end|>x", special=True) == [t.token_id("<|im_end|>x")]  # the longest first
    assert t.encode("") == [] and t.encode("", special=True) == []


def test_a_prompt_gets_bos_when_the_model_asks_and_text_never_does() -> None:
    llama = Tokenizer(bpe("llama-bpe"))
    assert llama.add_bos and llama.encode_prompt("a") == [llama.bos_id, *llama.encode("a")]
    assert llama.bos_id not in llama.encode("a", special=True)
    off = Tokenizer(bpe("llama-bpe", add_bos_token=False))
    assert not off.add_bos and off.encode_prompt("a") == off.encode("a")
    both = Tokenizer(bpe("qwen2", add_bos_token=True, add_eos_token=True))
    assert both.encode_prompt("a") == [both.bos_id, *both.encode("a"), both.eos_id]
    glm = Tokenizer(vocab.bpe("glm4", CONTROL))
    assert glm.bos_id is None and not glm.add_bos


def test_stop_ids_are_those_of_llama_cpp() -> None:
    names = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|user|>",
        "<|eom_id|>",
        "<repo_name>",
        "<reponame>",
        "<|fim_pad|>",
    ]
    t = Tokenizer(vocab.bpe("smollm", names, eos_token_id="<|im_end|>", eot_token_id="<|user|>"))
    assert t.stop_ids == {t.token_id(n) for n in names if n not in ("<|im_start|>", "<repo_name>")}
    metadata = vocab.bpe("smollm", ["<|endoftext|>"])
    metadata["tokenizer.ggml.token_type"][-1] = 1  # a file that calls it normal text
    assert Tokenizer(metadata).is_special(Tokenizer(metadata).n_vocab - 1)


def test_streaming_holds_back_unfinished_characters() -> None:
    t = Tokenizer(bpe())
    text = "naïve 👩🏽‍💻 日本語 ok"
    d = t.decoder()
    parts = [d.feed(i) for i in t.encode(text)]
    assert "".join(parts) + d.flush() == text and "�" not in "".join(parts)
    d = t.decoder()
    assert [d.feed(i) for i in "é".encode()[:1]] == [
        ""
    ] and d.flush() == "�"  # byte tokens come first in the vocabulary
    d = t.decoder()
    assert d.feed(0xF0) + d.feed(0x41) == "�A"


def test_control_tokens_show_when_asked_for() -> None:
    t = Tokenizer(bpe())
    ids = t.encode("<|im_start|>a<think>b", special=True)
    assert t.decode(ids) == "a<think>b" and t.decode(ids, special=True) == "<|im_start|>a<think>b"
    for decoder, shown in [
        (t.decoder(), ""),
        (t.decoder(True), "<|im_start|>"),
        (t.decoder(show=ids[:1]), "<|im_start|>"),
    ]:
        assert "".join(map(decoder.feed, ids)) == shown + "a<think>b"


def test_inspecting_tokens() -> None:
    t = Tokenizer(bpe())
    assert t.token_bytes(0xF0) == b"\xf0" and t.token_text(0xF0) == "\\xf0" and t.token_text(0x0A) == "\n"
    assert t.is_special(t.bos_id or 0) and not t.is_special(65)
    for call in (t.token_bytes, t.token_text, t.is_special):
        for bad in (-1, t.n_vocab):
            with pytest.raises(TinychatError, match="outside the vocabulary"):
                call(bad)
    spm = Tokenizer(vocab.spm())
    assert spm.token_text(spm.token_id("▁the") or 0) == " the" and spm.token_bytes(3 + 0xE9) == b"\xe9"


def test_unused_tokens_stand_for_nothing_and_empty_ones_do_not_collide() -> None:
    metadata = bpe()
    metadata["tokenizer.ggml.tokens"] += ["[PAD1]", "", ""]
    metadata["tokenizer.ggml.token_type"] += [5, 1, 1]
    t = Tokenizer(metadata)
    assert t.decode([65, t.n_vocab - 3, 66]) == "AB"


@pytest.mark.parametrize(
    "text", ["\ud800a\udfff", "\x00\x01", "a" * 20000, " " * 20000 + "x", "\n \n" * 3000, "é日" * 5000]
)
@pytest.mark.parametrize("pre", ["qwen2", "deepseek-llm", "kimi-k2"])
def test_odd_and_long_texts(text: str, pre: str) -> None:
    t = Tokenizer(bpe(pre))
    assert t.decode(t.encode(text)) == text.replace("\ud800", "�").replace("\udfff", "�")


def change(**changes: Any) -> dict[str, Any]:
    metadata = bpe()
    for key, value in changes.items():
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
        else:
            metadata[f"tokenizer.ggml.{key}"] = value
    return metadata


@pytest.mark.parametrize(
    "metadata, names",
    [
        ({}, "tokenizer.ggml.model is missing"),
        (change(model="bert"), "'bert'"),
        (change(model=7), "tokenizer.ggml.model"),
        (change(pre="made-up\x1b[31m"), r"'made-up\\x1b\[31m'"),
        (change(tokens=None), "tokenizer.ggml.tokens is missing"),
        (change(tokens="abc"), "tokenizer.ggml.tokens"),
        (change(tokens=[1, 2]), "tokenizer.ggml.tokens"),
        (change(tokens=["a", "a"], token_type=[1, 1], merges=[]), "'a' twice"),
        (change(merges=None), "tokenizer.ggml.merges is missing"),
        (change(merges=np.arange(3)), "tokenizer.ggml.merges"),
        (change(token_type=[1, 2]), "tokenizer.ggml.token_type has 2 entries"),
        (change(token_type="x"), "tokenizer.ggml.token_type"),
        (change(bos_token_id=10**6), "tokenizer.ggml.bos_token_id is 1000000"),
        (change(eos_token_id=-1), "tokenizer.ggml.eos_token_id is -1"),
        (change(eos_token_id="x"), "tokenizer.ggml.eos_token_id"),
        (change(add_bos_token="yes"), "tokenizer.ggml.add_bos_token"),
        (vocab.spm() | {"tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores has 1 entries"),
    ],
)
def test_bad_metadata_is_one_clear_line(metadata: dict[str, Any], names: str) -> None:
    with pytest.raises(TinychatError, match=names) as caught:
        Tokenizer(metadata)
    assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)


def test_a_vocabulary_is_built_in_linear_time() -> None:
    """CPU time, as a ratio: 150,000 tokens may take three times their share of what 15,000 take."""
    assert min(_build_s(150_000) for _ in range(2)) < 30 * min(_build_s(15_000) for _ in range(3))


def _build_s(size: int) -> float:
    """CPU seconds of building a byte-pair tokenizer of `size` tokens."""
    table = vocab.byte_tokens()
    pairs = [(a, b) for a in table for b in table]
    pairs = pairs[: size - 256]
    threes = [(a + b, c) for a, b in pairs[::100] for c in table][: size - 256 - len(pairs)]
    tokens, merges = [*table, *map("".join, pairs), *map("".join, threes)], list(map(" ".join, [*pairs, *threes]))
    assert len(tokens) == len(set(tokens)) == size
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
    }
    started = time.thread_time()
    Tokenizer(metadata)
    return time.thread_time() - started


def test_a_message_that_goes_on_is_no_end() -> None:
    """gpt-oss: an answer is several messages, and <|end|> stands behind each."""
    marks = ["<|start|>", "<|end|>", "<|message|>", "<|return|>", "<|call|>", "<|channel|>"]
    harmony = Tokenizer(vocab.bpe("gpt-4o", marks, eos_token_id="<|return|>"))
    assert {harmony.token_text(i) for i in harmony.stop_ids} == {"<|return|>", "<|call|>"}
    phi = Tokenizer(vocab.bpe("gpt-4o", ["<|end|>", "<|return|>"], eos_token_id="<|return|>"))
    assert {phi.token_text(i) for i in phi.stop_ids} == {"<|end|>", "<|return|>"}
