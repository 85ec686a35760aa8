"""Small vocabularies with everything a real one has: byte tokens, learned merges that cross spaces and digits (so that
every pre-tokenizer gives other ids), control and user-defined tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

TEXT = (
    "Hello world! It's 2024, we're at 12345.67; don't SHOUT, I'LL see...  double  spaces\n\n\tTabs and\r\nlines   \n"
    "def f(x):\n    return x**2 + 100000 // 3  # camelCase HTMLParser\n"
    "日本語とカタカナ、中文字符。한국어 안녕하세요 ㄱㄴㄷ ㄅㄆ naïve café Straße Привет мир עברית हिन्दी ไทย 😀👩🏽‍💻🚀 "
    "１２３ ٣٤٥ ½ Ⅷ … “quotes” — it’s $5 + 3 = 8 <tag> a|b ~x `y` http://a.b/c?d=e&f_g end   "
)


def byte_tokens() -> list[str]:
    """The 256 byte tokens as GPT-2 writes them, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(hidden)) for b in range(256)]


@cache
def merges() -> tuple[tuple[str, str], ...]:
    """Every pair of bytes in TEXT, the most frequent first, then every pair of such pairs: across all word
    boundaries."""
    table = byte_tokens()
    data = [table[b] for b in TEXT.encode()]
    pairs = Counter(pairwise(data))
    fours = Counter((a + b, c + d) for a, b, c, d in zip(data, data[1:], data[2:], data[3:]))
    ranked = [sorted(counts, key=lambda pair: (-counts[pair], pair)) for counts in (pairs, fours)]
    return (*ranked[0], *ranked[1])


def bpe(pre: str | None, control: Sequence[str] = (), user: Sequence[str] = (), **extra: Any) -> dict[str, Any]:
    """Metadata of a byte-pair vocabulary: 256 bytes, merged tokens, words no merge leads to, `control`, `user`-defined
    ones."""
    table = byte_tokens()
    words = ["".join(table[b] for b in f" {word}".encode()) for word in TEXT.split()]
    tokens = list(dict.fromkeys([*table, *("".join(m) for m in merges()), *words]))
    kinds = [1] * len(tokens) + [3] * len(control) + [4] * len(user)
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "gpt2"} | ({"tokenizer.ggml.pre": pre} if pre else {})
    metadata |= {
        "tokenizer.ggml.tokens": [*tokens, *control, *user],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(m) for m in merges()],
    }
    ids = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    for key, value in extra.items():
        metadata[f"tokenizer.ggml.{key}"] = ids[value] if key.endswith("_id") and isinstance(value, str) else value
    return metadata


def spm(control: Sequence[str] = ("<s>", "</s>"), user: Sequence[str] = (), **extra: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary: <unk>, control tokens, bytes, then pieces; runs of spaces share one
    score."""
    letters = "abcdefghijklmnopqrstuvwxyzHWéß日本"
    words = "▁a ▁w he He ll lo or ld in er ▁wo hello rld aa aaa ▁▁a th ▁th ▁the an and ▁and"
    pieces = ["▁", *(("▁" * n) for n in range(2, 9)), *letters, *words.split()]
    scores = [-1.0 - i / 8 for i in range(len(pieces))]
    scores[1:8] = [0.0] * 7
    tokens = ["<unk>", *control, *(f"<0x{b:02X}>" for b in range(256)), *pieces, *user]
    kinds = [2] + [3] * len(control) + [6] * 256 + [1] * len(pieces) + [4] * len(user)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * (1 + len(control) + 256) + scores + [0.0] * len(user),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def gemma4(control: Sequence[str] = ("<bos>", "<eos>"), user: Sequence[str] = (), **extra: Any) -> dict[str, Any]:
    """Metadata of a vocabulary like Gemma 4's: SentencePiece pieces, and merges in place of scores; runs of line
    ends."""
    metadata = spm(control, user)
    texts = metadata["tokenizer.ggml.tokens"]
    del metadata["tokenizer.ggml.scores"]
    known, first = set(texts), len(control) + 257
    pairs = [(t[:i], t[i:]) for t in texts[first:] for i in range(1, len(t)) if {t[:i], t[i:]} <= known]
    metadata |= {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*texts, "\n", "\n\n\n"],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1, 1],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in reversed(pairs)],
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def write(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A GGUF with `metadata` and no tensors, which llama-tokenize opens too."""
    w = GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length"):
        w.add_uint32(f"llama.{key}", 64)
    w.add_uint32("llama.block_count", 1)
    w.add_uint32("llama.attention.head_count", 1)
    w.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in metadata.items():
        if isinstance(value, bool):
            w.add_bool(key, value)
        elif isinstance(value, int):
            w.add_uint32(key, value)
        elif isinstance(value, str):
            w.add_string(key, value)
        else:
            w.add_array(key, list(value))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path
