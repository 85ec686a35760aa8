"""The sampling that a model file recommends: its metadata `general.sampling.*`, as llama.cpp names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinychat.kernels.sampling import SAMPLING_PARAMETERS

_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, float]:
    """By field of Sampling; a value that is no number or out of range is left out."""
    found: dict[str, float] = {}
    for theirs, name in _NAMES.items():
        value, spec = metadata.get(f"general.sampling.{theirs}"), SAMPLING_PARAMETERS[name]
        if spec.takes(value):
            found[name] = spec.kind(float(f"{value:.6g}"))  # 0.95 is 0.949999988 as the float32 of the file
    return found
