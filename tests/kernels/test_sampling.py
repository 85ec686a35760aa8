"""Sampling's meaning: what survives, what the draws follow, what stays the same."""

import inspect
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from tinychat.kernels.cpu.library import SAMPLED
from tinychat.kernels.sampler import dry, gumbel, penalties, sample, survivors
from tinychat.kernels.sampling import SAMPLING_PARAMETERS, Sampling

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
    out = penalties(s, [3, 0, 0, 1]).apply(np.array([4, -4, 4, 4], np.float32))
    assert out.tolist() == [2, -8, 4, 4]


def test_presence_once_and_frequency_for_each_time_then_the_bias() -> None:
    s = Sampling(repeat_last_n=3, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((1, -100.0), (4, 2.0)))
    out = penalties(s, [3, 0, 0, 1]).apply(np.full(5, 4, np.float32))
    assert out.tolist() == [3, -96.75, 4, 4, 6]
    assert penalties(Sampling(presence_penalty=2.0, repeat_last_n=0), [3, 0]).ids.tolist() == []


def dry_by_definition(s: Sampling, recent: list[int]) -> dict[int, float]:
    """For every earlier place, how many of the newest tokens end there too: the token behind it would continue that."""
    window = recent if s.dry_penalty_last_n < 0 else recent[len(recent) - min(s.dry_penalty_last_n, len(recent)) :]
    since = next((i for i, t in enumerate(reversed(window)) if t in s.dry_breakers), len(window))
    if s.dry_penalty_last_n == 0 or len(window) <= s.dry_allowed_length or since < s.dry_allowed_length:
        return {}
    found: dict[int, int] = {}
    for end in range(1, len(window)):  # the repetition ends before window[end]
        n = 0
        while n < min(end, since) and window[end - 1 - n] == window[-1 - n]:
            n += 1
        if n >= s.dry_allowed_length and window[end] not in s.dry_breakers:
            found[window[end]] = max(n, found.get(window[end], 0))
    return {t: s.dry_multiplier * s.dry_base ** (n - s.dry_allowed_length) for t, n in found.items()}


def test_dry_takes_off_what_its_definition_says() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        s = Sampling(
            dry_multiplier=0.8,
            dry_base=float(rng.choice([1.0, 1.3, 1.75])),
            dry_allowed_length=int(rng.integers(0, 4)),
            dry_penalty_last_n=int(rng.choice([-1, 0, 3, 12])),
            dry_breakers=tuple(rng.choice(5, rng.integers(0, 3))),
        )
        recent = rng.integers(0, rng.choice([1, 2, 4]), rng.integers(0, 30)).tolist()
        ids, amounts = dry(s, recent)
        assert dict(zip(ids.tolist(), amounts.tolist())) == pytest.approx(dry_by_definition(s, recent)), (s, recent)


def test_dry_stays_finite_and_spares_breakers() -> None:
    s = Sampling(dry_multiplier=1.0, dry_base=2.0)
    ids, amounts = dry(s, [5] * 3000)
    assert ids.tolist() == [5] and amounts[0] == 2.0**127 < np.finfo(np.float32).max
    assert not len(dry(Sampling(dry_multiplier=1.0, dry_breakers=(5,)), [5] * 3000)[0])
    assert not len(dry(Sampling(dry_multiplier=1.0, dry_base=0.9), [5] * 30)[0])


def test_dry_ends_a_loop() -> None:
    """A model that says 1 2 3 1 2 3 ... says something else."""
    logits = np.zeros(8, np.float32)
    loop = [1, 2, 3] * 4
    logits[1] = 3.0
    assert sample(logits, Sampling(temperature=0.0), 0, loop)[0] == 1
    assert sample(logits, Sampling(temperature=0.0, dry_multiplier=0.8), 0, loop)[0] != 1


def test_every_parameter_reaches_every_executor() -> None:
    """A new field of Sampling is read by the CPU (sample.h or a penalty) and by the GPU's kernels."""
    host = "".join(inspect.getsource(f) for f in (penalties, dry))
    cuda = Path(str(files("tinychat.kernels"))) / "cuda"
    device = "".join(p.read_text() for p in cuda.glob("*.cu*"))
    for name in SAMPLING_PARAMETERS:
        assert name in SAMPLED or f"s.{name}" in host, f"the CPU does not read {name}"
        assert f"[{name.upper()}]" in device, f"the GPU does not read {name}"
