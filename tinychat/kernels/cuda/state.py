"""The buffer `state`: where a step is and how its token is chosen, as int32 words that the kernels read by name."""

from __future__ import annotations

import struct

import numpy as np

from tinychat.kernels.sampler import longest_dry
from tinychat.kernels.sampling import SAMPLING_PARAMETERS, Sampling

STATE_BYTES = 256


WORDS = (
    "POS",  # position of the step's first token; the last kernel of a step moves it on
    "COUNT",  # tokens of the step
    "BASE",  # position of the first row of layers with a sliding window (window_rows.py)
    "FIRST_KNOWN",  # position of the first token that the penalties know
    "TURN",  # slots that the step's results stand further on in the ring: a step ahead leaves those before it
    "SEED_LO",
    "SEED_HI",
    "DRY_LONGEST",  # repetitions of more tokens cost no more
    "BIASED",  # 1: the buffer `bias` is added to the logits
    "MASKED",  # 1: only the tokens of the buffer `allowed` may come
    "KEPT",  # tokens of a prompt's step whose state stays in a slot of its own; 0: none
    *(name.upper() for name in SAMPLING_PARAMETERS),  # the bits of a float where the parameter is one
)
"""The words in order: WORDS[i] is the constant i in the kernels. The host writes them before a run of steps."""


def header() -> str:
    """The C++ definition of the words."""
    return f"enum {{ {', '.join(f'{word} = {i}' for i, word in enumerate(WORDS))} }};\n"


def state_words(
    s: Sampling, pos: int, count: int, first_known: int, masked: bool = False, base: int = 0, kept: int = 0
) -> np.ndarray:
    """int32: all words for a step of `count` tokens at `pos`; tokens are known from `first_known` on."""
    seed = struct.unpack("<2i", struct.pack("<Q", s.seed % 2**64))
    longest = longest_dry(s) if s.has_dry else 0
    own = [pos, count, base, max(0, first_known), 0, *seed, longest, bool(s.logit_bias), masked, kept]
    words = np.array([*own, *[0] * len(SAMPLING_PARAMETERS)], np.int32)
    for at, (name, parameter) in enumerate(SAMPLING_PARAMETERS.items(), len(words) - len(SAMPLING_PARAMETERS)):
        (words.view(np.float32) if parameter.kind is float else words)[at] = getattr(s, name)
    if not s.has_dry:
        words[WORDS.index("DRY_MULTIPLIER")] = 0
    return words


def breaker_bits(breakers: tuple[int, ...], vocab: int) -> np.ndarray:
    """uint32 (vocab / 32 rounded up,): a bit per token id that ends repetitions."""
    bits = np.zeros(-(-vocab // 32) * 32, np.uint8)
    bits[[i for i in breakers if 0 <= i < vocab]] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def bias_values(bias: tuple[tuple[int, float], ...], vocab: int) -> np.ndarray:
    """float32 (vocab,): what is added to each logit."""
    values = np.zeros(vocab, np.float32)
    for i, value in bias:
        values[i] = value
    return values
