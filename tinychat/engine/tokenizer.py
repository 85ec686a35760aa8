"""Text to token ids and back, with exactly llama.cpp's ids.

Byte-pair vocabularies (`tokenizer.ggml.model` = gpt2) run on byte_pairs.py, behind the pre-tokenizer that
`tokenizer.ggml.pre` names (pretokenizers.py), SentencePiece vocabularies ("llama", "gemma4") on sentencepiece.py.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tinychat.engine import file_limits
from tinychat.engine.byte_pairs import BytePairs
from tinychat.engine.gguf import GGUF
from tinychat.engine.pretokenizers import PRE_TOKENIZERS
from tinychat.engine.sentencepiece import SentencePiece
from tinychat.errors import TinychatError, encodable, printable

# --- what a token is ---

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

# Texts that end an answer wherever they occur in a vocabulary, as llama.cpp has it.
_STOP_TEXTS = {
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "</s>",
    "<eos>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
}
# Where a vocabulary has one of these sets, <|end|> ends a message and not the answer (gpt-oss, Solar).
_MESSAGES_GO_ON = (("<|end|>", "<|return|>", "<|call|>"), ("<|end|>", "<|flush|>", "<|calls|>"))
# Padding, repository and file marks of fill-in-the-middle training: metadata key, or else the first of these texts.
_STOP_FIM = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

# GPT-2's printable stand-ins: the bytes that are no printable Latin-1 character are written as U+0100 onward.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [b for b in range(256) if b not in _PRINTABLE]
_CHAR_TO_BYTE = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_HIDDEN)}


class Tokenizer:
    """A GGUF's tokenizer. Encoding never adds BOS by itself; `encode_prompt` does.

    Attributes: `n_vocab`; `bos_id`, `eos_id` (None where there is none); `add_bos`, `add_eos` (does a raw prompt get
    them); `stop_ids` (every token that ends an answer); `marks` (text and id of each control or user-defined token,
    longest first).
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        """Builds from GGUF metadata. Raises TinychatError for a tokenizer that is unknown, incomplete or
        contradictory."""
        self._metadata = metadata
        self._merging: BytePairs | SentencePiece
        model = self._get("tokenizer.ggml.model", str, required=True)
        self._texts = _strings(metadata, "tokenizer.ggml.tokens")
        self.n_vocab = n = len(self._texts)
        if not file_limits.VOCABULARY.least <= n <= file_limits.VOCABULARY.most:
            raise TinychatError(
                f"tokenizer.ggml.tokens has {n:,} entries, accepted is 1 to {file_limits.VOCABULARY.most:,} "
                f"({file_limits.VOCABULARY.why}); the file is damaged"
            )
        if "" in self._texts:
            self._texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(self._texts)]
        self._ids = dict(zip(self._texts, range(n)))
        if len(self._ids) != n:
            seen: set[str] = set()
            for text in self._texts:
                if text in seen and "�" not in text:
                    raise TinychatError(
                        f"tokenizer.ggml.tokens holds {printable(repr(text))} twice; the file is damaged"
                    )
                seen.add(text)
        self._types = _numbers(metadata, "tokenizer.ggml.token_type", n) or [_NORMAL] * n

        if model == "gpt2":
            name = self._get("tokenizer.ggml.pre", str) or "default"
            if name not in PRE_TOKENIZERS:
                raise TinychatError(
                    f"pre-tokenizer {printable(repr(name))} (tokenizer.ggml.pre) is not known to this version"
                )
            pre = PRE_TOKENIZERS[name]
            key = "tokenizer.ggml.merges"
            merges = _strings(metadata, key) if name != "kimi-k2" or key in metadata else []
            self._merging = BytePairs(self._ids, merges, pre)
            default_bos, default_eos, add_bos, space_prefix = pre.default_bos, None, pre.add_bos, False
        elif model == "llama":
            scores = _numbers(metadata, "tokenizer.ggml.scores", n) or [0.0] * n
            order = {text: -score for text, score in zip(self._texts, scores)}
            unknown = self._special_id("unknown", 0)
            self._merging = SentencePiece(self._ids, lambda a, b: order.get(a + b), unknown)
            default_bos, default_eos, add_bos, space_prefix = 1, 2, True, True
        elif model == "gemma4":
            lines = _strings(metadata, "tokenizer.ggml.merges")
            ranks = {merge: float(i) for i, line in enumerate(lines) if (merge := _merge_of(line))}
            unknown = self._special_id("unknown", None)
            self._merging = SentencePiece(self._ids, lambda a, b: ranks.get((a, b)), unknown, lines=True)
            default_bos, default_eos, add_bos, space_prefix = None, None, True, False
        else:
            known = "gpt2, llama and gemma4 are"
            raise TinychatError(f"tokenizer {printable(repr(model))} (tokenizer.ggml.model) is not supported; {known}")

        self.bos_id = self._special_id("bos", default_bos)
        self.eos_id = self._special_id("eos", default_eos)
        # llama.cpp: files of Gemma 4 say that it wants no BOS, wrongly
        add_bos = model == "gemma4" or self._flag("tokenizer.ggml.add_bos_token", add_bos)
        self.add_bos = add_bos and self.bos_id is not None
        self.add_eos = self._flag("tokenizer.ggml.add_eos_token", False) and self.eos_id is not None
        self._of_bytes = model == "gpt2"
        self._space_prefix = self._flag("tokenizer.ggml.add_space_prefix", space_prefix) and not self._of_bytes
        self.stop_ids = self._find_stops()
        self._bytes = lru_cache(1 << 16)(self._bytes_of)
        special = [i for i, kind in enumerate(self._types) if kind != _NORMAL]
        self._control = frozenset(i for i in special if self._types[i] in (_CONTROL, _UNKNOWN))
        user = [i for i in special if self._types[i] == _USER]
        self._check_marks([*self._control, *user])
        self._user_marks = self._longest_first(user)
        self.marks = self._longest_first([*self._control, *user])

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of the file at `path`; reads its header only. Raises TinychatError."""
        return cls(GGUF.open(path).metadata)

    # --- text to ids ---

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`, without BOS. `special`: control tokens written in `text` are recognised; else they stay text.

        User-defined tokens (type 4) are recognised either way, as llama.cpp has it; longer texts match before shorter
        ones.
        """
        return self.encode_pieces(self.split(text, special))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt as `llama-tokenize` gives them: control tokens recognised, BOS and EOS added if the model
        asks."""
        ids = self.encode(text, special=True)
        head = [self.bos_id] if self.add_bos and self.bos_id is not None else []
        tail = [self.eos_id] if self.add_eos and self.eos_id is not None else []
        return head + ids + tail

    def split(self, text: str, special: bool) -> list[int | str]:
        """`text` cut at the special tokens in it: ids of those, and the plain text between them (see `encode`)."""
        pieces: list[int | str] = [text] if text else []
        for mark, token in self.marks if special else self._user_marks:
            if mark not in text:
                continue
            cut: list[int | str] = []
            for piece in pieces:
                if isinstance(piece, int) or mark not in piece:
                    cut.append(piece)
                    continue
                for n, part in enumerate(piece.split(mark)):
                    cut += ([token] if n else []) + ([part] if part else [])
            pieces = cut
        return pieces

    def encode_pieces(self, pieces: Iterable[int | str]) -> list[int]:
        """Ids of what `split` returns: ids pass, text becomes tokens without another look for special ones."""
        ids: list[int] = []
        after_special = True
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                continue
            text = encodable(piece)
            ids += self._merging.encode(" " + text if self._space_prefix and after_special else text)
            after_special = False
        return ids

    # --- ids to text ---

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; a special token stands for its name, an unused one for nothing."""
        return self._bytes(token)

    def _bytes_of(self, token: int) -> bytes:
        text, kind = self._at(token), self._types[token]
        if kind in (_CONTROL, _UNKNOWN, _USER):
            return text.encode()
        if kind == _BYTE:
            return bytes([int(text[3:5], 16)]) if re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) else text.encode()
        if kind != _NORMAL:
            return b""
        if not self._of_bytes:
            return text.replace("▁", " ").encode()
        return b"".join(bytes([_CHAR_TO_BYTE[c]]) if c in _CHAR_TO_BYTE else c.encode() for c in text)

    def token_text(self, token: int) -> str:
        """How an inspector shows `token`: its text; bytes that are no text on their own as `\\xNN`."""
        return self.token_bytes(token).decode("utf-8", "backslashreplace")

    def is_special(self, token: int) -> bool:
        """Whether `token` is markup that cannot occur in text (control or unknown)."""
        self._at(token)
        return token in self._control

    def token_id(self, text: str) -> int | None:
        """The id of the token whose name is exactly `text`, if there is one."""
        return self._ids.get(text)

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. `special`: control tokens are written out, else left
        out."""
        ids = list(ids)
        data = b"".join(self.token_bytes(i) for i in ids if special or not self.is_special(i))
        if self._space_prefix and ids and not self.is_special(ids[0]):
            data = data.removeprefix(b" ")
        return data.decode("utf-8", "replace")

    def decoder(self, special: bool = False, show: Collection[int] = (), mark: str = "") -> StreamDecoder:
        """A decoder for tokens that come one at a time. `special`: all control tokens are written out, else those in
        `show`, with `mark` in front."""
        shown = frozenset(show)
        return StreamDecoder(self, frozenset() if special else self._control - shown, shown, mark.encode())

    # --- building ---

    def _longest_first(self, ids: Iterable[int]) -> list[tuple[str, int]]:
        return sorted(((self._texts[i], i) for i in ids), key=lambda mark: -len(mark[0].encode()))

    def _at(self, token: int) -> str:
        if not 0 <= token < self.n_vocab:
            raise TinychatError(f"token id {token} is outside the vocabulary of {self.n_vocab}")
        return self._texts[token]

    def _get(self, key: str, kind: type, required: bool = False) -> Any:
        value = self._metadata.get(key)
        if value is None and not required:
            return None
        if value is None:
            raise TinychatError(f"{key} is missing; this file has no tokenizer, use a complete GGUF")
        if not isinstance(value, kind):
            raise TinychatError(
                f"{key} is of type {type(value).__name__}, expected {kind.__name__}; the file is damaged"
            )
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._get(key, int)
        return default if value is None else bool(value)

    def _special_id(self, name: str, default: int | None = None) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self._get(key, int)
        if value is None:
            return default if default is not None and default < self.n_vocab else None
        if not 0 <= value < self.n_vocab:
            raise TinychatError(f"{key} is {value}, outside the vocabulary of {self.n_vocab}; the file is damaged")
        return int(value)

    def _find_stops(self) -> frozenset[int]:
        stops = [self.eos_id, self._special_id("eot"), self._special_id("eom")]
        for name, texts in _STOP_FIM.items():
            found = min((self._ids[text] for text in texts if text in self._ids), default=None)
            stops.append(self._special_id(name, found))
        by_text = {self._ids[text] for text in _STOP_TEXTS if text in self._ids}
        if any(by_text >= {self._ids.get(text, -1) for text in texts} for texts in _MESSAGES_GO_ON):
            by_text.discard(self._ids["<|end|>"])
        for token in by_text:  # some files call them normal text
            if self._types[token] not in (_CONTROL, _UNKNOWN):
                self._types[token] = _CONTROL
        return frozenset(by_text | {token for token in stops if token is not None})

    def _check_marks(self, ids: Sequence[int]) -> None:
        """Raises TinychatError for control and user-defined tokens that would make matching them slow or large."""
        sizes = [len(self._texts[i]) for i in ids]
        for what, value, limit in (
            ("control and user-defined tokens in the vocabulary", len(ids), file_limits.MARKS),
            ("characters in a control or user-defined token", max(sizes, default=0), file_limits.MARK_CHARS),
            ("characters in all control and user-defined tokens", sum(sizes), file_limits.MARKS_CHARS),
        ):
            if value > limit.most:
                raise TinychatError(f"{value:,} {what}, accepted are {limit.most:,} ({limit.why})")


class StreamDecoder:
    """Text of tokens as they come: bytes of an unfinished character are held back until it is complete."""

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int], shown: frozenset[int], mark: bytes) -> None:
        self._token_bytes, self._hidden, self._shown, self._mark = tokenizer.token_bytes, hidden, shown, mark
        self._rest = b""

    def feed(self, token: int) -> str:
        """The text that `token` completes, perhaps empty."""
        if token in self._hidden:
            return ""
        data = self._token_bytes(token)
        return self._decode(self._mark + data if token in self._shown else data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD where a character was never finished."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._rest + data
        text, used = codecs.utf_8_decode(data, "replace", final)
        self._rest = data[used:]
        return text


def _merge_of(line: str) -> tuple[str, str] | None:
    """The two parts of a merge, which the first space behind the first character divides."""
    at = line.find(" ", 1)
    return (line[:at], line[at + 1 :]) if at > 0 else None


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if value is None:
        raise TinychatError(f"{key} is missing; this file has no tokenizer, use a complete GGUF")
    if not isinstance(value, list) or not set(map(type, value)) <= {str}:
        raise TinychatError(f"{key} is no list of strings; the file is damaged")
    return value


def _numbers(metadata: Mapping[str, Any], key: str, n: int) -> list[Any]:
    """The first `n` numbers of the array `key`, or [] when the file has none."""
    value = metadata.get(key)
    if value is None:
        return []
    try:
        numbers = list(value.tolist() if hasattr(value, "tolist") else value)
    except TypeError:
        numbers = [None]
    if not all(issubclass(kind, int | float) for kind in set(map(type, numbers))):
        raise TinychatError(f"{key} is no list of numbers; the file is damaged")
    if len(numbers) < n:
        raise TinychatError(f"{key} has {len(numbers)} entries for a vocabulary of {n}; the file is damaged")
    return numbers[:n]
