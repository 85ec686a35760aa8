"""The buffer `state`: where a step is and how its token is chosen, as int32 words that the kernels read by name."""

from __future__ import annotations

import struct
from enum import IntEnum

import numpy as np

from tinychat.kernels.sampling import Sampling, longest_dry

STATE_BYTES = 256


class Word(IntEnum):
    """Index of each word. The host writes them before a run of steps, the last kernel of a step moves POS on."""

    POS = 0  # position of the step's first token
    COUNT = 1  # tokens of the step
    TOP_K = 2
    TEMPERATURE = 3  # from here to PENALTY: bits of a float
    TOP_P = 4
    MIN_P = 5
    PENALTY = 6
    LAST_N = 7  # tokens under the repeat penalty
    SEED_LO = 8
    SEED_HI = 9
    FIRST_KNOWN = 10  # position of the first token that the penalties know
    DRY_MULTIPLIER = 11  # bits of a float
    DRY_BASE = 12  # bits of a float
    DRY_ALLOWED = 13
    DRY_LAST_N = 14  # -1: all
    DRY_LONGEST = 15  # repetitions of more tokens cost no more


def state_words(s: Sampling, pos: int, count: int, first_known: int) -> np.ndarray:
    """int32: all words for a step of `count` tokens at `pos`; tokens are known from `first_known` on."""
    seed = struct.unpack("<2i", struct.pack("<Q", s.seed % 2**64))
    dry = s.dry_multiplier > 0 and s.dry_base >= 1 and s.dry_penalty_last_n != 0
    values: dict[Word, int | float] = {
        Word.POS: pos,
        Word.COUNT: count,
        Word.TOP_K: s.top_k,
        Word.TEMPERATURE: s.temperature,
        Word.TOP_P: s.top_p,
        Word.MIN_P: s.min_p,
        Word.PENALTY: s.repeat_penalty,
        Word.LAST_N: max(0, s.repeat_last_n),
        Word.SEED_LO: seed[0],
        Word.SEED_HI: seed[1],
        Word.FIRST_KNOWN: max(0, first_known),
        Word.DRY_MULTIPLIER: s.dry_multiplier if dry else 0.0,
        Word.DRY_BASE: s.dry_base,
        Word.DRY_ALLOWED: s.dry_allowed_length,
        Word.DRY_LAST_N: s.dry_penalty_last_n,
        Word.DRY_LONGEST: longest_dry(s) if dry else 0,
    }
    floats = {Word.TEMPERATURE, Word.TOP_P, Word.MIN_P, Word.PENALTY, Word.DRY_MULTIPLIER, Word.DRY_BASE}
    words = np.zeros(len(Word), np.int32)
    for word, value in values.items():
        (words.view(np.float32) if word in floats else words)[word] = value
    return words


def breaker_bits(breakers: tuple[int, ...], vocab: int) -> np.ndarray:
    """uint32 (vocab / 32 rounded up,): a bit per token id that ends repetitions."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[[i for i in breakers if 0 <= i < vocab]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)
