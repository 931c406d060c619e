"""The statistics of an evaluation, each against a count of all cases."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest

from verl_ext.evaluation.statistics import bootstrap_mean, ks_up_to, majority_at_k, pass_at_k

SAMPLES = [(n, c, k) for n in range(1, 9) for c in range(n + 1) for k in range(1, n + 1)]


def brute_pass(samples: int, right: int, k: int) -> float:
    outcomes = [1] * right + [0] * (samples - right)
    drawn = list(combinations(outcomes, k))
    return sum(any(one) for one in drawn) / len(drawn)


def brute_majority(votes: list, right: object, k: int) -> float:
    total, count = 0.0, 0
    for drawn in combinations(votes, k):
        tally = Counter(vote for vote in drawn if vote is not None)
        most = max(tally.values(), default=0)
        winners = [answer for answer, size in tally.items() if size == most]
        total += (right in winners) / len(winners) if winners else 0
        count += 1
    return total / count


@pytest.mark.parametrize(("samples", "right", "k"), SAMPLES)
def test_pass_at_k_is_the_share_of_all_choices_with_a_right_one(samples: int, right: int, k: int):
    assert pass_at_k(samples, right, k) == pytest.approx(brute_pass(samples, right, k), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """The mean of the estimate over all outcomes of n samples of a model is the chance for k samples of it."""
    chance, n, k = 0.3, 6, 4
    expected = 0.0
    for outcomes in product((0, 1), repeat=n):
        weight = np.prod([chance if right else 1 - chance for right in outcomes])
        expected += weight * pass_at_k(n, sum(outcomes), k)
    assert expected == pytest.approx(1 - (1 - chance) ** k, abs=1e-12)


@pytest.mark.parametrize("seed", range(60))
def test_majority_at_k_is_the_share_of_all_choices(seed: int):
    draw = random.Random(seed)
    votes = [draw.choice(["right", "a", "b", "c", None]) for _ in range(draw.randint(1, 9))]
    for k in range(1, len(votes) + 1):
        assert majority_at_k(votes, "right", k) == pytest.approx(brute_majority(votes, "right", k), abs=1e-12)


def test_what_the_three_have_in_common_at_one_sample():
    votes = ["right", "right", "a", None, "b"]
    assert majority_at_k(votes, "right", 1) == pytest.approx(pass_at_k(5, 2, 1)) == pytest.approx(2 / 5)


@pytest.mark.parametrize("k", [0, 4])
def test_more_samples_than_there_are_is_refused(k: int):
    with pytest.raises(ValueError, match="it can be 1 to 3"):
        pass_at_k(3, 1, k)
    with pytest.raises(ValueError, match="it can be 1 to 3"):
        majority_at_k(["a"] * 3, "a", k)


def test_the_interval_of_three_problems_is_that_of_all_their_resamples():
    values = [0.0, 0.5, 1.0]
    means = [np.mean(drawn) for drawn in product(values, repeat=3)]
    found = bootstrap_mean(values, resamples=200_000)
    assert found.mean == 0.5
    assert (found.low, found.high) == pytest.approx(np.quantile(means, [0.025, 0.975], method="inverted_cdf"))


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(7)
    draws = generator.beta(2, 3, size=(300, 40))
    covered = [
        interval.low <= 0.4 <= interval.high for interval in (bootstrap_mean(row, resamples=400) for row in draws)
    ]
    assert 0.88 <= np.mean(covered) <= 0.98


def test_the_same_seed_gives_the_same_interval_and_another_one_another():
    values = np.linspace(0, 1, 30)
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(values, seed=2) != bootstrap_mean(values)


def test_a_sure_thing_has_no_width():
    found = bootstrap_mean([1.0] * 5)
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)


def test_of_no_problem_there_is_no_mean():
    with pytest.raises(ValueError, match="no problem"):
        bootstrap_mean([])


def test_the_ks_are_powers_of_two_and_the_number_itself():
    assert ks_up_to(30) == [1, 2, 4, 8, 16, 30]
    assert ks_up_to(4) == [1, 2, 4]
    assert ks_up_to(1) == [1]
    assert ks_up_to(0) == []
