"""Numbers over problems that were each answered several times: mean@k, pass@k, majority@k, with intervals.

Pure: arrays and lists in, numbers out. A problem is the unit everywhere, since samples of one problem are not
independent: each problem weighs the same, whatever the number of its samples that count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

RESAMPLES = 10_000
BOOTSTRAP_SEED = 1
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over problems with its bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap_mean(
    values: Sequence[float] | np.ndarray,
    *,
    resamples: int = RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The mean of one value a problem, and the percentile bootstrap interval over problems.

    For the difference of two settings give the differences problem by problem: both were asked the same problems, and
    what those have in common cancels.

    Args:
        values: float (P,), one a problem, P at least 1.
        resamples: times that P problems are drawn with replacement.
        seed: of numpy's PCG64.
        confidence: share of the resampled means inside the interval.

    Raises:
        ValueError: there is no value.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    values = np.asarray(values, dtype=np.float64)
    if not values.size:
        raise ValueError("no problem to take a mean over")
    generator = np.random.default_rng(seed)
    # How often each problem is drawn decides a resample's mean: (R, P) counts, not (R, P) draws and a gather.
    counts = generator.multinomial(values.size, np.full(values.size, 1 / values.size), size=resamples)
    means = counts @ values / values.size
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(values.mean()), float(low), float(high))


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k samples is right, drawn without replacement from those of one problem.

    Unbiased for k independent samples of the model. Exact: integers until the last division.

    Args:
        samples: n, at least k.
        right: c, how many of them are right.
        k: at least 1.

    Raises:
        ValueError: k does not lie between 1 and the number of samples.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1.
    """
    _check(samples, k)
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority_at_k(votes: Sequence[Hashable | None], right: Hashable, k: int) -> float:
    """Chance that the most frequent answer among k samples is the right one, drawn without replacement.

    Exact, over all choices of k of the samples of one problem. None is a sample without an answer and votes for
    nothing; if nothing is voted for, the outcome is wrong. Among answers with equally many votes each wins alike.

    Args:
        votes: (n,), the answer of each sample; whatever counts as one answer must be equal.
        right: the answer that is right.
        k: samples that vote, 1 to n.

    Raises:
        ValueError: k does not lie between 1 and the number of samples.

    Source: self-consistency, Wang et al. 2022, arXiv:2203.11171; the expectation over subsets is counted here.
    """
    _check(len(votes), k)
    sizes = Counter(votes)
    silent, right_size = sizes.pop(None, 0), sizes.pop(right, 0)
    wins = 0.0
    for winning in range(1, min(k, right_size) + 1):
        ways = _ways_at_most(list(sizes.values()), silent, winning, k - winning)
        shared = sum(count / (ties + 1) for ties, count in ways.items())
        wins += comb(right_size, winning) * shared
    return wins / comb(len(votes), k)


def _ways_at_most(sizes: Sequence[int], silent: int, most: int, drawn: int) -> dict[int, int]:
    """Ways to draw so many of the other samples that no answer has more than `most` votes, by answers with `most`."""
    # State: samples drawn and answers that have `most` votes -> ways.
    states = {(count, 0): comb(silent, count) for count in range(min(silent, drawn) + 1)}
    for size in sizes:
        grown: Counter[tuple[int, int]] = Counter()
        for (count, ties), ways in states.items():
            for votes in range(min(size, most, drawn - count) + 1):
                grown[count + votes, ties + (votes == most)] += ways * comb(size, votes)
        states = grown
    return {ties: ways for (count, ties), ways in states.items() if count == drawn}


def ks_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and the number of samples itself; none for no sample."""
    powers = [1 << power for power in range(samples.bit_length())]
    return sorted({*powers, samples}) if samples else []


def _check(samples: int, k: int) -> None:
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}, with {samples} samples it can be 1 to {samples}")
