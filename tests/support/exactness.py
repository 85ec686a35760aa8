"""Measures of how far logits are from the float64 forward's."""

import numpy as np


def relative(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 distance of each token's logits: float64 (tokens,)."""
    return np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)


def divergence(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """KL(softmax(want) || softmax(got)) of each token in nats: float64 (tokens,)."""
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), -1, keepdims=True) for x in (want, got))
    return (np.exp(p) * (p - q)).sum(-1)
