"""Measures of how far logits are from the float64 forward's."""

import numpy as np

from tinychat.engine import Engine


def relative(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Relative L2 distance of each token's logits: float64 (tokens,)."""
    return np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)


def divergence(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """KL(softmax(want) || softmax(got)) of each token in nats: float64 (tokens,)."""
    p, q = (x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), -1, keepdims=True) for x in (want, got))
    return (np.exp(p) * (p - q)).sum(-1)


def last_logits(engine: Engine) -> np.ndarray:
    """float32 (vocab,): the logits behind the last token whose row the KV cache holds; that token is run again."""
    rows = engine.executor.forward(engine.tokens[-1:], len(engine.tokens) - 1, "last")
    assert rows is not None
    return rows[0]
