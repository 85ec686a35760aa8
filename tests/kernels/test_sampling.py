"""Sampling's meaning: what survives, what the draws follow, what stays the same."""

import numpy as np
import pytest

from tinychat.kernels.sampling import Sampling, gumbel, penalise, sample, survivors

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32))
ALL = Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 5),
        ({"top_k": 2}, 2),
        ({"top_k": 9}, 5),
        ({"top_p": 0.5}, 2),
        ({"top_p": 0.39}, 1),
        ({"top_p": 0.0}, 1),
        ({"min_p": 0.49}, 3),
        ({"min_p": 1.0}, 1),
        ({"top_k": 3, "top_p": 0.7}, 2),  # 0.7 of the 0.9 that top_k left
    ],
)
def test_survivors(changes: dict, kept: int) -> None:
    mask = survivors(LOGITS, Sampling(**{**ALL.__dict__, **changes}))
    assert mask.tolist() == [True] * kept + [False] * (5 - kept)


def test_draws_follow_the_softmax() -> None:
    counts = np.bincount([sample(LOGITS, ALL, pos)[0] for pos in range(4000)], minlength=5) / 4000
    assert np.abs(counts - np.exp(LOGITS)).max() < 0.03


def test_temperature_sharpens() -> None:
    cold = Sampling(temperature=0.2, top_k=0, top_p=1.0, min_p=0.0)
    assert np.mean([sample(LOGITS, cold, pos)[0] == 0 for pos in range(500)]) > 0.75


def test_greedy_takes_the_lowest_id_on_ties_and_tells_its_probability() -> None:
    token, logprob = sample(np.array([1, 5, 5, 2], np.float32), Sampling(temperature=0.0), 0)
    assert token == 1
    assert logprob == pytest.approx(5 - np.log(np.exp([1, 5, 5, 2]).sum()))


def test_seed_and_position_alone_decide() -> None:
    draws = [sample(LOGITS, Sampling(temperature=1.5, seed=7), pos)[0] for pos in range(50)]
    assert draws == [sample(LOGITS, Sampling(temperature=1.5, seed=7), pos)[0] for pos in range(50)]
    assert draws != [sample(LOGITS, Sampling(temperature=1.5, seed=8), pos)[0] for pos in range(50)]


def test_noise_is_gumbel() -> None:
    noise = gumbel(3, 11, 20000)
    assert noise.mean() == pytest.approx(0.5772, abs=0.03) and noise.std() == pytest.approx(1.2825, abs=0.03)


def test_repeat_penalty_counts_each_token_once_and_only_the_last_n() -> None:
    s = Sampling(repeat_penalty=2.0, repeat_last_n=3)
    out = penalise(np.array([4, -4, 4, 4], np.float32), s, [3, 0, 0, 1])
    assert out.tolist() == [2, -8, 4, 4]
